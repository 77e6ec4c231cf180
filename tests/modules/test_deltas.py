"""Deltas of dynamic tables: a snapshot and the deltas after it are a later snapshot."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchembed
from tests.support.dynamic_tables import one_bag_each, train_on, two_and_a_static_one
from tests.support.tolerance import assert_same_bits
from torchembed import (
    LFU,
    LRU,
    CallerScores,
    Delta,
    Dynamic,
    EmbeddingBag,
    EmbeddingBagCollection,
    SnapshotDueError,
    TableDelta,
)
from torchembed.ops.hash_table import Counter
from torchembed.tables import DeletionLog, Operation
from torchembed.training import TrainPipeline

Copies = dict[str, dict[int, Tensor]]
"""For each table the row of each id, as one that follows training holds them."""


def collection(capacity: int = 4, **settings: Any) -> EmbeddingBagCollection:
    return two_and_a_static_one(capacity, Dynamic(**{"deletion_log": 100, **settings}))


def applied(copies: Copies, delta: Delta) -> Copies:
    """``copies`` after a delta."""
    after = {name: dict(copies.get(name, {})) for name in delta.tables}
    for name, changes in delta.tables.items():
        for operation, id_, row in changes.operations():
            if row is None:
                assert operation is Operation.DELETE
                after[name].pop(id_, None)
            else:
                assert operation is Operation.UPSERT
                after[name][id_] = row
    return after


def assert_equal_copies(copies: Copies, expected: Copies) -> None:
    assert copies.keys() == expected.keys()
    for name, rows in expected.items():
        assert copies[name].keys() == rows.keys()
        for id_, row in rows.items():
            assert_same_bits(copies[name][id_], row)


def num_changes(delta: Delta) -> int:
    return sum(len(of.ids) + len(of.deleted_ids) for of in delta.tables.values())


_ids = st.lists(st.integers(-4, 12), min_size=1, max_size=6)
_windows = st.lists(
    st.lists(st.one_of(st.tuples(_ids, _ids), st.integers(0, 4)), max_size=4),
    min_size=2,
    max_size=5,
)
"""In each window batches, and numbers of rows down to which table a is evicted."""


@settings(max_examples=60, derandomize=True, database=None)
@given(_windows, st.sampled_from([LRU(), LFU()]), st.sampled_from([None, 3]))
def test_a_snapshot_and_deltas_are_a_later_snapshot(
    windows: list[list[tuple[list[int], list[int]] | int]], eviction: LRU | LFU, ttl: int | None
) -> None:
    """Bit for bit, with ids evicted, expired and admitted again; marks may be skipped."""
    module = collection(eviction=eviction, ttl_steps=ttl)
    optimizer = torchembed.optim.Adagrad(module.parameters(), lr=0.1)
    first = module.delta()
    marks, copies, states = [first.mark], applied({}, first), [applied({}, first)]
    for window in windows:
        for operation in window:
            if isinstance(operation, int):
                module.evict(max_rows=operation, table="a")
            else:
                train_on(module, optimizer, *operation)
        delta = module.delta(since=marks[-1])
        if not window:
            assert num_changes(delta) == 0
        copies = applied(copies, delta)
        assert_equal_copies(copies, applied({}, module.delta()))
        marks.append(delta.mark)
        states.append(copies)
    # The union of all windows from any moment on.
    for mark, state in zip(marks, states, strict=True):
        assert_equal_copies(applied(state, module.delta(since=mark)), copies)


def changes_of(module: EmbeddingBagCollection, since: Delta) -> TableDelta:
    return module.delta(since=since.mark).tables["a"]


def test_an_eviction_is_a_deletion_with_its_epoch_and_reason() -> None:
    module = collection(2)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    for a in ([1, 2], [2], [2]):
        train_on(module, optimizer, a, [0])
    before = module.delta()
    train_on(module, optimizer, [3], [0])
    changes = changes_of(module, before)
    assert changes.ids.tolist() == [3]
    assert changes.deleted_ids.tolist() == [1]
    assert changes.deleted_epochs.tolist() == [4]
    assert changes.deletion_reasons.tolist() == [Counter.EVICTED_FULL]
    assert before.tables["a"].deleted_ids.tolist() == []


def test_an_expired_id_is_a_deletion() -> None:
    module = collection(4, ttl_steps=2, sweep_steps=1)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, optimizer, [1], [0])
    before = module.delta()
    for _ in range(3):
        train_on(module, optimizer, [2], [0])
    changes = changes_of(module, before)
    assert changes.ids.tolist() == [2]
    assert changes.deleted_ids.tolist() == [1]
    assert changes.deletion_reasons.tolist() == [Counter.EVICTED_EXPIRED]


def test_an_id_evicted_on_demand_is_a_deletion_at_once() -> None:
    module = collection(4)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    for a in ([1], [2], [2]):
        train_on(module, optimizer, a, [0])
    before = module.delta()
    module.evict(max_rows=1, table="a")
    changes = changes_of(module, before)
    assert changes.ids.tolist() == []
    assert changes.deleted_ids.tolist() == [1]
    assert changes.deletion_reasons.tolist() == [Counter.EVICTED_TARGET]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint64])
def test_an_erased_id_is_a_deletion(dtype: torch.dtype) -> None:
    """Ids whose rows are in use stay, and so do those of other tables."""
    module = collection(4)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    for a in ([1, 3], [2], [2]):
        train_on(module, optimizer, a, [1])
    before = module.delta()
    module.erase(torch.tensor([[1, 1], [2, 9]]).to(dtype), table="a")
    changes = changes_of(module, before)
    assert changes.deleted_ids.tolist() == [1]
    assert changes.deletion_reasons.tolist() == [Counter.ERASED]
    assert module.statistics()["a"].erased == 1
    copies = applied(applied({}, before), module.delta(since=before.mark))
    assert_equal_copies(copies, applied({}, module.delta()))
    assert (copies["a"].keys(), copies["b"].keys()) == ({2, 3}, {1})
    with pytest.raises(ValueError, match="table must be the name of a dynamic table"):
        module.erase(torch.tensor([1]))


def test_modules_without_dynamic_tables_have_no_deltas() -> None:
    static, ids = EmbeddingBag(4, 2, mode="sum"), torch.tensor([1])
    calls: list[Callable[[], object]] = [
        static.delta,
        static.delta_mark,
        lambda: static.erase(ids),
        lambda: static.evict(max_rows=1),
        lambda: static.set_score(1),
        lambda: static.assign_scores(ids, ids),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"this module has no dynamic table, .*; give one dyn"):
            call()


def test_what_is_no_mark_and_no_ids_is_named() -> None:
    bag = EmbeddingBag(4, 2, mode="sum", dynamic=Dynamic(deletion_log=8))
    with pytest.raises(TypeError, match=r"since must be the mark of an earlier delta, .* got 'x'"):
        bag.delta(since="x")  # type: ignore[arg-type]
    scored = EmbeddingBag(4, 2, mode="sum", dynamic=Dynamic(eviction=CallerScores()))
    with pytest.raises(TypeError, match=r"ids must be .*, got list"):
        bag.erase([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ids must be .*, got float32"):
        bag.erase(torch.tensor([1.0]))
    with pytest.raises(TypeError, match=r"ids must be .*, got list"):
        scored.assign_scores([1], torch.tensor([1]))  # type: ignore[arg-type]


def test_an_id_that_came_back_is_an_upsert_alone() -> None:
    module = collection(1)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, optimizer, [1], [0])
    before = module.delta()
    for a in (2, 2, 1, 1, 2, 2, 1, 1):
        train_on(module, optimizer, [a], [0])
    changes = changes_of(module, before)
    assert (changes.ids.tolist(), changes.deleted_ids.tolist()) == ([1], [2])


def test_a_log_that_is_too_short_says_that_a_snapshot_is_due() -> None:
    """The two tables of the group share room for four."""
    module = collection(1, deletion_log=2)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, optimizer, [1], [0])
    before = module.delta()
    for number in range(2, 6):
        train_on(module, optimizer, [number], [0])
        train_on(module, optimizer, [number], [0])
    assert changes_of(module, before).deleted_ids.tolist() == [1, 2, 3, 4]
    train_on(module, optimizer, [6], [0])
    train_on(module, optimizer, [6], [0])
    with pytest.raises(SnapshotDueError, match=r"at most 4 ids left .* which 5 did; a full"):
        module.delta(since=before.mark)
    snapshot = module.delta()
    assert num_changes(module.delta(since=snapshot.mark)) == 0


def test_a_mark_from_before_a_load_says_that_a_snapshot_is_due() -> None:
    module = collection()
    state = copy.deepcopy(module.state_dict())
    before = module.delta()
    module.load_state_dict(state)
    with pytest.raises(SnapshotDueError, match="table a as it is, and its ids were loaded"):
        module.delta(since=before.mark)
    with pytest.raises(SnapshotDueError, match="or it is of another process"):
        copy.deepcopy(module).delta(since=module.delta().mark)


def test_bad_uses_are_refused_by_name() -> None:
    module = collection()
    other = EmbeddingBag(4, 2, dynamic=Dynamic(deletion_log=1))
    with pytest.raises(ValueError, match=r"mark of the tables \['a', 'b'\].* got one of \['weigh"):
        module.delta(since=other.delta().mark)
    with pytest.raises(ValueError, match=r"table a keeps no log .* got deletion_log=0"):
        collection(deletion_log=0).delta()
    with pytest.raises(ValueError, match="deletion_log must be at least 0, got -1"):
        Dynamic(deletion_log=-1)


def test_rows_that_gradients_wait_for_come_in_the_next_delta() -> None:
    module = collection()
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, optimizer, [1], [0])
    copies = applied({}, module.delta())
    module(one_bag_each([1, 5], [0])).values().sum().backward()
    between = module.delta()
    optimizer.step()
    copies = applied(applied(copies, between), module.delta(since=between.mark))
    assert_equal_copies(copies, applied({}, module.delta()))


def test_more_deletions_than_the_log_holds_in_one_batch() -> None:
    log = DeletionLog(3, torch.device("cpu"))
    ids, none = torch.arange(10, 15), torch.zeros(5, dtype=torch.bool)
    tables, epoch = torch.zeros(5, dtype=torch.int32), torch.tensor([7])
    log.append(~none, ids, tables, epoch, Counter.EVICTED_FULL)
    log.append(none, ids, tables, epoch, Counter.EVICTED_FULL)
    assert int(log.num_appended) == 5
    with pytest.raises(SnapshotDueError):
        log.since(0, 5)
    log.append(ids == 12, ids, tables, epoch, Counter.ERASED)
    assert [column.tolist() for column in log.since(5, 6)] == [[12], [0], [7], [Counter.ERASED]]


class Clicks(nn.Module):
    """One dynamic table, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = EmbeddingBag(6, 2, mode="sum", dynamic=Dynamic(deletion_log=100), seed=0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids).sum(1)


@pytest.mark.parametrize("capture", [False, True])
def test_deltas_between_the_steps_of_a_pipeline(capture: bool) -> None:
    """Also where the next batch's ids were inserted before."""
    model = Clicks()
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    batches = iter(
        [(torch.randint(12, (2, 2), generator=generator), torch.zeros(2)) for _ in range(12)]
    )
    snapshot = model.bag.delta()
    copies, num_deleted = applied({}, snapshot), 0
    mark = snapshot.mark
    with TrainPipeline(model, F.mse_loss, [optimizer], capture=capture) as pipeline:
        for _ in range(12):
            pipeline.progress(batches)
            delta = model.bag.delta(since=mark)
            num_deleted += len(delta.tables["weight"].deleted_ids)
            copies, mark = applied(copies, delta), delta.mark
            assert_equal_copies(copies, applied({}, model.bag.delta()))
    assert num_deleted > 0
