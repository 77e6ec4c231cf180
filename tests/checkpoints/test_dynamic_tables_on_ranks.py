"""Checkpoints of sharded dynamic tables: saved on some ranks, and loaded on others."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    Case,
    exact_loss,
    made_mesh,
    make_batch,
    make_model,
    make_optimizer,
)
from torchembed import (
    LFU,
    CallerScores,
    CountMinSketch,
    Dynamic,
    EmbeddingBagConfig,
    EpochLFU,
    MinimumCount,
    SparseFeatures,
)
from torchembed.tables import row_chunks
from torchembed.training import CheckpointFolder, TrainingRun

NUM_STEPS = 4
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": "RowwiseAdagrad"},
    "counted": {
        "optimizer": "Adam",
        "eviction": LFU(),
        "admission": MinimumCount(2, capacity=200),
        "dtype": torch.bfloat16,
    },
    "sketched": {
        "eviction": EpochLFU(steps_per_epoch=2),
        "admission": CountMinSketch(threshold=2, width=1 << 14, depth=2),
    },
    "scored": {"eviction": CallerScores(initial_score=3), "optimizer": "SGD"},
}
PLACEMENTS = {
    "rows": dict.fromkeys("abcd", "row_wise"),
    "columns": dict.fromkeys("abcd", "column_wise"),
    "tables": dict.fromkeys("abcd", "table_wise"),
}


def case_of(policies: str, placement: str, dynamic: str = "abd", capacity: int = 256) -> Case:
    return Case(
        placements=PLACEMENTS[placement],
        dynamic=tuple(dynamic),
        capacity=capacity,
        **POLICIES[policies],
    )


def new_run(case: Case) -> TrainingRun:
    """Sharded where there is a process group."""
    model = make_model(case, "meta" if dist.is_initialized() else "cpu")
    if dist.is_initialized():
        torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
    return TrainingRun(model=model, optimizers=[make_optimizer(case, model)])


def joined(batches: list[SparseFeatures]) -> SparseFeatures:
    """One batch of the samples of all."""
    lengths = torch.cat([batch.lengths() for batch in batches], 1)
    ends = [batch.offsets.tolist() for batch in batches if batch.offsets is not None]
    values = [
        batch.values[of[f * batch.batch_size] : of[(f + 1) * batch.batch_size]]
        for f in range(len(batches[0].keys))
        for batch, of in zip(batches, ends, strict=True)
    ]
    return SparseFeatures(
        keys=batches[0].keys,
        values=torch.cat(values),
        batch_size=lengths.shape[1],
        offsets=torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)]),
    )


def train(case: Case, run: TrainingRun, first_step: int, num_steps: int, num_ranks: int) -> None:
    """The steps that ``num_ranks`` ranks do together: this one's part of them, or all at once."""
    ranks = [dist.get_rank()] if dist.is_initialized() else range(num_ranks)
    for step in range(first_step, first_step + num_steps):
        run.optimizers[0].zero_grad()
        batches = [make_batch(case, rank, step) for rank in ranks]
        vectors = run.model.tables(joined(batches)).values()
        parts = vectors.split([batch.batch_size for batch in batches])
        losses = [exact_loss(part.float().flatten()) for part in parts]
        (torch.stack(losses).sum() / len(losses)).backward()
        run.optimizers[0].step()


Held = dict[str, dict[Any, Any]]


def held(model: nn.Module) -> Held:
    """By table what this rank holds: by id and column the element, its states, score and last use;
    and by id what is counted, or the sketch."""
    found: Held = {}
    for table in model.tables.table_set.tables:
        of_table: dict[Any, Any] = {}
        for chunk in row_chunks(table, 1 << 20):
            use = [t.tolist() for t in (chunk.scores, chunk.touched) if t is not None]
            for place, row_id in enumerate(chunk.keys.tolist()):
                of_id = [column[place] for column in use]
                for column in range(table.num_columns):
                    states = [
                        (s[place, column] if s.dim() == 2 else s[place]).item()
                        for s in chunk.states.values()
                    ]
                    value = chunk.rows[place, column].item()
                    of_table[row_id, table.first_column + column] = (value, states, of_id)
        contents = table.index_contents()
        if "counts" in contents:
            for place in contents["counted_digests"].nonzero().flatten().tolist():
                names = ("counts", "counted_epochs")
                counted = tuple(int(contents[name][place]) for name in names)
                of_table["counted", int(contents["counted_ids"][place])] = counted
        if "sketch" in contents and not table.first_column:
            of_table["sketch"] = contents["sketch"].numpy().copy()
        found[table.spec.name] = of_table
    return found


