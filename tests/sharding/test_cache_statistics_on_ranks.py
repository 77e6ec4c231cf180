"""Statistics of caches of tables in host memory on gloo ranks."""

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import CACHE_ROWS, SIZES, Case, make_model, make_optimizer
from tests.support.steps_on_ranks import NO_RANK, NUM_STEPS, WithLoss, static_batch
from torchembed.training import History, MetricsWriter, TrainPipeline, read_metrics, train

CASES = [
    Case(placements=dict.fromkeys("abcd", "row_wise"), stored=("a", "b"), fixed=True),
    # One rank alone has a cache.
    Case(placements=dict.fromkeys("abcd", "table_wise"), stored=("d",), fixed=True),
]


def trained_with_metrics(cases: list[Case]) -> list[dict[str, Any]]:
    """On a rank: the figures of its caches after training, and the metrics that the first wrote."""
    rank, results = dist.get_rank(), []
    for case in cases:
        model = make_model(case, "meta")
        torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
        steps: nn.Module = WithLoss(model)
        batches = [static_batch(case, rank, step, NO_RANK) for step in range(NUM_STEPS)]
        with tempfile.TemporaryDirectory() as folder:
            metrics = MetricsWriter(Path(folder)) if rank == 0 else None
            with TrainPipeline(
                steps, None, [make_optimizer(case, model)], device="cpu", capture=case.fixed
            ) as pipeline:
                train(pipeline, batches, history=History(read_loss_every=4), metrics=metrics)
            lines = [] if metrics is None else read_metrics(Path(folder))
            if metrics is not None:
                metrics.close()
        found = {names: of.scalars() for names, of in model.tables.cache_statistics().items()}
        results.append({"lines": lines, "statistics": found})
    return results


def test_a_rank_reads_its_own_figures_and_metrics_are_sums() -> None:
    ranks = run_on_ranks(2, trained_with_metrics, CASES)
    for number in range(len(CASES)):
        of_ranks = [rank[number]["statistics"] for rank in ranks]
        caches = [of for found in of_ranks for of in found.values()]
        (last,) = (line for line in ranks[0][number]["lines"] if line["step"] == NUM_STEPS)
        for name in ("capacity", "size", "unique", "unique_misses", "rows_read_ahead"):
            assert last[f"tables.cache/{name}"] == sum(of[name] for of in caches)
        assert all(of["batches_fetched_late"] == 0 for of in caches)
        if number:
            assert [list(found) for found in of_ranks].count([]) == 1
            assert last["tables.cache/capacity"] == min(CACHE_ROWS, SIZES["d"][0])
        else:
            assert [list(found) for found in of_ranks] == [[("a",), ("b",)]] * 2  # means and sums
        assert last["tables.cache/unique"] > 0
        assert last["tables.cache/hit_rate"] == 1 - (
            sum(of["unique_misses"] for of in caches) / sum(of["unique"] for of in caches)
        )
