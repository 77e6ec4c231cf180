"""Statistics of dynamic tables."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchembed
from tests.support.dynamic_tables import (
    index_of,
    one_bag_each,
    train_on,
    two_and_a_static_one,
)
from torchembed import (
    LFU,
    LRU,
    Dynamic,
    EmbeddingBag,
    TableStatistics,
)
from torchembed.core.host_numbers import HostNumbers
from torchembed.modules.model_statistics import dynamic_tables
from torchembed.ops.hash_table import Counter, SlotRange, erase_if, erase_keys
from torchembed.tables import CountedTables, StatisticsReader
from torchembed.training import History, MetricsWriter, TrainPipeline, read_metrics, train


def test_what_steps_did_is_counted_by_table() -> None:
    module = two_and_a_static_one(2, Dynamic())
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    for ids in ([7, 7], [7, -1], [-1], [-1], [5]):
        train_on(module, optimizer, ids, [3])
    found = module.statistics()
    assert found.keys() == {"a", "b"}
    assert found["a"] == TableStatistics(
        epoch=5,
        capacity=2,
        size=2,
        hits=3,
        misses=4,
        inserted=3,
        refused=0,
        evicted_full=1,
        evicted_expired=0,
        evicted_target=0,
        erased=0,
        evicted_age=3,
    )
    assert found["a"].mean_evicted_age == 3
    assert found["a"].load_factor == 1
    assert found["a"].hit_rate == 3 / 7
    assert found["a"].admitted == 3
    assert (found["b"].size, found["b"].hits, found["b"].misses) == (1, 4, 1)


def test_a_table_that_was_never_trained_has_rates_of_zero() -> None:
    module = two_and_a_static_one(4, Dynamic())
    module.eval()(one_bag_each([1], [2]))
    found = module.statistics()["a"]
    assert (found.lookups, found.hit_rate, found.load_factor, found.mean_evicted_age) == (0,) * 4


_ids = st.lists(st.integers(-4, 12), min_size=1, max_size=6)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("train"), _ids, _ids),
        st.tuples(st.just("erase"), _ids, _ids),
        st.tuples(st.just("expire"), st.integers(0, 6), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=40, derandomize=True, database=None)
@given(_operations, st.sampled_from([LRU(), LFU()]))
def test_statistics_add_up(operations: list[Any], eviction: LRU | LFU) -> None:
    module = two_and_a_static_one(4, Dynamic(eviction=eviction))
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    index = index_of(module)
    state, num_lookups = index.hash_tables, 0
    for operation, first, second in operations:
        last = index.clock.last
        if operation == "train":
            train_on(module, optimizer, first, second)
            num_lookups += len(first)
        elif operation == "erase":
            tables = torch.zeros(len(first), dtype=torch.int32)
            erase_keys(state, torch.tensor(first), tables, released=last)
        else:
            slots = SlotRange(0, 0, 4)
            is_old = slots.of(state.touched) < last - first
            erase_if(
                state, slots, is_old, reason=Counter.EVICTED_EXPIRED, epoch=last, released=last
            )
        found = module.statistics()["a"]
        assert found.lookups == found.hits + found.misses == num_lookups
        assert found.inserted - found.evicted - found.erased == found.size
        assert found.size == int((state.digests[:4] > 0).sum())
        assert found.admitted >= found.inserted >= found.evicted
        assert 0 <= found.load_factor <= 1


def test_what_was_read_does_not_change_with_the_table() -> None:
    module = two_and_a_static_one(4, Dynamic())
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, optimizer, [1], [2])
    before = module.statistics()
    train_on(module, optimizer, [3], [4])
    assert before["a"].size == 1
    assert module.statistics()["a"].size == 2


def test_a_copy_that_is_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose copies arrive late gives the figures of the step at which they were begun."""
    arrived = [False]
    monkeypatch.setattr(HostNumbers, "have_arrived", property(lambda numbers: arrived[0]))
    monkeypatch.setattr(HostNumbers, "__init__", _copy_at_once)
    module = two_and_a_static_one(4, Dynamic())
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, optimizer, [1], [2])
    assert module.statistics() == {}
    train_on(module, optimizer, [3], [4])
    assert module.statistics() == {}
    arrived[0] = True
    assert module.statistics()["a"].epoch == 2
    arrived[0] = False
    train_on(module, optimizer, [5], [6])
    assert module.statistics()["a"].epoch == 2
    assert module.statistics(wait=True)["a"].epoch == 3


def _copy_at_once(numbers: Any, tensor: Tensor) -> None:
    numbers._numbers, numbers._arrived = tensor.clone(), None


def test_copies_of_a_module_read_their_own_figures() -> None:
    module = two_and_a_static_one(4, Dynamic())
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, optimizer, [1], [2])
    module.statistics()
    twin = copy.deepcopy(module)
    train_on(module, optimizer, [3], [4])
    assert twin.statistics()["a"].size == 1
    assert StatisticsReader().read(CountedTables({}, torch.device("cpu")), wait=False) == {}


def test_statistics_follow_a_table_into_another_group() -> None:
    module = two_and_a_static_one(4, Dynamic())
    train_on(module, torchembed.optim.SGD(module.parameters(), lr=0.1), [1], [2])
    weights = {table.spec.name: table.parameter for table in module.table_set.tables}
    weights["b"].requires_grad_(False)
    assert {name: of.size for name, of in module.statistics().items()} == {"a": 1, "b": 1}


class Clicks(nn.Module):
    """Two collections with tables of the same names, and a module of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (
            two_and_a_static_one(4, Dynamic()),
            two_and_a_static_one(4, Dynamic()),
        )
        self.bag = EmbeddingBag(3, 2, mode="sum", dynamic=Dynamic())

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids).sum(1)


def test_tables_of_a_model_have_names_of_their_own() -> None:
    names = {
        Clicks(): {"users.a", "users.b", "items.a", "items.b", "bag"},
        two_and_a_static_one(4, Dynamic()): {"a", "b"},
        EmbeddingBag(3, 2, dynamic=Dynamic()): {"weight"},
    }
    for model, expected in names.items():
        (counted,) = dynamic_tables(model)
        assert counted.tables.keys() == expected


def test_training_writes_statistics_of_tables(tmp_path: Path) -> None:
    """As of the step of the line, beside the loss."""
    model = Clicks()
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.tensor([[number, number + 1]]), torch.zeros(1)) for number in (1, 2, 2, 3, 9)]
    with MetricsWriter(tmp_path) as metrics:
        train(
            TrainPipeline(model, F.mse_loss, [optimizer]),
            batches,
            history=History(read_loss_every=2),
            metrics=metrics,
        )
    lines = read_metrics(tmp_path)
    assert [line["bag/misses"] for line in lines] == [3, 4, 6]
    assert [line["bag/size"] for line in lines] == [3, 3, 3]
    assert [line["bag/inserted"] for line in lines] == [3, 4, 5]
    assert lines[-1]["bag/load_factor"] == 1
    # The batch before keeps both of its rows.
    assert (lines[-1]["bag/evicted_full"], lines[-1]["bag/refused"]) == (2, 1)
    assert lines[-1]["users.a/size"] == 0
