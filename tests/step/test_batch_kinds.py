"""The agreement of ranks on the kind of step for a batch."""

import torch
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.ranks import run_on_ranks
from torchembed.core import ranks
from torchembed.step.batch_kinds import Layouts
from torchembed.step.pipeline import _agreement


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
    both = Layouts(nn.Module())
    pairs = [
        (features((1, 2)), features((1, 2))),
        (features((1, 2)), features((1, 2), reverse=True)),
        (features((1, 2)), features((2, 1))),
        (features((1, 2)), features((1, 2), weighted=True)),
        (features(None), features(None)),
        (features(None), features(None, weighted=True)),
        (features((1, 2)), features(None)),
    ]
    asked = [(Layouts(nn.Module()), pair[dist.get_rank()]) for pair in pairs]
    # The second batch of a layout counts as the first one.
    asked += [(both, features((1, 2))), (both, features((1, 2)))]
    found = []
    for layouts, batch in asked:
        kinds = layouts.kinds_of(batch)
        assert kinds.static or kinds.jagged
        digest = layouts.lengths_digest(kinds)
        least = ranks.start_minimum(*kinds, -6 if kinds.jagged else 0, digest, -digest)
        (static, jagged), num_ids = _agreement(least)
        found.append((static, jagged, num_ids))
    return found


def test_captured_steps_take_batches_that_are_alike_on_all_ranks() -> None:
    static, jagged = (True, False, 0), (False, True, 6)
    expected = [static, static, (False, False, 0), (False, False, 0)]
    expected += [jagged, (False, False, 6), (False, False, 6), static, static]
    assert run_on_ranks(2, agreed) == [expected, expected]
