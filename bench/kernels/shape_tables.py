"""The tables that ``bench.kernels.shapes`` compares, as their users call them."""

import abc
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import torchembed
from bench.data.workload import ADAGRAD, ADAM, ROWWISE_ADAGRAD, SGD
from bench.kernels.shape import Shape, ShapeBatch
from torchembed.core.types import Pooling
from torchembed.tables import RowChunk, Table, row_chunks, table_of, write_rows

_CHUNK_BYTES = 1 << 28


class ShapeTables(abc.ABC):
    """One library's tables and optimizer, with random rows."""

    name: str
    is_dynamic = False
    """Whether ids are given rows as they come."""

    @abc.abstractmethod
    def __init__(self, shape: Shape, device: torch.device) -> None: ...

    @staticmethod
    def why_not(shape: Shape) -> str | None:
        """Why the library cannot take ``shape``; None where it can."""
        return None

    @abc.abstractmethod
    def prepare(self, batch: ShapeBatch) -> object:
        """``batch`` in the form that the library takes; not timed."""

    @abc.abstractmethod
    def look_up(self, prepared: object) -> list[Tensor]:
        """The vectors: of all features side by side, or those of each feature's ids."""

    @abc.abstractmethod
    def train(self, vectors: list[Tensor], grads: Sequence[Tensor]) -> None:
        """Run backward from a result of :meth:`look_up`, and a step of the optimizer."""

    @abc.abstractmethod
    def weights(self) -> list[Tensor]:
        """Each table's weight ``[num_rows, dim]``."""

    def _fill(self) -> None:
        """Give the rows random values."""
        with torch.no_grad():
            for weight in self.weights():
                weight.uniform_(-0.5, 0.5)


class TorchembedShape(ShapeTables):
    """``EmbeddingBagCollection`` or ``EmbeddingCollection`` with a fused optimizer."""

    name = "torchembed"

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, rule = shape, shape.rule
        self._keys = tuple(f"f{table}" for table in range(shape.num_tables))
        kind: Callable[..., torchembed.EmbeddingConfig] = torchembed.EmbeddingConfig
        if shape.pooling is not None:
            kind = functools.partial(torchembed.EmbeddingBagConfig, pooling=shape.pooling)
        configs = [
            kind(
                name=f"t{table}",
                num_embeddings=self._capacity,
                embedding_dim=shape.dim,
                feature_names=(key,),
                dtype=shape.dtype,
                initializer=torchembed.Constant(value=0.0),
                dynamic=torchembed.Dynamic() if self.is_dynamic else None,
            )
            for table, key in enumerate(self._keys)
        ]
        self._collection = (
            torchembed.EmbeddingCollection(configs, device=device)
            if shape.pooling is None
            else torchembed.EmbeddingBagCollection(
                configs, is_weighted=shape.is_weighted, device=device
            )
        )
        parameters = list(self._collection.parameters())
        accumulator = rule.initial_accumulator
        optim = torchembed.optim
        if rule == SGD:
            self._optimizer = optim.SGD(parameters, lr=rule.lr)
        elif rule == ADAM:
            self._optimizer = optim.Adam(parameters, lr=rule.lr, eps=rule.eps, betas=rule.betas)
        else:
            make = optim.Adagrad if rule == ADAGRAD else optim.RowwiseAdagrad
            self._optimizer = make(
                parameters, lr=rule.lr, eps=rule.eps, initial_accumulator_value=accumulator
            )
        self._fill()

    @property
    def _capacity(self) -> int:
        return self._shape.num_rows

    def prepare(self, batch: ShapeBatch) -> torchembed.SparseFeatures:
        shape = self._shape
        return torchembed.SparseFeatures(
            keys=self._keys,
            values=batch.ids,
            batch_size=shape.batch_size,
            offsets=batch.offsets if shape.is_jagged else None,
            hotness=None if shape.is_jagged else (shape.hotness,) * shape.num_tables,
            weights=batch.weights,
        )

    def look_up(self, prepared: object) -> list[Tensor]:
        found = self._collection(prepared)
        if self._shape.pooling is not None:
            return [found.values()]
        return [found[key].values() for key in self._keys]

    def train(self, vectors: list[Tensor], grads: Sequence[Tensor]) -> None:
        torch.autograd.backward(vectors, grads)
        self._optimizer.step()

    def weights(self) -> list[Tensor]:
        return list(self._collection.parameters())


