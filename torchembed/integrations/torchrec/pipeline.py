"""``TrainPipeline``: torchembed's pipeline with the interface of TorchRec's."""

import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchembed.core import ranks
from torchembed.core.trees import Tree
from torchembed.integrations.torchrec.batches import unsupported_batch
from torchembed.integrations.torchrec.pipeline_steps import PipelineSteps
from torchembed.integrations.torchrec.unwrapped_model import unsupported_model, unwrap
from torchembed.sharding.wire import WireTransport

_logger = logging.getLogger("torchembed.integrations.torchrec")


class TrainPipeline:
    """Trains a sharded TorchRec model by :class:`torchembed.training.TrainPipeline`, with the
    interface and the numbers of ``TrainPipelineSparseDist``.

    For models whose collections torchembed's sharders have sharded. What it does not support
    (modules that TorchRec shards itself, tables under Adam, batches that are no trees of tensors
    and ``KeyedJaggedTensor``s, ...) ``TrainPipelineSparseDist`` trains; the log then says so and
    why.

    A step is one CUDA graph, collectives included. Where every bag of a key has the same number of
    ids on all ranks, which a thread finds out, it is captured for that number; where lengths vary,
    with a capacity above the first batch's. Other batches, as a smaller last one, are trained
    eagerly, and models that look up sequences without graphs. The thread reads the user's iterator
    two batches further ahead than the steps need, and copies batches to pinned memory.

    Gradients of dense parameters are averaged as the ``DistributedDataParallel`` in the model
    would; where it has none, they stay each rank's. ``SGD``, ``Adagrad`` and ``Adam`` of torch,
    without further settings, update in the graph, with the optimizer's own states; other optimizers
    step after it.

    Between steps the model can be used as before: ``state_dict``, optimizers and schedulers,
    evaluation by the model itself. In evaluation mode ``progress`` returns the output and trains
    nothing. An id outside its table is treated as FBGEMM's ``bounds_check_mode`` says, and the log
    gives their number once the batches end. Under ``FATAL`` a step with such an id changes nothing,
    and a later call raises an ``IndexError``.

    Collective: every rank makes it, and calls it for the same number of batches. Use it in a
    ``with``, or :meth:`close` it, before the process group is destroyed.

    Args:
        model: a ``DistributedModelParallel`` or the module in it; ``model(batch)`` returns the loss
            and an output.
        optimizer: TorchRec's or torch's, stepped as TorchRec's pipeline does.
        device: the device of the steps, which batches are copied to.
        execute_all_batches: False leaves the last two batches out, as TorchRec's does.
        transport: ``WireTransport.PUSH`` is faster on the GPUs of one node.
        fuses_layers: whether ``nn.Linear`` and TorchRec's ``LowRankCrossNet`` are computed by
            torchembed's operations, which take fewer passes but have no second derivative.
        timeout_seconds: how long the host waits for a step of a GPU.
        torchrec_settings: further arguments of ``TrainPipelineSparseDist``; where one is not its
            default, that pipeline trains.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        *,
        transport: WireTransport = WireTransport.COLLECTIVE,
        fuses_layers: bool = True,
        timeout_seconds: float = 600.0,
        **torchrec_settings: Any,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._executes_all = execute_all_batches
        self._torchrec_settings = torchrec_settings
        self._theirs: TrainPipelineSparseDist[Any, Any] | None = None
        """TorchRec's pipeline, where that one trains."""
        self._given: Iterator[Tree] | None = None
        self._batches: Iterator[Tree] = iter(())
        unwrapped = unwrap(model)
        reason = unsupported_model(unwrapped)
        others = _settings_that_count(torchrec_settings)
        if others:
            reason = f"it is given {', '.join(others)}"
        if reason is not None:
            self._fall_back(reason)
            return
        self._steps = PipelineSteps(
            unwrapped,
            optimizer,
            self._device,
            transport=transport,
            fuses_layers=fuses_layers,
            timeout_seconds=timeout_seconds,
        )

    def progress(self, dataloader_iter: Iterator[Tree]) -> Tree:
        """Train the next batch.

        Args:
            dataloader_iter: the batches, the same iterator in each call. Batches that were read
                from another one before are trained first.

        Returns:
            The model's output for the batch, without the loss.

        Raises:
            StopIteration: after the last batch.
            IndexError, TimeoutError, Exception: as
                :meth:`torchembed.training.TrainPipeline.progress`.
        """
        if dataloader_iter is not self._given:
            self._follow(dataloader_iter)
        if self._theirs is not None:
            return self._theirs.progress(self._batches)
        steps = self._steps
        if not self._executes_all and not steps.has_left(3):
            raise StopIteration
        if not self._model.training:
            _, output = self._model(steps.next_untrained())
            return output
        self._optimizer.zero_grad()
        return steps.next_output()

    def _follow(self, batches: Iterator[Tree]) -> None:
        """Read from ``batches`` from now on; fall back where the first batch is not supported."""
        self._batches = batches
        if self._given is None and self._theirs is None:
            first = next(batches, None)
            self._batches = itertools.chain([] if first is None else [first], batches)
            reason = None if first is None else unsupported_batch(first)
            if reason is not None:
                self._steps.close()
                self._fall_back(reason)
        if self._theirs is None:
            self._steps.follow(self._batches)
        # Set last: where the first batch could not be read, the next call tries again.
        self._given = batches

    def _fall_back(self, reason: str) -> None:
        if ranks.rank() == 0:
            _logger.warning("TorchRec's TrainPipelineSparseDist trains, since %s", reason)
        self._theirs = TrainPipelineSparseDist(
            self._model,
            self._optimizer,
            self._device,
            self._executes_all,
            **self._torchrec_settings,
        )

    def detach(self) -> nn.Module:
        """The model, for use by itself until the next :meth:`progress`; TorchRec's pipeline, where
        that one trains, first undoes its own changes to it."""
        return self._model if self._theirs is None else self._theirs.detach()

    def close(self) -> None:
        """Wait for the steps so far and destroy graphs, as leaving a ``with`` does.

        Raises:
            IndexError, TimeoutError: as :meth:`progress`.
        """
        if self._theirs is None:
            self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._theirs is None:
            self._steps.exit(kind, error, trace)


def _settings_that_count(settings: Mapping[str, object]) -> list[str]:
    """Names of the ``settings`` that are not TorchRec's defaults."""
    known = inspect.signature(TrainPipelineSparseDist.__init__).parameters
    return [name for name, v in settings.items() if name not in known or v != known[name].default]
