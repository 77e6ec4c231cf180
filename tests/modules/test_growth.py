"""Dynamic tables that start small and grow up to their capacity."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.hash_tables import blocks_of
from tests.support.tolerance import assert_same_bits
from torchembed import (
    LFU,
    Dynamic,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    MinimumCount,
    SparseFeatures,
)
from torchembed.modules.table_module import TableModule
from torchembed.tables import Table, row_chunks, write_rows

CAPACITY = 4 * 4096
GROWS = Dynamic(initial_capacity=100)


def collection(
    dynamic: Dynamic, capacity: int = CAPACITY, dtype: torch.dtype = torch.float32
) -> EmbeddingBagCollection:
    """Two dynamic tables of one group, and a static one."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=capacity,
            embedding_dim=2,
            feature_names=(name,),
            dynamic=dynamic if name in "ab" else None,
            dtype=dtype,
        )
        for name in "abc"
    ]
    return EmbeddingBagCollection(configs)


def ids_of(step: int, num_ids: int) -> Tensor:
    """Ids of which three in four are new; each stands there twice."""
    first = step * num_ids * 3 // 4
    return (torch.arange(first, first + num_ids) * 0x9E3779B97F4A7C15).repeat(2)


def batch(step: int, num_ids: int) -> SparseFeatures:
    """``num_ids`` ids of table a, and half as many of table b."""
    a, b = ids_of(step, num_ids), ids_of(step, num_ids // 2)
    return SparseFeatures.from_dict({"a": [a.tolist()], "b": [b.tolist()], "c": [[step]]})


def train(
    module: EmbeddingBagCollection, optimizer: torch.optim.Optimizer, steps: range, num_ids: int
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = module(batch(step, num_ids)).values().square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rows_by_id(table: Table) -> list[Tensor]:
    """Ids in ascending order; and their rows, states, scores and last uses."""
    chunks = list(row_chunks(table, 2**30))
    if not chunks:
        return []
    (chunk,) = chunks
    order = chunk.keys.argsort()
    tensors = [chunk.keys, chunk.rows, *chunk.states.values(), chunk.scores, chunk.touched]
    return [tensor.clone()[order] for tensor in tensors if tensor is not None]


def assert_same_rows(module: TableModule, expected: TableModule) -> None:
    for table, other in zip(module.table_set.tables, expected.table_set.tables, strict=True):
        for tensor, of_other in zip(rows_by_id(table), rows_by_id(other), strict=True):
            assert_same_bits(tensor, of_other)


def sizes(module: TableModule) -> list[int]:
    return [table.num_rows for table in module.table_set.tables]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("admission", [None, MinimumCount(2)])
def test_a_table_that_grew_equals_one_that_had_all_rows(
    admission: MinimumCount | None, dtype: torch.dtype
) -> None:
    """Rows, optimizer state, scores and last uses of each id, bit for bit, where nothing is
    evicted; rounding too, which 16-bit rows take from their ids."""
    small = collection(
        Dynamic(eviction=LFU(), admission=admission, initial_capacity=100), dtype=dtype
    )
    whole = collection(Dynamic(eviction=LFU(), admission=admission), dtype=dtype)
    assert sizes(small) == [4096, 4096, CAPACITY]
    parameters = list(small.parameters())
    losses = []
    for module in (small, whole):
        optimizer = torchembed.optim.Adam(module.parameters(), lr=0.1)
        state = [tensor for of in optimizer.state.values() for tensor in of.values()]
        losses.append(train(module, optimizer, range(12), 1000))
        shown = [tensor for of in optimizer.state.values() for tensor in of.values()]
        assert all(a is b for a, b in zip(state, shown, strict=True))
        expected = optimizer.state_dict()["state"]
        for number, of in enumerate(optimizer.state.values()):
            for name, tensor in of.items():
                assert_same_bits(tensor, expected[number][name])
    assert losses[0] == losses[1]
    assert sizes(small) == [CAPACITY, 2 * 4096, CAPACITY]
    assert_same_rows(small, whole)
    statistics, of_whole = small.statistics(), whole.statistics()
    for name in "ab":
        assert statistics[name].evicted == 0
        assert statistics[name].inserted == of_whole[name].inserted
    assert all(a is b for a, b in zip(parameters, small.parameters(), strict=True))


def bag(capacity: int = 64, **dynamic: Any) -> EmbeddingBag:
    return EmbeddingBag(capacity, 2, mode="sum", seed=1, dynamic=Dynamic(**dynamic))


def step(module: EmbeddingBag, optimizer: torch.optim.Optimizer, ids: list[int]) -> None:
    optimizer.zero_grad()
    module(torch.tensor([ids])).square().sum().backward()
    optimizer.step()


def test_a_table_grows_before_the_third_batch_after_the_one_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3 and three times 2 new rows are more than 3 of 4 of the table's 8; 9 ids need 12 rows."""
    blocks_of(8, monkeypatch)
    module = bag(initial_capacity=8)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    step(module, optimizer, [1])
    for ids in ([2, 3], [4], [5]):
        step(module, optimizer, ids)
        assert module.weight.shape == (8, 2)
    step(module, optimizer, [6])
    assert module.weight.shape == (16, 2)
    statistics = module.statistics()["weight"]
    assert (statistics.size, statistics.capacity, statistics.evicted_full) == (6, 16, 0)
    for first in range(7, 87, 4):
        step(module, optimizer, list(range(first, first + 4)))
    assert module.weight.shape == (64, 2)
    assert module.statistics()["weight"].evicted_full > 0


def test_no_table_grows_between_the_forwards_of_one_step() -> None:
    """The gradients of that step hold rows as they were numbered before."""
    small, whole = bag(CAPACITY, initial_capacity=8), bag(CAPACITY)
    for module in (small, whole):
        optimizer = torchembed.optim.Adagrad(module.parameters(), lr=0.1)
        for first in range(0, 6000, 1000):
            loss = torch.zeros(())
            for ids in (range(first, first + 600), range(first + 400, first + 1000)):
                loss = loss + module(torch.tensor([list(ids)])).square().sum()
            loss.backward()
            optimizer.step()
    assert small.weight.shape == (2 * 4096, 2)
    assert_same_rows(small, whole)


def test_a_table_of_torchs_optimizer_has_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states have one shape for ever."""
    blocks_of(8, monkeypatch)
    module = bag(initial_capacity=8)
    assert module.weight.shape == (8, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for first in range(0, 20, 5):
        step(module, optimizer, list(range(first, first + 5)))
    assert module.weight.shape == (64, 2)
    assert module.statistics()["weight"].size == 20


def test_evaluation_lets_no_table_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of(8, monkeypatch)
    module = bag(initial_capacity=8)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        step(module, optimizer, list(range(8)))
    with torch.no_grad():
        for _ in range(4):
            module(torch.tensor([[1]]))
    module.eval()(torch.tensor([[1]]))
    assert module.weight.shape == (8, 2)
    module.train()
    step(module, optimizer, [1])
    step(module, optimizer, [1])
    assert module.weight.shape == (64, 2)


def test_copies_have_the_rows_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of(8, monkeypatch)
    module = bag(initial_capacity=8)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    for first in range(0, 14, 2):
        step(module, optimizer, [first, first + 1])
    copied = copy.deepcopy(module)
    assert copied.weight.shape == module.weight.shape == (32, 2)
    assert_same_rows(copied, module)
    for trained in (module, copied):
        optimizer = torchembed.optim.SGD(trained.parameters(), lr=0.1)
        for first in range(14, 40, 2):
            step(trained, optimizer, [first, first + 1])
    assert copied.weight.shape == (64, 2)
    assert_same_rows(copied, module)


def test_without_memory_a_table_stays_and_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is half applied, one warning says so, and training goes on."""
    blocks_of(8, monkeypatch)
    module = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=64,
                embedding_dim=dim,
                feature_names=(name,),
                dynamic=Dynamic(initial_capacity=8),
            )
            for name, dim in (("a", 2), ("b", 4))
        ]
    )
    optimizer = torchembed.optim.Adagrad(module.parameters(), lr=0.1)

    def train_on(first: int) -> None:
        ids = list(range(first, first + 4))
        module(SparseFeatures.from_dict({"a": [ids], "b": [ids]})).values().sum().backward()
        optimizer.step()

    for first in range(0, 12, 4):
        train_on(first)
    new_full = Tensor.new_full

    def fails_for_b(tensor: Tensor, size: tuple[int, ...], *others: Any, **named: Any) -> Tensor:
        if tuple(size[1:]) == (4,):
            raise torch.OutOfMemoryError("no memory")
        return new_full(tensor, size, *others, **named)

    before = [tensor.clone() for tensor in module.state_dict().values()]
    monkeypatch.setattr(Tensor, "new_full", fails_for_b)
    with pytest.warns(UserWarning, match="dynamic tables a, b do not grow any more"):
        train_on(12)
    assert [tensor.shape for tensor in module.state_dict().values()] == [t.shape for t in before]
    for first in range(16, 32, 4):
        train_on(first)
    assert sizes(module) == [8, 8]
    assert all(s.evicted_full > 0 for s in module.statistics().values())


