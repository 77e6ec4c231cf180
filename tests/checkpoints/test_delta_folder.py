"""Numbered exports of a model: what is loaded from them is the model, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchembed
from tests.support.dynamic_tables import one_bag_each, train_on, two_and_a_static_one
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from tests.support.tolerance import assert_same_bits
from torchembed import Dynamic, HashedRows
from torchembed.checkpoints import DeltaFolder, load_deltas


class Model(nn.Module):
    """Dynamic tables a and b, the static table c, a dense layer and a buffer."""

    def __init__(self, capacity: int = 4, **policies: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = two_and_a_static_one(capacity, Dynamic(**{"deletion_log": 50, **policies}))
        self.over = nn.Linear(6, 1)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def step(self, optimizer: torch.optim.Optimizer, a: list[int], b: list[int]) -> None:
        train_on(self.tables, optimizer, a, b)
        optimizer.zero_grad()
        with torch.no_grad():
            self.over.weight += self.tables(one_bag_each(a[:1], b[:1])).values().mean()
        self.num_steps += 1


def contents(model: Model) -> dict[str, Any]:
    """What is to be the same: rows by id, rows that ids share, and all else."""
    found: dict[str, Any] = {
        "over": model.over.weight.detach().clone(),
        "bias": model.over.bias.detach().clone(),
        "num_steps": model.num_steps.clone(),
        "c": model.tables.embedding_bags["c"].weight.detach().clone(),
    }
    for name, of_table in model.tables.delta().tables.items():
        found[name] = dict(zip(of_table.ids.tolist(), of_table.rows, strict=True))
        found[f"{name}.shared"] = of_table.shared_rows
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert_same_bits(found[name], value)
            continue
        assert found[name].keys() == value.keys(), name
        for id_, row in value.items():
            assert_same_bits(found[name][id_], row)


_ids = st.lists(st.integers(-(2**40), 2**40) | st.integers(-3, 9), min_size=1, max_size=5)
_days = st.lists(st.lists(st.tuples(_ids, _ids), max_size=3), min_size=2, max_size=4)


@settings(max_examples=12, derandomize=True, database=None)
@given(_days, st.sampled_from([0, 2]), st.integers(0, 3), st.sampled_from([50, 3]))
def test_whatever_was_exported_is_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    days: list[list[tuple[list[int], list[int]]]],
    num_shared: int,
    forgotten: int,
    log: int,
) -> None:
    """With ids evicted and admitted again, a process that ends between two days, and logs that are
    too short; at once, and day after day."""
    path = tmp_path_factory.mktemp("exports") / "deltas"
    policies: dict[str, Any] = {"deletion_log": log}
    if num_shared:
        policies["missing"] = HashedRows(num_shared)
    model, follower = Model(**policies), Model(**policies)
    follower.tables(one_bag_each([77, 78], [79]))  # ids that are to go
    optimizer = torchembed.optim.Adagrad(model.tables.parameters(), lr=0.5)
    folder, at = DeltaFolder(path), None
    for number, day in enumerate(days):
        for a, b in day:
            model.step(optimizer, a, b)
        if number == forgotten:
            folder = DeltaFolder(path)
        is_whole = folder.export(model, number)
        if number in (0, forgotten):
            assert is_whole
        elif log == 50:
            assert not is_whole
        at, num_left_out = load_deltas(follower, path, after=at)
        assert (at, num_left_out) == (number, 0)
        assert_same(contents(follower), contents(model))
    new = Model(**policies)
    assert load_deltas(new, path) == (len(days) - 1, 0)
    assert_same(contents(new), contents(model))
    assert load_deltas(new, path, after=at) == (at, 0)
    assert folder.numbers() == list(range(len(days)))


def two_days(path: Path) -> tuple[Model, DeltaFolder]:
    model, folder = Model(), DeltaFolder(path)
    optimizer = torchembed.optim.Adagrad(model.tables.parameters(), lr=0.5)
    for number, ids in enumerate(([1, 2], [2, 3])):
        model.step(optimizer, ids, ids)
        folder.export(model, number)
    return model, folder


def test_deltas_hold_what_has_changed(tmp_path: Path) -> None:
    model, folder = two_days(tmp_path)
    rows = torchembed.checkpoints.open_rows(tmp_path / "000001" / "rows" / _A)
    assert torch.cat([chunk.keys for chunk in rows]).sort().values.tolist() == [2, 3]
    assert torchembed.checkpoints.open_rows(tmp_path / "000000" / "rows" / _A).num_rows == 2
    model.tables.erase(torch.tensor([1]), table="a")
    assert not folder.export(model, 2)
    follower = Model()
    load_deltas(follower, tmp_path)
    assert sorted(contents(follower)["a"]) == [2, 3]


_A = "tables.embedding_bags.a.weight"


def test_days_that_are_trained_again_take_the_place_of_their_exports(tmp_path: Path) -> None:
    two_days(tmp_path)
    other = Model()
    optimizer = torchembed.optim.Adagrad(other.tables.parameters(), lr=0.5)
    other.step(optimizer, [8], [9])
    # As of a run that goes on from before day 0's export.
    folder = DeltaFolder(tmp_path)
    assert folder.export(other, 0)
    assert folder.numbers() == [0]
    follower = Model()
    load_deltas(follower, tmp_path)
    assert_same(contents(follower), contents(other))


def test_an_export_that_fails_leaves_nothing_and_the_next_one_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = two_days(tmp_path)
    (tmp_path / "000002.partial").write_text("a file in the way")
    with pytest.raises(OSError, match=r"000002\.partial"):
        folder.export(model, 2)
    assert folder.numbers() == [0, 1]
    (tmp_path / "000002.partial").unlink()
    assert not folder.export(model, 2)
    follower = Model()
    assert load_deltas(follower, tmp_path) == (2, 0)
    assert_same(contents(follower), contents(model))


def test_exports_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    path = tmp_path / "there"
    model, folder = two_days(path)
    folder.export(model, 2)
    with pytest.raises(ValueError, match=r"number must follow one that is there, got 5.*\[0, 1, 2"):
        folder.export(model, 5)
    with pytest.raises(ValueError, match="number must not be negative, got -1"):
        folder.export(model, -1)
    with pytest.raises(FileNotFoundError, match=r"path must hold exports of a model, and .*none"):
        load_deltas(model, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="path must hold exports of a model from 4 on"):
        load_deltas(model, path, after=4)
    others = nn.ModuleDict({"tables": two_and_a_static_one(4, Dynamic())})
    with pytest.raises(ValueError, match=r"and these differ: .*'num_steps', 'over\.bias'"):
        load_deltas(others, path)
    with pytest.raises(ValueError, match=r"model must have the dynamic tables of .* got \[\]"):
        load_deltas(nn.Linear(2, 2), path)
    with pytest.raises(ValueError, match=r"must have as many hashed rows .*got 3"):
        load_deltas(Model(missing=HashedRows(3)), path)
    shutil.rmtree(path / "000001")
    with pytest.raises(FileNotFoundError, match="lacks number 1 before 2; copy it there"):
        load_deltas(model, path)
    (path / "000002" / "delta.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"delta\.json is corrupt: export again"):
        load_deltas(model, path)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (f"000001/rows/{_A}/rows-00000-00000.safetensors", "must have .* bytes and CRC-32"),
        ("000001/changes.safetensors", "must have .* bytes and CRC-32"),
        ("000001/rest.safetensors", "must have .* bytes and CRC-32"),
    ],
)
def test_damaged_exports_change_nothing(place: str, message: str, tmp_path: Path) -> None:
    model, _ = two_days(tmp_path)
    model.tables.erase(torch.tensor([1, 2]), table="a")
    before = contents(model)
    content = bytearray((tmp_path / place).read_bytes())
    content[-1] ^= 1
    (tmp_path / place).write_bytes(content)
    with pytest.raises(ValueError, match=f"{place} {message}"):
        load_deltas(model, tmp_path)
    assert_same(contents(model), before)


def test_exports_of_other_static_tables_change_nothing(tmp_path: Path) -> None:
    two_days(tmp_path)
    longer = Model()
    config = torchembed.EmbeddingBagConfig(
        name="c", num_embeddings=99, embedding_dim=2, feature_names=("c",)
    )
    longer.tables.embedding_bags["c"] = torchembed.EmbeddingBagCollection(
        tables=[config]
    ).embedding_bags["c"]
    before = contents(longer)
    with pytest.raises(ValueError, match=r"table tables\.embedding_bags\.c\.weight must have"):
        load_deltas(longer, tmp_path)
    assert_same(contents(longer), before)
    more = Model()
    more.add_module("more", torchembed.EmbeddingBag(3, 2))
    before = contents(more)
    with pytest.raises(ValueError, match=r"and these differ: \['more.weight'\]"):
        load_deltas(more, tmp_path)
    assert_same(contents(more), before)


def test_tables_without_a_log_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="table a keeps no log of the ids that leave it"):
        DeltaFolder(tmp_path).export(Model(deletion_log=0), 0)


def on_ranks(path: Path) -> None:
    """Two days on two ranks, loaded by both, by ranks that divide the tables otherwise."""
    model, folder, rank = Model(64, missing=HashedRows(2)), DeltaFolder(path), dist.get_rank()
    shard(model, {"a": "row_wise", "b": "table_wise", "c": "row_wise"})
    optimizer = torchembed.optim.Adagrad(list(model.tables.parameters()), lr=0.5)
    for number in range(3):
        for step in range(2):
            ids = [9 * number + 3 * step + rank, 100 + number, 7]
            train_on(model.tables, optimizer, ids, [*ids, 200 + step])
            optimizer.zero_grad()
        model.tables.erase(torch.tensor([9 * number - 9, 9 * number - 8, 99 + number]), table="b")
        assert folder.export(model, number) == (number == 0)
    same = Model(64, missing=HashedRows(2))
    shard(same, {"a": "row_wise", "b": "table_wise", "c": "row_wise"})
    assert load_deltas(same, path) == (2, 0)
    assert_equal_deltas(same, model)
    other = Model(64, missing=HashedRows(2))
    shard(other, {"a": "table_wise", "b": "row_wise", "c": "table_wise"})
    load_deltas(other, path)
    model_rows, other_rows = (rows_of_all(m) for m in (model, other))
    assert model_rows == other_rows
    if model_rows is not None:
        # The first ids of a day were erased the day after.
        assert sorted(model_rows["b"])[:4] == [3, 4, 7, 12]


def shard(model: Model, placements: dict[str, str]) -> None:
    named = {f"tables.embedding_bags.{name}": value for name, value in placements.items()}
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), named)


def assert_equal_deltas(found: Model, expected: Model) -> None:
    ours, theirs = found.tables.delta().tables, expected.tables.delta().tables
    assert ours.keys() == theirs.keys()
    for name, of_table in theirs.items():
        order, own_order = of_table.ids.argsort(), ours[name].ids.argsort()
        assert_same_bits(ours[name].ids[own_order], of_table.ids[order])
        assert_same_bits(ours[name].rows[own_order], of_table.rows[order])
        assert_same_bits(ours[name].shared_rows, of_table.shared_rows)


def rows_of_all(model: Model) -> dict[str, dict[int, list[float]]] | None:
    whole = torchembed.gather_delta(model.tables.delta())
    if whole is None:
        return None
    return {
        name: dict(sorted(zip(of.ids.tolist(), of.rows.tolist(), strict=True)))
        for name, of in whole.items()
    }


def test_models_on_ranks_are_exported_and_loaded_on_any(tmp_path: Path) -> None:
    run_on_ranks(2, on_ranks, tmp_path / "deltas")
    alone = Model(64)
    # The whole tables, of which the ranks held the rows, fit here; shared rows they have not.
    with pytest.raises(ValueError, match="hashed rows"):
        load_deltas(alone, tmp_path / "deltas")
    alone = Model(64, missing=HashedRows(2))
    assert load_deltas(alone, tmp_path / "deltas") == (2, 0)
    assert 7 in contents(alone)["a"]
