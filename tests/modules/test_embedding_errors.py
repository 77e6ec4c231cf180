"""Errors of ``EmbeddingBag`` and ``Embedding``, word by word."""

from typing import Any

import pytest
import torch
from torch import Tensor

import torchembed
from torchembed import HostMemory


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


BAD_ARGUMENTS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "max_norm": (ValueError, r"max_norm=0\.0 is not supported; use torch\.nn", {"max_norm": 0.0}),
    "scale_grad_by_freq": (ValueError, "scale_grad_by_freq=True", {"scale_grad_by_freq": True}),
    "padding_idx": (ValueError, r"padding_idx must be in \[-5, 5\), got 5", {"padding_idx": 5}),
    "dtype": (
        TypeError,
        r"dtype must be torch\.float32, .* got torch\.int64",
        {"dtype": torch.int64},
    ),
    "dtype that is a string": (TypeError, "dtype must be .* got 'float32'", {"dtype": "float32"}),
    "_weight": (
        ValueError,
        r"_weight must be \(5, 3\), got \(3, 5\)",
        {"_weight": torch.ones(3, 5)},
    ),
    "_weight_dim": (ValueError, r"_weight must have 2 dim", {"_weight": torch.ones(3)}),
    "storage": (
        TypeError,
        r"storage of this module must be HostMemory\(\.\.\.\), Disk\(\.\.\.\) or None for the dev",
        {"storage": "host"},
    ),
    "storage of a table that grows": (
        ValueError,
        "initial_capacity of this module must be None with a storage, got 2",
        {
            "storage": HostMemory(cache_rows=2),
            "dynamic": torchembed.Dynamic(initial_capacity=2),
        },
    ),
    "dtype in host memory": (
        TypeError,
        "dtype of a table in host memory or on disk must be float32, .* which .* got .*float64",
        {"storage": HostMemory(cache_rows=2), "dtype": torch.float64},
    ),
    "seed": (TypeError, "seed must be an int, got 'x'", {"seed": "x"}),
    "seed that is no integer": (TypeError, r"seed must be an int, got 1\.5", {"seed": 1.5}),
    "seed that is a bool": (TypeError, "seed must be an int, got True", {"seed": True}),
    "capacity": (
        ValueError,
        "max_bytes of table weight must have room for a row, of 29 bytes without .*, got 28",
        {"dynamic": torchembed.Dynamic(max_bytes=28)},
    ),
    "on_bad_id": (ValueError, 'on_bad_id must be "raise", .* got .ignore', {"on_bad_id": "ignore"}),
}


@pytest.mark.parametrize("kind", [torchembed.EmbeddingBag, torchembed.Embedding])
@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_refused_arguments(
    argument: str, kind: type[torchembed.EmbeddingBag] | type[torchembed.Embedding]
) -> None:
    error, message, settings = BAD_ARGUMENTS[argument]
    with pytest.raises(error, match=message):
        kind(5, 3, **settings)


@pytest.mark.parametrize("kind", [torchembed.EmbeddingBag, torchembed.Embedding])
def test_refused_sizes(
    kind: type[torchembed.EmbeddingBag] | type[torchembed.Embedding],
) -> None:
    with pytest.raises(TypeError, match=r"num_embeddings must be an int, got 1000000\.0"):
        kind(1e6, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="embedding_dim must be an int, got '3'"):
        kind(5, "3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_embeddings must not be negative, got -1"):
        kind(-1, 3)
    with pytest.raises(ValueError, match="embedding_dim must not be negative, got -3"):
        kind(5, -3)


def test_a_refused_mode() -> None:
    with pytest.raises(ValueError, match=r'mode must be "sum", "mean" or "max", got \'min\''):
        torchembed.EmbeddingBag(5, 3, mode="min")
    with pytest.raises(ValueError, match=r'sparse must be False where mode="max", as for torch.nn'):
        torchembed.EmbeddingBag(5, 3, mode="max", sparse=True)


def test_a_refused_pretrained_weight() -> None:
    with pytest.raises(ValueError, match=r"embeddings must have 2 dimension\(s\)"):
        torchembed.Embedding.from_pretrained(torch.ones(3))


@pytest.mark.parametrize(
    ("error", "message", "settings", "arguments"),
    [
        (
            TypeError,
            r"input must be int32 or int64 or uint32 or uint64, got float32",
            {},
            (torch.ones(2, 2),),
        ),
        (TypeError, r"input must be a tensor of int32 or .*, got list; call", {}, ([[1, 2]],)),
        (
            ValueError,
            r"input must have 1 or 2 dimensions, got shape \(1, 1, 1\)",
            {},
            (ids(1, 1, 1),),
        ),
        (
            ValueError,
            r"offsets must be None where input is two",
            {},
            (ids(2, 2), torch.tensor([0])),
        ),
        (ValueError, r"offsets must be given where input is one", {}, (ids(2),)),
        (ValueError, r"offsets must have 1 dimension", {}, (ids(2), torch.zeros(1, 1).long())),
        (TypeError, r"offsets must be int32 or int64, got float32", {}, (ids(2), torch.zeros(1))),
        (
            ValueError,
            r"offsets must hold at least one element under include_last_offset",
            {"include_last_offset": True},
            (ids(0), torch.zeros(0).long()),
        ),
        (
            ValueError,
            r"offsets must start at 0 .* the number of ids, 2, or before, got 1 and 2",
            {},
            (ids(2), torch.tensor([1])),
        ),
        (
            ValueError,
            r"offsets must start at 0 .* the number of ids, 2, or before, got 0 and 3",
            {"include_last_offset": True},
            (ids(2), torch.tensor([0, 3])),
        ),
        (
            ValueError,
            r"offsets must not decrease, got 2 and 1 at positions 1 and 2",
            {},
            (ids(2), torch.tensor([0, 2, 1])),
        ),
        (
            ValueError,
            r'per_sample_weights needs mode="sum", got mode=\'mean\'',
            {},
            (ids(2, 2), None, torch.ones(2, 2)),
        ),
        (
            TypeError,
            r"per_sample_weights must be floating-point numbers, got int64; call \.float\(\)",
            {"mode": "sum"},
            (ids(2, 2), None, ids(2, 2)),
        ),
        (
            ValueError,
            r"per_sample_weights must have the shape of input, \(2, 2\), got \(4,\)",
            {"mode": "sum"},
            (ids(2, 2), None, torch.ones(4)),
        ),
    ],
)
def test_errors_of_a_bags_forward(
    error: type[Exception], message: str, settings: dict[str, Any], arguments: tuple[Any, ...]
) -> None:
    bag = torchembed.EmbeddingBag(5, 3, **settings)
    with pytest.raises(error, match=message):
        bag(*arguments)


def test_errors_of_an_embeddings_forward() -> None:
    with pytest.raises(
        TypeError, match=r"input must be int32 or int64 or uint32 or uint64, got float32; call"
    ):
        torchembed.Embedding(5, 3)(torch.ones(2))
