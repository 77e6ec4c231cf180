"""Ids that servers may have rows of."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchembed.training.published_ids import PublishedIds

_ids = st.lists(
    st.integers(-3, 6) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=6, unique=True
)


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "delete", "confirm", "without"]), _ids)))
def test_deletions_count_once_they_are_confirmed(calls: list[tuple[str, list[int]]]) -> None:
    published, held, unconfirmed = PublishedIds(), set[int](), set[int]()
    for name, ids in [*calls, ("without", [])]:
        tensor = torch.tensor(ids, dtype=torch.int64)
        match name:
            case "add":
                published.add(tensor)
                held |= set(ids)
                unconfirmed -= set(ids)
            case "delete":
                published.delete(tensor)
                unconfirmed |= set(ids)
            case "confirm":
                published.confirm()
                held -= unconfirmed
                unconfirmed.clear()
            case _:
                assert published.without(tensor).tolist() == sorted(held - set(ids))


def test_notes_are_settled_before_they_outgrow_the_ids() -> None:
    published = PublishedIds()
    for first in range(0, 1_000_000, 10_000):
        published.add(torch.arange(first, first + 10_000))
        published.delete(torch.arange(first, first + 5_000))
        published.confirm()
        assert published._num_noted <= max(len(published._ids), 1 << 16)
    assert len(published.without(torch.empty(0, dtype=torch.int64))) == 500_000
