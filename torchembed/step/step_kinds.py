"""As which kind of step a batch can be trained."""

from typing import Any, NamedTuple

from torch import nn

from torchembed.core.trees import layout_of
from torchembed.modules.preparing import PreparingModule
from torchembed.step.batch_layout import has_fixed_shape, jagged_layout


class StepKinds(NamedTuple):
    """Neither: eagerly."""

    static: bool
    """Of the layout of the first such batch."""
    jagged: bool
    """Of the layout of the first such batch but for the lengths of bags."""


class Layouts:
    """The layouts that the first batches of a kind have set for those after them."""

    def __init__(self, model: nn.Module) -> None:
        collections = [m for m in model.modules() if isinstance(m, PreparingModule)]
        self._all_wait = any(collection.always_waits_for_sizes for collection in collections)
        self._static: Any = None
        self._jagged: Any = None

    def kinds_of(self, batch: Any) -> StepKinds:
        """The kinds of ``batch``, which is the first of its own where there was none."""
        if self._static is not None and layout_of(batch) == self._static:
            return StepKinds(static=True, jagged=False)
        if has_fixed_shape(batch) and not self._all_wait:
            layout = layout_of(batch)
            self._static = layout if self._static is None else self._static
            return StepKinds(static=layout is not None and layout == self._static, jagged=False)
        layout = jagged_layout(batch)
        self._jagged = layout if self._jagged is None else self._jagged
        return StepKinds(static=False, jagged=layout is not None and layout == self._jagged)
