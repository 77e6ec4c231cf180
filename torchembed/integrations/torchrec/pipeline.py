"""``TrainPipeline``: our pipeline with the call of TorchRec's."""

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
from torchembed.integrations.torchrec.batches import unfit
from torchembed.integrations.torchrec.model_parts import parts_of, unfit_model
from torchembed.integrations.torchrec.pipeline_steps import PipelineSteps
from torchembed.sharding.wire import WireTransport

_logger = logging.getLogger("torchembed.integrations.torchrec")


class TrainPipeline:
    """Trains a sharded TorchRec model with the call of ``TrainPipelineSparseDist``, and the same
    numbers, by :class:`torchembed.training.TrainPipeline`.

    For models whose collections our sharders have sharded. Where ours cannot (modules that TorchRec
    shards itself, tables under Adam, batches that are no trees of tensors and
    ``KeyedJaggedTensor``s, ...) ``TrainPipelineSparseDist`` trains, and a line in the log says so,
    and why.

    A step is one CUDA graph, collectives inside. Where every bag of a key has as many ids on all
    ranks, which a thread finds out, it is for exactly these; where lengths vary, there is room for
    more. Other batches, as a smaller last one, are trained eagerly, and models that look up
    sequences without graphs. The thread reads the user's iterator, two batches more than the steps
    need, and pins what is not pinned.

    Gradients of dense parameters are averaged as the ``DistributedDataParallel`` in the model
    would; where it has none, they stay each rank's. ``SGD``, ``Adagrad`` and ``Adam`` of torch,
    without further settings, are updated in the graph, with the optimizer's own states; other
    optimizers step after it.

    Between steps the model is as it was: ``state_dict``, optimizers and schedulers, evaluation of
    the model itself. In evaluation mode ``progress`` gives the output and trains nothing. An id
    outside its table counts as FBGEMM's ``bounds_check_mode`` says; how many there were, the log
    says once the batches end. A step under ``FATAL`` with one changes nothing, and a later call
    raises an ``IndexError``.

    Collective: every rank makes it, and calls it for equally many batches. Use it in a ``with``, or
    :meth:`close` it, before the process group is destroyed.

    Args:
        model: a ``DistributedModelParallel`` or what it holds; called as ``model(batch)``, gives
            the loss and an output.
        optimizer: TorchRec's or torch's, stepped as TorchRec's pipeline does.
        device: where batches go.
        execute_all_batches: False leaves the last two batches out, as TorchRec's does.
        transport: ``WireTransport.PUSH`` is faster on the GPUs of one node.
        fuses_layers: False has ``nn.Linear`` and TorchRec's ``LowRankCrossNet`` computed by torch's
            operations and not by ours, which take fewer passes but have no second derivative.
        timeout_seconds: how long the host waits for a step of a GPU.
        torchrec_settings: of ``TrainPipelineSparseDist`` alone, which then trains.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
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
        self._theirs: Any = None
        self._given: Iterator[Any] | None = None
        self._batches: Iterator[Any] | None = None
        parts = parts_of(model)
        reason = unfit_model(parts)
        others = _settings_that_count(torchrec_settings)
        if others:
            reason = f"it is given {', '.join(others)}"
        if reason is not None:
            self._fall_back(reason)
            return
        self._steps = PipelineSteps(
            parts,
            optimizer,
            self._device,
            transport=transport,
            fuses_layers=fuses_layers,
            timeout_seconds=timeout_seconds,
        )

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train the next batch.

        Args:
            dataloader_iter: each call is given the same one. What was read of one before is trained
                before what another one gives.

        Returns:
            The model's output for the batch: what comes with the loss.

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

    def _follow(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        if self._given is None and self._theirs is None:
            first = next(batches, None)
            self._batches = itertools.chain([] if first is None else [first], batches)
            reason = None if first is None else unfit(first)
            if reason is not None:
                self._steps.close()
                self._fall_back(reason)
        if self._theirs is None:
            self._steps.follow(self._batches)
        # Only now: where the first batch could not be read, the next call begins anew.
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
        """The model, to be used by itself until the next :meth:`progress`; ours has changed nothing
        of it."""
        return self._model if self._theirs is None else self._theirs.detach()

    def close(self) -> None:
        """Wait for the steps so far, and destroy graphs; leaving a ``with`` does it too.

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


def _settings_that_count(settings: Mapping[str, Any]) -> list[str]:
    """The names of those that are not TorchRec's defaults."""
    known = inspect.signature(TrainPipelineSparseDist.__init__).parameters
    return [name for name, v in settings.items() if name not in known or v != known[name].default]
