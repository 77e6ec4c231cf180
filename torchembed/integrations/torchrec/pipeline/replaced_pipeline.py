"""torchembed's pipeline in the place of TorchRec's ``TrainPipelineSparseDist`` within a process."""

import atexit
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline import TrainPipeline as TorchrecTrainPipeline

from torchembed.core import ranks
from torchembed.integrations.torchrec.pipeline.train_pipeline import TrainPipeline

_logger = logging.getLogger("torchembed.integrations.torchrec")

_destroy = distributed_c10d.destroy_process_group
"""torch's own, read on import since it is replaced."""
_is_replaced = False
_open: "weakref.WeakSet[TrainPipeline]" = weakref.WeakSet()
"""Pipelines that were made in the place of TorchRec's."""
_named: set[type] = set()
"""Other classes of TorchRec's pipelines whose use was logged."""


def replace_pipeline() -> None:
    """Make ``TrainPipelineSparseDist(...)`` give :class:`TrainPipeline`, a subclass, by whatever
    name a script has imported it.

    Classes derived from it are made as before. Scripts for TorchRec close no pipeline, so these are
    closed before the default process group is destroyed, and when the process ends.
    """
    global _is_replaced  # noqa: PLW0603 - says what the class is now
    if _is_replaced:
        return
    _is_replaced = True
    TorchrecTrainPipeline.__new__ = _new  # type: ignore[assignment,method-assign]
    _set_destroy(_close_and_destroy)
    atexit.register(_leave)


def restore_pipeline() -> None:
    """Let ``TrainPipelineSparseDist(...)`` give TorchRec's. Pipelines that were made stay."""
    global _is_replaced  # noqa: PLW0603 - as above
    if not _is_replaced:
        return
    # __new__ stays: a class from which one was deleted takes no arguments any more.
    _is_replaced = False
    _set_destroy(_destroy)
    atexit.unregister(_leave)
    _named.clear()


def _new(kind: type[TorchrecTrainPipeline], *_: Any, **__: Any) -> TorchrecTrainPipeline:
    """``__new__`` of all of TorchRec's pipelines and of what users derive from them."""
    if not _is_replaced or issubclass(kind, TrainPipeline):
        return object.__new__(kind)
    if kind is TrainPipelineSparseDist:
        pipeline = object.__new__(TrainPipeline)
        _open.add(pipeline)
        return pipeline
    if not issubclass(kind, EvalPipelineSparseDist) and kind not in _named:
        _named.add(kind)
        if ranks.rank() == 0:
            _logger.warning(
                "%s trains as TorchRec has it, since torchembed's pipeline takes the place of "
                "TrainPipelineSparseDist itself and of no other class",
                kind.__name__,
            )
    return object.__new__(kind)


@functools.wraps(_destroy)
def _close_and_destroy(group: dist.ProcessGroup | None = None) -> None:
    # Destroying the group of a captured step's collectives would wait for ever.
    if group is None or group is dist.group.WORLD:
        for pipeline in list(_open):
            pipeline.close()
    _destroy(group)


def _set_destroy(destroy: Callable[..., None]) -> None:
    for module in (dist, distributed_c10d):
        module.destroy_process_group = destroy  # type: ignore[assignment]


def _leave() -> None:
    """Destroy graphs as the process ends, and wait for no rank that may have ended before."""
    for pipeline in list(_open):
        pipeline.__exit__(SystemExit, SystemExit(), None)