def together(of_ranks: list[Held]) -> Held:
    """What the ranks hold: each once, or the same on each; the sum of sketches."""
    found: Held = {}
    for of_rank in of_ranks:
        for name, of_table in of_rank.items():
            whole = found.setdefault(name, {})
            for key, value in of_table.items():
                if key == "sketch" and key in whole:
                    whole[key] = whole[key] + value
                else:
                    assert key not in whole or whole[key] == value, (name, key)
                    whole[key] = value
    return found


def assert_same(found: Held, expected: Held, message: str) -> None:
    assert set(found) == set(expected)
    for name, of_table in expected.items():
        np.testing.assert_array_equal(found[name].pop("sketch", 0), of_table.get("sketch", 0))
        without = {key: value for key, value in of_table.items() if key != "sketch"}
        assert found[name] == without, (message, name)


LOADS = [
    *(("plain", saved, other) for saved in PLACEMENTS for other in PLACEMENTS),
    *(("counted", saved, other) for saved, other in (("rows", "rows"), ("rows", "columns"))),
    *(("plain", "one", other) for other in PLACEMENTS),
    ("counted", "one", "rows"),
    ("scored", "rows", "rows"),
    *(("sketched", saved, other) for saved, other in (("rows", "rows"), ("columns", "tables"))),
]
"""Policies, the placement that was saved, and the one that it is loaded under."""


SAVED = list(dict.fromkeys(load[:2] for load in LOADS))
"""Policies and placement of each checkpoint; its step is the number from 1 on."""


def save_all(folder: str) -> None:
    """Those of four ranks, or those of one where there is no process group."""
    with contextlib.closing(CheckpointFolder(folder, keep=len(SAVED))) as checkpoints:
        for step, (policies, placement) in enumerate(SAVED, 1):
            if (placement == "one") != dist.is_initialized():
                case = case_of(policies, "rows" if placement == "one" else placement)
                run = new_run(case)
                train(case, run, 0, NUM_STEPS, 4)
                checkpoints.save(step, run)


def load_all(folder: str) -> dict[str, tuple[Held, Held]]:
    """What this rank holds of each of ``LOADS``: once loaded, and after one more step."""
    found = {}
    checkpoints, runs = CheckpointFolder(folder), dict[tuple[str, str], TrainingRun]()
    for policies, saved, placement in LOADS:
        case = case_of(policies, placement)
        if (policies, placement) not in runs:
            runs[policies, placement] = new_run(case)
        run = runs[policies, placement]
        checkpoints.load(run, SAVED.index((policies, saved)) + 1)
        assert not checkpoints.rows_left_out
        loaded = held(run.model)
        train(case, run, NUM_STEPS, 1, 2)
        found[f"{policies} {saved} {placement}"] = loaded, held(run.model)
    return found


def refuse_damaged(folder: Path) -> None:
    """A byte of a rank's file that changed, and a rank's file that is missing, are named by one
    rank that loads it, whose tables stay as they are."""
    case = case_of("counted", "rows")
    step, run = SAVED.index(("counted", "rows")) + 1, new_run(case)
    train(case, run, 7, 1, 1)
    before, files = held(run.model), folder / f"step-{step:09d}"
    damaged, missing = files / "__1_0.distcp", files / "__2_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=f"{damaged.name} must have .* it is corrupt"):
        CheckpointFolder(folder).load(run, step)
    missing.rename(folder / "elsewhere")
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(FileNotFoundError, match=f"lacks its file {missing.name}"):
        CheckpointFolder(folder).load(run, step)
    assert_same(held(run.model), before, "after errors")


