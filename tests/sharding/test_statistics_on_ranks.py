"""Statistics of dynamic tables that several gloo ranks share: those of the whole tables."""

import collections
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import USERS, Case, make_model, make_optimizer
from tests.support.steps_on_ranks import NO_RANK, NUM_STEPS, WithLoss, static_batch
from torchembed.training import History, MetricsWriter, TrainPipeline, read_metrics, train

CASES = [
    Case(
        placements={"a": "row_wise", "b": "column_wise", "c": "data_parallel", "d": "table_wise"},
        dynamic=("a", "b", "d"),
    ),
]


def counts_of(case: Case, num_steps: int, num_ranks: int) -> dict[str, dict[str, int]]:
    """By table what ``num_steps`` count where nothing is evicted."""
    found = {}
    for name in case.dynamic:
        known, counts = set[int](), collections.Counter(misses=0, hits=0)
        for step in range(num_steps):
            new = set[int]()
            for rank in range(num_ranks):
                batch = static_batch(case, rank, step, NO_RANK)
                lengths = batch.lengths().sum(1).tolist()
                for key, ids in zip(batch.keys, batch.values.split(lengths), strict=True):
                    if key in USERS[name]:
                        new.update(ids.tolist())
                        counts.update("hits" if i in known else "misses" for i in ids.tolist())
            known |= new
        found[name] = {**counts, "inserted": len(known), "size": len(known), "refused": 0}
    return found


def trained_with_metrics(cases: list[Case]) -> list[dict[str, Any]]:
    """On a rank: statistics after training, and the metrics that the first rank wrote."""
    rank, results = dist.get_rank(), []
    for case in cases:
        model = make_model(case, "meta")
        torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
        steps: nn.Module = WithLoss(model)
        batches = [static_batch(case, rank, step, NO_RANK) for step in range(NUM_STEPS)]
        with tempfile.TemporaryDirectory() as folder:
            metrics = MetricsWriter(Path(folder)) if rank == 0 else None
            with TrainPipeline(
                steps, None, [make_optimizer(case, model)], device="cpu"
            ) as pipeline:
                train(pipeline, batches, history=History(read_loss_every=4), metrics=metrics)
            lines = [] if metrics is None else read_metrics(Path(folder))
            if metrics is not None:
                metrics.close()
        found = {name: of.scalars() for name, of in model.tables.statistics().items()}
        epochs = {of.epoch for of in model.tables.statistics(wait=True).values()}
        results.append({"lines": lines, "statistics": found, "epochs": epochs})
    return results


def test_every_rank_reads_the_figures_of_whole_tables_and_one_writes_them() -> None:
    first, second = run_on_ranks(2, trained_with_metrics, CASES)
    for case, of_first, of_second in zip(CASES, first, second, strict=True):
        assert of_first["statistics"] == of_second["statistics"]
        assert of_first["epochs"] == of_second["epochs"] == {NUM_STEPS}
        for name, expected in counts_of(case, NUM_STEPS, 2).items():
            found = of_first["statistics"][name]
            assert {key: found[key] for key in expected} == expected
            assert found["capacity"] >= case.capacity
        assert [line["step"] for line in of_first["lines"]] == [4, 8, 9]
        for line in of_first["lines"]:
            for name, expected in counts_of(case, line["step"], 2).items():
                assert {key: line[f"{name}/{key}"] for key in expected} == expected
