"""Checkpoints of runs with dynamic tables."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchembed
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers
from torchembed import (
    LFU,
    CountMinSketch,
    Dynamic,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EpochLFU,
    HashedRows,
    MinimumCount,
    SparseFeatures,
)
from torchembed.ops.hash_table import Counter
from torchembed.tables import Table, row_chunks
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline, train

POLICIES = {
    "lru": Dynamic(),
    "lfu": Dynamic(eviction=LFU(), admission=MinimumCount(2)),
}


def new_run(
    dynamic: Dynamic | None, capacity: int = 12, dtype: torch.dtype = torch.float32
) -> TrainingRun:
    """Tables of fewer rows than there are ids, which evict all the time."""

    def config(*, num_embeddings: int, **others: Any) -> EmbeddingBagConfig:
        rows = num_embeddings if dynamic is None else capacity
        return EmbeddingBagConfig(num_embeddings=rows, dynamic=dynamic, dtype=dtype, **others)

    model = TinyModel(is_deep=True, config=config)
    return TrainingRun(model=model, optimizers=make_optimizers(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_goes_on_as_if_it_had_not_stopped(
    policy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Which ids have rows, and how 16-bit rows are rounded, too."""
    kept, loaded = (new_run(POLICIES[policy], dtype=dtype) for _ in range(2))
    batches = fixed_batches(12)
    loss = F.binary_cross_entropy_with_logits
    pipeline = functools.partial(TrainPipeline, loss_fn=loss, device=torch.device("cpu"))
    train(pipeline(kept.model, optimizers=kept.optimizers, capture=True), batches[:7])
    CheckpointFolder(tmp_path).save(7, kept)
    train(pipeline(loaded.model, optimizers=loaded.optimizers), batches[9:11])
    assert CheckpointFolder(tmp_path).load(loaded) == 7
    for run in (kept, loaded):
        train(pipeline(run.model, optimizers=run.optimizers, capture=True), batches[7:])
    for name, value in kept.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def small_run(
    dynamic: Dynamic | None = None,
    capacity: int = 256,
    *,
    seed: int = 0,
    dim: int = 4,
    **others: Any,
) -> TrainingRun:
    """Table ``f0``, behind another one."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=size,
            embedding_dim=dim,
            feature_names=(name,),
            dynamic=dynamic,
            **others,
        )
        for name, size in (("other", 9), ("f0", capacity))
    ]
    model = nn.ModuleDict({"tables": EmbeddingBagCollection(configs, seed=seed)})
    return TrainingRun(model=model, optimizers=[torchembed.optim.Adam(model.parameters(), lr=0.1)])


def train_on(run: TrainingRun, ids: list[int]) -> None:
    features = SparseFeatures.from_dict({"other": [ids[0] % 9], "f0": [ids]})
    run.optimizers[0].zero_grad()
    run.model["tables"](features).values().square().sum().backward()  # type: ignore[index]
    run.optimizers[0].step()


def whole_state(run: TrainingRun) -> dict[str, Any]:
    states = run.optimizers[0].state_dict()["state"]
    return {
        **{key: value.clone() for key, value in run.model.state_dict().items()},
        **{f"{n}.{k}": v.clone() for n, of in states.items() for k, v in of.items()},
    }


def single_run(dynamic: Dynamic, capacity: int = 20) -> TrainingRun:
    """A module of one table, whose seed is drawn."""
    model = nn.ModuleDict({"bag": EmbeddingBag(capacity, 4, mode="sum", dynamic=dynamic)})
    return TrainingRun(model=model, optimizers=[torchembed.optim.SGD(model.parameters(), lr=0.1)])


def test_modules_of_one_table_load_rows_of_other_seeds(tmp_path: Path) -> None:
    """Into as many rows and into others; sketches count on by the keys that they bring."""
    sketched = Dynamic(admission=CountMinSketch(threshold=2, width=1 << 12))
    for number, dynamic in enumerate((Dynamic(), sketched)):
        saved, ids = single_run(dynamic), torch.tensor([[3, 2**40]])
        saved.model["bag"](torch.tensor([[3, 3, 2**40, 2**40, 5]])).sum().backward()
        saved.optimizers[0].step()
        CheckpointFolder(tmp_path / str(number)).save(1, saved)
        for capacity in (20, 30):
            run = single_run(dynamic, capacity)
            CheckpointFolder(tmp_path / str(number)).load(run)
            expected = saved.model.eval()["bag"](ids)  # type: ignore[index]
            assert torch.equal(run.model.eval()["bag"](ids), expected)  # type: ignore[index]
            run.model.train()["bag"](torch.tensor([[5]]))  # type: ignore[index]
            assert run.model["bag"].statistics()["weight"].size == 3  # type: ignore[union-attr]


def test_checkpoints_of_other_tables_are_refused_and_change_nothing(tmp_path: Path) -> None:
    """Each reason is named."""
    sketched = Dynamic(admission=CountMinSketch(threshold=1, width=8))
    far, lru = small_run(Dynamic()), Dynamic()
    train_on(far, [3, 256, -1])
    wider = Dynamic(admission=CountMinSketch(threshold=1, width=9))
    lfu, counted = Dynamic(eviction=LFU()), Dynamic(admission=MinimumCount(2))
    every_2, every_3 = (Dynamic(eviction=EpochLFU(steps_per_epoch=n)) for n in (2, 3))
    shared = Dynamic(missing=HashedRows(3))
    cases = [
        (small_run(shared), small_run(lru), "has 3 hashed rows, and 0 in the run"),
        (small_run(lfu), small_run(lru), "evicts by LFU, and by LRU in the run"),
        (small_run(every_2), small_run(every_3), r"by EpochLFU\(steps_per_epoch=2\), and by"),
        (small_run(counted), small_run(lru), "admits ids by MinimumCount, and by None"),
        (small_run(lru), small_run(counted), "admits ids by None, and by MinimumCount"),
        (small_run(sketched), small_run(wider), r"sketch has shape \[4, 8\], and \[4, 9\]"),
        (small_run(lru, seed=1), small_run(lru), "is of a table of another name or seed"),
        (small_run(lru, dim=8), small_run(lru, 99), "has 8 columns, and 4 in the run"),
        (
            small_run(lru, 99),
            small_run(lru, dtype=torch.bfloat16),
            "has dtype torch.float32, and torch.bfloat16 in the run",
        ),
        (far, small_run(), "weight has 2 ids outside the 256 rows of the run's static table"),
    ]
    for number, (saved, run, reason) in enumerate(cases):
        CheckpointFolder(tmp_path / str(number)).save(1, saved)
        train_on(run, [5, 2, 5])
        before = whole_state(run)
        with pytest.raises(ValueError, match=rf"embedding_bags\.f0.*{reason}.*Nothing was loaded"):
            CheckpointFolder(tmp_path / str(number)).load(run)
        after = whole_state(run)
        assert all(torch.equal(after[key], value) for key, value in before.items()), reason


def test_state_of_optimizers_of_torch_follows_no_rows_by_id(tmp_path: Path) -> None:
    runs = []
    for capacity in (256, 300):
        model = small_run(Dynamic(), capacity).model
        runs.append(TrainingRun(model=model, optimizers=[torch.optim.Adam(model.parameters())]))
    train_on(runs[0], [1, 2])
    CheckpointFolder(tmp_path).save(1, runs[0])
    with pytest.raises(ValueError, match="exp_avg is state of an optimizer of torch"):
        CheckpointFolder(tmp_path).load(runs[1])


def test_static_tables_become_dynamic_and_back(tmp_path: Path) -> None:
    """While ids are numbers of rows both train alike, so that either takes the other's place."""
    static, dynamic = small_run(), small_run(Dynamic())
    for run in (static, dynamic):
        train_on(run, [3, 250, 3])
        train_on(run, [17, 250])
    CheckpointFolder(tmp_path / "static").save(2, static)
    CheckpointFolder(tmp_path / "dynamic").save(2, dynamic)
    again, made_dynamic = small_run(), small_run(Dynamic(ttl_steps=2, sweep_steps=1), 500)
    for run in (again, made_dynamic):  # what was there before goes
        train_on(run, [3, 4, 250])
    CheckpointFolder(tmp_path / "dynamic").load(again)
    CheckpointFolder(tmp_path / "static").load(made_dynamic)
    table = made_dynamic.model["tables"].table_set.tables[1]  # type: ignore[index]
    assert int(table.index_contents()["counters"][Counter.SIZE]) == 256
    for ids in ([4, 250], [4, 3]):
        for run in (static, again, made_dynamic):
            train_on(run, ids)
    expected = whole_state(static)
    assert all(torch.equal(value, expected[key]) for key, value in whole_state(again).items())
    chunk = next(row_chunks(table, 1 << 20))
    rows = {int(row_id): place for place, row_id in enumerate(chunk.keys)}
    weight = static.model["tables"].embedding_bags["f0"].weight  # type: ignore[index]
    for row in (3, 4, 250):
        assert torch.equal(chunk.rows[rows[row]], weight[row])


