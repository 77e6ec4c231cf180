"""Arguments of the operations of exchanges by push for calls without their public functions: some
that fit, and what is said to others."""

from typing import Any

import torch
from torch import Tensor

import torchembed.ops.push  # noqa: F401

HALF = 64
BUFFER = torch.zeros(2, HALF)
SOURCE = torch.ones(3, 2)
SPREAD = torch.ones(3, 1).expand(3, 2)
STATE = torch.zeros(2, dtype=torch.int32)
ADDRESSES = torch.zeros(1, dtype=torch.int64)
FLAGS = torch.zeros(1, dtype=torch.int32)
COPIES = {
    "copies": torch.tensor([[0, 3, 2, 0, 0, 0, 2]]),
    "max_rows": 3,
    "max_columns": 2,
    "vector": 2,
}
TO = {"buffers": [BUFFER], "addresses": ADDRESSES, "state": STATE}
FITTING: dict[str, dict[str, Any]] = {
    "push_rectangles": {"source": SOURCE, **COPIES, **TO, "scale": None},
    "collect_rectangles": {
        "buffer": BUFFER,
        "state": STATE,
        "stride": 2,
        **COPIES,
        "num_terms": 1,
        "out": torch.zeros(3, 2),
    },
    "copy_rectangles": {"source": SOURCE, **COPIES, "out": torch.zeros(3, 2)},
    "push_mean": {
        "parts": BUFFER,
        "parts_state": STATE,
        "means": [torch.zeros(2, HALF)],
        "addresses": ADDRESSES,
        "means_state": STATE,
        "share": HALF,
        "num_elements": 3,
        "rank": 0,
    },
    "push_barrier": {
        "flags": [FLAGS],
        "addresses": ADDRESSES,
        "state": torch.zeros(2, dtype=torch.int32),
        "failed": torch.zeros(1, dtype=torch.int32),
        "rank": 0,
        "limit_seconds": 60.0,
    },
    "push_pooled_lookup": {
        "weight": torch.ones(4, 2),
        "rows": torch.tensor([0, 1, 1]),
        "offsets": None,
        "hotness": [1],
        "per_id_weights": None,
        "num_features": 1,
        "batch_size": 3,
        **COPIES,
        **TO,
    },
}


