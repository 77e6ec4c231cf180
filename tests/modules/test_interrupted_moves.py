"""Ctrl-C while rows move between memories: each row keeps its values, wherever it is."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchembed import Disk, Dynamic, EmbeddingBag, HostMemory
from torchembed.ops.hash_table import HashTables
from torchembed.optim import Adagrad
from torchembed.tables.dynamic.hash_index import HashIndex
from torchembed.tables.tiers import host_places, row_places, tiered_group
from torchembed.training import TrainPipeline

pytestmark = pytest.mark.usefixtures("interrupting_ctrl_c")

NUM_IDS = 40
CPU = torch.device("cpu")


class Bag(torch.nn.Module):
    """A loss from the rows of a batch of ids."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.bag = EmbeddingBag(NUM_IDS, 4, mode="sum", seed=0, **settings)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids).square().sum()

    def rows(self) -> Tensor:
        with torch.no_grad():
            rows = self.eval().bag(torch.arange(NUM_IDS).unsqueeze(1))
        self.train()
        return rows


def ids_of(step: int) -> Tensor:
    return torch.randint(NUM_IDS, (2, 4), generator=torch.Generator().manual_seed(step))


class Interrupting:
    """Has Ctrl-C come right after a function is done, from when it is armed on, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> None:
        self.is_armed = False
        for owner, name in places:
            monkeypatch.setattr(owner, name, self._interrupted(getattr(owner, name)))

    def _interrupted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if self.is_armed:
                self.is_armed = False
                signal.raise_signal(signal.SIGINT)
            return result

        return call


def storage_of(kind: str, folder: Path) -> HostMemory | Disk:
    if kind == "host":
        return HostMemory(cache_rows=16)
    pytest.importorskip("rocksdict", reason="tables on disk are kept by rocksdict")
    return Disk(path=folder, cache_rows=16, host_rows=24)


@pytest.mark.parametrize("capture", [None, False, True], ids=["by hand", "eager", "captured"])
@pytest.mark.parametrize(
    ("kind", "where"),
    [("host", tiered_group), ("disk", tiered_group), ("disk", host_places)],
    ids=["host", "disk to device", "disk to host"],
)
def test_rows_that_were_on_their_way(
    kind: str, where: Any, capture: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting = Interrupting(monkeypatch, (where, "claim_slots"))
    model, expected = Bag(storage=storage_of(kind, tmp_path)), Bag()
    optimizer, other = (Adagrad(of.parameters(), lr=0.1) for of in (model, expected))
    pipeline = TrainPipeline(model, None, optimizer, device=CPU, capture=capture)

    def train(step: int) -> None:
        if capture is not None:
            pipeline.progress(iter([ids_of(step)]))
            return
        optimizer.zero_grad()
        model(ids_of(step)).backward()
        optimizer.step()

    for step in range(12):
        if step % 3 == 2:
            interrupting.is_armed = True
            with pytest.raises(KeyboardInterrupt):
                train(100 + step)
            assert not interrupting.is_armed
        train(step)
        other.zero_grad()
        expected(ids_of(step)).backward()
        other.step()
        assert torch.equal(model.rows(), expected.rows())


@pytest.mark.parametrize(
    "where", [(row_places, "_write"), (tiered_group.TieredGroup, "_write_dirty")]
)
def test_rows_that_were_on_their_way_to_their_own_places(
    where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting = Interrupting(monkeypatch, where)
    model, expected = Bag(storage=HostMemory(cache_rows=16)), Bag()
    for of in (model, expected):
        optimizer = Adagrad(of.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            of(ids_of(step)).backward()
            optimizer.step()
    interrupting.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        model.state_dict()
    assert not interrupting.is_armed
    assert torch.equal(model.rows(), expected.rows())
    assert torch.equal(model.state_dict()["bag.weight"], expected.state_dict()["bag.weight"])


def test_tables_that_were_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting = Interrupting(monkeypatch, (HashIndex, "take_grown"))
    found, num_interrupted = [], 0
    for is_interrupted in (False, True):
        bag = EmbeddingBag(8192, 2, mode="sum", seed=0, dynamic=Dynamic(initial_capacity=8))
        optimizer = Adagrad(bag.parameters(), lr=0.1)
        interrupting.is_armed = is_interrupted
        for ids in torch.arange(8000).view(8, 1, 1000):
            try:
                vectors = bag(ids)
            except KeyboardInterrupt:
                num_interrupted += 1
                vectors = bag(ids)
            vectors.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(bag.weight) == 8192
        found.append(bag.eval()(torch.arange(8000).unsqueeze(1)).detach())
    assert num_interrupted == 1
    assert torch.equal(*found)


@pytest.mark.parametrize("dynamic", [Dynamic(), Dynamic(ttl_steps=2), Dynamic(max_rows=8)])
def test_ids_that_were_taken_away(dynamic: Dynamic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a state dict would be of a table that no other one can take."""
    of_slots, is_armed = HashTables.of_slots, False

    def interrupted(tables: HashTables) -> Iterator[Tensor]:
        nonlocal is_armed
        for number, state in enumerate(of_slots(tables)):
            if is_armed and number == 1:  # between the first two
                is_armed = False
                signal.raise_signal(signal.SIGINT)
            yield state

    monkeypatch.setattr(HashTables, "of_slots", interrupted)
    bag = EmbeddingBag(NUM_IDS, 4, mode="sum", seed=0, dynamic=dynamic)
    optimizer = Adagrad(bag.parameters(), lr=0.1)
    num_interrupted = 0
    for step in range(8):
        is_armed = True
        try:
            bag(ids_of(step))
            bag.evict(max_rows=6)
        except KeyboardInterrupt:
            num_interrupted += 1
        is_armed = False
        bag(ids_of(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert num_interrupted > 0
    EmbeddingBag(NUM_IDS, 4, seed=0, dynamic=dynamic).load_state_dict(bag.state_dict())