def growing_run(dynamic: Dynamic, capacity: int) -> TrainingRun:
    model = nn.ModuleDict({"bag": EmbeddingBag(capacity, 2, mode="sum", seed=3, dynamic=dynamic)})
    return TrainingRun(model=model, optimizers=[torchembed.optim.Adam(model.parameters(), lr=0.1)])


def train_on_drawn(run: TrainingRun, seeds: range, num_ids: int) -> None:
    for seed in seeds:
        drawn = torch.randint(num_ids, (50, 60), generator=torch.Generator().manual_seed(seed))
        run.optimizers[0].zero_grad()
        run.model["bag"](drawn * 0x9E3779B97F4A7C1).square().sum().backward()  # type: ignore[index]
        run.optimizers[0].step()


@pytest.mark.parametrize(
    ("dynamic", "num_steps", "num_ids", "num_rows"),
    [
        (Dynamic(initial_capacity=1000), 12, 10_000, 10_000),
        (
            Dynamic(initial_capacity=1000, eviction=LFU(), admission=MinimumCount(2)),
            16,
            10_000,
            10_000,
        ),
        (Dynamic(initial_capacity=1000, missing=HashedRows(7)), 9, 700, 5007),
    ],
    ids=["lru", "lfu", "half grown"],
)
def test_tables_that_have_grown_go_on_as_if_training_had_not_stopped(
    dynamic: Dynamic, num_steps: int, num_ids: int, num_rows: int, tmp_path: Path
) -> None:
    """In a run whose table is small yet: it grows, and each saved row is the same row of it."""
    kept, loaded = (growing_run(dynamic, 10_000) for _ in range(2))
    train_on_drawn(kept, range(num_steps), num_ids)
    weight = kept.model["bag"].weight  # type: ignore[index]
    assert len(weight) == num_rows > len(loaded.model["bag"].weight)  # type: ignore[index]
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(num_steps, kept)
    train_on_drawn(loaded, range(50, 51), 100)
    shown = loaded.model["bag"].weight  # type: ignore[index]
    assert len(shown) < num_rows
    assert checkpoints.load(loaded) == num_steps
    assert not checkpoints.rows_left_out and loaded.model["bag"].weight is shown  # type: ignore[index]
    for steps in (range(0), range(num_steps, num_steps + 4)):
        for run in (kept, loaded):
            train_on_drawn(run, steps, num_ids)
        expected, found = whole_state(kept), whole_state(loaded)
        assert expected.keys() == found.keys()
        assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


