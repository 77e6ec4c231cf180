"""Dynamic tables whose rows are evicted by scores that the caller gives."""

import contextlib
import copy
from typing import Any

import pytest
import torch

import torchembed
from tests.support.lanes import picked_kernel
from tests.support.tape import taped_captures
from torchembed import CallerScores, Dynamic, EmbeddingBag, EmbeddingBagCollection
from torchembed.training import TrainPipeline

SCORED = Dynamic(eviction=CallerScores(initial_score=5))


def bag_of(capacity: int = 3, **settings: Any) -> tuple[EmbeddingBag, torch.optim.Optimizer]:
    bag = EmbeddingBag(capacity, 2, mode="sum", seed=1, **{"dynamic": SCORED, **settings})
    return bag, torchembed.optim.SGD(bag.parameters(), lr=0.1)


def train(bag: EmbeddingBag, optimizer: torch.optim.Optimizer, *batches: list[int]) -> None:
    """A step on each batch."""
    for ids in batches:
        optimizer.zero_grad()
        bag(torch.tensor([ids])).sum().backward()
        optimizer.step()


def scores_of(module: Any) -> dict[int, int]:
    """The ids that the only table holds, and their scores."""
    (table,) = [t for t in module.table_set.tables if t.spec.num_ids is None]
    contents = table.index_contents()
    rows = contents["digests"].nonzero().flatten()
    return dict(zip(contents["ids"][rows].tolist(), contents["scores"][rows].tolist(), strict=True))


def test_ids_keep_their_scores_until_they_get_others() -> None:
    bag, optimizer = bag_of()
    train(bag, optimizer, [7, 8], [7, 7])
    assert scores_of(bag) == {7: 5, 8: 5}
    bag.assign_scores(torch.tensor([[8, 9, 8]]), torch.tensor([[1, 2, 3]]))
    train(bag, optimizer, [8])
    assert scores_of(bag) == {7: 5, 8: 3}
    bag.set_score(-4)
    train(bag, optimizer, [7, 9])
    assert scores_of(bag) == {7: -4, 8: 3, 9: -4}
    bag.eval()(torch.tensor([[8]]))
    with torch.no_grad():
        bag.train()(torch.tensor([[8]]))
    assert scores_of(bag) == {7: -4, 8: 3, 9: -4}
    bag.set_score(None)
    train(bag, optimizer, [7], [7])
    assert scores_of(bag) == {7: -4, 8: 3, 9: -4}


def test_the_least_score_goes_and_lesser_ids_are_refused() -> None:
    bag, optimizer = bag_of()
    train(bag, optimizer, [7, 8, 9])
    bag.assign_scores(torch.tensor([7, 8, 9]), torch.tensor([10, 3, 6]))
    train(bag, optimizer, [1], [1])
    assert scores_of(bag) == {7: 10, 9: 6, 1: 5}
    bag.assign_scores(torch.tensor([1]), torch.tensor([20]))
    train(bag, optimizer, [2], [2])
    assert scores_of(bag) == {7: 10, 9: 6, 1: 20}
    assert not bag.eval()(torch.tensor([[2]])).any()
    bag.evict(max_rows=1)
    assert scores_of(bag) == {1: 20}


def test_extreme_scores_and_ids() -> None:
    bag, optimizer = bag_of(2)
    train(bag, optimizer, [-1, 2**63 - 1])
    limits = torch.iinfo(torch.int64)
    bag.assign_scores(torch.tensor([-1, 2**63 - 1]), torch.tensor([limits.min, limits.max]))
    assert scores_of(bag) == {-1: limits.min, 2**63 - 1: limits.max}
    bag.assign_scores(torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([3]))
    assert scores_of(bag)[-1] == 3


def test_the_step_score_moves_with_the_table() -> None:
    """By copies, state dicts, and where an optimizer or freezing forms groups anew."""
    bag, optimizer = bag_of()
    bag.set_score(9)
    twin = copy.deepcopy(bag)
    loaded, of_loaded = bag_of()
    loaded.load_state_dict(bag.state_dict())
    bag.weight.requires_grad_(False)
    bag(torch.tensor([[1]]))
    bag.weight.requires_grad_(True)
    train(bag, optimizer, [7])
    train(twin, torchembed.optim.SGD(twin.parameters(), lr=0.1), [7])
    train(loaded, of_loaded, [7])
    for module in (bag, twin, loaded):
        assert scores_of(module) == {7: 9}


def model_of(capacity: int) -> tuple[Any, list[torch.optim.Optimizer]]:
    config = torchembed.EmbeddingBagConfig
    settings: dict[str, Any] = {"num_embeddings": capacity, "embedding_dim": 2}
    tables = EmbeddingBagCollection(
        [
            config(name="t", feature_names=("f",), dynamic=SCORED, **settings),
            config(name="s", feature_names=("g",), **settings),
        ]
    )
    return tables, [torchembed.optim.SGD(tables.parameters(), lr=0.1)]


class Summed(torch.nn.Module):
    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: torchembed.SparseFeatures) -> torch.Tensor:
        return self.tables(features).values().sum()


def test_captured_steps_read_the_score_of_now() -> None:
    """A batch gets the score that was set before the step in which it is admitted."""
    tables, optimizers = model_of(64)
    batches = [
        torchembed.SparseFeatures.from_dict({"f": [100 + step, 7], "g": [step, 0]})
        for step in range(10)
    ]
    is_native = picked_kernel("insert_keys", "cpu") == "native"
    seen = []
    with taped_captures() if is_native else contextlib.nullcontext():
        pipeline = TrainPipeline(Summed(tables), None, optimizers, device="cpu", capture=True)
        iterator = iter(batches)
        for step in range(10):
            tables.set_score(1000 + step, table="t")
            pipeline.progress(iterator)
            seen.append(scores_of(tables))
    # Batch t + 1 is admitted while batch t is trained.
    for step in range(5, 9):
        assert seen[step][100 + step + 1] == 1000 + step
        assert seen[step][7] == 1000 + step
    assert len(seen[-1]) == 11


def test_tables_that_take_no_scores() -> None:
    tables, _ = model_of(8)
    for call in (
        lambda module, **table: module.set_score(3, **table),
        lambda module, **table: module.assign_scores(torch.tensor([1]), torch.tensor([1]), **table),
    ):
        with pytest.raises(ValueError, match=r"table"):
            call(tables, table="s")
        with pytest.raises(ValueError, match=r"eviction of dynamic table weight must be CallerSc"):
            call(EmbeddingBag(4, 2, dynamic=Dynamic()))
    bag, _ = bag_of()
    with pytest.raises(TypeError, match=r"score must be an int, got 1\.5"):
        bag.set_score(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"score must be in \[-2\*\*63, 2\*\*63\), got"):
        bag.set_score(2**63)
    with pytest.raises(TypeError, match="scores must be int64, got float32"):
        bag.assign_scores(torch.tensor([1]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"scores must have shape \(2,\) \(one for each id\)"):
        bag.assign_scores(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(TypeError, match="initial_score must be an int, got None"):
        CallerScores(initial_score=None)  # type: ignore[arg-type]
