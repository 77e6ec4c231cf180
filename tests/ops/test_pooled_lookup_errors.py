"""Errors of ``pooled_lookup`` for arguments that do not fit."""

from typing import Any

import pytest
import torch

from torchembed.ops.pooled_lookup import pooled_lookup

ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "weight dtype": (
        TypeError,
        r"^weight must be float32 or float16 or bfloat16, got float64; call \.float\(\)$",
        {"weight": torch.zeros(4, 2, dtype=torch.float64)},
    ),
    "weight shape": (
        ValueError,
        r"^weight must have 2 dimension\(s\), got shape \(4,\); reshape it$",
        {"weight": torch.zeros(4)},
    ),
    "rows dtype": (
        TypeError,
        r"^rows must be int32 or int64, got float32; call \.long\(\)$",
        {"rows": torch.zeros(3)},
    ),
    "rows shape": (
        ValueError,
        r"^rows must have 1 dimension\(s\), got shape \(1, 3\); reshape it$",
        {"rows": torch.zeros(1, 3, dtype=torch.int64)},
    ),
    "rows device": (
        ValueError,
        r"^rows must be on cpu as weight is, got meta; call \.to\('cpu'\)$",
        {"rows": torch.zeros(3, dtype=torch.int64, device="meta")},
    ),
    "offsets dtype": (
        TypeError,
        r"^offsets must be int32 or int64, got float32; call \.long\(\)$",
        {"offsets": torch.zeros(3)},
    ),
    "offsets length": (
        ValueError,
        r"^offsets must hold 3 elements \(num_features \* batch_size \+ 1\), got 4$",
        {"offsets": torch.tensor([0, 1, 2, 3])},
    ),
    "offsets device": (
        ValueError,
        r"^offsets must be on cpu as rows is, got meta; call \.to\('cpu'\)$",
        {"offsets": torch.zeros(3, dtype=torch.int64, device="meta")},
    ),
    "neither offsets nor hotness": (
        ValueError,
        r"^give exactly one of offsets and hotness, got neither$",
        {"offsets": None},
    ),
    "both offsets and hotness": (
        ValueError,
        r"^give exactly one of offsets and hotness, got both$",
        {"hotness": [1]},
    ),
    "hotness length": (
        ValueError,
        r"^hotness must be 1 counts >= 0, one for each feature, got \[1, 2\]$",
        {"offsets": None, "hotness": [1, 2]},
    ),
    "negative hotness": (
        ValueError,
        r"^hotness must be 1 counts >= 0, one for each feature, got \[-1\]$",
        {"offsets": None, "hotness": [-1]},
    ),
    "rows for the hotness": (
        ValueError,
        r"^rows must hold 4 elements \(sum\(hotness\) \* batch_size\), got 3$",
        {"offsets": None, "hotness": [2]},
    ),
    "negative batch size": (
        ValueError,
        r"^batch_size must not be negative, got -1$",
        {"batch_size": -1},
    ),
    "per-id weights dtype": (
        TypeError,
        r"^per_id_weights must be float32 or float16 or bfloat16, got int64; call \.float\(\)$",
        {"per_id_weights": torch.ones(3, dtype=torch.int64)},
    ),
    "per-id weights length": (
        ValueError,
        r"^per_id_weights must hold 3 elements \(one for each id\), got 2$",
        {"per_id_weights": torch.ones(2)},
    ),
    "per-id weights device": (
        ValueError,
        r"^per_id_weights must be on cpu as weight is, got meta; call \.to\('cpu'\)$",
        {"per_id_weights": torch.ones(3, device="meta")},
    ),
    "output dtype": (
        TypeError,
        r"^output_dtype must be float32, float16 or bfloat16, got torch\.float64$",
        {"output_dtype": torch.float64},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name: str) -> None:
    error, message, changes = ERRORS[name]
    arguments: dict[str, Any] = {
        "weight": torch.zeros(4, 2),
        "rows": torch.zeros(3, dtype=torch.int64),
        "offsets": torch.tensor([0, 1, 3]),
        "batch_size": 2,
    } | changes
    with pytest.raises(error, match=message):
        pooled_lookup(arguments.pop("weight"), arguments.pop("rows"), **arguments)