def test_rows_of_tables_of_other_blocks_are_loaded_by_id(tmp_path: Path) -> None:
    """12288 rows are 3 blocks of a table that has all of them at once, and 4 of one that grew."""
    at_once, growing = Dynamic(), Dynamic(initial_capacity=12288)
    for number, (before, after) in enumerate([(at_once, growing), (growing, at_once)]):
        saved, run = growing_run(before, 12288), growing_run(after, 12288)
        train_on_drawn(saved, range(2), 3000)
        assert run.model["bag"].weight.shape == saved.model["bag"].weight.shape  # type: ignore[index]
        CheckpointFolder(tmp_path / str(number)).save(2, saved)
        CheckpointFolder(tmp_path / str(number)).load(run)
        tables = [r.model["bag"].table_set.tables[0] for r in (saved, run)]  # type: ignore[index]
        assert scores_of(tables[1]) == scores_of(tables[0])
        ids = torch.arange(3000)[:, None] * 0x9E3779B97F4A7C1
        expected = saved.model.eval()["bag"](ids)  # type: ignore[index]
        assert expected.any() and torch.equal(run.model.eval()["bag"](ids), expected)  # type: ignore[index]


def scores_of(table: Table) -> dict[int, int]:
    """By id its score."""
    chunk = next(row_chunks(table, 1 << 20))
    assert chunk.scores is not None
    return dict(zip(chunk.keys.tolist(), chunk.scores.tolist(), strict=True))


def test_a_smaller_table_keeps_the_best_and_says_how_many_went(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lfu = Dynamic(eviction=LFU())
    saved, run = small_run(lfu), small_run(lfu, 20)
    for times in range(1, 11):
        train_on(saved, [number * times for number in range(-10, 0)] * times)
    CheckpointFolder(tmp_path).save(10, saved)
    checkpoints = CheckpointFolder(tmp_path)
    assert checkpoints.load(run) == 10
    tables = [r.model["tables"].table_set.tables[1] for r in (saved, run)]  # type: ignore[index]
    held, kept = map(scores_of, tables)
    assert len(kept) == 20 and kept.items() <= held.items()
    assert min(kept.values()) >= max(score for i, score in held.items() if i not in kept)
    name = "tables.embedding_bags.f0.weight"
    assert checkpoints.rows_left_out == {name: len(held) - 20}
    assert f"{len(held) - 20} ids of {name}" in caplog.text
