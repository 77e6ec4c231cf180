"""The two libraries that ``bench.kernels.gpu`` compares, over one set of weights."""

import itertools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from bench.data.workload import ADAGRAD, Batch, Rule, Workload
from bench.kernels.row_traffic import touch_rows
from torchembed.core.types import OptimizerKind
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.pooled_lookup.schema import pooled_lookup_gradient_map_op
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import Runs, find_runs


class Stages(NamedTuple):
    """Calls to be timed for one batch; running one does not change the work of another."""

    forward: Callable[[], Tensor]
    """The pooled vectors, bfloat16 ``[batch_size, num_features * dim]``."""
    backward: Callable[[], None]
    """All that follows from the vectors' gradient, rows updated."""
    update: Callable[[], None] | None
    """The part of backward that needs the gradient; None where a library does not separate it."""
    touch: Callable[[], None] | None = None
    """Reads and writes the rows and states of ``update``, and does nothing else."""


class TorchembedTables:
    """torchembed's operations, as its modules and optimizers call them."""

    name = "torchembed"

    def __init__(self, workload: Workload, weight: Tensor, state: Tensor, rule: Rule) -> None:
        kind = OptimizerKind.ADAGRAD if rule == ADAGRAD else OptimizerKind.ROWWISE_ADAGRAD
        first_rows = list(itertools.accumulate(workload.num_rows, initial=0))[:-1]
        self._weight, self._state = weight, state
        self._rule = UpdateRule(kind=kind, eps=rule.eps)
        self._lr = torch.full((1,), rule.lr, device=weight.device)
        self._first_rows = torch.tensor(first_rows, device=weight.device)
        self._num_rows = torch.tensor(workload.num_rows, device=weight.device)

    def stages(self, workload: Workload, batch: Batch) -> Stages:
        hotness, batch_size = workload.hotness, workload.batch_size
        values, num_features = torch.cat(batch.ids), len(batch.ids)
        grad = batch.grad.view(-1, workload.dim).bfloat16()

        def rows() -> Tensor:
            tables = (self._first_rows, self._num_rows)
            return linearize_ids(
                values, *tables, hotness=hotness, batch_size=batch_size, rows_dtype=torch.int32
            ).rows

        def gradient_rows(rows: Tensor) -> Tensor:
            arguments = (None, list(hotness), None, num_features, batch_size, False)
            return pooled_lookup_gradient_map_op(rows, *arguments)[0]

        def update(runs: Runs, gradient_rows: Tensor) -> None:
            gradients = RowGradients(grad, gradient_rows)
            rowwise_update(self._weight, (self._state,), runs, gradients, self._rule, self._lr)

        def forward() -> Tensor:
            vectors = pooled_lookup(
                self._weight,
                known_rows,
                hotness=hotness,
                batch_size=batch_size,
                num_features=num_features,
                output_dtype=torch.bfloat16,
            )
            return vectors.view(batch_size, -1)

        def backward() -> None:
            # FBGEMM's backward makes rows of ids too.
            found = rows()
            update(find_runs(found, self._weight.shape[0]), gradient_rows(found))

        known_rows = rows()
        known_runs, known_map = (
            find_runs(known_rows, self._weight.shape[0]),
            gradient_rows(known_rows),
        )
        touched = known_runs.unique_rows[: int(known_runs.num_runs)]
        return Stages(
            forward,
            backward,
            lambda: update(known_runs, known_map),
            lambda: touch_rows(self._weight, self._state, touched),
        )


class FbgemmTables:
    """FBGEMM's table-batched embedding, whose backward updates the rows."""

    name = "FBGEMM"

    def __init__(self, workload: Workload, rule: Rule) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        is_adagrad = rule == ADAGRAD
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (num_rows, workload.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
                for num_rows in workload.num_rows
            ],
            optimizer=EmbOptimType.EXACT_ADAGRAD
            if is_adagrad
            else EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=rule.lr,
            eps=rule.eps,
            stochastic_rounding=False,
            output_dtype=SparseType.BF16,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        weights = cast(Tensor, self._tables.weights_dev)
        self.weight = weights.detach().view(-1, workload.dim)
        self.states = [state for (state, *_) in self._tables.split_optimizer_states()]

    def stages(self, workload: Workload, batch: Batch) -> Stages:
        lengths = torch.tensor(workload.hotness).repeat_interleave(workload.batch_size)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
        values, grad = torch.cat(batch.ids), batch.grad.bfloat16()

        def backward() -> None:
            self._tables(values, offsets).backward(grad)

        return Stages(lambda: self._tables(values, offsets), backward, None)