def test_a_state_dict_of_a_table_that_grew_loads_into_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which grows to as many rows first, and goes on as the other one; the optimizer too."""
    blocks_of(8, monkeypatch)
    module, loaded = bag(initial_capacity=8), bag(initial_capacity=8)
    optimizer = torchembed.optim.Adagrad(module.parameters(), lr=0.1)
    for first in range(0, 12, 2):
        step(module, optimizer, [first, first + 1])
    of_loaded = torchembed.optim.Adagrad(loaded.parameters(), lr=0.1)
    weight = loaded.weight
    loaded.load_state_dict(copy.deepcopy(module.state_dict()))
    of_loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.weight is weight
    assert loaded.weight.shape == module.weight.shape == (16, 2)
    assert_same_rows(loaded, module)
    for first in range(12, 20, 2):
        step(module, optimizer, [first, first + 1])
        step(loaded, of_loaded, [first, first + 1])
    assert loaded.weight.shape[0] > 16


def test_a_table_grows_for_rows_that_are_written_by_id() -> None:
    written, source = bag(CAPACITY, initial_capacity=8), bag(CAPACITY)
    optimizer = torchembed.optim.Adagrad(source.parameters(), lr=0.1)
    step(source, optimizer, list(range(9000)))
    torchembed.optim.Adagrad(written.parameters(), lr=0.1)
    for chunk in row_chunks(source.table_set.tables[0], 2**14):
        assert write_rows(written.table_set.tables[0], chunk) == 0
    assert written.weight.shape[0] == CAPACITY
    assert_same_rows(written, source)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_an_initial_capacity_is_a_positive_integer(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="initial_capacity must be"):
        Dynamic(initial_capacity=value)
