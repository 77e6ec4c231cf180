"""``SparseFeatures`` and the results of lookups, and TorchRec's classes taken by their methods."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures, as_sparse_features, torchrec_class
from torchembed.core.lookup_results import JaggedTensor, KeyedTensor

VALUES = torch.tensor([7, 7, 2, 3, 9, 9])
OFFSETS = torch.tensor([0, 1, 2, 3, 5, 5, 6])


def jagged(**changes: Any) -> SparseFeatures:
    arguments: dict[str, Any] = {
        "keys": ("user", "genre"),
        "values": VALUES,
        "batch_size": 3,
        "offsets": OFFSETS,
    }
    return SparseFeatures(**(arguments | changes))


def test_holds_jagged_and_fixed_bags() -> None:
    assert jagged().hotness is None
    fixed = jagged(offsets=None, hotness=(1, 1))
    assert fixed.offsets is None
    empty = SparseFeatures(keys=(), values=VALUES[:0], batch_size=3, hotness=())
    assert empty.batch_size == 3
    jagged(batch_size=0, offsets=torch.zeros(1, dtype=torch.int32), values=VALUES[:0])


def test_moves_keep_what_has_been_checked() -> None:
    features = jagged(weights=torch.ones(6))
    assert features.to("cpu") is features
    meta = features.to("meta")
    assert all(t is not None and t.is_meta for t in (meta.values, meta.offsets, meta.weights))
    assert (meta.keys, meta.batch_size, meta.hotness) == (features.keys, 3, None)
    assert not features.values.is_meta


def test_takes_lists_for_tuples() -> None:
    features = jagged(keys=["user", "genre"], offsets=None, hotness=[1, 1])
    assert features.keys == ("user", "genre")
    assert features.hotness == (1, 1)


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        jagged().batch_size = 4  # type: ignore[misc]


def test_moves_every_tensor(device: torch.device) -> None:
    features = jagged(weights=torch.ones(6)).to(device)
    for tensor in (features.values, features.offsets, features.weights):
        assert tensor is not None and tensor.device.type == device.type
    assert features.keys == ("user", "genre")
    assert jagged(offsets=None, hotness=(1, 1)).to(device).offsets is None


@pytest.mark.gpu
def test_pins_and_records_streams(device: torch.device) -> None:
    pinned = jagged(weights=torch.ones(6)).pin_memory()
    tensors = (pinned.values, pinned.offsets, pinned.weights)
    assert all(tensor is not None and tensor.is_pinned() for tensor in tensors)
    moved = pinned.to(device, non_blocking=True)
    moved.record_stream(torch.cuda.Stream(device))
    assert moved.values.tolist() == VALUES.tolist()


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "values dtype": (
        TypeError,
        r"^values must be int32 or int64 or uint32 or uint64, got float32; call \.long\(\)$",
        {"values": VALUES.float()},
    ),
    "values shape": (
        ValueError,
        r"^values must have 1 dimension\(s\), got shape \(2, 3\); reshape it$",
        {"values": VALUES.view(2, 3)},
    ),
    "keys": (
        ValueError,
        r"^keys must all be different, got \['user', 'user'\]$",
        {"keys": ("user", "user")},
    ),
    "one string for keys": (
        TypeError,
        r"^keys must be a sequence of names, got the string 'user'; pass \['user'\]$",
        {"keys": "user"},
    ),
    "numbers for keys": (
        TypeError,
        r"^keys must be a sequence of names, got \[1, 2\]$",
        {"keys": [1, 2]},
    ),
    "numbers in a tuple of keys": (
        TypeError,
        r"^keys must hold strings, got \[1, 2\]$",
        {"keys": (1, 2)},
    ),
    "batch size": (
        TypeError,
        r"^batch_size must be a whole number that is not negative, got 3\.0$",
        {"batch_size": 3.0},
    ),
    "one count for hotness": (
        TypeError,
        r"^hotness must be a sequence of counts, one for each key, got 1$",
        {"offsets": None, "hotness": 1},
    ),
    "a fraction for hotness": (
        TypeError,
        r"^hotness must hold whole numbers that are not negative, got \[1\.0, 1\]$",
        {"offsets": None, "hotness": (1.0, 1)},
    ),
    "a negative hotness": (
        TypeError,
        r"^hotness must hold whole numbers that are not negative, got \[-1, 3\]$",
        {"offsets": None, "hotness": [-1, 3]},
    ),
    "neither": (
        ValueError,
        r"^give exactly one of offsets and hotness, got neither$",
        {"offsets": None},
    ),
    "both": (
        ValueError,
        r"^give exactly one of offsets and hotness, got both$",
        {"hotness": (1, 1)},
    ),
    "offsets dtype": (
        TypeError,
        r"^offsets must be int32 or int64, got float32; call \.long\(\)$",
        {"offsets": OFFSETS.float()},
    ),
    "offsets length": (
        ValueError,
        r"^offsets must hold 7 elements \(len\(keys\) \* batch_size \+ 1\), got 6$",
        {"offsets": OFFSETS[1:]},
    ),
    "hotness length": (
        ValueError,
        r"^hotness must hold 2 counts, one for each key, got 1$",
        {"offsets": None, "hotness": (2,)},
    ),
    "values for the hotness": (
        ValueError,
        r"^values must hold 9 elements \(sum\(hotness\) \* batch_size\), got 6$",
        {"offsets": None, "hotness": (1, 2)},
    ),
    "weights dtype": (
        TypeError,
        r"^weights must be float32 or float16 or bfloat16 or float64, got int64; call \.float\(\)$",
        {"weights": VALUES},
    ),
    "weights length": (
        ValueError,
        r"^weights must hold 6 elements \(one for each id\), got 5$",
        {"weights": torch.ones(5)},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name: str) -> None:
    error, message, changes = ERRORS[name]
    with pytest.raises(error, match=message):
        jagged(**changes)


def test_keyed_tensor_splits_by_key() -> None:
    keyed = KeyedTensor(["user", "genre"], [1, 2], torch.arange(6.0).view(2, 3))
    assert keyed.keys() == ["user", "genre"] and keyed.length_per_key() == [1, 2]
    assert keyed["genre"].tolist() == [[1.0, 2.0], [4.0, 5.0]]
    assert set(keyed.to_dict()) == {"user", "genre"}
    keyed["user"].zero_()
    assert keyed.values()[:, 0].tolist() == [0.0, 0.0]
    with pytest.raises(KeyError, match="movie"):
        keyed["movie"]


def test_jagged_tensor_has_lengths() -> None:
    jagged_tensor = JaggedTensor(torch.ones(3, 2), torch.tensor([0, 2, 2, 3]))
    assert jagged_tensor.lengths().tolist() == [2, 0, 1]
    assert jagged_tensor.values().shape == (3, 2)
    assert jagged_tensor.offsets().tolist() == [0, 2, 2, 3]


class KeyedJaggedLike:
    """The methods that are read of a ``KeyedJaggedTensor``, written here: TorchRec is not needed
    for it."""

    def __init__(self, variable_stride: bool = False) -> None:
        self._variable_stride = variable_stride

    def keys(self) -> list[str]:
        return ["user", "genre"]

    def values(self) -> Tensor:
        return VALUES

    def offsets(self) -> Tensor:
        return OFFSETS

    def weights_or_none(self) -> Tensor | None:
        return torch.ones(6)

    def stride(self) -> int:
        return 3

    def variable_stride_per_key(self) -> bool:
        return self._variable_stride


def test_takes_the_tensors_of_what_reads_like_a_keyed_jagged_tensor() -> None:
    features = as_sparse_features(KeyedJaggedLike())
    assert features.keys == ("user", "genre") and features.batch_size == 3
    assert features.values is VALUES and features.offsets is OFFSETS
    assert features.weights is not None
    assert as_sparse_features(features) is features


def test_takes_torchrecs_own() -> None:
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="needs TorchRec")
    lengths = torch.tensor([1, 1, 1, 2, 0, 1])
    keyed = sparse.KeyedJaggedTensor(["user", "genre"], VALUES, lengths=lengths)
    features = as_sparse_features(keyed)
    assert features.keys == ("user", "genre") and features.batch_size == 3
    assert features.offsets is not None and features.offsets.tolist() == OFFSETS.tolist()
    assert torchrec_class(keyed, "KeyedTensor") is sparse.KeyedTensor
    assert torchrec_class(jagged(), "KeyedTensor") is None


def test_says_what_is_missing() -> None:
    with pytest.raises(
        TypeError,
        match=r"^features must be SparseFeatures or a KeyedJaggedTensor, got Tensor, "
        r"which has no keys, offsets, weights_or_none; make them by .*SparseFeatures.from_dict$",
    ):
        as_sparse_features(VALUES)
    with pytest.raises(ValueError, match=r"one batch size for all keys.*pad it to one stride"):
        as_sparse_features(KeyedJaggedLike(variable_stride=True))
