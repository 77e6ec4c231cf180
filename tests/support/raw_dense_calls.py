"""Arguments of the operations of dense layers and losses for calls without their public functions:
some that fit, and what is said to others."""

from typing import Any

import torch

import torchembed.ops.binary_cross_entropy
import torchembed.ops.cross
import torchembed.ops.linear  # noqa: F401

X = torch.ones(3, 2)
ROW = torch.ones(1, 2)
COLUMN = torch.ones(3, 1)
PAIR = torch.ones(2)
ONE = torch.ones(1)
NOT_THERE = torch.ones(3, 2, device="meta")
SPREAD = COLUMN.expand(3, 2)
"""Two columns that are one in memory."""
LOW_RANK_BACKWARD = {"grad": X, "grad_h": COLUMN, "v": ROW, "x0": X, "sums": PAIR}

FITTING: dict[str, dict[str, Any]] = {
    "linear_relu_backward": {"grad": X, "output": X, "sums": PAIR},
    "linear_relu_input_backward": {
        "grad": COLUMN,
        "weight": ROW,
        "output": X,
        "sums": torch.ones(1, 2),
    },
    "sum_rows": {"grad": X, "total": PAIR},
    "sum_partials": {"partials": X, "total": PAIR},
    "linear_to_one_forward": {"x": X, "weight": ROW, "bias": ONE},
    "linear_to_one_backward": {
        "grad": COLUMN,
        "x": X,
        "weight": ROW,
        "grad_weight": torch.ones(1, 2),
        "grad_bias": torch.ones(1),
    },
    "cross_epilogue_forward": {"x0": X, "z": X, "bias": PAIR, "x": X},
    "cross_epilogue_backward": {"grad": X, "x0": X, "z": X, "bias": PAIR, "x_is_x0": False},
    "low_rank_cross_forward": {"x0": X, "h": COLUMN, "u": PAIR.view(2, 1), "bias": PAIR, "x": X},
    "low_rank_cross_scale": {"grad": X, "x0": X, "sums": torch.ones(1, 2)},
    "low_rank_cross_backward": LOW_RANK_BACKWARD,
    "low_rank_cross_input_backward": {
        "grad_h": COLUMN,
        "v": ROW,
        "grads": [X],
        "z": [X],
        "widths": [0, 2],
    },
    "binary_cross_entropy_forward": {"logits": X, "labels": X},
    "binary_cross_entropy_backward": {"grad": torch.ones(()), "logits": X, "labels": X},
}

