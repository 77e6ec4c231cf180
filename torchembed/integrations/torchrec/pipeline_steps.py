"""The steps of our pipeline on a TorchRec model."""

import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core import ranks
from torchembed.core.trees import map_tensors
from torchembed.integrations.torchrec.batches import BatchReader
from torchembed.integrations.torchrec.dense_parameters import OptimizerOfLeaves
from torchembed.integrations.torchrec.dense_updates import DenseUpdates, plain_optimizers
from torchembed.integrations.torchrec.model_parts import Parts
from torchembed.integrations.torchrec.pipeline_model import PipelineModel
from torchembed.sharding.transport.peer_access import check_transport
from torchembed.sharding.transport.ranks import Ranks
from torchembed.sharding.wire import WireTransport
from torchembed.step.reading_thread import ReadingThread
from torchembed.training import TrainPipeline

_logger = logging.getLogger("torchembed.integrations.torchrec")

_NUM_READ_AHEAD = 2
"""Beside the two batches that steps on a GPU are ahead."""


class PipelineSteps:
    """Trains the model of ``parts``, which our pipeline can; collective.

    Args:
        optimizer: the user's, of all parameters or of the dense ones.
        device: where batches go.
        transport: of pooled vectors and dense gradients.
        fuses_layers: whether layers are computed by our operations where we have them.
        timeout_seconds: for a step of a GPU.
    """

    def __init__(
        self,
        parts: Parts,
        optimizer: Any,
        device: torch.device,
        *,
        transport: WireTransport,
        fuses_layers: bool,
        timeout_seconds: float,
    ) -> None:
        self._is_cuda = device.type == "cuda"
        ranks.make_cpu_group()
        group = _with_cpu(parts.collections[0][1]._env.process_group)
        mesh = DeviceMesh.from_group(group, device.type)
        check_transport(transport, mesh, num_nodes=1)
        of_all = Ranks(mesh, (), parts.wire, transport=transport)
        self._model = PipelineModel(parts, of_all, fuses_layers=fuses_layers)
        leaves = self._model.dense.leaves
        # Without a graph torch's own steps are as good, and faster on the CPU.
        updates = DenseUpdates(plain_optimizers(optimizer) if self._is_cuda else [], leaves)
        self._optimizers: list[Any] = [*self._model.optimizers_of_tables, updates]
        self._granted: list[Any] | None = None
        """What graphs take for granted of the optimizers."""
        of_leaves: Any = OptimizerOfLeaves(optimizer, leaves, updates.leaves)
        self._pipeline = TrainPipeline(
            self._model,
            None,
            [*self._optimizers, of_leaves],
            device=device,
            timeout_seconds=timeout_seconds,
        )
        is_alone = dist.get_world_size(group) == 1
        reader = BatchReader(None if is_alone else dist.new_group(backend="gloo"), device)
        self._batches = ReadingThread(reader.read, _NUM_READ_AHEAD)

    def follow(self, batches: Iterator[Any]) -> None:
        """Read from ``batches`` from now on."""
        self._batches.follow(batches)

    def has_left(self, count: int) -> bool:
        """Whether ``count`` batches are left, those included that the pipeline has read."""
        return self._batches.has(count - self._pipeline.num_read_ahead)

    def next_output(self) -> Any:
        """Train the next batch; the model's output, which is the caller's own."""
        self._follow_model()
        result = self._progress(self._pipeline.progress)
        for optimizer in self._optimizers:
            optimizer.end()
        # Steps to come use the memory of the result.
        return map_tensors(Tensor.clone, result.output) if self._is_cuda else result.output

    def next_untrained(self) -> Any:
        """The next batch on the device, in the user's form."""
        return self._model.restored(self._progress(self._pipeline.take))

    def _progress(self, take: Callable[[Iterator[Any]], Any]) -> Any:
        try:
            return take(self._batches)
        except StopIteration:
            self._report_bad_ids()
            raise

    def _follow_model(self) -> None:
        """Take over what was changed since the step before."""
        self._model.dense.follow()
        granted = [optimizer.begin() for optimizer in self._optimizers]
        if self._granted not in (None, granted):
            self._pipeline.close()
        self._granted = granted

    def _report_bad_ids(self) -> None:
        number = sum(collection.take_num_bad() for collection in self._model.adopted)
        if number:
            _logger.warning(
                "%d ids were outside their tables and counted as id 0, as bounds_check_mode has it",
                number,
            )

    def close(self) -> None:
        """End the thread, wait for the steps so far, and destroy the graphs."""
        self._batches.close()
        self._pipeline.close()
        self._report_bad_ids()

    def exit(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As :meth:`close`; where there is an ``error``, without waiting."""
        self._batches.close()
        self._pipeline.__exit__(kind, error, trace)
        if error is None:
            self._report_bad_ids()


def _with_cpu(group: Any) -> Any:
    """``group``, or one of the same ranks where that carries no CPU tensors; collective."""
    backends = dist.get_backend_config(group)
    if "cpu:" in backends:
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend=f"cpu:gloo,{backends}")
