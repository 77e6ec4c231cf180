"""The ids of a table that servers may have rows of."""

import torch
from torch import Tensor

_FEWEST_NOTES = 1 << 16


class PublishedIds:
    """Ids that were published and not deleted since: int64, some 8 bytes for each id, and up to
    twice that. A deletion counts once it is confirmed."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)
        """Distinct and ascending, but for what was noted since."""
        self._notes: list[tuple[Tensor, bool]] = []
        """Further ids, and whether they are there; later ones count."""
        self._num_noted = 0
        self._unconfirmed: list[Tensor] = []

    def add(self, ids: Tensor) -> None:
        """Note ids whose rows are published."""
        self._note(ids, True)
        self._unconfirmed = [of_one[~torch.isin(of_one, ids)] for of_one in self._unconfirmed]

    def delete(self, ids: Tensor) -> None:
        """Note ids whose deletion is published, and not confirmed yet."""
        self._unconfirmed.append(ids.clone())

    def confirm(self) -> None:
        """Take it that servers learn of all deletions by now."""
        for ids in self._unconfirmed:
            self._note(ids, False)
        self._unconfirmed.clear()

    def without(self, ids: Tensor) -> Tensor:
        """The ids that are there and not among ``ids``, ascending."""
        self._settle()
        return self._ids[~torch.isin(self._ids, ids)]

    def _note(self, ids: Tensor, is_there: bool) -> None:
        if not len(ids):
            return
        self._notes.append((ids.clone(), is_there))
        self._num_noted += len(ids)
        if self._num_noted > max(len(self._ids), _FEWEST_NOTES):
            self._settle()

    def _settle(self) -> None:
        notes = [(self._ids, True), *self._notes]
        ids = torch.cat([of_note for of_note, _ in notes])
        are_there = torch.cat([torch.full((len(i),), there) for i, there in notes])
        ids, order = ids.sort(stable=True)
        is_last = torch.ones_like(ids, dtype=torch.bool)
        is_last[:-1] = ids[1:] != ids[:-1]
        self._ids = ids[is_last & are_there[order]]
        self._notes.clear()
        self._num_noted = 0
