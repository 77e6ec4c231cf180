"""Which updates of rows the library's kernels for GPUs take, and how much of the GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import RowUpdate
from torchembed.ops.rowwise_update import cuda

SGD, ROWWISE, ADAGRAD, ADAM = (
    OptimizerKind.SGD,
    OptimizerKind.ROWWISE_ADAGRAD,
    OptimizerKind.ADAGRAD,
    OptimizerKind.ADAM,
)
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16


def rows(dim: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(4, dim, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("dim", "dtype", "grad_dtype", "optimizer", "on_hopper", "elsewhere"),
    [
        (128, FLOAT, BFLOAT, ROWWISE, True, True),
        (128, FLOAT, FLOAT, ADAM, False, False),
        (256, FLOAT, HALF, ADAM, True, False),
        (512, FLOAT, FLOAT, ROWWISE, True, False),
        (32, FLOAT, BFLOAT, SGD, False, False),
        (64, FLOAT, FLOAT, ROWWISE, True, False),
        (64, FLOAT, FLOAT, ADAGRAD, False, False),
        (96, FLOAT, HALF, ADAM, True, False),
        (48, FLOAT, FLOAT, ROWWISE, False, False),
        (64, HALF, FLOAT, ROWWISE, False, False),
        (128, HALF, FLOAT, ROWWISE, True, False),
        (128, HALF, BFLOAT, SGD, True, False),
        (128, BFLOAT, BFLOAT, ADAM, False, False),
        (128, BFLOAT, HALF, ADAGRAD, False, False),
        (256, BFLOAT, BFLOAT, ADAGRAD, True, False),
        (256, HALF, FLOAT, ADAGRAD, True, False),
        (256, BFLOAT, FLOAT, ADAM, False, False),
        (512, BFLOAT, FLOAT, ROWWISE, True, False),
        (512, BFLOAT, FLOAT, ADAGRAD, False, False),
        (256, HALF, HALF, ROWWISE, False, False),
        (256, torch.float64, FLOAT, ROWWISE, False, False),
    ],
)
def test_takes_what_is_faster_than_triton(
    dim: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    optimizer: OptimizerKind,
    on_hopper: bool,
    elsewhere: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, grad = rows(dim, dtype), rows(dim, grad_dtype)
    for major, expected in ((9, on_hopper), (8, elsewhere), (10, elsewhere)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, major=major: (major, 0)
        )
        assert cuda._takes(weight, grad, optimizer) == expected


def update(weight: Tensor, optimizer: OptimizerKind, grad: Tensor) -> RowUpdate:
    fields: dict[str, Any] = dict.fromkeys(RowUpdate._fields)
    return RowUpdate(**fields | {"weight": weight, "grad": grad, "optimizer": int(optimizer)})


@pytest.mark.parametrize(
    ("dim", "dtype", "optimizer", "grad_dtype", "alone", "with_ranks", "beside_products"),
    [
        (128, FLOAT, ROWWISE, FLOAT, 110, 110, 66),
        (256, FLOAT, ROWWISE, FLOAT, 132, 110, 66),
        (256, FLOAT, ROWWISE, BFLOAT, 110, 110, 66),
        (256, FLOAT, ADAGRAD, FLOAT, 110, 110, 66),
        (512, FLOAT, ROWWISE, FLOAT, 110, 110, 66),
        (128, BFLOAT, ADAGRAD, BFLOAT, 132, 110, 110),
        (256, HALF, ROWWISE, FLOAT, 132, 110, 110),
        (512, BFLOAT, ROWWISE, FLOAT, 132, 110, 110),
    ],
)
def test_takes_all_multiprocessors_only_alone(
    dim: int,
    dtype: torch.dtype,
    optimizer: OptimizerKind,
    grad_dtype: torch.dtype,
    alone: int,
    with_ranks: int,
    beside_products: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "_num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    record = update(rows(dim, dtype), optimizer, rows(dim, grad_dtype))
    assert cuda._num_blocks(record) == alone
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "is_initialized", lambda: True)
        assert cuda._num_blocks(record) == with_ranks
    monkeypatch.setattr(cuda, "are_waiting", lambda: True)
    assert cuda._num_blocks(record) == beside_products
