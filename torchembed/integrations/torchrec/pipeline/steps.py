"""The steps of torchembed's pipeline on a TorchRec model."""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core import ranks
from torchembed.core.trees import Tree
from torchembed.integrations.torchrec.batches.batch_stream import BatchStream
from torchembed.integrations.torchrec.batches.conversion import BatchReader, ReadItem
from torchembed.integrations.torchrec.trained_model.dense_parameters import AliasedOptimizer
from torchembed.integrations.torchrec.trained_model.dense_updates import (
    DenseUpdates,
    plain_optimizers,
)
from torchembed.integrations.torchrec.trained_model.pipeline_model import PipelineModel
from torchembed.integrations.torchrec.trained_model.unwrapped_model import UnwrappedModel
from torchembed.sharding.transport.peer_access import check_transport
from torchembed.sharding.transport.process_groups import borrow_cpu_group, group_with_cpu
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.sharding.wire import WireTransport
from torchembed.training import TrainPipeline

R = TypeVar("R")

_logger = logging.getLogger("torchembed.integrations.torchrec")

_last_made: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[PipelineSteps]]"
_last_made = weakref.WeakKeyDictionary()
"""The steps that were made last of each of the user's models, on every rank."""


class PipelineSteps:
    """Trains a TorchRec model that torchembed's pipeline supports; collective.

    Takes the model's tables over from steps that were made of it before.

    Args:
        model: the user's model.
        optimizer: the user's, of all parameters or of the dense ones.
        device: the device of the steps.
        transport: how pooled vectors and dense gradients are exchanged.
        stream: where batches are read; None for a new one.
        fuses_layers: whether layers are computed by torchembed's fused operations where it has any.
        timeout_seconds: longest that the host waits for a step of a GPU.
    """

    def __init__(
        self,
        model: UnwrappedModel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        stream: BatchStream | None,
        transport: WireTransport,
        fuses_layers: bool,
        timeout_seconds: float,
    ) -> None:
        self._is_cuda = device.type == "cuda"
        ranks.make_cpu_group()
        group = group_with_cpu(model.collections[0][1].process_group)
        mesh = DeviceMesh.from_group(group, device.type)
        wire = model.wire
        check_transport(transport, wire, mesh, num_nodes=1)
        of_all = TableRanks(mesh, (), wire, transport=transport)
        self._model = PipelineModel(model, of_all, fuses_layers=fuses_layers)
        aliased = self._model.dense.aliased
        # On the CPU nothing is captured, and torch's own steps are faster.
        updates = DenseUpdates(plain_optimizers(optimizer) if self._is_cuda else [], aliased)
        self._optimizers = [*self._model.table_optimizers, updates]
        self._assumptions: list[Hashable] | None = None
        """The optimizers' state that captured steps rely on."""
        of_user = AliasedOptimizer(optimizer, aliased, updates.aliased)
        self._pipeline = TrainPipeline(
            self._model,
            None,
            # The last two have the parts of an optimizer that the pipeline uses.
            cast("list[torch.optim.Optimizer]", [*self._optimizers, of_user]),
            device=device,
            timeout_seconds=timeout_seconds,
        )
        if stream is None:
            is_alone = dist.get_world_size(group) == 1
            reader = BatchReader(None if is_alone else borrow_cpu_group(group), device)
            stream = BatchStream(reader.read)
        self._batches = stream
        _last_made[model.inner] = weakref.ref(self)

    @property
    def have_tables(self) -> bool:
        """False once other steps were made of the model, which alone can train it then."""
        return _last_made[self._model.inner]() is self

    def follow(self, batches: Iterator[Tree]) -> None:
        """Read from ``batches`` from now on."""
        self._batches.follow(batches)

    def has_left(self, count: int) -> bool:
        """True where ``count`` batches are left, those that the pipeline has read included."""
        return self._batches.has(count - self._pipeline.num_read_ahead)

    def next_output(self) -> Tree:
        """Train the next batch and return the model's output, which no later step changes."""
        self._refresh()
        result = self._progress(self._pipeline.progress)
        for optimizer in self._optimizers:
            optimizer.end()
        return result.output

    def stop(self) -> BatchStream:
        """Wait for the steps so far, destroy the graphs and return the stream, to which batches
        that were read and not trained are given back.

        Raises:
            Exception: as :meth:`torchembed.training.TrainPipeline.progress`.
        """
        with self._batches.paused():
            count = self._pipeline.num_read_ahead
            unused = [self._pipeline.take(self._batches) for _ in range(count)]
        self._batches.give_back(unused)
        self._pipeline.close()
        return self._batches

    def drop_batches(self) -> None:
        """Forget the iterator and all batches that were read of it and not trained."""
        self.stop().drop()

    def next_untrained(self) -> Tree:
        """Return the next batch untrained, on the device and in the user's form."""
        return self._model.batch_of(self._progress(self._pipeline.take))

    def _progress(self, take: Callable[[Iterator[ReadItem]], R]) -> R:
        try:
            return take(self._batches)
        except StopIteration:
            self._report_bad_ids()
            raise

    def _refresh(self) -> None:
        """Before a step: take over changes of the model and the optimizers since the last one."""
        self._model.dense.refresh()
        assumptions: list[Hashable] = [optimizer.begin() for optimizer in self._optimizers]
        if self._assumptions not in (None, assumptions):
            self._pipeline.close()
        self._assumptions = assumptions

    def _report_bad_ids(self) -> None:
        number = sum(view.take_num_bad() for view in self._model.views)
        if number:
            _logger.warning(
                "%d ids were outside their tables and counted as id 0, as bounds_check_mode has it",
                number,
            )

    def close(self) -> None:
        """End the reading thread, wait for the steps so far, and destroy the graphs."""
        self._batches.close()
        self._pipeline.close()
        self._report_bad_ids()

    def exit(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close as :meth:`close` does; where there is an ``error``, without waiting for steps."""
        self._batches.close()
        self._pipeline.__exit__(kind, error, trace)
        if error is None:
            self._report_bad_ids()
