"""Errors of ``rowwise_update`` for arguments that do not fit."""

from typing import Any

import pytest
import torch

from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import (
    RoundingKeys,
    RowGradients,
    UpdateRule,
    rowwise_update,
)
from torchembed.ops.segments import find_runs

SGD = UpdateRule(kind=OptimizerKind.SGD)
ADAM = UpdateRule(kind=OptimizerKind.ADAM)
ONE = torch.ones(1)
KEYS = RoundingKeys(torch.tensor([0, 5]), torch.tensor([7]))

ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "weight dtype": (
        TypeError,
        r"^weight must be float32 or float16 or bfloat16, got float64; call \.float\(\)$",
        {"weight": torch.zeros(5, 2, dtype=torch.float64)},
    ),
    "weight shape": (
        ValueError,
        r"^weight must have 2 dimension\(s\), got shape \(5,\); reshape it$",
        {"weight": torch.zeros(5)},
    ),
    "weight layout": (
        ValueError,
        r"^weight must be contiguous, since it is updated in place; copy it first$",
        {"weight": torch.zeros(2, 5).t()},
    ),
    "too few states": (
        ValueError,
        r"^states must be 2 tensor\(s\), got 1$",
        {"rule": ADAM, "states": (torch.zeros(5, 2),), "step": ONE},
    ),
    "too many states": (
        ValueError,
        r"^states must be 0 tensor\(s\), got 1$",
        {"states": (torch.zeros(5, 2),)},
    ),
    "state dtype": (
        TypeError,
        r"^state0 must be float32, got float16; call \.float\(\)$",
        {"rule": ADAM, "states": (torch.zeros(5, 2).half(),) * 2, "step": ONE},
    ),
    "state shape": (
        ValueError,
        r"^state0 must be contiguous \(5,\), got \(5, 2\)$",
        {
            "rule": UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD),
            "states": (torch.zeros(5, 2),),
        },
    ),
    "state layout": (
        ValueError,
        r"^state0 must be contiguous \(5, 2\), got \(5, 2\)$",
        {"rule": UpdateRule(kind=OptimizerKind.ADAGRAD), "states": (torch.zeros(2, 5).t(),)},
    ),
    "state device": (
        ValueError,
        r"^state0 must be on cpu as weight is, got meta; call \.to\('cpu'\)$",
        {
            "rule": UpdateRule(kind=OptimizerKind.ADAGRAD),
            "states": (torch.zeros(5, 2, device="meta"),),
        },
    ),
    "grad dtype": (
        TypeError,
        r"^grad must be float32 or float16 or bfloat16, got int64; call \.float\(\)$",
        {"gradients": RowGradients(torch.ones(3, 2, dtype=torch.int64))},
    ),
    "grad shape": (
        ValueError,
        r"^grad must have 2 dimension\(s\), got shape \(6,\); reshape it$",
        {"gradients": RowGradients(torch.ones(6))},
    ),
    "grad columns": (
        ValueError,
        r"^grad must have 2 columns, got 3$",
        {"gradients": RowGradients(torch.ones(3, 3))},
    ),
    "grad rows": (
        ValueError,
        r"^grad must have 3 rows \(one for each id\), got 4$",
        {"gradients": RowGradients(torch.ones(4, 2))},
    ),
    "gradient rows dtype": (
        TypeError,
        r"^gradient_rows must be int32 or int64, got float32; call \.long\(\)$",
        {"gradients": RowGradients(torch.ones(3, 2), torch.zeros(3))},
    ),
    "gradient rows length": (
        ValueError,
        r"^gradient_rows must hold 3 elements \(one for each id\), got 2$",
        {"gradients": RowGradients(torch.ones(3, 2), torch.zeros(2, dtype=torch.int64))},
    ),
    "scales dtype": (
        TypeError,
        r"^scales must be float32, got float64; call \.float\(\)$",
        {"gradients": RowGradients(torch.ones(3, 2), None, torch.ones(3).double())},
    ),
    "scales length": (
        ValueError,
        r"^scales must hold 3 elements \(one for each id\), got 2$",
        {"gradients": RowGradients(torch.ones(3, 2), None, torch.ones(2))},
    ),
    "lr dtype": (
        TypeError,
        r"^lr must be float32, got float64; call \.float\(\)$",
        {"lr": ONE.double()},
    ),
    "lr size": (
        ValueError,
        r"^lr must hold 1 elements \(a scalar in a tensor\), got 2$",
        {"lr": torch.ones(2)},
    ),
    "step dtype": (
        TypeError,
        r"^step must be float32, got int64; call \.float\(\)$",
        {"step": torch.ones(1, dtype=torch.int64)},
    ),
    "multiplier dtype": (
        TypeError,
        r"^grad_multiplier must be float32, got float16; call \.float\(\)$",
        {"grad_multiplier": ONE.half()},
    ),
    "skip dtype": (
        TypeError,
        r"^skip must be float32, got bool; call \.float\(\)$",
        {"skip": ONE.bool()},
    ),
    "lr device": (
        ValueError,
        r"^lr must be on cpu as weight is, got meta; call \.to\('cpu'\)$",
        {"lr": torch.ones(1, device="meta")},
    ),
    "grad device": (
        ValueError,
        r"^grad must be on cpu as weight is, got meta; call \.to\('cpu'\)$",
        {"gradients": RowGradients(torch.ones(3, 2, device="meta"))},
    ),
    "Adam without a step": (
        ValueError,
        r"^step must be given for Adam and for stochastic rounding, got None$",
        {"rule": ADAM, "states": (torch.zeros(5, 2), torch.zeros(5, 2))},
    ),
    "rounding without a step": (
        ValueError,
        r"^step must be given for Adam and for stochastic rounding, got None$",
        {"weight": torch.zeros(5, 2).half(), "rounding": KEYS},
    ),
    "rounding of float32": (
        ValueError,
        r"^rounding must be None for float32 weights, which need no rounding$",
        {"rounding": KEYS, "step": ONE},
    ),
    "rounding offsets dtype": (
        TypeError,
        r"^row_offsets must be int64, got int32; call \.long\(\)$",
        {
            "weight": torch.zeros(5, 2).half(),
            "step": ONE,
            "rounding": KEYS._replace(row_offsets=KEYS.row_offsets.int()),
        },
    ),
    "rounding keys length": (
        ValueError,
        r"^row_keys must hold 1 elements \(one for each table\), got 2$",
        {
            "weight": torch.zeros(5, 2).half(),
            "step": ONE,
            "rounding": KEYS._replace(row_keys=torch.tensor([1, 2])),
        },
    ),
    "rounding first columns": (
        ValueError,
        r"^first_columns must hold 1 elements \(one for each table\), got 2$",
        {
            "weight": torch.zeros(5, 2).half(),
            "step": ONE,
            "rounding": KEYS._replace(first_columns=torch.tensor([0, 4])),
        },
    ),
    "runs of another device": (
        ValueError,
        r"^unique_rows must be on cpu as weight is, got meta; call \.to\('cpu'\)$",
        {"runs": find_runs(torch.zeros(3, dtype=torch.int64, device="meta"), 5)},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name: str) -> None:
    error, message, changes = ERRORS[name]
    arguments: dict[str, Any] = {
        "weight": torch.zeros(5, 2),
        "states": (),
        "runs": find_runs(torch.tensor([0, 1, 1]), 5),
        "gradients": RowGradients(torch.ones(3, 2)),
        "rule": SGD,
        "lr": ONE,
    } | changes
    with pytest.raises(error, match=message):
        rowwise_update(**arguments)
