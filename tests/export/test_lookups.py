"""Lookups of exported graphs, beside those of the modules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchembed
from torchembed.core.types import OnBadId
from torchembed.export.lookups import look_up
from torchembed.modules.dense_part.forms import BadIds, Combining
from torchembed.ops.bags_without_search import bags_of_ids

NUM_ROWS = 7
BAGS = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=4), max_size=6)
_MODULES_WORD = {
    BadIds.RAISE: OnBadId.RAISE,
    BadIds.CLAMP: OnBadId.CLAMP,
    BadIds.ZERO: OnBadId.ZERO,
}


def looked_up(weight: Tensor, ids: Tensor, **more: object) -> Tensor:
    given = {
        "lengths": None,
        "weights": None,
        "combining": Combining.SUM,
        "padding_id": None,
        "bad_ids": BadIds.RAISE,
    }
    return look_up(weight, ids, **given | more)  # type: ignore[arg-type]


def flat(bags: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and lengths of bags."""
    ids = torch.tensor([n for bag in bags for n in bag], dtype=torch.int64)
    return ids, torch.tensor([len(bag) for bag in bags], dtype=torch.int32)


def test_the_worked_example() -> None:
    assert bags_of_ids(torch.tensor([2, 0, 1]), 3).tolist() == [0, 0, 2]
    assert bags_of_ids(torch.tensor([1]), 3).tolist() == [0, 1, 1]
    assert bags_of_ids(torch.zeros(0, dtype=torch.int32), 0).tolist() == []


@settings(max_examples=60)
@given(
    bags=BAGS,
    combining=st.sampled_from([Combining.SUM, Combining.MEAN]),
    padding_id=st.sampled_from([None, 0, 3]),
    is_weighted=st.booleans(),
)
def test_jagged_bags_are_those_of_the_module(
    bags: list[list[int]], combining: Combining, padding_id: int | None, is_weighted: bool
) -> None:
    is_weighted = is_weighted and combining is Combining.SUM
    module = torchembed.EmbeddingBag(NUM_ROWS, 3, mode=combining.value, padding_idx=padding_id)
    ids, lengths = flat(bags)
    weights = torch.rand(len(ids)) if is_weighted else None
    offsets = lengths.cumsum(0) - lengths
    with torch.no_grad():
        expected = module(ids, offsets, weights)
    found = looked_up(
        module.weight.detach(),
        ids,
        lengths=lengths,
        weights=weights,
        combining=combining,
        padding_id=padding_id,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("combining", [Combining.SUM, Combining.MEAN])
@pytest.mark.parametrize("padding_id", [None, 2])
@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_bags_of_fixed_hotness_are_those_of_the_module(
    dtype: torch.dtype, combining: Combining, padding_id: int | None, batch_size: int
) -> None:
    module = torchembed.EmbeddingBag(NUM_ROWS, 3, mode=combining.value, padding_idx=padding_id)
    for hotness in (1, 4):
        ids = torch.randint(NUM_ROWS, (batch_size, hotness), dtype=dtype)
        with torch.no_grad():
            expected = module(ids)
        found = looked_up(module.weight.detach(), ids, combining=combining, padding_id=padding_id)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad_ids", [BadIds.CLAMP, BadIds.ZERO])
@pytest.mark.parametrize("combining", [Combining.SUM, Combining.MEAN])
def test_bad_ids_do_what_they_do_in_the_module(bad_ids: BadIds, combining: Combining) -> None:
    config = torchembed.EmbeddingBagConfig(
        name="t",
        num_embeddings=NUM_ROWS,
        embedding_dim=3,
        feature_names=("f",),
        pooling=combining.value,  # type: ignore[arg-type]
    )
    module = torchembed.EmbeddingBagCollection([config], on_bad_id=_MODULES_WORD[bad_ids])
    bags = [[-1, 3], [], [NUM_ROWS], [2**40, -(2**63), 6]]
    with torch.no_grad():
        expected = module(torchembed.SparseFeatures.from_dict({"f": bags})).values()
    ids, lengths = flat(bags)
    weight = module.state_dict()["embedding_bags.t.weight"]
    found = looked_up(weight, ids, lengths=lengths, combining=combining, bad_ids=bad_ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [-1, -NUM_ROWS, NUM_ROWS, 2**62, -(2**63)])
def test_an_id_without_a_row_is_never_another_row(bad: int) -> None:
    with pytest.raises(IndexError, match="index out of range"):
        looked_up(torch.ones(NUM_ROWS, 2), torch.tensor([[0], [bad]]))


@pytest.mark.parametrize("combining", Combining)
@pytest.mark.parametrize("lengths", [[1, 1], [2, 2], [4, -1], [0, 0]])
def test_lengths_that_do_not_fit_are_refused(combining: Combining, lengths: list[int]) -> None:
    for num_ids in (3, 0):
        if num_ids == sum(lengths) and min(lengths) >= 0:
            continue
        ids = torch.zeros(num_ids, dtype=torch.int64)
        with pytest.raises((IndexError, RuntimeError), match=r"index .*out of (range|bounds)"):
            looked_up(
                torch.ones(NUM_ROWS, 2), ids, lengths=torch.tensor(lengths), combining=combining
            )


def test_narrow_rows_are_summed_in_float32_and_wide_ones_in_float64() -> None:
    ids = torch.tensor([[0, 1]])
    for dtype, summed in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        weight = torch.tensor([[1.0], [2**-12]], dtype=dtype)
        found = looked_up(weight, ids)
        assert found.dtype is summed and found.item() == 1 + 2**-12
