"""Batches read ahead: an error waits for its turn, what another source gave is left out, and ranks
agree on the kind of step."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.ranks import run_on_ranks
from torchembed.step.batches.layouts import Layouts
from torchembed.step.batches.read_ahead import ReadAhead
from torchembed.step.stages import NO_KIND, Agreement, ReadBatch


def source(*items: int, error: Exception | None = None) -> Iterator[int]:
    yield from items
    if error is not None:
        raise error


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


def features(
    hotness: tuple[int, ...] | None, *, weighted: bool = False, reverse: bool = False
) -> torchembed.SparseFeatures:
    """Two samples of two features; ``reverse`` gives them in another order."""
    keys = ("b", "a") if reverse else ("a", "b")
    num_ids = 6 if hotness is None else 2 * sum(hotness)
    return torchembed.SparseFeatures(
        keys=keys,
        values=torch.zeros(num_ids, dtype=torch.int64),
        batch_size=2,
        hotness=hotness if hotness is None or not reverse else hotness[::-1],
        offsets=torch.tensor([0, 1, 3, 4, 6]) if hotness is None else None,
        weights=torch.ones(num_ids) if weighted else None,
    )


def agreed() -> list[tuple[bool, bool, int]]:
    """For pairs of batches, one of each rank, what the ranks agree on."""
    both = Layouts(nn.Module(), 1)
    pairs = [
        (features((1, 2)), features((1, 2))),
        (features((1, 2)), features((1, 2), reverse=True)),
        (features((1, 2)), features((2, 1))),
        (features((1, 2)), features((1, 2), weighted=True)),
        (features(None), features(None)),
        (features(None), features(None, weighted=True)),
        (features((1, 2)), features(None)),
    ]
    asked = [(Layouts(nn.Module(), 1), pair[dist.get_rank()]) for pair in pairs]
    # The second batch of a layout counts as the first one.
    asked += [(both, features((1, 2))), (both, features((1, 2)))]
    found = []
    for layouts, batch in asked:
        kinds = layouts.kinds_of(batch, 0)
        assert kinds.static or kinds.jagged
        (static, jagged, _), num_ids, *_ = layouts.start_agreement(batch, kinds)()
        found.append((static, jagged, num_ids))
    return found


def test_captured_steps_take_batches_that_are_alike_on_all_ranks() -> None:
    static, jagged = (True, False, 0), (False, True, 6)
    expected = [static, static, (False, False, 0), (False, False, 0)]
    expected += [jagged, (False, False, 6), (False, False, 6), static, static]
    assert run_on_ranks(2, agreed) == [expected, expected]
