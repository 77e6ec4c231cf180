"""Rows on disk read and write as a tensor, some at a time."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.tables import Constant, Disk, DiskGroup, Table, TableSet, TableSpec

ROWS, DIM = 10, 3


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weight, and Adagrad's state of it, of the second of two tables, whose rows are all 0 and
    all 2 at first; copied three rows at a time."""
    pytest.importorskip("torchrec")
    pytest.importorskip("rocksdict")
    from torchembed.integrations.torchrec.tables import rows_on_disk

    monkeypatch.setattr(rows_on_disk, "_BYTES_AT_ONCE", 3 * 2 * DIM * 4)
    storage = Disk(path=tmp_path / "rows", host_rows=4, cache_rows=2)
    tables = [
        Table(
            TableSpec(
                name=name,
                num_rows=num_rows,
                dim=DIM,
                storage=storage,
                initializer=Constant(value=value),
            )
        )
        for name, num_rows, value in (("first", 5, 7.0), ("second", ROWS, 0.0))
    ]
    stored = torch.empty(5 + ROWS, DIM, device="meta")
    group = DiskGroup(tables, stored, torch.device("cpu"))
    TableSet.over([group])
    group.set_rule(UpdateRule(kind=OptimizerKind.ADAGRAD), 2.0)
    return [rows_on_disk.RowsOnDisk(group, part, range(5, 5 + ROWS)) for part in (0, 1)]


def numbered(num_rows: int = ROWS) -> torch.Tensor:
    return torch.arange(num_rows * DIM, dtype=torch.float32).view(num_rows, DIM)


def test_copies_write_rows_and_read_them(rows: list[Any]) -> None:
    weight, state = rows
    assert torch.equal(weight.full_tensor(), torch.zeros(ROWS, DIM))
    assert torch.equal(state.full_tensor(), torch.full((ROWS, DIM), 2.0))
    weight.copy_(numbered())
    assert torch.equal(weight.full_tensor(), numbered())
    assert torch.equal(state.full_tensor(), torch.full((ROWS, DIM), 2.0))
    state.copy_(weight)
    target = torch.empty(ROWS, DIM, dtype=torch.float64)
    assert torch.equal(target.copy_(state), numbered().double())
    weight.copy_(numbered().half()[:1])  # broadcast, and converted
    assert torch.equal(weight.full_tensor(), numbered(1).expand(ROWS, DIM))


def test_slices_are_rows_and_columns_on_disk(rows: list[Any]) -> None:
    weight = rows[0]
    weight.copy_(numbered())
    expected = numbered()
    for found, part in (
        (weight[2:9], expected[2:9]),
        (weight[2:9][1:-1], expected[3:8]),
        (weight[:, 1:], expected[:, 1:]),
        (weight.narrow(1, 2, 1)[-3:], expected[-3:, 2:]),
        (weight[4:4], expected[4:4]),
    ):
        assert type(found) is type(weight)
        assert torch.equal(found.full_tensor(), part)
    weight[3:7, 1:2].copy_(torch.full((4, 1), -1.0))
    expected[3:7, 1:2] = -1.0
    assert torch.equal(weight.full_tensor(), expected)
    for index in (0, 4, -1):
        assert torch.equal(weight[index], expected[index])
        assert type(weight[index]) is torch.Tensor
    assert torch.equal(weight[:, 1], expected[:, 1])
    assert torch.equal(weight[::2], expected[::2])
    assert torch.equal(weight[torch.tensor([3, 3, 0])], expected[[3, 3, 0]])
    for index in (ROWS, -ROWS - 1):
        with pytest.raises(IndexError):
            weight[index]


def test_views_of_the_same_shape_hold_no_rows(rows: list[Any]) -> None:
    weight = rows[0]
    for found in (weight.detach(), weight.data, weight.view(-1, DIM), weight.view(ROWS, DIM)):
        assert type(found) is type(weight)
    parameter = torch.nn.Parameter(weight)
    assert isinstance(parameter, torch.nn.Parameter)
    assert (parameter.shape, parameter.dtype) == ((ROWS, DIM), torch.float32)
    assert parameter.requires_grad
    assert parameter.is_contiguous()
    assert not parameter.is_pinned()
    weight.copy_(numbered())
    assert torch.equal(weight.view(-1), numbered().view(-1))


def test_other_operations_read_all_rows(rows: list[Any]) -> None:
    weight, state = rows
    weight.copy_(numbered())
    plain: list[Any] = [
        weight.clone(),
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
        weight.to(torch.float64),
        weight + 0,
    ]
    weight.copy_(state)
    for found in plain:
        assert type(found) is torch.Tensor
        assert torch.equal(found.float(), numbered())
    assert weight.to(torch.float64).dtype is torch.float64
    assert weight.sum() == 2 * ROWS * DIM
    assert repr(weight) == ("RowsOnDisk(rows of tables first, second, (10, 3), torch.float32)")
    assert repr(state).startswith("RowsOnDisk(state 0 of rows of tables first, second")
    twice = [weight, weight]
    assert copy.deepcopy(twice)[0] is not weight


def test_only_copies_change_rows(rows: list[Any]) -> None:
    weight = rows[0]
    for change in (weight.zero_, lambda: weight.mul_(2), lambda: torch.nn.init.normal_(weight)):
        with pytest.raises(
            TypeError, match=r"rows of tables on disk must be changed by copy_, got aten"
        ):
            change()
    assert torch.equal(weight.full_tensor(), torch.zeros(ROWS, DIM))
