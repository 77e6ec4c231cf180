"""Updates that are joined to one come to what they come to one behind the other."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchembed.serving.updates.row_batches import RowBatch
from torchembed.streams import RowUpdate, UpdateOrigin

_KEYS = st.lists(st.integers(0, 7), max_size=4, unique=True)


def update(
    sequence: int,
    keys: list[int],
    deleted: list[int],
    *,
    version: int = 1,
    publisher: int = 1,
    partition: int = 0,
    dim: int = 2,
    dtype: torch.dtype = torch.float32,
) -> RowUpdate:
    return RowUpdate(
        model="m",
        table="t",
        version=version,
        sequence=sequence,
        keys=torch.tensor(keys, dtype=torch.int64),
        rows=torch.full((len(keys), dim), float(sequence), dtype=dtype),
        deleted_keys=torch.tensor(deleted, dtype=torch.int64),
        origin=UpdateOrigin(publisher=publisher, partition=partition),
    )


def apply(rows: dict[int, list[float]], joined: RowUpdate) -> None:
    rows |= dict(zip(joined.keys.tolist(), joined.rows.tolist(), strict=True))
    for key in joined.deleted_keys.tolist():
        rows.pop(key, None)


@settings(max_examples=300, derandomize=True, database=None)
@given(st.lists(st.tuples(_KEYS, _KEYS, st.integers(1, 2)), min_size=1, max_size=12))
def test_rows_are_the_same(published: list[tuple[list[int], list[int], int]]) -> None:
    updates = [
        update(
            n,
            keys,
            [k for k in deleted if k not in keys],
            version=sum(v == 2 for _, _, v in published[:n]),
        )
        for n, (keys, deleted, _) in enumerate(published, 1)
    ]
    expected: dict[int, list[float]] = {}
    for each in updates:
        apply(expected, each)
    batches: list[RowBatch] = []
    for each in updates:
        if batches and batches[-1].takes(each):
            batches[-1].add(each)
        else:
            batches.append(RowBatch(each))
    found: dict[int, list[float]] = {}
    for batch in batches:
        assert len({u.version for u in batch.updates}) == 1
        apply(found, batch.joined())
    assert found == expected
    assert [u for batch in batches for u in batch.updates] == updates


def test_only_what_may_follow_is_taken() -> None:
    batch = RowBatch(update(5, [1], []))
    for other, is_taken in (
        (update(6, [1], [2]), True),
        (update(6, [], [2]), True),
        (update(1, [1], [], partition=1, publisher=9), True),
        (update(5, [1], []), False),
        (update(4, [1], []), False),
        (update(6, [1], [], publisher=2), False),
        (update(6, [1], [], version=2), False),
        (update(6, [1], [], dim=3), False),
        (update(6, [1], [], dtype=torch.float16), False),
        (update(6, [0] * (1 << 21), []), False),
    ):
        assert batch.takes(other) is is_taken, other
    batch.add(update(6, [], [1]))
    assert not batch.takes(update(7, [1], []))
    assert batch.takes(update(7, [], [3]))
