"""The order of updates: which of them are older than what was applied."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from torchembed.serving.updates.applier_statistics import DropReason
from torchembed.stores import RowStore
from torchembed.streams import RowUpdate, Update

_RECORDS = "torchembed.applied_updates"


class _Place(NamedTuple):
    model: str
    table: str | None
    """None for the dense part."""
    partition: int
    publisher: int | None
    """The publisher of sequence numbers; None for versions, which all publishers have in common."""


class _Position(NamedTuple):
    done: int = 0
    """All up to this number were applied."""
    begun: int = 0
    """All up to this number may have been applied, in part or whole."""


class UpdateOrder:
    """Remembers what was applied last in each partition of a table or a dense part.

    A key is always in the same partition, so that nothing else needs an order. Within a partition
    the sequence numbers of one publisher ascend; one that begins anew, or another rank, has numbers
    of its own. Versions never go down, whoever published them; those that are 0, as HugeCTR's
    messages have it, are of no version, and are not compared.

    Args:
        records: the store that keeps rows when the process ends, in which the order of their
            updates is kept likewise; None where no rows outlive the process. That of dense parts
            never is, since these do not.
    """

    def __init__(self, records: RowStore | None = None) -> None:
        self._records = None if records is None else records.table(_RECORDS, 16)
        self._known: dict[_Place, _Position] = {}

    def read(self, updates: Iterable[Update]) -> None:
        """Learn what is on record of the partitions of updates, before the other methods are asked
        about them.

        Raises:
            RowStoreError, OSError: where records cannot be read.
        """
        asked = {place for update in updates for place in _places(update)}
        new = sorted((p for p in asked if p not in self._known and p.table is not None), key=str)
        if self._records is None or not new:
            return
        lines = torch.zeros(len(new), 16, dtype=torch.uint8)
        self._records.read(torch.tensor([_key(place) for place in new]), lines)
        positions = lines.view(torch.int64).tolist()
        self._known |= {p: _Position(*n) for p, n in zip(new, positions, strict=True)}

    def forget(self) -> None:
        """Read again what is on record: another process may have applied updates meanwhile."""
        if self._records is not None:
            self._known = {p: n for p, n in self._known.items() if p.table is None}

    def why_not(self, update: Update) -> DropReason | None:
        """Why an update must not be applied, None where it may be."""
        sequences, versions = _places(update)
        if update.sequence <= self._position(sequences).done:
            return DropReason.REPEATED
        if 0 < update.version < self._position(versions).done:
            return DropReason.OLD_VERSION
        return None

    def is_torn(self, update: Update) -> bool:
        """True where an earlier process may have applied later updates of the partition already, so
        that this one must be applied together with these."""
        return update.sequence < self._position(_places(update)[0]).begun

    def note_begun(self, updates: Sequence[Update]) -> None:
        """Take note that updates that :meth:`why_not` had nothing against will be applied at once.

        Raises:
            RowStoreError, OSError: where that cannot be put on record.
        """
        begun: dict[_Place, _Position] = {}
        for update in updates:
            sequences, _ = _places(update)
            known = self._position(sequences)
            begun[sequences] = known._replace(begun=max(update.sequence, known.begun))
        self._write(begun)

    def note_applied(self, updates: Sequence[Update]) -> None:
        """Take note that updates were applied, each behind those before it.

        Raises:
            RowStoreError, OSError: where that cannot be put on record.
        """
        done: dict[_Place, _Position] = {}
        for update in updates:
            sequences, versions = _places(update)
            known = done.get(versions, self._position(versions))
            version = max(update.version, known.done)
            done[versions] = _Position(version, version)
            done[sequences] = _Position(update.sequence, update.sequence)
        self._write(done)
        self._known |= done

    def _position(self, place: _Place) -> _Position:
        return self._known.get(place, _Position())

    def _write(self, positions: dict[_Place, _Position]) -> None:
        kept = {p: n for p, n in positions.items() if p.table is not None}
        if self._records is not None and kept:
            lines = torch.tensor(list(kept.values()), dtype=torch.int64).view(torch.uint8)
            self._records.write(torch.tensor([_key(place) for place in kept]), lines)


def _places(update: Update) -> tuple[_Place, _Place]:
    """Places where the sequence number and the version of an update are remembered."""
    table = update.table if isinstance(update, RowUpdate) else None
    partition = update.origin.partition
    versions = _Place(update.model, table, partition, None)
    return versions._replace(publisher=update.origin.publisher), versions


def _key(place: _Place) -> int:
    digest = hashlib.blake2b("\n".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
