"""The kinds of step that can train a batch, which its layout decides."""

from collections.abc import Hashable
from typing import NamedTuple

from torch import nn

from torchembed.core.trees import Tree, layout_of
from torchembed.modules.staged_collection import StagedCollection
from torchembed.step.batch_layout import has_fixed_shape, jagged_layout, lengths_digest


class BatchKinds(NamedTuple):
    """The kinds of step that can train a batch; where there is none, an eager step does."""

    static: bool
    """The batch has fixed hotness, and the layout of the first such batch."""
    jagged: bool
    """The batch has the layout of the first jagged one, but for the lengths of its bags."""


class Layouts:
    """The layouts that the first batches of a kind have set for those after them."""

    def __init__(self, model: nn.Module) -> None:
        collections = [m for m in model.modules() if isinstance(m, StagedCollection)]
        self._all_wait = any(collection.always_waits_for_sizes for collection in collections)
        self._static: Hashable = None
        self._jagged: Hashable = None
        self._static_digest = self._jagged_digest = 0

    def kinds_of(self, batch: Tree) -> BatchKinds:
        """The kinds of ``batch``, which sets the layout where it is the first of its kind."""
        if self._static is not None and layout_of(batch) == self._static:
            return BatchKinds(static=True, jagged=False)
        if has_fixed_shape(batch) and not self._all_wait:
            layout = layout_of(batch)
            if self._static is None:
                self._static, self._static_digest = layout, lengths_digest(batch)
            return BatchKinds(static=layout is not None and layout == self._static, jagged=False)
        layout = jagged_layout(batch)
        if self._jagged is None:
            self._jagged, self._jagged_digest = layout, lengths_digest(batch)
        return BatchKinds(static=False, jagged=layout is not None and layout == self._jagged)

    def lengths_digest(self, kinds: BatchKinds) -> int:
        """:func:`~torchembed.step.batch_layout.lengths_digest` of batches of ``kinds``, which must
        be the same on all ranks for a step of these kinds."""
        return self._static_digest if kinds.static else self._jagged_digest
