"""``TrainPipeline``: torchembed's pipeline with the interface of TorchRec's."""

import functools
import inspect
import itertools
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.backward_injection import BackwardHookWork, InjectionSite

from torchembed.core import ranks
from torchembed.core.trees import Tree
from torchembed.integrations.torchrec.batches.batch_stream import BatchStream
from torchembed.integrations.torchrec.batches.conversion import unsupported_batch
from torchembed.integrations.torchrec.pipeline.steps import PipelineSteps
from torchembed.integrations.torchrec.trained_model.unwrapped_model import (
    unsupported_hooks,
    unsupported_model,
    unwrap,
)
from torchembed.sharding.wire import WireTransport

_logger = logging.getLogger("torchembed.integrations.torchrec")

_SCHEDULING = frozenset(
    (
        *("apply_jit", "pipeline_postproc", "dmp_collection_sync_interval_batches"),
        *("enqueue_batch_after_forward", "enable_inplace_copy_batch"),
        *("free_features_storage_early", "clear_data_dist_inputs"),
    )
)
"""Arguments of TorchRec's pipeline that do not change what it trains. Models that are synchronized
over several groups of ranks are left to it for another reason."""


class TrainPipeline(TrainPipelineSparseDist[Tree, Tree]):
    """Trains a sharded TorchRec model by :class:`torchembed.training.TrainPipeline`, with the
    interface and the numbers of ``TrainPipelineSparseDist``.

    For models whose collections torchembed's sharders have sharded. What it does not support
    (modules that TorchRec shards itself, tables under Adam, batches that are no trees of tensors
    and ``KeyedJaggedTensor``s, ...) TorchRec's own steps train; the log then says so and why.
    Either way it is a ``TrainPipelineSparseDist``, whose model and optimizer may be replaced
    between steps. ``batches`` and ``contexts`` hold what TorchRec's own steps have read, and
    nothing while torchembed's train.

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
        torchrec_arguments: further positional arguments of ``TrainPipelineSparseDist``.
        transport: ``WireTransport.PUSH`` is faster on the GPUs of one node.
        fuses_layers: whether ``nn.Linear`` and TorchRec's ``LowRankCrossNet`` are computed by
            torchembed's operations, which take fewer passes but have no second derivative.
        timeout_seconds: how long the host waits for a step of a GPU.
        torchrec_settings: further arguments of ``TrainPipelineSparseDist``. Those that only say
            when its steps copy, exchange or free what they need, or how they compile a model,
            change nothing here; with others that are not their defaults, its own steps train.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        *torchrec_arguments: Any,
        transport: WireTransport = WireTransport.COLLECTIVE,
        fuses_layers: bool = True,
        timeout_seconds: float = 600.0,
        **torchrec_settings: Any,
    ) -> None:
        device = torch.device(device)
        arguments = (model, optimizer, device, execute_all_batches, *torchrec_arguments)
        super().__init__(*arguments, **torchrec_settings)
        self._unsupported_settings = _unsupported_settings(arguments, torchrec_settings)
        self._make_steps = functools.partial(
            PipelineSteps,
            device=device,
            transport=transport,
            fuses_layers=fuses_layers,
            timeout_seconds=timeout_seconds,
        )
        self._steps: PipelineSteps | None = None
        """Ours; None where TorchRec's train."""
        self._given: Iterator[Tree] | None = None
        self._to_read: Iterator[Tree] = iter(())
        """The iterator that the steps read in place of the one that was given."""
        self._unread: BatchStream | None = None
        """The batches that TorchRec's steps read, once they have taken over from ours."""
        self._set_up(None)

    def _set_up(self, stream: BatchStream | None) -> None:
        """Make the steps of the model and the optimizer as they are now, or fall back.

        Args:
            stream: of the steps before; None for the first.
        """
        reason = self._unsupported()
        if reason is None:
            self._steps = self._make_steps(unwrap(self._model), self._optimizer, stream=stream)
        else:
            self._fall_back(reason, stream)
        self._trained, self._num_handles = self._trains(), RemovableHandle.next_id

    def _trains(self) -> tuple[object, ...]:
        """The parts of the steps that users and TorchRec's wrappers may replace."""
        return self._model, self._optimizer, self._model_fwd

    def _has_changed(self) -> bool:
        """True where the steps cannot go on as they are: what they are made of was replaced,
        another pipeline of the model has its tables, or a hook was registered that they would not
        call."""
        if self._trains() != self._trained:
            return True
        if self._model.training and not (self._steps is None or self._steps.have_tables):
            return True
        # Every registration of a hook takes the next number.
        if RemovableHandle.next_id == self._num_handles:
            return False
        self._num_handles = RemovableHandle.next_id
        return unsupported_hooks(unwrap(self._model)) is not None

    def _unsupported(self) -> str | None:
        """Reason why TorchRec's steps must train; None where ours can."""
        if self._unsupported_settings:
            return f"it is given {', '.join(self._unsupported_settings)}"
        if self._model_fwd is not self._model:
            return "another function than its model computes losses"
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            return f"its optimizer is a {type(self._optimizer).__name__}"
        return unsupported_model(unwrap(self._model))

    def _fall_back(self, reason: str, stream: BatchStream | None) -> None:
        """Leave the steps to TorchRec's from now on, and what is in the ``stream``."""
        if ranks.rank() == 0:
            _logger.warning("TorchRec's TrainPipelineSparseDist trains, since %s", reason)
        self._steps, self._unread = None, stream
        if stream is not None:
            self._to_read = stream.restored()

    def progress(self, dataloader_iter: Iterator[Tree]) -> Tree:
        """Train the next batch; in evaluation mode, compute the model's output alone.

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
        if self._steps is not None and self._has_changed():
            self._set_up(self._steps.stop())
        if dataloader_iter is not self._given:
            self._follow(dataloader_iter)
        steps = self._steps
        if steps is None:
            return super().progress(self._to_read)
        self._model_attached = True
        if not self._execute_all_batches and not steps.has_left(3):
            raise StopIteration
        if not self._model.training:
            _, output = self._model(steps.next_untrained())
            return output
        self._optimizer.zero_grad()
        return steps.next_output()

    def _follow(self, batches: Iterator[Tree]) -> None:
        """Read from ``batches`` from now on; fall back where the first batch is not supported."""
        self._to_read = batches
        if self._given is None and self._steps is not None:
            first = next(batches, None)
            self._to_read = itertools.chain([] if first is None else [first], batches)
            reason = None if first is None else unsupported_batch(first)
            if reason is not None:
                self._steps.close()
                self._fall_back(reason, None)
        if self._steps is not None:
            self._steps.follow(self._to_read)
        elif self._unread is not None:
            self._unread.follow(self._to_read)
            self._to_read = self._unread.restored()
        # Set last: where the first batch could not be read, the next call tries again.
        self._given = batches

    def detach(self) -> nn.Module:
        """The model, for use by itself until the next :meth:`progress` or :meth:`attach`; where
        TorchRec's steps train, they first undo their own changes to it."""
        if self._steps is None:
            return super().detach()
        self._model_attached = False
        return self._model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Train ``model`` from now on, the same one where it is None. Batches that were read are
        trained first.

        Args:
            model: sharded as the one before.
            sparse_dist: where TorchRec's steps train, if ids of the batches that were read are
                exchanged at once.
        """
        if self._steps is None:
            super().attach(model, sparse_dist)
            return
        self._model_attached = True
        if model is not None and model is not self._model:
            if self._model_fwd is self._model:
                self._model_fwd = model
            self._model = model

    def reset(self) -> None:
        """Forget the iterator and the batches that were read of it; the next :meth:`progress` reads
        from where it is."""
        if self._steps is not None:
            self._steps.drop_batches()
        elif self._unread is not None:
            self._unread.drop()
        self._given = None
        super().reset()

    def register_backward_hook(self, site: InjectionSite, work: BackwardHookWork) -> None:
        """Call ``work`` in each backward, at ``site``; TorchRec's steps train from now on."""
        if self._steps is not None:
            self._fall_back("it calls hooks during backward", self._steps.stop())
        super().register_backward_hook(site, work)

    def fill_pipeline(self, dataloader_iter: Iterator[Tree]) -> None:
        """Read the first batches; TorchRec's steps train from now on."""
        super().fill_pipeline(self._left_to_torchrec(dataloader_iter))

    def enqueue_batch(self, dataloader_iter: Iterator[Tree]) -> bool:
        """Read a batch, and return False where there is none; TorchRec's steps train from now
        on."""
        return super().enqueue_batch(self._left_to_torchrec(dataloader_iter))

    def _left_to_torchrec(self, batches: Iterator[Tree]) -> Iterator[Tree]:
        """The iterator that TorchRec's steps read in place of ``batches``."""
        if self._steps is not None:
            self._fall_back("a script calls its stages", self._steps.stop())
        if batches is not self._to_read and batches is not self._given:
            self._follow(batches)
        return self._to_read

    def close(self) -> None:
        """Wait for the steps so far and destroy graphs, as leaving a ``with`` does.

        Raises:
            IndexError, TimeoutError: as :meth:`progress`.
        """
        if self._steps is not None:
            self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._steps is not None:
            self._steps.exit(kind, error, trace)


def _unsupported_settings(arguments: tuple[Any, ...], settings: dict[str, Any]) -> list[str]:
    """Names of TorchRec's arguments that are not its defaults and change what is trained."""
    signature = inspect.signature(TrainPipelineSparseDist.__init__)
    given = signature.bind(None, *arguments, **settings).arguments
    known = signature.parameters
    own = ("self", "model", "optimizer", "device", "execute_all_batches")
    return [
        name
        for name, value in given.items()
        if name not in own and name not in _SCHEDULING and value != known[name].default
    ]
