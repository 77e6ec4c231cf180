"""Rows on disk that are read ahead for batches to come: training is the same."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.disk_tables import (
    LOSS,
    NUM_IDS,
    StoredRanker,
    assert_same_tables,
    batches,
    disk_groups_of,
    most_rows,
    optimizers_of,
    rows_and_states,
    train_by_hand,
)
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from torchembed import Disk, Dynamic, EmbeddingBag
from torchembed.core.row_caches import CacheCounter
from torchembed.data import BackgroundLoader, Batch
from torchembed.stores import ReadAheadCounts, ReadAheadTable
from torchembed.tables import DiskGroup
from torchembed.tables.tiers.line_layout import LineLayout
from torchembed.tables.tiers.line_store import LineStore
from torchembed.training import DiskReadAhead, TrainPipeline, train

NUM_STEPS, NUM_BEFORE = 20, 8


def table_of(group: DiskGroup) -> ReadAheadTable:
    table = group.lines.store.table
    assert isinstance(table, ReadAheadTable)
    return table


def counts_of(model: nn.Module) -> list[ReadAheadCounts]:
    """What was read of each group that has rows on disk."""
    groups = [g for g in disk_groups_of(model) if not g.lines.store.is_empty]
    return [table_of(group).counts for group in groups]


def readers_since(before: set[threading.Thread]) -> list[str]:
    """Names of threads that read for batches to come, but for those of other tests, whose pipelines
    may live on until they are collected."""
    started = set(threading.enumerate()) - before
    return [thread.name for thread in started if "to come" in thread.name]


def wait_until_read(table: ReadAheadTable) -> None:
    buffer = table._buffer
    with buffer.changed:
        assert buffer.changed.wait_for(
            lambda: not buffer.announced and not buffer._reading, timeout=60
        )


def trained(
    model: StoredRanker, first: list[Batch], rest: list[Batch], num_ahead: int, *, capture: bool
) -> list[ReadAheadCounts]:
    """Train on ``first``, which brings rows to the disk, and then on the ``rest``."""
    threads = set(threading.enumerate())
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device="cpu", capture=capture)
    with pipeline, DiskReadAhead(model, buffer_bytes=5000) as ahead:
        train(pipeline, BackgroundLoader(first, announce=ahead))
        train(pipeline, BackgroundLoader(rest, num_ahead=num_ahead, announce=ahead))
        ahead.wait()
    assert set(threading.enumerate()) <= threads
    return counts_of(model)


@pytest.mark.parametrize("dynamic", [None, Dynamic()], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("form", "num_ahead", "capture"),
    [("fixed", 1, False), ("fixed", 1000, True), ("mixed", 3, True), ("jagged", 1000, True)],
)
def test_training_is_the_same(
    tmp_path: Path, form: str, num_ahead: int, capture: bool, dynamic: Dynamic | None
) -> None:
    of = batches(form, NUM_STEPS)
    expected = StoredRanker(None, dynamic=dynamic)
    first, rest = of[:NUM_BEFORE], of[NUM_BEFORE:]
    train_by_hand(expected, of)
    most = -(-most_rows(of) // 2)
    model = StoredRanker(Disk(path=tmp_path, cache_rows=most, host_rows=2 * most), dynamic=dynamic)
    counts = trained(model, first, rest, num_ahead, capture=capture)
    assert_same_tables(model, expected)
    assert sum(of_group.rows_ahead for of_group in counts) > 0


@pytest.mark.parametrize("changes", [False, True], ids=["the same steps", "steps captured anew"])
def test_no_row_that_was_announced_is_read_late(tmp_path: Path, changes: bool) -> None:
    model = StoredRanker(Disk(path=tmp_path, cache_rows=NUM_IDS, host_rows=NUM_IDS))
    of, optimizers = batches("fixed", NUM_STEPS), optimizers_of(model)
    pipeline = TrainPipeline(model, LOSS, optimizers, device="cpu", capture=True)
    with pipeline, DiskReadAhead(model) as ahead:
        train(pipeline, of[:10])
        for group in disk_groups_of(model):
            group.write_back()
            group.forget_cached()
        numbers = [ahead.announce(batch) for batch in of]
        assert numbers == list(range(1, NUM_STEPS + 1))
        ahead.wait()
        for group in disk_groups_of(model):
            wait_until_read(table_of(group))
        before = counts_of(model)
        if changes:
            next(model.dense.parameters()).requires_grad_(False)
        train(pipeline, of)
        for group, (rows_ahead, *_), now in zip(
            disk_groups_of(model), before, counts_of(model), strict=True
        ):
            used = torch.cat([table_rows(group, batch) for batch in of]).unique()
            assert now == (rows_ahead, len(used), 0)
            assert rows_ahead == len(used)
        # Rows that are in host memory are not read again.
        ahead.announce(of[0])
        ahead.wait()
        for group in disk_groups_of(model):
            wait_until_read(table_of(group))
        assert [c.rows_ahead for c in counts_of(model)] == [c.rows_ahead for c in before]
        ahead.retire(numbers[-1])
        ahead.wait()


def test_what_was_read_ahead_reaches_the_device_in_its_step(tmp_path: Path) -> None:
    """Batches with a row from the disk are fetched late, and counted so; others are not."""
    model = StoredRanker(Disk(path=tmp_path, cache_rows=NUM_IDS, host_rows=NUM_IDS))
    of = batches("fixed", NUM_STEPS)

    def counts() -> dict[str, float]:
        found = [m.cache_statistics(wait=True).values() for m in (model.bags, model.sequences)]
        parts = [of_cache.scalars() for of_one in found for of_cache in of_one]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device="cpu", capture=True)
    with pipeline, DiskReadAhead(model) as ahead:
        train(pipeline, of)
        for group in disk_groups_of(model):
            group.write_back()
            group.forget_cached()
        for batch in of:
            ahead.announce(batch)
        ahead.wait()
        for group in disk_groups_of(model):
            wait_until_read(table_of(group))
        before = counts()
        train(pipeline, of)
        after = counts()
        train(pipeline, of)
        last = counts()
    assert [of_group.rows_late for of_group in counts_of(model)] == [0, 0]
    from_disk, again = (
        {name: late[name] - early[name] for name in before}
        for early, late in ((before, after), (after, last))
    )
    assert from_disk["host_misses"] > 0
    assert from_disk["batches_fetched_late"] > 0
    assert 0 < from_disk["conflict_misses"] <= from_disk["rows_read_in_step"]
    assert from_disk["batches_refused"] == 0
    names = ("host_misses", "batches_fetched_late", "conflict_misses", "batches_refused")
    assert [again[name] for name in names] == [0, 0, 0, 0]


def test_rows_that_leave_host_memory_are_read_ahead_again(tmp_path: Path) -> None:
    of = batches("fixed", NUM_STEPS)
    first, rest = of[:NUM_BEFORE], of[NUM_BEFORE:]
    most = -(-most_rows(of) // 2)
    model = StoredRanker(Disk(path=tmp_path, cache_rows=most, host_rows=2 * most))
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device="cpu", capture=False)
    with pipeline, DiskReadAhead(model) as ahead:
        train(pipeline, first)
        for batch in rest:
            ahead.announce(batch)
        ahead.wait()
        groups = disk_groups_of(model)
        evicted = [group.host.counters[CacheCounter.WRITTEN_ROWS].item() for group in groups]
        iterator = iter(rest)
        for _ in rest:
            for group in groups:
                wait_until_read(table_of(group))
            pipeline.progress(iterator)
        for group, before in zip(groups, evicted, strict=True):
            assert group.host.counters[CacheCounter.WRITTEN_ROWS].item() > before
        assert [of_group.rows_late for of_group in counts_of(model)] == [0, 0]


def on_ranks(path: Path | None) -> list[Any]:
    """The rows of two ranks, of tables on disk read ahead where there is a ``path``."""
    of = batches("jagged", 16)
    most = most_rows(of)
    storage = None if path is None else Disk(path=path, cache_rows=most, host_rows=2 * most)
    model = StoredRanker(storage)
    placements = {"bags.embedding_bags.a": "row_wise", "bags.embedding_bags.b": "table_wise"}
    placements["sequences.embeddings.d"] = "row_wise"
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), placements)
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device="cpu", capture=True)
    own = of[dist.get_rank() :: 2]
    with pipeline, DiskReadAhead(model) as ahead:
        train(pipeline, own[:3])
        model.bags.write_back()
        model.sequences.write_back()
        if path is not None:
            ahead.announce(own[3])
            ahead.wait()
            for group in disk_groups_of(model):
                wait_until_read(table_of(group))
            assert all(of_group.rows_ahead > 0 for of_group in counts_of(model))
        train(pipeline, BackgroundLoader(own[3:], num_ahead=8, announce=ahead))
    return [tensor.numpy() for tensor in rows_and_states(model).values()]


def test_sharded_tables_train_the_same(tmp_path: Path) -> None:
    expected = run_on_ranks(2, on_ranks, None)
    for of_rank, found in zip(expected, run_on_ranks(2, on_ranks, tmp_path), strict=True):
        for one, other in zip(of_rank, found, strict=True):
            np.testing.assert_array_equal(other, one)


def table_rows(group: DiskGroup, batch: Batch) -> torch.Tensor:
    """The rows of a group that a batch of fixed hotness looks up."""
    ids = dict(zip(batch.sparse.keys, batch.sparse.values.split([16, 8, 24]), strict=True))
    found = []
    for table in group.tables:
        features = {"a": "ac", "b": "b", "d": "b"}[table.spec.name]
        found += [ids[feature] + group.first_row_of(table) for feature in features]
    return torch.cat(found)


def test_a_restored_database_gives_nothing_that_was_read_before(tmp_path: Path) -> None:
    layout, threads_before = LineLayout([torch.empty(0, 3)]), set(threading.enumerate())
    store, rows = LineStore(tmp_path / "rows", layout), torch.arange(5)
    assert store.announce(rows.numpy(), 1000) is None
    old, new = (layout.packed([torch.full((5, 3), value)]) for value in (1.0, 2.0))
    store.write(rows, old)
    saved = store.saved()
    store.write(rows, new)
    assert store.announce(rows.numpy(), 1000) is not None
    assert isinstance(store.table, ReadAheadTable)
    wait_until_read(store.table)
    assert torch.equal(store.read(rows[:2])[0], new[:2])
    store.replace(saved)
    assert torch.equal(store.read(rows)[0], old)
    assert store.announce(rows.numpy(), 1000) is not None
    wait_until_read(store.table)
    store.clear()
    assert store.announce(rows.numpy(), 1000) is None
    assert not readers_since(threads_before)


def test_the_ids_of_a_pass_are_announced_by_the_name_of_their_table(tmp_path: Path) -> None:
    model = StoredRanker(Disk(path=tmp_path, cache_rows=NUM_IDS, host_rows=NUM_IDS))
    train_by_hand(model, batches("fixed", 3))
    name, group = "bags.embedding_bags.b.weight", disk_groups_of(model)[0]
    group.write_back()
    group.forget_cached()
    with DiskReadAhead(model) as ahead:
        ids = torch.arange(NUM_IDS, dtype=torch.int32)
        assert ahead.announce_ids(name, ids) == 1
        ahead.wait()
        wait_until_read(table_of(group))
        assert sorted(table_of(group)._buffer._slots) == list(range(NUM_IDS, 2 * NUM_IDS))
        with pytest.raises(ValueError, match=r"name must be that of .* on disk, .*got 'dense.0.w"):
            ahead.announce_ids("dense.0.weight", ids)
        with pytest.raises(TypeError, match=r"ids must be int32 or .*, got float32"):
            ahead.announce_ids(name, ids.float())


def test_ids_of_a_pass_that_no_row_has_are_refused(tmp_path: Path) -> None:
    model = StoredRanker(Disk(path=tmp_path / "static", cache_rows=4, host_rows=8))
    name = "bags.embedding_bags.b.weight"
    with DiskReadAhead(model) as ahead:
        for ids, error, message in (
            (
                torch.tensor([[0, NUM_IDS], [-3, 2]]),
                IndexError,
                (
                    f"ids must be at least 0 and less than {NUM_IDS}, the number of rows of table "
                    f"b, got {NUM_IDS} at position 1, the first of 2 such ids; leave them out"
                ),
            ),
            (torch.rand(2), TypeError, r"ids must be .*, got float32; call \.long\(\)"),
            ([1, 2], TypeError, r"ids must be a tensor, got list; call torch\.tensor"),
            (
                torch.empty(2, dtype=torch.int64, device="meta"),
                ValueError,
                r"ids must be on the CPU, got meta; call \.cpu\(\)",
            ),
        ):
            with pytest.raises(error, match=message):
                ahead.announce_ids(name, ids)  # type: ignore[arg-type]
        assert ahead.announce_ids(name, torch.empty(0, dtype=torch.int64)) == 1
    storage = Disk(path=tmp_path / "dynamic", cache_rows=4, host_rows=8)
    of_any_ids = StoredRanker(storage, dynamic=Dynamic())
    with DiskReadAhead(of_any_ids) as ahead:
        assert ahead.announce_ids(name, torch.tensor([-3, NUM_IDS])) == 1
        ahead.wait()


def test_numbers_are_retired_once_it_is_closed_too() -> None:
    with DiskReadAhead(EmbeddingBag(10, 2)) as ahead:
        number = ahead.announce(batches("fixed", 1)[0])
    ahead.retire(number)  # as a loader does that is closed later


def test_nothing_is_announced_once_it_is_closed(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model = StoredRanker(Disk(path=tmp_path, cache_rows=4, host_rows=8))
    with DiskReadAhead(model) as ahead:
        pass
    ahead.close()
    message = "this DiskReadAhead is closed, and reads nothing that is announced; make another one"
    with pytest.raises(RuntimeError, match=message):
        ahead.announce(batches("fixed", 1)[0])
    with pytest.raises(RuntimeError, match=message):
        ahead.announce_ids("bags.embedding_bags.b.weight", torch.arange(2))
    assert not readers_since(before)


def test_a_failure_is_raised_by_the_next_announcement(tmp_path: Path) -> None:
    model = StoredRanker(Disk(path=tmp_path, cache_rows=NUM_IDS, host_rows=NUM_IDS))
    train_by_hand(model, batches("fixed", 3))
    for group in disk_groups_of(model):
        group.write_back()
        group.forget_cached()
        assert group.lines.store._open is not None
        group.lines.store._open.store.close()
    ahead, of = DiskReadAhead(model), batches("fixed", 1)[0]
    ahead.announce(of)
    ahead.wait()
    for group in disk_groups_of(model):
        buffer = table_of(group)._buffer
        with buffer.changed:
            assert buffer.changed.wait_for(lambda b=buffer: b._failure is not None, timeout=60)
    ahead.announce(of)
    with pytest.raises(RuntimeError, match="closed"):
        ahead.wait()
    ahead.close()


def test_models_without_tables_on_disk_announce_nothing() -> None:
    model = nn.Sequential(EmbeddingBag(10, 2))
    before = set(threading.enumerate())
    with DiskReadAhead(model) as ahead:
        assert ahead.announce(batches("fixed", 1)[0]) == 1
        ahead.retire(1)
        assert not readers_since(before)


def test_wrong_arguments(tmp_path: Path) -> None:
    model = EmbeddingBag(10, 2)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        DiskReadAhead(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer_bytes must be positive, got 0"):
        DiskReadAhead(model, buffer_bytes=0)
    with pytest.raises(TypeError, match=r"buffer_bytes must be an int, got 1\.5"):
        DiskReadAhead(model, buffer_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="announce must be a DiskReadAhead or None, got 5"):
        BackgroundLoader([], announce=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="number must be an int, as announcing gave it, got True"):
        DiskReadAhead(model).retire(True)
    for number, last in ((0, 0), (1, 0), (-1, 0), (2, 1)):
        ahead = DiskReadAhead(model)
        for _ in range(last):
            ahead.announce(batches("fixed", 1)[0])
        with pytest.raises(ValueError, match=f"that announcing gave, from 1 to {last}, got"):
            ahead.retire(number)
