"""Requests under way at a version, which is let go of once they are answered."""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from torchembed.serving.interface import Answer, ModelForm, ServedModel
from torchembed.serving.models.loaded_version import LoadedVersion


class VersionLease:
    """A loaded version, used by any number of requests until it is retired.

    Args:
        version: that is loaded.
        answering: answers its requests: the version itself, or what gathers requests for it.
        release: called once, by :meth:`let_go`.
    """

    def __init__(
        self, version: LoadedVersion, answering: ServedModel, release: Callable[[], None]
    ) -> None:
        self.version, self.answering, self._release = version, answering, release
        self._num_users, self._is_retired = 0, False
        self._changed = threading.Condition()

    @property
    def number(self) -> int:
        """The version of the folder."""
        return self.version.description.version

    def begin(self) -> bool:
        """Begin a request, unless the version is retired."""
        with self._changed:
            self._num_users += not self._is_retired
            return not self._is_retired

    def end(self) -> None:
        """End a request that was begun."""
        with self._changed:
            self._num_users -= 1
            self._changed.notify_all()

    def retire(self) -> None:
        """Begin no more requests."""
        with self._changed:
            self._is_retired = True

    def let_go(self) -> None:
        """Release a retired version when the requests under way are answered; returns then.

        The caller's thread releases it: no request waits for that, or fails with it.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._num_users)
        self._release()


class AnsweringModel:
    """A model that answers by whichever version is there when it is asked.

    Args:
        find: gives the version of the moment, or raises as
            :meth:`torchembed.serving.interface.ModelDirectory.model` does.
    """

    def __init__(self, find: Callable[[], VersionLease]) -> None:
        self._find = find

    @property
    def form(self) -> ModelForm:
        """The form of the version of the moment."""
        return self._find().version.form

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        """As :meth:`torchembed.serving.interface.ServedModel.answer`."""
        lease = self._find()
        while not lease.begin():
            # It was retired since it was found: another one has its place by now, or none.
            lease = self._find()
        try:
            return lease.answering.answer(inputs, outputs)
        finally:
            lease.end()
