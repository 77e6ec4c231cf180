"""The versions of one model that are loaded, and the one that answers."""

import threading
from collections.abc import Collection
from typing import NamedTuple

from torchembed.serving.interface import ModelNotReadyError, ModelState, UnknownModelError
from torchembed.serving.models.loaded_version import DenseWeights
from torchembed.serving.models.version_lease import VersionLease


class _Before(NamedTuple):
    """What answered before the last change.

    Attributes:
        current: the version.
        changed: the version whose weights changed, which may be another one.
        weights: of ``changed``, as they were.
    """

    current: VersionLease
    changed: VersionLease
    weights: DenseWeights


class ModelVersions:
    """The loaded versions of a model. Requests find them while one thread at a time, which holds
    :attr:`changing`, loads, swaps and unloads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changing = threading.RLock()
        self.state, self.reason = ModelState.UNAVAILABLE, ""
        """Of the newest version that was to be loaded."""
        self._leases: dict[int, VersionLease] = {}
        self._current: VersionLease | None = None
        self._before: _Before | None = None
        self._lock = threading.Lock()

    def find(self, number: int | None = None) -> VersionLease:
        """A version, or where none is named the current one.

        Raises:
            UnknownModelError: where the version is not loaded.
            ModelNotReadyError: where no version is.
        """
        with self._lock:
            if self._current is None:
                raise ModelNotReadyError(
                    f"model {self.name} is not loaded: {self.reason or self.state.value}"
                )
            lease = self._current if number is None else self._leases.get(number)
            if lease is None:
                raise UnknownModelError(
                    f"version of model {self.name} must be one of {sorted(self._leases)}, got "
                    f"{number}"
                )
            return lease

    def leases(self) -> list[VersionLease]:
        """All loaded versions, oldest first."""
        with self._lock:
            return [self._leases[number] for number in sorted(self._leases)]

    def add(
        self, lease: VersionLease, num_kept: int, named: Collection[int], *, is_current: bool
    ) -> None:
        """Answer by a version from now on, and let go of those that are to answer no longer: all
        that are neither among the ``num_kept`` newest nor ``named``, but for the current one and
        the one before it. Returns when these have answered what they were asked.

        Args:
            is_current: False for a version that answers only those who name it, unless there is
                no other.
        """
        with self._lock:
            current = self._current
            self._leases[lease.number] = lease
            if current is None:
                current = lease
            elif is_current and current is not lease:
                self._before = _Before(current, current, current.version.weights)
                current = lease
            self._current = current
            kept = {*sorted(self._leases)[-num_kept:], *named, lease.number, current.number}
            if self._before is not None:
                kept |= {self._before.current.number, self._before.changed.number}
            retired = [self._leases.pop(n) for n in set(self._leases) - kept]
        _let_go(retired)

    def swap(self, lease: VersionLease, weights: DenseWeights) -> None:
        """Answer by other dense weights of a version from the next request on."""
        with self._lock:
            assert self._current is not None
            self._before = _Before(self._current, lease, lease.version.weights)
            lease.version.weights = weights

    def roll_back(self) -> str:
        """Answer again as before the last :meth:`add` or :meth:`swap`; returns the version.

        Raises:
            ValueError: where nothing was before, or that was rolled back already.
        """
        with self._lock:
            if self._before is None:
                raise ValueError(
                    f"model {self.name} must have answered by something before, to roll back to"
                )
            self._current, changed, changed.version.weights = self._before
            self._before = None
            return self._current.version.weights.version

    def clear(self) -> None:
        """Retire all versions; returns when they are let go of."""
        with self._lock:
            leases = list(self._leases.values())
            self._leases.clear()
            self._current = self._before = None
        _let_go(leases)


def _let_go(leases: Collection[VersionLease]) -> None:
    for lease in leases:
        lease.retire()
    for lease in leases:
        lease.let_go()