class DynamicShape(TorchembedShape):
    """:class:`TorchembedShape` with dynamic tables, which hold all ids from the start, in four
    fifths of their rows."""

    name = "torchembed, dynamic"
    is_dynamic = True

    @property
    def _capacity(self) -> int:
        return self._shape.num_rows * 5 // 4

    def weights(self) -> list[Tensor]:
        """Copies: each table's rows by their ids."""
        found = []
        for weight in self._collection.parameters():
            rows = weight.new_zeros(self._shape.num_rows, self._shape.dim, requires_grad=False)
            for chunk in row_chunks(self._table(weight), _CHUNK_BYTES, with_states=False):
                rows[chunk.keys.to(rows.device)] = chunk.rows
            found.append(rows)
        return found

    def _fill(self) -> None:
        shape, ids = self._shape, torch.arange(self._shape.num_rows)
        for weight in self._collection.parameters():
            rows = weight.new_empty(shape.num_rows, shape.dim, requires_grad=False)
            chunk = RowChunk(ids, rows.uniform_(-0.5, 0.5), {})
            if write_rows(self._table(weight), chunk):
                raise RuntimeError("a table is too full to hold all ids")

    @staticmethod
    def _table(weight: Tensor) -> Table:
        table = table_of(weight)
        assert table is not None
        return table


class FbgemmShape(ShapeTables):
    """FBGEMM's table-batched embedding with its defaults, which check ids, and whose backward
    updates the rows. It has no bfloat16 rows: float16 ones, which are as long, stand for them."""

    name = "FBGEMM"

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        rule = shape.rule
        kinds = {
            SGD: EmbOptimType.EXACT_SGD,
            ADAGRAD: EmbOptimType.EXACT_ADAGRAD,
            ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            ADAM: EmbOptimType.ADAM,
        }
        modes = {
            None: PoolingMode.NONE,
            Pooling.SUM: PoolingMode.SUM,
            Pooling.MEAN: PoolingMode.MEAN,
        }
        location, where = EmbeddingLocation.DEVICE, ComputeDevice.CUDA
        if device.type == "cpu":
            location, where = EmbeddingLocation.HOST, ComputeDevice.CPU
        # FBGEMM's Adam adds eps to the corrected root, torch's SparseAdam and ours before it.
        eps = rule.eps / (1 - rule.betas[1]) ** 0.5 if rule == ADAM else rule.eps
        self._shape = shape
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.num_rows, shape.dim, location, where)] * shape.num_tables,
            optimizer=kinds[rule],
            learning_rate=rule.lr,
            eps=eps,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            pooling_mode=modes[shape.pooling],
            weights_precision=(
                SparseType.FP32 if shape.dtype == torch.float32 else SparseType.FP16
            ),
        )
        if rule in (ADAGRAD, ROWWISE_ADAGRAD):
            for (accumulator,) in self._tables.split_optimizer_states():
                accumulator.fill_(rule.initial_accumulator)
        self._fill()

    @staticmethod
    def why_not(shape: Shape) -> str | None:
        if shape.rule == ADAM and shape.dtype != torch.float32:
            return "its Adam takes float32 rows alone"
        return None

    def prepare(self, batch: ShapeBatch) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
        return batch.ids, batch.offsets, batch.weights, batch.num_ids

    def look_up(self, prepared: object) -> list[Tensor]:
        assert isinstance(prepared, tuple)
        ids, offsets, weights, num_ids = prepared
        found = self._tables(ids, offsets, per_sample_weights=weights)
        # A collection gives each feature its vectors, TorchRec's over these tables by a split, too.
        return list(found.split(num_ids)) if self._shape.pooling is None else [found]

    def train(self, vectors: list[Tensor], grads: Sequence[Tensor]) -> None:
        torch.autograd.backward(vectors, grads)

    def weights(self) -> list[Tensor]:
        return self._tables.split_embedding_weights()
