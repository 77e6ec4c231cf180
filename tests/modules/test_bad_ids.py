"""Ids outside their table: raised, clamped or looked up as zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.clicks import Clicks
from tests.support.tolerance import assert_same_bits
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, OnBadId

TABLES = [
    EmbeddingBagConfig(name="users", num_embeddings=5, embedding_dim=3, feature_names=("user",)),
    EmbeddingBagConfig(
        name="genres",
        num_embeddings=7,
        embedding_dim=2,
        feature_names=("genre", "mood"),
        pooling="mean",  # type: ignore[arg-type]
    ),
]


def clicks(mood: list[list[int]]) -> Clicks:
    return Clicks({"mood": mood, "user": [[4, 0], [1, 1]], "genre": [[6, 6], [0, 1]]}, {})


def raised(module: nn.Module, *arguments: Any) -> str:
    """The error of the lookup: at once on the CPU; on a GPU when the host waits for it."""
    with pytest.raises(IndexError) as caught:  # noqa: PT012 - where it raises depends on the device
        module(*arguments)
        assert arguments[0].values.is_cuda
        module.check_ids()
    return str(caught.value)


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["jagged", "fixed"])
@pytest.mark.parametrize("bad", [7, -1, 2**31 - 1])
def test_the_error_names_table_feature_position_and_value(
    bad: int, form: str, dtype: torch.dtype, kind: type[nn.Module], device: torch.device
) -> None:
    module = kind(TABLES, device=device)
    features = getattr(clicks([[1, 2], [bad, 9]]), form)(device, dtype=dtype)
    assert raised(module, features) == (
        "id out of range: table genres, feature mood, position 2 of the feature's ids, "
        f"value {bad}; ids of this table are in [0, 7). Fix the data, enlarge the table, or pass "
        'on_bad_id="clamp" or "zero"'
    )


def test_an_id_is_judged_by_its_own_table(device: torch.device) -> None:
    # 6 is a genre, but no user.
    module = EmbeddingBagCollection(TABLES, device=device)
    module(clicks([[6, 6], [6, 6]]).jagged(device))
    module.check_ids()
    both = Clicks({"user": [[6]], "genre": [[6]], "mood": [[]]}, {})
    assert "table users, feature user, position 0 of" in raised(module, both.jagged(device))


@pytest.mark.parametrize("value", [2**40, -(2**63), 2**63 - 1])
def test_large_ids_do_not_wrap(value: int, device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device)
    assert f"value {value};" in raised(module, clicks([[value, 2], [0, 0]]).jagged(device))


def test_a_bad_id_loses_nothing(device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=1.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    raised(module, clicks([[1, 2], [7, 9]]).jagged(device))
    optimizer.step()
    for name, value in module.state_dict().items():
        assert_same_bits(value, before[name])
    module(clicks([[1, 2], [3, 4]]).jagged(device)).values().sum().backward()
    optimizer.step()
    module.check_ids()
    assert not torch.equal(module.state_dict()["embedding_bags.users.weight"], before.popitem()[1])


def pooled(module: nn.Module, bags: Clicks, device: torch.device) -> Tensor:
    """The pooled vectors of "mood"."""
    values = module(bags.jagged(device))["mood"]
    values.sum().backward()
    return values


@pytest.mark.parametrize("on_bad_id", [OnBadId.CLAMP, "clamp"])
def test_clamped_ids_are_the_nearest_ones(on_bad_id: Any, device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device, on_bad_id=on_bad_id)
    values = pooled(module, clicks([[-5], [2**40]]), device)
    weight = module.embedding_bags["genres"].weight
    assert_same_bits(values, weight[[0, 6]])
    # "genre" adds 1/2 + 1/2 to row 6, 1/2 to rows 0 and 1, but values has "mood" alone.
    assert weight.grad.sum(1).tolist() == [2, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("on_bad_id", [OnBadId.ZERO, "zero"])
def test_zeroed_ids_are_zeros_and_get_no_gradient(on_bad_id: Any, device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device, on_bad_id=on_bad_id)
    values = pooled(module, clicks([[-5, 3], [2**40]]), device)
    weight = module.embedding_bags["genres"].weight
    # The mean counts them.
    assert_same_bits(values, torch.stack([weight[3] / 2, torch.zeros_like(weight[3])]))
    assert weight.grad.sum(1).tolist() == [0, 0, 0, 1, 0, 0, 0]


MAKE: list[Callable[..., nn.Module]] = [torchembed.EmbeddingBag, torchembed.Embedding]


@pytest.mark.parametrize("make", MAKE)
def test_single_tables(make: Callable[..., nn.Module], device: torch.device) -> None:
    ids = torch.tensor([[1], [5], [-1]], device=device)
    module = make(5, 3, device=device)
    with pytest.raises(IndexError, match=r"table weight, feature input, position 1 of .* value 5;"):  # noqa: PT012
        module(ids)
        module.check_ids()
    clamped = make(5, 3, device=device, on_bad_id="clamp")
    assert_same_bits(clamped(ids).view(3, 3), clamped.weight[[1, 4, 0]])
    zeroed = make(5, 3, device=device, on_bad_id="zero")
    expected = torch.zeros_like(zeroed.weight[:3])
    expected[0] = zeroed.weight[1]
    assert_same_bits(zeroed(ids).view(3, 3), expected.detach())


@pytest.mark.gpu
def test_a_gpu_raises_at_a_later_call_without_being_waited_for(device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device)
    module(clicks([[1, 2], [3, 4]]).fixed(device))  # the first call compiles, which waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fixed = clicks([[1, 2], [7, 9]]).fixed(torch.device("cpu"))
        features = fixed.pin_memory().to(device, non_blocking=True)
        module(features)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="table genres, feature mood, position 2 of"):
        module(clicks([[1, 2], [3, 4]]).fixed(device))
    module.check_ids()