ERRORS: dict[str, list[tuple[type[Exception], str, dict[str, Any]]]] = {
    "linear_relu_backward": [
        (TypeError, r"^output must be float32 or .*, got float64", {"output": X.double()}),
        (TypeError, r"^grad must be float32, got bfloat16; cast it", {"grad": X.bfloat16()}),
        (
            ValueError,
            r"^grad must have shape \(3, 2\) \(that of output\), got \(1, 2\)$",
            {"grad": ROW},
        ),
        (ValueError, r"^grad must have contiguous rows, got strides", {"grad": SPREAD}),
        (ValueError, r"^output must be contiguous", {"output": SPREAD}),
        (
            ValueError,
            r"^sums must have shape \(2,\) \(one for each column of output\), got \(1,\)$",
            {"sums": ONE},
        ),
        (
            ValueError,
            r"^sums must have shape \(1, 2\) \(partial sums over 128 rows .*, got \(2, 1\)$",
            {"sums": PAIR.view(2, 1)},
        ),
        (TypeError, r"^sums must be float32, got bfloat16; partial", {"sums": ROW.bfloat16()}),
        (ValueError, r"^sums must be contiguous", {"sums": ONE.expand(2)}),
        (ValueError, r"^grad must be on cpu as output is, got meta", {"grad": NOT_THERE}),
    ],
    "linear_relu_input_backward": [
        (ValueError, r"^weight must have 2 dimension", {"weight": PAIR}),
        (TypeError, r"^weight must be float32, got float16; cast", {"weight": ROW.half()}),
        (
            ValueError,
            r"^grad must have shape \(3, 1\) \(rows of output and of weight\), got \(3, 2\)$",
            {"grad": X},
        ),
        (
            ValueError,
            r"^weight must have shape \(1, 2\) \(a column for each of output\), got \(1, 1\)$",
            {"weight": ONE.view(1, 1)},
        ),
        (ValueError, r"^sums must have shape \(2,\)", {"sums": ONE}),
    ],
    "sum_rows": [
        (TypeError, r"^grad must be float32 or .*, got int64", {"grad": X.long()}),
        (ValueError, r"^grad must have 2 dimension", {"grad": PAIR}),
        (ValueError, r"^grad must have contiguous rows, got strides", {"grad": SPREAD}),
        (
            ValueError,
            r"^total must have shape \(2,\) \(one for each column of grad\), got \(1,\)$",
            {"total": ONE},
        ),
    ],
    "sum_partials": [
        (TypeError, r"^partials must be float32, got bfloat16", {"partials": X.bfloat16()}),
        (ValueError, r"^partials must be contiguous", {"partials": SPREAD}),
        (ValueError, r"^total must have shape \(2,\)", {"total": ONE}),
    ],
    "linear_to_one_forward": [
        (ValueError, r"^x must have 2 dimension", {"x": PAIR}),
        (ValueError, r"^weight must have shape \(1, 2\) \(a row of x\), got", {"weight": X}),
        (TypeError, r"^weight must be float32 as x is, got float16", {"weight": ROW.half()}),
        (ValueError, r"^bias must have shape \(1,\)", {"bias": PAIR}),
        (ValueError, r"^x must be contiguous", {"x": SPREAD}),
    ],
    "linear_to_one_backward": [
        (ValueError, r"^grad must have shape \(3, 1\) \(a column for", {"grad": X}),
        (ValueError, r"^grad_weight must have shape \(1, 2\) .that of w", {"grad_weight": PAIR}),
        (ValueError, r"^grad_weight must be contiguous", {"grad_weight": ONE.expand(1, 2)}),
        (ValueError, r"^grad_bias must have shape \(1,\)", {"grad_bias": PAIR}),
        (TypeError, r"^grad_bias must be float32 or .*, got int64", {"grad_bias": ONE.long()}),
    ],
    "cross_epilogue_forward": [
        (TypeError, r"^x0 must be float32 or .*, got float64", {"x0": X.double()}),
        (ValueError, r"^z must have the shape of x0, \(3, 2\), got \(1, 2\)$", {"z": ROW}),
        (ValueError, r"^x must be contiguous", {"x": SPREAD}),
        (ValueError, r"^bias must hold 2 elements", {"bias": ONE}),
        (ValueError, r"^x must be on cpu as x0 is, got meta", {"x": NOT_THERE}),
    ],
    "cross_epilogue_backward": [
        (ValueError, r"^grad must have the shape of x0, \(3, 2\), got \(1, 2\)$", {"grad": ROW}),
        (ValueError, r"^grad must be contiguous", {"grad": SPREAD}),
        (ValueError, r"^bias must be contiguous", {"bias": ONE.expand(2)}),
    ],
    "low_rank_cross_forward": [
        (ValueError, r"^h must have 2 dimension", {"h": PAIR}),
        (ValueError, r"^h must have shape \(3, 2\) \(a row for", {"h": PAIR.view(1, 2)}),
        (ValueError, r"^u must have shape \(2, 1\) \(columns of x0, columns of h\)", {"u": ROW}),
        (TypeError, r"^u must be float32 as x0 is, got float16", {"u": PAIR.view(2, 1).half()}),
        (ValueError, r"^bias must have shape \(2,\)", {"bias": ONE}),
        (ValueError, r"^x must be contiguous", {"x": SPREAD}),
        (ValueError, r"^x must be on cpu as x0 is, got meta", {"x": NOT_THERE}),
    ],
    "low_rank_cross_scale": [
        (ValueError, r"^grad must be contiguous", {"grad": SPREAD}),
        (ValueError, r"^x0 must have shape \(3, 2\) \(that of grad\)", {"x0": ROW}),
        (ValueError, r"^sums must have shape \(2,\)", {"sums": ONE}),
    ],
    "low_rank_cross_backward": [
        (ValueError, r"^grad_h must have shape \(3, 2\) \(a row for", {"grad_h": ROW}),
        (ValueError, r"^v must have shape \(1, 2\) \(columns of grad_h, of the result", {"v": X}),
        (ValueError, r"^x0 must have shape \(3, 2\)", {"x0": ROW}),
        (ValueError, r"^sums must have 1 dimension for a float32 grad", {"sums": ROW}),
    ],
    "low_rank_cross_input_backward": [
        (ValueError, r"^grads and z must hold one tensor a layer, .*, got 1 and 2$", {"z": [X, X]}),
        (ValueError, r"^grads and z must .*, got 0 and 0$", {"grads": [], "z": []}),
        (ValueError, r"^z\[0\] must have shape \(3, 2\) \(that of grads\[0\]\)", {"z": [ROW]}),
        (ValueError, r"^z\[0\] must be contiguous", {"z": [SPREAD]}),
        (ValueError, r"^v must have shape \(1, 2\)", {"v": X}),
        (ValueError, r"^widths must be counts >= 0 whose sum is 2, .*\[1\]$", {"widths": [1]}),
        (ValueError, r"^widths must be .*, got \[3, -1\]$", {"widths": [3, -1]}),
    ],
    "binary_cross_entropy_forward": [
        (TypeError, r"^labels must be float32 or .*, got int64", {"labels": X.long()}),
        (ValueError, r"^labels must have the shape of logits, \(3, 2\)", {"labels": ROW}),
        (ValueError, r"^logits must be contiguous", {"logits": SPREAD}),
        (ValueError, r"^labels must be on cpu as logits is, got meta", {"labels": NOT_THERE}),
    ],
    "binary_cross_entropy_backward": [
        (ValueError, r"^grad must hold 1 elements", {"grad": PAIR}),
        (TypeError, r"^grad must be float32 or .*, got float64", {"grad": ONE.double()}),
        (ValueError, r"^labels must be contiguous", {"labels": SPREAD}),
    ],
}
