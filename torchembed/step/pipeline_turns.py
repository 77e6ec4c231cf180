"""Turns of several pipelines over the same dynamic tables."""

import weakref

from torch import nn

from torchembed.modules.table_module import TableModule
from torchembed.step.batches.read_ahead import ReadAhead
from torchembed.step.engines.engine_choice import EngineChoice

_last: "weakref.WeakKeyDictionary[TableModule, weakref.ref[PipelineTurns]]" = (
    weakref.WeakKeyDictionary()
)
"""For each module with dynamic tables the pipeline that took the last step on it."""


class PipelineTurns:
    """Keeps a pipeline from training dynamic tables of which another one has prepared a batch.

    The rows of batches under way stay in their places until the number of their batch is released,
    and each pipeline counts its own batches: the steps of one would release a batch of the other.

    Args:
        model: of the pipeline.
        engines: of its steps.
        upcoming: its batches that were read and not trained yet.
    """

    def __init__(self, model: nn.Module, engines: EngineChoice, upcoming: ReadAhead) -> None:
        self._engines, self._upcoming = engines, upcoming
        self._names: dict[TableModule, list[str]] = {}
        """For each module with dynamic tables their names."""
        for module in model.modules():
            if isinstance(module, TableModule):
                tables = module.table_set.tables
                names = [table.spec.name for table in tables if table.spec.num_ids is None]
                if names:
                    self._names[module] = names

    def begin(self) -> None:
        """Begin a step of the pipeline.

        Raises:
            RuntimeError: before any change, where another pipeline has prepared a batch.
        """
        for module, names in self._names.items():
            known = _last.get(module)
            other = None if known is None else known()
            if other is self:
                continue
            if other is not None and other._has_prepared:
                raise RuntimeError(
                    f"dynamic tables {', '.join(names)} hold rows of a batch that another "
                    "TrainPipeline has prepared and not trained yet; call its close(), or its "
                    "progress() until its iterator ends, before this pipeline trains them"
                )
            _last[module] = weakref.ref(self)

    @property
    def _has_prepared(self) -> bool:
        """True if tables have admitted the pipeline's next batch."""
        following = next(iter(self._upcoming), None)
        return following is not None and self._engines.has_prepared(following)
