"""Parameters that are frozen or unfrozen or given other memory, and modules that are set to
training or evaluation, so often that captures would not pay."""

import collections
from collections.abc import Iterator, Mapping

from torchembed.step.stages import Reason
from torchembed.step.trained_modules import TrainedModules
from torchembed.tables import table_of

_MAX_CHANGES = 3
_WINDOW = 30
"""A value that changes so often in so many steps is not worth a capture each time."""


class ModelChanges:
    """Counts how often each parameter was frozen or unfrozen or given other memory, and each module
    set to training or evaluation, when steps had to begin anew.

    Args:
        trained: modules, which are at first as they are now.
    """

    def __init__(self, trained: TrainedModules) -> None:
        self._trained, self._known = trained, dict(_state_of(trained))
        self._changes: dict[str, collections.deque[int]] = {}
        """For each thing that changed, the numbers of the last steps that found it changed."""

    def note(self, num_steps: int) -> Reason | None:
        """Note what has changed since the last call, after ``num_steps`` steps.

        Returns:
            The reason to capture no more, which names the first that changes again and again; None
            without one.
        """
        known, self._known = self._known, dict(_state_of(self._trained))
        unsteady: list[str] = []
        for name in _changed(known, self._known):
            steps = self._changes.setdefault(name, collections.deque(maxlen=_MAX_CHANGES))
            steps.append(num_steps)
            if len(steps) == _MAX_CHANGES and num_steps - steps[0] < _WINDOW:
                unsteady.append(name)
        if not unsteady:
            return None
        return Reason("it changes again and again, for which no graph is captured", unsteady[0])


def _state_of(trained: TrainedModules) -> Iterator[tuple[str, int]]:
    for name, parameter in trained.named_parameters():
        yield f"requires_grad of {name}", parameter.requires_grad
        if table_of(parameter) is None:
            yield f"memory of {name}", parameter.data_ptr()
    for name, module in trained.named_modules():
        yield f"training of {name}", module.training


def _changed(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Names of what is there in both, and differs."""
    return [name for name, state in now.items() if before.get(name, state) != state]
