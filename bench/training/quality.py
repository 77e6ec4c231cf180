"""Does bf16 learn as well as fp32? DLRM-DCNv2 of MLPerf on the made click log, one GPU.

``python -m bench.training.quality`` trains with several seeds in each precision, all on the same
batches, and prints the AUC of each on held-out rows and the most that a model can expect. bf16
passes where the means of the two precisions are no further apart than 0.0005, or two standard
deviations of fp32's seeds. ``--output`` is written after each training, with the result so far.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro

from bench.data import dlrm_dcnv2 as workload
from bench.data.device_click_log import DeviceClickLog
from bench.report.result_file import Row, write_results
from torchembed import optim
from torchembed.data import Batch, ClickLog, ClickLogConfig, Split
from torchembed.data.click_log import rank_auc
from torchembed.tables import table_of
from torchembed.training import Evaluation, TrainPipeline, evaluate

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAST_LIMIT = 0.0005


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trainings to compare."""

    batch_size: int = 2048
    num_steps: int = 3000
    max_rows: int = 1_000_000
    """Tables are cut to this."""
    num_held_out: int = 1 << 20
    """Rows that the AUC is of."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the initial weights."""
    learning_rate: float = 0.004
    """Learning rate of Adagrad, for tables and dense layers."""
    output: Path | None = None
    """JSON to write the rows to."""


def train_once(
    config: Config,
    precision: str,
    seed: int,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    device: torch.device,
) -> Row:
    """One pass over ``batches``, and how the model then does on ``held_out``."""
    dtype = PRECISIONS[precision]
    autocast = None if dtype is torch.float32 else dtype
    model = workload.make_model(
        workload.table_configs(config.max_rows),
        workload.DENSE_SIZES,
        table_device=device,
        device=device,
        seed=seed,
        output_dtype=dtype,
    )
    tables = [p for p in model.parameters() if table_of(p) is not None]
    lr, eps = config.learning_rate, 1e-8
    optimizers = [
        optim.Adagrad(tables, lr=lr, eps=eps),
        optim.DenseAdagrad(workload.dense_parameters(model), lr=lr, eps=eps, dtype=dtype),
    ]
    stream, loss_fn = iter(batches), F.binary_cross_entropy_with_logits
    start = time.perf_counter()
    with TrainPipeline(model, loss_fn, optimizers, autocast=autocast) as pipeline:
        losses = [pipeline.progress(stream).loss.clone() for _ in batches]
    seconds = time.perf_counter() - start
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        result: Evaluation = evaluate(model, held_out)
    last = torch.stack(losses[-100:]).mean()
    return {
        "bench": "quality",
        "precision": precision,
        "seed": seed,
        "auc": result.auc,
        "logloss": result.logloss,
        "train_loss": float(last),
        "train_seconds": seconds,
        "num_steps": len(batches),
        "batch_size": config.batch_size,
        "held_out_rows": result.num_rows,
    }


def compare(rows: Sequence[Row], bayes_auc: float) -> Row:
    """Distance of bf16 from fp32, and the one that is allowed."""
    fp32, bf16 = ([r["auc"] for r in rows if r["precision"] == name] for name in PRECISIONS)
    deviation = statistics.stdev(fp32) if len(fp32) > 1 else 0.0
    difference = statistics.fmean(bf16) - statistics.fmean(fp32)
    limit = max(LEAST_LIMIT, 2 * deviation)
    return {
        "bench": "quality_summary",
        "fp32_auc": statistics.fmean(fp32),
        "bf16_auc": statistics.fmean(bf16),
        "difference": difference,
        "fp32_deviation": deviation,
        "limit": limit,
        "passes": abs(difference) <= limit,
        "bayes_auc": bayes_auc,
    }


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log = ClickLogConfig(
        table_sizes=workload.table_sizes(config.max_rows),
        hotness=workload.HOTNESS,
        num_train=config.batch_size * config.num_steps,
        num_held_out=config.num_held_out,
    )
    start = time.perf_counter()
    (batches, _), (held_out, likely) = (
        DeviceClickLog(ClickLog(log, batch_size=config.batch_size, split=split), device).make()
        for split in (Split.TRAIN, Split.HELD_OUT)
    )
    labels = torch.cat([batch.labels for batch in held_out])
    bayes_auc = rank_auc(labels.numpy(), likely.numpy())
    print(
        f"{len(batches)} batches of {config.batch_size} to train and {len(held_out)} held out made "
        f"in {time.perf_counter() - start:.1f} s\n"
        "precision seed      AUC  log loss  training loss  seconds",
        flush=True,
    )
    rows: list[Row] = []
    summary = None
    for seed in config.seeds:
        for precision in PRECISIONS:
            row = train_once(config, precision, seed, batches, held_out, device)
            rows.append(row)
            print(
                f"{precision:9} {seed:4d}  {row['auc']:.5f}   {row['logloss']:.5f}"
                f"        {row['train_loss']:.5f} {row['train_seconds']:8.1f}",
                flush=True,
            )
            gc.collect()
            if len(rows) >= len(PRECISIONS):
                summary = compare(rows, bayes_auc)
            if config.output is not None:
                write_results(config.output, rows if summary is None else [*rows, summary])
    assert summary is not None
    print(
        f"mean AUC: fp32 {summary['fp32_auc']:.5f}, bf16 {summary['bf16_auc']:.5f}, the most that "
        f"can be expected {summary['bayes_auc']:.5f}\n"
        f"bf16 - fp32 = {summary['difference']:+.5f}, allowed {summary['limit']:.5f} (standard "
        f"deviation of fp32 {summary['fp32_deviation']:.5f}): "
        + ("passes" if summary["passes"] else "FAILS")
    )
    raise SystemExit(0 if summary["passes"] else 1)


if __name__ == "__main__":
    main()