def test_what_four_ranks_saved_two_and_one_load_under_any_placement(tmp_path: Path) -> None:
    """And what one rank saved, two load: rows, states, scores, last uses and counts; and training
    goes on as if unsharded."""
    run_on_ranks(4, save_all, str(tmp_path))
    save_all(str(tmp_path))
    of_two = run_on_ranks(2, load_all, str(tmp_path))
    of_one = load_all(str(tmp_path))
    refuse_damaged(tmp_path)
    for policies in POLICIES:
        case = case_of(policies, "rows")
        run = new_run(case)
        train(case, run, 0, NUM_STEPS, 4)
        saved = held(run.model)
        train(case, run, NUM_STEPS, 1, 2)
        trained = held(run.model)
        assert len(saved["b"]) > 80 and saved != trained
        for name in (name for name in of_one if name.startswith(policies)):
            for of_ranks in ([rank[name] for rank in of_two], [of_one[name]]):
                for number, expected in enumerate((saved, trained)):
                    found = together([of_rank[number] for of_rank in of_ranks])
                    assert_same(found, expected, f"{name} on {len(of_ranks)} ranks")


def growing_run(initial_capacity: int | None) -> TrainingRun:
    dynamic = Dynamic(initial_capacity=initial_capacity)
    config = EmbeddingBagConfig(
        name="a", num_embeddings=20_000, embedding_dim=4, feature_names=("a",), dynamic=dynamic
    )
    model = nn.ModuleDict({"tables": torchembed.EmbeddingBagCollection([config])})
    if dist.is_initialized():
        plan = {"tables.embedding_bags.a": "row_wise"}
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), plan)
    optimizer = torchembed.optim.Adagrad(model.parameters(), lr=0.1)
    return TrainingRun(model=model, optimizers=[optimizer])


def load_growing(folder: str) -> tuple[int, int]:
    """On a rank: the ids and rows of a table that one id was loaded into."""
    run = TrainingRun(model=growing_run(1000).model)
    CheckpointFolder(folder).load(run)
    (table,) = run.model["tables"].table_set.tables  # type: ignore[index]
    check_that_grown_parts_go_on(f"{folder} of ranks")
    return sum(len(chunk.keys) for chunk in row_chunks(table, 1 << 20)), table.num_rows


def check_that_grown_parts_go_on(folder: str) -> None:
    """Once they have grown, in a run whose parts are small yet, bit for bit."""
    kept, loaded = growing_run(1000), growing_run(1000)

    def train_on(run: TrainingRun, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            ids = torch.randint(30_000, (3000,), generator=generator)
            features = SparseFeatures(keys=("a",), values=ids, batch_size=3000, hotness=(1,))
            run.optimizers[0].zero_grad()
            run.model["tables"](features).values().square().sum().backward()  # type: ignore[index]
            run.optimizers[0].step()

    train_on(kept, range(8))
    tables = [run.model["tables"].table_set.tables[0] for run in (kept, loaded)]  # type: ignore[index]
    assert tables[0].num_rows == 10_000 > tables[1].num_rows
    CheckpointFolder(folder).save(8, kept)
    assert CheckpointFolder(folder).load(loaded) == 8
    found = []
    for run, table in zip((kept, loaded), tables, strict=True):
        train_on(run, range(8, 11))
        found.append([table.parameter, *table.group.states, *table.index_contents().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_parts_of_growing_tables_have_equally_many_rows_whoever_holds_the_ids(
    tmp_path: Path,
) -> None:
    run = TrainingRun(model=growing_run(None).model)
    run.model["tables"](SparseFeatures.from_dict({"a": [7]}))  # type: ignore[index]
    CheckpointFolder(tmp_path).save(1, run)
    assert sorted(run_on_ranks(2, load_growing, str(tmp_path))) == [(0, 10_000), (1, 10_000)]
