"""Tables on disk train as on the device, whatever their cache and host memory hold."""

import contextlib
import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.disk_tables import (
    LOSS,
    NUM_IDS,
    StoredRanker,
    assert_same_tables,
    batches,
    disk_groups_of,
    most_rows,
    optimizers_of,
    tables_of,
    train_by_hand,
)
from tests.support.lanes import picked_kernel
from tests.support.tape import taped_captures
from tests.support.tiny_training import results_of
from torchembed import (
    LFU,
    Disk,
    Dynamic,
    EmbeddingBagConfig,
    HashedRows,
    InPlaceFunction,
    Missing,
)
from torchembed.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from torchembed.tables import RowChunk, row_chunks, write_rows
from torchembed.training import TrainPipeline

CPU = torch.device("cpu")
OPTIMIZERS = {kind.__name__: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam)}
COUNT = 24
BATCHES = {form: batches(form, COUNT) for form in ("fixed", "jagged", "mixed")}


DYNAMIC = {
    "evicting": Dynamic(),
    "by score": Dynamic(eviction=LFU()),
    "of initial values": Dynamic(missing=Missing.INITIAL),
    "of hashed rows": Dynamic(missing=HashedRows(5)),
}


@functools.cache
def on_device(
    optimizer: str, form: str, dynamic: Dynamic | None = None
) -> tuple[StoredRanker, list[float]]:
    """The model after training with all rows on the device, and its losses."""
    model = StoredRanker(None, dynamic=dynamic)
    return model, train_by_hand(model, BATCHES[form], OPTIMIZERS[optimizer])


def disk(path: Path, form: str, *, cache: str = "one batch", host: str = "least") -> Disk:
    most = most_rows(BATCHES[form])
    cache_rows = {"one batch": most, "two batches": 2 * most}[cache]
    host_rows = {"least": cache_rows + most, "all": NUM_IDS}[host]
    # Two tables share both, and have half of it each.
    return Disk(
        path=path, cache_rows=-(-cache_rows // 2), host_rows=max(-(-host_rows // 2), cache_rows)
    )


CASES = [
    *(("Adam", form, cache) for form in BATCHES for cache in ("one batch", "two batches")),
    *((optimizer, "mixed", "one batch") for optimizer in ("SGD", "Adagrad", "RowwiseAdagrad")),
]


@pytest.mark.parametrize("is_taped", [False, True], ids=["called", "taped"])
@pytest.mark.parametrize(("optimizer", "form", "cache"), CASES)
def test_captured_steps_equal_those_on_the_device(
    tmp_path: Path, optimizer: str, form: str, cache: str, is_taped: bool
) -> None:
    if is_taped and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    expected, losses = on_device(optimizer, form)
    model = StoredRanker(disk(tmp_path, form, cache=cache))
    with taped_captures() if is_taped else contextlib.nullcontext():
        pipeline = TrainPipeline(
            model, LOSS, optimizers_of(model, OPTIMIZERS[optimizer]), device=CPU, capture=True
        )
        assert results_of(pipeline, BATCHES[form]) == losses
    assert_same_tables(model, expected)
    assert all(not group.lines.store.is_empty for group in disk_groups_of(model))


@pytest.mark.parametrize("way", ["by hand", "called", "taped"])
@pytest.mark.parametrize(("kind", "form"), [*((kind, "mixed") for kind in DYNAMIC)])
def test_dynamic_tables_equal_those_on_the_device(
    tmp_path: Path, kind: str, form: str, way: str
) -> None:
    if way == "taped" and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    expected, losses = on_device("Adam", form, DYNAMIC[kind])
    model = StoredRanker(disk(tmp_path, form), dynamic=DYNAMIC[kind])
    if way == "by hand":
        assert train_by_hand(model, BATCHES[form]) == losses
    else:
        with taped_captures() if way == "taped" else contextlib.nullcontext():
            pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
            assert results_of(pipeline, BATCHES[form]) == losses
    assert_same_tables(model, expected)
    assert all(not group.lines.store.is_empty for group in disk_groups_of(model))
    for one in batches("mixed", 5, first=70):
        wanted, found = (m.eval()(one.dense, one.sparse) for m in (expected, model))
        assert torch.equal(found, wanted)
    expected.train()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("host", ["least", "all"])
def test_loops_by_hand_equal_those_on_the_device(tmp_path: Path, optimizer: str, host: str) -> None:
    expected, losses = on_device(optimizer, "mixed")
    model = StoredRanker(disk(tmp_path, "mixed", host=host))
    assert train_by_hand(model, BATCHES["mixed"], OPTIMIZERS[optimizer]) == losses
    assert_same_tables(model, expected)


def test_evaluation_reads_rows_from_wherever_they_are(tmp_path: Path) -> None:
    expected, _ = on_device("Adam", "fixed")
    model = StoredRanker(disk(tmp_path, "fixed"))
    train_by_hand(model, BATCHES["fixed"])
    before = [group.cache.row_of_slot.clone() for group in disk_groups_of(model)]
    for one in batches("mixed", 9, first=50):
        wanted, found = (m.eval()(one.dense, one.sparse) for m in (expected, model))
        assert torch.equal(found, wanted)
    for group, rows in zip(disk_groups_of(model), before, strict=True):
        assert torch.equal(group.cache.row_of_slot, rows)
    expected.train()


def test_rows_that_nothing_trained_are_on_no_disk(tmp_path: Path) -> None:
    model = StoredRanker(Disk(path=tmp_path / "rows", host_rows=20, cache_rows=10))
    assert_same_tables(model, StoredRanker(None))
    model.eval()(BATCHES["fixed"][0].dense, BATCHES["fixed"][0].sparse)
    assert not (tmp_path / "rows").exists()


def test_tables_that_are_frozen_and_trained_again_keep_their_rows(tmp_path: Path) -> None:
    found = []
    for storage in (None, disk(tmp_path, "mixed")):
        model = StoredRanker(storage)
        optimizers, losses = optimizers_of(model), []
        for first, requires_grad in ((0, True), (8, False), (16, True)):
            model.bags.requires_grad_(requires_grad)
            pipeline = TrainPipeline(model, LOSS, optimizers, device=CPU, capture=True)
            losses += results_of(pipeline, BATCHES["mixed"][first : first + 8])
        found.append((model, losses))
    assert found[0][1] == found[1][1]
    assert_same_tables(found[1][0], found[0][0])


def test_another_optimizer_takes_rows_over_and_makes_its_own_state(tmp_path: Path) -> None:
    found = []
    for storage in (None, disk(tmp_path, "fixed")):
        model = StoredRanker(storage)
        losses = train_by_hand(model, BATCHES["fixed"][:12], Adam)
        losses += train_by_hand(model, BATCHES["fixed"][12:], Adagrad)
        found.append((model, losses))
    assert found[0][1] == found[1][1]
    assert_same_tables(found[1][0], found[0][0])


def test_rows_are_converted(tmp_path: Path) -> None:
    found = []
    for storage in (None, disk(tmp_path, "fixed")):
        model = StoredRanker(storage)
        losses = train_by_hand(model, BATCHES["fixed"][:12])
        model.bags.to(torch.bfloat16)
        losses += train_by_hand(model, BATCHES["fixed"][12:])
        found.append((model, losses))
    assert found[0][1] == found[1][1]
    assert_same_tables(found[1][0], found[0][0])


def test_rows_are_reset(tmp_path: Path) -> None:
    found = []
    for storage in (None, disk(tmp_path, "fixed")):
        model = StoredRanker(storage)
        optimizers = optimizers_of(model)
        pipeline = TrainPipeline(model, LOSS, optimizers, device=CPU, capture=True)
        losses = results_of(pipeline, BATCHES["fixed"][:12])
        model.bags.reset_rows(model.bags.table_set.tables[1])
        model.sequences.reset_parameters()
        losses += results_of(pipeline, BATCHES["fixed"][12:])
        found.append((model, losses))
    assert found[0][1] == found[1][1]
    assert_same_tables(found[1][0], found[0][0])


def test_a_model_on_the_meta_device_gets_its_rows_later(tmp_path: Path) -> None:
    expected, losses = on_device("Adam", "fixed")
    model = StoredRanker(disk(tmp_path, "fixed"), device="meta").to_empty(device="cpu")
    model.dense.load_state_dict(StoredRanker(None).dense.state_dict())
    assert train_by_hand(model, BATCHES["fixed"]) == losses
    assert_same_tables(model, expected)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["by hand", "pipeline"])
