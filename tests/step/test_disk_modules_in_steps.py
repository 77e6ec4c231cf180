"""Modules of one table on disk train as on the device, and so do they evaluate."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch

from tests.support.disk_tables import assert_same_tables, disk_groups_of
from tests.support.lanes import picked_kernel
from tests.support.stored_modules import (
    NUM_IDS,
    PADDING,
    StoredModules,
    batches,
    largest_batch,
    train_by_hand,
)
from tests.support.tape import taped_captures
from torchembed import Disk, Dynamic, Embedding, EmbeddingBag
from torchembed.optim import SGD, Adagrad, Adam
from torchembed.training import TrainPipeline

NUM_STEPS = 20
CACHE_ROWS = largest_batch(batches(NUM_STEPS))


def disk(path: Path) -> Disk:
    return Disk(path=path, cache_rows=CACHE_ROWS, host_rows=2 * CACHE_ROWS)


@pytest.mark.parametrize(
    ("way", "kind", "dtype", "dynamic"),
    [
        ("by hand", Adam, torch.float32, None),
        ("by hand", Adam, torch.float32, Dynamic()),
        ("eager", Adagrad, torch.float32, None),
        ("eager", SGD, torch.bfloat16, None),
        ("captured", Adam, torch.float32, None),
        ("captured", Adam, torch.float32, Dynamic()),
        ("taped", Adam, torch.float32, None),
    ],
)
def test_modules_equal_those_on_the_device(
    tmp_path: Path, way: str, kind: type[Adam], dtype: torch.dtype, dynamic: Dynamic | None
) -> None:
    if way == "taped" and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    expected = StoredModules(None, dtype=dtype, dynamic=dynamic)
    losses = train_by_hand(expected, batches(NUM_STEPS), kind)
    model = StoredModules(disk(tmp_path), dtype=dtype, dynamic=dynamic)
    threads = set(threading.enumerate())
    if way == "by hand":
        assert train_by_hand(model, batches(NUM_STEPS), kind) == losses
    else:
        optimizer, of = kind.with_dense(model.parameters(), lr=0.05), batches(NUM_STEPS)
        with (
            taped_captures() if way == "taped" else contextlib.nullcontext(),
            TrainPipeline(model, None, [optimizer], device="cpu", capture=way != "eager") as steps,
        ):
            assert [steps.progress(of).loss.item() for _ in range(NUM_STEPS)] == losses
            assert ("graph" in map(str, steps.kinds)) is (way != "eager")
        assert set(threading.enumerate()) <= threads
    assert_same_tables(model, expected)
    assert all(not group.lines.store.is_empty for group in disk_groups_of(model))
    (batch,) = batches(1, first=40)
    for one, other in zip(model.eval().tables, expected.eval().tables, strict=True):
        assert torch.equal(one.lookup(batch["ids"]).vectors, other.lookup(batch["ids"]).vectors)
    assert torch.equal(model(batch), expected(batch))


def test_padding_rows_are_zeros_at_first(tmp_path: Path) -> None:
    module = Embedding(NUM_IDS, 4, padding_idx=PADDING, seed=0, storage=disk(tmp_path))
    expected = Embedding(NUM_IDS, 4, padding_idx=PADDING, seed=0)
    assert torch.equal(module.eval()(torch.arange(NUM_IDS)), expected(torch.arange(NUM_IDS)))
    assert not module(torch.tensor([PADDING])).any()


def test_rows_cannot_be_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight of table weight on disk must not be replaced"):
        EmbeddingBag(4, 3, _weight=torch.zeros(4, 3), storage=disk(tmp_path))
