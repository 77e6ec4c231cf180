"""The order of updates: whatever comes again or late, rows end up as they were published."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchembed.serving.updates import DropReason
from torchembed.serving.updates.update_order import UpdateOrder
from torchembed.stores import MemoryStore
from torchembed.streams import DenseUpdate, RowUpdate, UpdateOrigin

_NONE = torch.empty(0, dtype=torch.int64)


def rows(
    sequence: int,
    *,
    version: int = 1,
    publisher: int = 1,
    partition: int = 0,
    table: str = "t",
    model: str = "m",
) -> RowUpdate:
    return RowUpdate(
        model=model,
        table=table,
        version=version,
        sequence=sequence,
        keys=_NONE,
        rows=torch.empty(0, 1),
        deleted_keys=_NONE,
        origin=UpdateOrigin(publisher=publisher, partition=partition),
    )


def dense(sequence: int, *, version: int = 1) -> DenseUpdate:
    origin = UpdateOrigin(publisher=1)
    return DenseUpdate(model="m", version=version, sequence=sequence, tensors={}, origin=origin)


def test_what_comes_again_or_late_is_refused() -> None:
    order = UpdateOrder()
    for update, expected in (
        (rows(3, version=2), None),
        (rows(3, version=2), DropReason.REPEATED),
        (rows(2, version=2), DropReason.REPEATED),
        (rows(4, version=1), DropReason.OLD_VERSION),
        (rows(5, version=2), None),
        # Nothing of it concerns other partitions, tables, models or the dense part.
        (rows(1, partition=1), None),
        (rows(1, table="u"), None),
        (rows(1, model="n"), None),
        (dense(1), None),
        (dense(2, version=5), None),
        (dense(3, version=4), DropReason.OLD_VERSION),
        (dense(2, version=6), DropReason.REPEATED),
        # A publisher that begins anew counts anew, and versions go on.
        (rows(1, publisher=2, version=1), DropReason.OLD_VERSION),
        (rows(2, publisher=2, version=2), None),
        (rows(6, publisher=1, version=2), None),
        (rows(3, publisher=2, version=9), None),
        (rows(7, publisher=1, version=8), DropReason.OLD_VERSION),
        # HugeCTR's are of no version.
        (rows(1, publisher=0, version=0), None),
        (rows(1, publisher=0, version=0), DropReason.REPEATED),
        (rows(2, publisher=0, version=0), None),
        (rows(4, publisher=2, version=8), DropReason.OLD_VERSION),
    ):
        assert order.why_not(update) is expected, update
        if expected is None:
            order.note_applied([update])


@settings(max_examples=200, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 2**32),
)
def test_partitions_that_are_read_again_from_anywhere_end_up_the_same(
    beginnings: list[int], rewinds: list[int], seed: int
) -> None:
    """A partition as publishers wrote it, of which a reader goes back time and again."""
    written, publisher, sequence = [], 1, 0
    for version, begins_anew in enumerate(beginnings, 1):
        publisher += begins_anew
        sequence = 1 if begins_anew else sequence + 1
        written.append(rows(sequence, version=version, publisher=publisher))
    random_numbers = random.Random(seed)
    order, applied, at = UpdateOrder(), [], 0
    stops = sorted(random_numbers.randrange(len(written) + 1) for _ in rewinds)
    for stop, rewind in zip([*stops, len(written)], [*rewinds, 0], strict=True):
        for update in written[at:stop]:
            if order.why_not(update) is None:
                order.note_applied([update])
                applied.append(update.version)
        at = max(min(stop, len(written)) - rewind, 0)
    assert applied == list(range(1, len(written) + 1))


def test_it_outlives_the_process_beside_the_rows() -> None:
    with MemoryStore() as records:
        before = UpdateOrder(records)
        before.note_applied([rows(3, version=5), rows(4, version=6), rows(2, partition=1)])
        before.note_applied([dense(7)])
        # Begun, and perhaps done in part, when the process ended.
        before.note_begun([rows(5, version=6), rows(8, version=6)])
        after = UpdateOrder(records)
        asked = [rows(4, version=6), rows(5, version=6), rows(9, version=6), rows(1, partition=1)]
        after.read([*asked, dense(7), rows(1, publisher=2, version=5)])
        assert [after.why_not(update) for update in asked] == [
            *(DropReason.REPEATED, None, None, DropReason.REPEATED)
        ]
        assert after.why_not(rows(1, publisher=2, version=5)) is DropReason.OLD_VERSION
        # The dense part went with the process.
        assert after.why_not(dense(7)) is None
        torn = [after.is_torn(rows(sequence)) for sequence in (5, 7, 8, 9)]
        assert torn == [True, True, False, False]
        # Another process goes on with the partition.
        other = UpdateOrder(records)
        other.read(asked)
        other.note_applied([rows(9, version=6)])
        assert after.why_not(rows(9, version=6)) is None
        after.forget()
        after.read(asked)
        assert after.why_not(rows(9, version=6)) is DropReason.REPEATED
