"""The versions of one model that are loaded, and the one that answers."""

import threading
from collections.abc import Collection

from torchembed.serving.interface import ModelNotReadyError, ModelState, UnknownModelError
from torchembed.serving.models.loaded_version import DenseWeights
from torchembed.serving.models.version_lease import VersionLease


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
        self._before: tuple[VersionLease, DenseWeights] | None = None
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

    def add(self, lease: VersionLease, num_kept: int, named: Collection[int]) -> None:
        """Answer by ``lease`` from now on, and retire versions that are to answer no longer: but
        for the one before, all that are neither among the ``num_kept`` newest nor ``named``."""
        with self._lock:
            if self._current is not None and self._current is not lease:
                self._before = self._current, self._current.version.weights
            self._leases[lease.number] = self._current = lease
            kept = {*sorted(self._leases)[-num_kept:], *named, lease.number}
            if self._before is not None:
                kept.add(self._before[0].number)
            retired = [self._leases.pop(n) for n in set(self._leases) - kept]
        for old in retired:
            old.retire()

    def swap(self, lease: VersionLease, weights: DenseWeights) -> None:
        """Answer by other dense weights of a version from the next request on."""
        with self._lock:
            self._before = lease, lease.version.weights
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
            lease, weights = self._before
            lease.version.weights, self._current, self._before = weights, lease, None
            return weights.version

    def clear(self) -> None:
        """Retire all versions; returns when they are let go of."""
        with self._lock:
            leases = list(self._leases.values())
            self._leases.clear()
            self._current = self._before = None
        for lease in leases:
            lease.retire()
        for lease in leases:
            lease.wait()
