"""Changes between steps that all of several ranks find before the same step."""

import warnings
from typing import NamedTuple

from torchembed.core.ranks.joint_notices import JointNotices
from torchembed.step.watches.hooks import PythonHooks
from torchembed.step.watches.watched_values import WatchedValues


class Joint(NamedTuple):
    """The kinds of changes that all ranks have found since the step before."""

    values: bool
    """True if values changed that captured steps hold."""
    hooks: bool
    """True if hooks came that no graph can call."""


NOTHING = Joint(values=False, hooks=False)


class JointChanges:
    """Says at each step of several ranks what has changed on all of them.

    Ranks run the same script as a rule, and find the same changed before the same step. They ask
    each other only then: a rank that finds nothing takes the step as ever.

    Args:
        values: looked at before each step.
        hooks: those that are there.
    """

    def __init__(self, values: WatchedValues, hooks: PythonHooks) -> None:
        self._values, self._hooks, self._notices = values, hooks, JointNotices()
        self._num_steps = self._version = 0
        self._has_noted_hooks = False
        """True while there are hooks, of which read batches or all ranks know."""

    def note_hooks(self) -> None:
        """Note that all ranks know of the hooks that are there."""
        self._has_noted_hooks = self._hooks.are_there

    def before_step(self, *, has_read: bool) -> Joint:
        """The changes that all ranks have found; a warning names values that changed on this rank
        alone, as seen from here. Every rank calls it before each step.

        Args:
            has_read: True if batches were read before this step, which have been agreed on.
        """
        self._num_steps += 1
        version, self._version = self._version, self._values.version
        are_new = self._version != version and self._values.outdated is not None
        if not self._hooks.are_there:
            have_come, self._has_noted_hooks = False, False
        else:
            have_come, self._has_noted_hooks = has_read and not self._has_noted_hooks, True
        if not (are_new or have_come):
            return NOTHING
        found = Joint(
            values=are_new and self._notices.are_joint(f"values/{self._num_steps}"),
            hooks=have_come and self._notices.are_joint(f"hooks/{self._num_steps}"),
        )
        if are_new and not found.values:
            warnings.warn(
                "not all ranks have found a value changed before the same step, so captured steps "
                "go on without the change for batches that were read before: "
                f"{self._values.outdated}; make the change on every rank before the same step",
                stacklevel=5,  # whoever called the pipeline
            )
        return found
