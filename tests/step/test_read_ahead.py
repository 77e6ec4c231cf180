"""Batches read ahead: an error waits for its turn, and what another source gave is left out."""

from collections.abc import Iterator

import pytest

from torchembed.step.batch_kinds import BatchKinds
from torchembed.step.read_ahead import ReadAhead
from torchembed.step.stages import Agreement, ReadBatch


def source(*items: int, error: Exception | None = None) -> Iterator[int]:
    yield from items
    if error is not None:
        raise error


NO_KIND = BatchKinds(static=False, jagged=False)


def taken_in(item: int) -> ReadBatch:
    if item < 0:
        raise ValueError(f"batch {item} is bad")
    return ReadBatch(item, item, NO_KIND, lambda: Agreement(NO_KIND, 0))


def popped(ahead: ReadAhead) -> int | None:
    batch = ahead.pop()
    return None if batch is None else batch.data


def test_batches_come_in_order_and_end() -> None:
    ahead, batches = ReadAhead(), source(1, 2, 3)
    found = []
    for _ in range(5):
        ahead.follow(batches)
        ahead.fill(2, taken_in)
        found.append(popped(ahead))
    assert found == [1, 2, 3, None, None]
    assert not list(ahead)


@pytest.mark.parametrize("in_reading", [True, False])
def test_an_error_comes_after_the_batches_before_it(in_reading: bool) -> None:
    batches = source(1, 2, error=OSError("batch is bad")) if in_reading else source(1, 2, -3, 4)
    ahead = ReadAhead()
    ahead.follow(batches)
    found = []
    for _ in range(2):
        ahead.fill(3, taken_in)
        found.append(popped(ahead))
    assert found == [1, 2]
    ahead.fill(3, taken_in)
    with pytest.raises((OSError, ValueError), match=r"batch.* is bad"):
        ahead.pop()
    # Once it was raised, reading goes on where it was.
    ahead.follow(batches)
    ahead.fill(3, taken_in)
    assert popped(ahead) == (None if in_reading else 4)


def test_another_source_leaves_out_what_was_read() -> None:
    ahead, first, second = ReadAhead(), source(1, 2, 3), source(11, -12)
    ahead.follow(first)
    ahead.fill(2, taken_in)
    assert popped(ahead) == 1
    ahead.follow(second)
    ahead.fill(2, taken_in)
    assert [batch.data for batch in ahead] == [11]
    ahead.follow(first)  # with it goes the error
    ahead.fill(2, taken_in)
    assert [popped(ahead), popped(ahead)] == [3, None]
