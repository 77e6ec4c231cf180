"""Batches of ids in Python lists, and batches of batches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchembed import SparseFeatures

GENRES = [[3, 9], [], [9]]


def bags_of(features: SparseFeatures, numbers: torch.Tensor) -> dict[str, list[list[Any]]]:
    """The part of ``numbers [L]`` that belongs to each bag."""
    lengths = features.lengths()
    flat = numbers[: int(lengths.sum())].split(lengths.flatten().tolist())
    size = features.batch_size
    return {
        key: [bag.tolist() for bag in flat[f * size : (f + 1) * size]]
        for f, key in enumerate(features.keys)
    }


@pytest.mark.parametrize(
    "users",
    [[7, 7, 2], [[7], [7], [2]], torch.tensor([7, 7, 2]), np.array([[7], [7], [2]]), (7, (7,), 2)],
    ids=["numbers", "lists", "tensor", "array", "mixed"],
)
def test_from_dict_and_lists(users: Any) -> None:
    for features in (
        SparseFeatures.from_dict({"user": users, "genre": GENRES}),
        SparseFeatures.from_lists(["user", "genre"], [users, GENRES]),
    ):
        assert features.keys == ("user", "genre")
        assert features.batch_size == 3
        assert features.weights is None and features.hotness is None
        assert features.values.dtype == torch.int64
        assert features.values.tolist() == [7, 7, 2, 3, 9, 9]
        assert features.offsets is not None and features.offsets.tolist() == [0, 1, 2, 3, 5, 5, 6]
        assert bags_of(features, features.values) == {"user": [[7], [7], [2]], "genre": GENRES}


def test_weights_go_along() -> None:
    weights = {"genre": [[0.5, 1], [], [2]], "user": [1, 2, 3]}
    features = SparseFeatures.from_dict({"user": [7, 7, 2], "genre": GENRES}, weights)
    assert features.weights is not None and features.weights.dtype == torch.float32
    assert features.weights.tolist() == [1, 2, 3, 0.5, 1, 2]


def test_without_samples_or_features() -> None:
    assert SparseFeatures.from_dict({}).batch_size == 0
    nobody = SparseFeatures.from_dict({"user": [], "genre": []})
    assert nobody.batch_size == 0 and nobody.values.numel() == 0
    empty = SparseFeatures.from_dict({"user": [[], []]}, {"user": [[], []]})
    assert empty.batch_size == 2 and empty.values.dtype == torch.int64
    assert empty.weights is not None and empty.weights.dtype == torch.float32


BAD: dict[str, tuple[type[Exception], str, Callable[[], SparseFeatures]]] = {
    "no mapping": (
        TypeError,
        r"^ids must be a mapping from features to bags, got list; from_lists takes lists$",
        lambda: SparseFeatures.from_dict([1]),  # type: ignore[arg-type]
    ),
    "a number of bags": (
        TypeError,
        r"^ids of feature user must be a sequence with a bag for each sample, got 7$",
        lambda: SparseFeatures.from_dict({"user": 7}),  # type: ignore[dict-item]
    ),
    "a string": (
        TypeError,
        r"^ids of feature user, sample 1, must be a list of numbers or one number, got 'x'$",
        lambda: SparseFeatures.from_dict({"user": [1, "x"]}),
    ),
    "a string in a bag": (
        TypeError,
        r"^ids of feature user, sample 1, must be whole numbers, got \['x'\]$",
        lambda: SparseFeatures.from_dict({"user": [1, ["x"]]}),
    ),
    "a fraction": (
        TypeError,
        r"^ids of feature genre, sample 0, must be whole numbers, got \[1, 2\.5\]$",
        lambda: SparseFeatures.from_dict({"user": [1], "genre": [[1, 2.5]]}),
    ),
    "nested too deep": (
        TypeError,
        r"^ids of feature user, sample 0, must be whole numbers, got \[\[1\]\]$",
        lambda: SparseFeatures.from_dict({"user": [[[1]]]}),
    ),
    "samples": (
        ValueError,
        r"^ids must have one number of samples for all features, got {'user': 2, 'genre': 3}$",
        lambda: SparseFeatures.from_dict({"user": [1, 2], "genre": GENRES}),
    ),
    "weights' features": (
        ValueError,
        r"^weights must be of the features \['user'\], got \['genre'\]$",
        lambda: SparseFeatures.from_dict({"user": [1]}, {"genre": [1]}),
    ),
    "weights' lengths": (
        ValueError,
        r"^weights of feature user must be one for each id, \[1\] in its bags, got \[2\]$",
        lambda: SparseFeatures.from_dict({"user": [1]}, {"user": [[1, 2]]}),
    ),
    "lists": (
        ValueError,
        r"^ids must hold 1 lists, one for each key, got 2$",
        lambda: SparseFeatures.from_lists(["user"], [[1], [2]]),
    ),
    "keys": (
        ValueError,
        r"^keys must all be different, got \['user', 'user'\]$",
        lambda: SparseFeatures.from_lists(["user", "user"], [[1], [2]]),
    ),
    "one key": (
        TypeError,
        r"^keys must be a sequence of names, got the string 'user'; pass \['user'\]$",
        lambda: SparseFeatures.from_lists("user", [[1]]),
    ),
    "no batch": (
        ValueError,
        r"^batches must hold at least one, got none$",
        lambda: SparseFeatures.concatenate([]),
    ),
    "batches' keys": (
        ValueError,
        r"^batches must have the same keys in one order, got \['a'\] and \['b'\]$",
        lambda: SparseFeatures.concatenate(
            [
                SparseFeatures.from_dict({"a": [1]}),
                SparseFeatures.from_dict({"b": [1]}),
            ]
        ),
    ),
    "batches' weights": (
        ValueError,
        r"^batches must all have weights, or none of them$",
        lambda: SparseFeatures.concatenate(
            [
                SparseFeatures.from_dict({"a": [1]}),
                SparseFeatures.from_dict({"a": [1]}, {"a": [1]}),
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_say_where(name: str) -> None:
    error, message, make = BAD[name]
    with pytest.raises(error, match=message):
        make()


def test_batches_are_concatenated(device: torch.device) -> None:
    first = {"user": [7, 7, 2], "genre": GENRES}
    second = {"user": [[1, 5]], "genre": [[4]]}
    weights = [
        {"user": [0, 1, 2], "genre": [[3, 4], [], [5]]},
        {"user": [[6, 7]], "genre": [[8]]},
    ]
    parts = [
        SparseFeatures.from_dict(ids, of_ids).to(device)
        for ids, of_ids in zip((first, second), weights, strict=True)
    ]
    nobody = SparseFeatures.from_dict({"user": [], "genre": []}, {"user": [], "genre": []})
    joined = SparseFeatures.concatenate([parts[0], nobody.to(device), parts[1]])
    assert joined.batch_size == 4
    expected = {"user": [[7], [7], [2], [1, 5]], "genre": [*GENRES, [4]]}
    assert bags_of(joined, joined.values) == expected
    assert joined.weights is not None
    expected = {"user": [[0], [1], [2], [6, 7]], "genre": [[3, 4], [], [5], [8]]}
    assert bags_of(joined, joined.weights) == expected


def test_fixed_hotness_stays() -> None:
    values = torch.arange(6)
    batch = SparseFeatures(keys=("a", "b"), values=values, batch_size=2, hotness=(1, 2))
    joined = SparseFeatures.concatenate([batch, batch])
    assert joined.hotness == (1, 2) and joined.offsets is None
    assert joined.values.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    jagged = SparseFeatures(
        keys=("a", "b"), values=torch.tensor([9]), batch_size=1, offsets=torch.tensor([0, 1, 1])
    )
    mixed = SparseFeatures.concatenate([batch, jagged])
    assert mixed.hotness is None
    assert bags_of(mixed, mixed.values) == {"a": [[0], [1], [9]], "b": [[2, 3], [4, 5], []]}


def test_spare_ids_are_left_out() -> None:
    spare = SparseFeatures(
        keys=("a",), values=torch.tensor([1, 2, 99]), batch_size=1, offsets=torch.tensor([0, 2])
    )
    joined = SparseFeatures.concatenate([spare, spare])
    assert joined.values.tolist() == [1, 2, 1, 2]