@pytest.mark.parametrize("level", ["cache", "host memory"])
def test_a_batch_that_is_too_large_names_the_level_and_changes_nothing(
    tmp_path: Path, level: str, is_ahead: bool
) -> None:
    most = most_rows(BATCHES["fixed"])
    small, large = -(-most // 2), -(-most // 4)
    sizes = {"cache": (large, NUM_IDS), "host memory": (small, small + 1)}[level]
    model = StoredRanker(Disk(path=tmp_path, cache_rows=sizes[0], host_rows=sizes[1]))
    message = {
        "cache": r"tables a, b share a cache of \d+ rows on the device, and a batch uses \d+ more",
        "host memory": r"tables a, b on disk share \d+ rows of host memory, and a batch needs \d+ "
        "more beside the rows in the cache on the device; enlarge host_rows or host_bytes",
    }[level]
    if is_ahead:
        pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
        with pytest.raises(RuntimeError, match=message):
            results_of(pipeline, BATCHES["fixed"])
    else:
        with pytest.raises(RuntimeError, match=message):
            train_by_hand(model, BATCHES["fixed"])


@pytest.mark.parametrize(
    ("cache_rows", "sizes", "num_host"),
    [(20, {"host_bytes": 30 * 16}, 20), (5, {"host_rows": 5}, 10)],
)
def test_host_memory_holds_more_than_the_cache_with_its_optimizer_state(
    tmp_path: Path, cache_rows: int, sizes: dict[str, int], num_host: int
) -> None:
    model = StoredRanker(Disk(path=tmp_path, cache_rows=cache_rows, **sizes))
    message = (
        "storage of tables a, b must hold more rows in host memory than in the cache, by those of "
        f"a batch, got {num_host} and {2 * cache_rows} rows of 48 bytes with their optimizer "
        "state; enlarge host_rows or host_bytes"
    )
    with pytest.raises(ValueError, match=message):
        optimizers_of(model)


def test_host_memory_may_hold_as_many_rows_as_the_cache_where_these_are_all(tmp_path: Path) -> None:
    expected = StoredRanker(None)
    model = StoredRanker(Disk(path=tmp_path, cache_rows=NUM_IDS, host_rows=NUM_IDS))
    for trained in (model, expected):
        train_by_hand(trained, BATCHES["fixed"][:3])
    assert_same_tables(model, expected)


def test_a_parameter_holds_no_rows_to_be_changed_or_replaced(tmp_path: Path) -> None:
    model = StoredRanker(disk(tmp_path, "fixed"))
    train_by_hand(model, BATCHES["fixed"][:3])
    weight = tables_of(model)[0].parameter
    assert weight.is_meta
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(RuntimeError, match="weight of one of the tables a, b on disk was changed"):
        train_by_hand(model, BATCHES["fixed"][3:4])
    model.bags.embedding_bags["a"].weight = torch.nn.Parameter(torch.zeros(NUM_IDS, 4))
    with pytest.raises(ValueError, match="weight of table a on disk must not be replaced"):
        model(BATCHES["fixed"][0].dense, BATCHES["fixed"][0].sparse)


def test_what_would_hold_all_rows_is_refused(tmp_path: Path) -> None:
    model = StoredRanker(disk(tmp_path, "fixed"))
    (of_tables, _) = optimizers_of(model)
    refused: dict[str, Any] = {
        "a state dict": model.state_dict,
        "a copy of its module": lambda: copy.deepcopy(model),
        "a module of torch": model.bags.to_torch,
        "a state dict of its optimizer": of_tables.state_dict,
    }
    for what, call in refused.items():
        with pytest.raises(TypeError, match=rf"tables a, b are on disk, and {what} would hold all"):
            call()
    on_device = StoredRanker(None).state_dict()
    with pytest.raises(TypeError, match="are on disk, and a state dict would hold all"):
        model.load_state_dict(on_device)


def test_initial_values_must_be_functions_of_ids(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="initializer of table a must be Uniform, Normal or Const"):
        EmbeddingBagConfig(
            name="a",
            num_embeddings=4,
            embedding_dim=4,
            feature_names=("a",),
            initializer=InPlaceFunction(torch.nn.init.ones_),
            storage=Disk(path=tmp_path, host_rows=4, cache_rows=2),
        )


@pytest.mark.parametrize("dynamic", [None, Dynamic()], ids=["static", "dynamic"])
@pytest.mark.parametrize("way", ["called", "taped"])
def test_rows_are_written_back_read_and_written_between_steps(
    tmp_path: Path, way: str, dynamic: Dynamic | None
) -> None:
    """While the next batch is prepared, whose rows are brought in once more."""
    if way == "taped" and picked_kernel("claim_slots", "cpu") != "native":
        pytest.skip("a tape refuses the reference of claim_slots, which is the host's own work")
    found = []
    for storage in (None, disk(tmp_path, "fixed")):
        model = StoredRanker(storage, dynamic=dynamic)
        with taped_captures() if way == "taped" else contextlib.nullcontext():
            pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
            of, losses = iter(BATCHES["fixed"]), []
            for step in range(COUNT):
                losses.append(pipeline.progress(of).loss.item())
                if step % 4 == 1:
                    model.bags.write_back()
                if step % 4 == 2:
                    for table in tables_of(model):
                        (chunk,) = row_chunks(table, 1 << 20)
                        halves = RowChunk(chunk.keys[::3], chunk.rows[::3].clone() / 2, {})
                        write_rows(table, halves)
        found.append((model, losses))
    assert found[0][1] == found[1][1]
    assert_same_tables(found[1][0], found[0][0])


def test_several_threads_look_up_at_once(tmp_path: Path) -> None:
    expected, _ = on_device("Adam", "fixed")
    model = StoredRanker(disk(tmp_path, "fixed"))
    train_by_hand(model, BATCHES["fixed"])
    features = [one.sparse for one in batches("mixed", 24, first=40)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(model.bags.lookup, features * 2))
    for one, looked_up in zip(features * 2, found, strict=True):
        wanted = expected.bags.lookup(one).vectors.values()
        assert torch.equal(looked_up.vectors.values(), wanted)


@pytest.mark.parametrize("is_exported", [False, True], ids=["compiled", "exported"])
def test_programs_are_refused(tmp_path: Path, is_exported: bool) -> None:
    module = StoredRanker(disk(tmp_path, "fixed")).bags.eval()
    (one,) = batches("fixed", 1)

    def run() -> None:
        if is_exported:
            torch.export.export(module, (one.sparse,))
        else:
            torch.compile(module, fullgraph=True, backend="eager")(one.sparse)

    with pytest.raises(Exception, match="tables a, b are on disk, and a program of"):
        run()