def with_addresses(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with the addresses of the ranks' tensors in them, where there are such."""
    of_ranks = [arguments[name] for name in ("buffers", "means", "flags") if name in arguments]
    if "addresses" not in arguments:
        return arguments
    (tensors,) = of_ranks
    numbers = [tensor.data_ptr() for tensor in tensors]
    return arguments | {"addresses": torch.tensor(numbers, device=tensors[0].device)}


Case = tuple[type[Exception], str, dict[str, Any]]


def _of_copies(name: str) -> list[Case]:
    fields: Tensor = COPIES["copies"]
    return [
        (TypeError, r"^copies must be int64, got int32", {"copies": fields.int()}),
        (
            ValueError,
            r"^copies must have shape \(1, 7\) \(the fields of each copy\), got \(1, 6\)$",
            {"copies": fields[:, :6].clone()},
        ),
        (
            ValueError,
            rf"^copies must be on cpu as {name} is, got meta",
            {"copies": fields.to("meta")},
        ),
        (ValueError, r"^max_rows must not be negative, got -1$", {"max_rows": -1}),
        (ValueError, r"^max_columns must not be negative, got -1$", {"max_columns": -1}),
        (ValueError, r"^vector must be 1, 2, 4 or 8 elements, got 3$", {"vector": 3}),
    ]


OF_EXCHANGE: list[Case] = [
    (ValueError, r"^buffers must hold a tensor of each rank, got none$", {"buffers": []}),
    (ValueError, r"^buffers\[0\] must have 2 halves of a m", {"buffers": [BUFFER[:1]]}),
    (ValueError, r"^buffers\[0\] must have .*\(2, 63\)$", {"buffers": [torch.ones(2, 63)]}),
    (ValueError, r"^buffers\[0\] must be contiguous", {"buffers": [BUFFER[:, :1].expand(2, 64)]}),
    (
        ValueError,
        r"^addresses must have shape \(2,\) \(one for each of buffers\), got \(1,\)$",
        {"buffers": [BUFFER, BUFFER]},
    ),
    (TypeError, r"^addresses must be int64, got int32", {"addresses": ADDRESSES.int()}),
    (TypeError, r"^state must be int32, got int64", {"state": STATE.long()}),
    (ValueError, r"^state must have shape \(2,\) \(exchanges", {"state": STATE[:1]}),
]
OF_SOURCE: list[Case] = [
    (ValueError, r"^source must have contiguous rows, got strides", {"source": SPREAD}),
    (ValueError, r"^source must have 2 dimension", {"source": torch.ones(6)}),
    (TypeError, r"^source must be float32 or .*, got int64", {"source": SOURCE.long()}),
]
OF_OUT: list[Case] = [
    (ValueError, r"^out must be contiguous", {"out": SPREAD}),
    (TypeError, r"^out must be float32 or .*, got int64", {"out": SOURCE.long()}),
]
ERRORS: dict[str, list[Case]] = {
    "push_rectangles": [*OF_SOURCE, *_of_copies("source"), *OF_EXCHANGE],
    "collect_rectangles": [
        (ValueError, r"^buffer must have 2 halves of a m", {"buffer": BUFFER[:1]}),
        (ValueError, r"^stride must not be negative, got -1$", {"stride": -1}),
        (ValueError, r"^num_terms must be 1 or more, got 0$", {"num_terms": 0}),
        *_of_copies("buffer"),
        *OF_OUT,
    ],
    "copy_rectangles": [*OF_SOURCE, *_of_copies("source"), *OF_OUT],
    "push_mean": [
        (ValueError, r"^parts must have 2 halves of a m", {"parts": BUFFER[:1]}),
        (ValueError, r"^means must hold a tensor of each rank, got none$", {"means": []}),
        (TypeError, r"^means\[0\] must be float32 as parts is", {"means": [BUFFER.half()]}),
        (
            ValueError,
            r"^means\[0\] must have shape \(2, 64\) \(that of parts\), got \(2, 128\)$",
            {"means": [torch.zeros(2, 128)]},
        ),
        (TypeError, r"^means_state must be int32, got int64", {"means_state": STATE.long()}),
        (ValueError, r"^rank must be in \[0, 1\), the ranks, got 1$", {"rank": 1}),
        (ValueError, r"^share must not be negative, got -1$", {"share": -1}),
        (ValueError, r"^num_elements must be at most share, 2, .*, got 3$", {"share": 2}),
        (
            ValueError,
            r"^num_elements must be .* must fit 1 times into a half of 64 elements, got 65$",
            {"share": 128, "num_elements": 65},
        ),
    ],
    "push_barrier": [
        (ValueError, r"^rank must be in \[0, 1\), the ranks, got -1$", {"rank": -1}),
        (TypeError, r"^flags\[0\] must be int32, got int64", {"flags": [FLAGS.long()]}),
        (
            ValueError,
            r"^flags\[0\] must have shape \(2,\) \(one for each rank\), got \(1,\)$",
            {"flags": [FLAGS, FLAGS]},
        ),
        (ValueError, r"^state must have shape \(2,\)", {"state": FLAGS}),
        (ValueError, r"^failed must hold 1 elements", {"failed": STATE}),
        (ValueError, r"^limit_seconds must not be negative, got -1.0$", {"limit_seconds": -1.0}),
    ],
    "push_pooled_lookup": [
        *_of_copies("weight"),
        *OF_EXCHANGE,
        (ValueError, r"^rows must hold 6 elements", {"hotness": [2]}),
        (
            ValueError,
            r"^copies must hold 1 copies \(one for each feature and rank\), got 2$",
            {"copies": COPIES["copies"].expand(2, 7).contiguous()},
        ),
    ],
}
