"""The order of updates: which of them are older than what was applied."""

from typing import NamedTuple

from torchembed.serving.updates.applier_statistics import DropReason
from torchembed.streams import RowUpdate, Update


class _Partition(NamedTuple):
    model: str
    table: str | None
    """None for the dense part."""
    number: int


class UpdateOrder:
    """Remembers what was applied last in each partition of a table or a dense part.

    A key is always in the same partition, so that nothing else needs an order. Within a partition
    the sequence numbers of one publisher ascend; one that begins anew, or another rank, has numbers
    of its own. Versions never go down, whoever published them; those that are 0, as HugeCTR's
    messages have it, are of no version, and are not compared.
    """

    def __init__(self) -> None:
        self._sequences: dict[tuple[_Partition, int], int] = {}
        """By publisher, too."""
        self._versions: dict[_Partition, int] = {}

    def why_not(self, update: Update) -> DropReason | None:
        """Why an update must not be applied, None where it may be."""
        partition = _partition(update)
        if update.sequence <= self._sequences.get((partition, update.origin.publisher), 0):
            return DropReason.REPEATED
        if 0 < update.version < self._versions.get(partition, 0):
            return DropReason.OLD_VERSION
        return None

    def note_applied(self, update: Update) -> None:
        """Take note of an update that :meth:`why_not` had nothing against."""
        partition = _partition(update)
        self._sequences[partition, update.origin.publisher] = update.sequence
        self._versions[partition] = max(update.version, self._versions.get(partition, 0))


def _partition(update: Update) -> _Partition:
    table = update.table if isinstance(update, RowUpdate) else None
    return _Partition(update.model, table, update.origin.partition)
