"""Do cheaper ways to store, update and compute learn as well? DLRM-DCNv2 on the made click log.

``python -m bench.training.quality`` trains with several seeds in float32 and bfloat16, all on the
same batches, and prints the AUC of each on held-out rows and the most that a model can expect.
``--compare rows`` trains the tables' choices in place of the dense part's: rows of 16 bits, rounded
stochastically, and row-wise Adagrad. ``--compare wire`` trains with vectors and gradients rounded
as ranks send them, which one process does, too; ``--compare products`` with products of wide layers
in 8 bits. ``--shape small`` is a model and a log for processors; the default is MLPerf's, for one
GPU.

A choice passes where its mean is no further from the first one's than 0.0005, or two standard
deviations of the first one's seeds. Row-wise Adagrad is an optimizer of its own, which nothing is
required of. ``--output`` is written after each training, with the result so far.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench.data import dlrm_dcnv2 as workload
from bench.data.device_click_log import DeviceClickLog
from bench.report.result_file import Row, write_results
from torchembed import EmbeddingBagConfig, optim, shard_embeddings
from torchembed.data import Batch, ClickLog, ClickLogConfig, Split
from torchembed.data.roc_auc import roc_auc
from torchembed.modules import use_float8_products
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.optim import FusedOptimizer
from torchembed.sharding import Placement, WirePrecision
from torchembed.tables import table_of
from torchembed.training import Evaluation, TrainPipeline, evaluate


class Choice(NamedTuple):
    """How a training stores, updates and computes."""

    rows: torch.dtype = torch.float32
    """Of the tables."""
    optimizer: type[optim.Adagrad] = optim.Adagrad
    """Of the tables."""
    dense: torch.dtype = torch.float32
    """Of the dense part and of the pooled vectors, whose weights and states stay float32."""
    wire: WirePrecision | None = None
    """Of vectors and gradients between ranks; tables are not sharded where None."""
    float8: bool = False
    """True for products of wide layers in 8 bits."""


CHOICES = {
    "precision": {"fp32": Choice(), "bf16": Choice(dense=torch.bfloat16)},
    "rows": {
        "fp32, Adagrad": Choice(),
        "bf16, Adagrad": Choice(rows=torch.bfloat16),
        "fp16, Adagrad": Choice(rows=torch.float16),
        "fp32, row-wise Adagrad": Choice(optimizer=optim.RowwiseAdagrad),
        "bf16, row-wise Adagrad": Choice(rows=torch.bfloat16, optimizer=optim.RowwiseAdagrad),
    },
    "products": {
        "fp32": Choice(),
        "bf16": Choice(dense=torch.bfloat16),
        "fp8 in wide layers, else bf16": Choice(dense=torch.bfloat16, float8=True),
    },
    "wire": {
        "fp32": Choice(wire=WirePrecision()),
        "bf16": Choice(wire=WirePrecision(forward=torch.bfloat16, backward=torch.bfloat16)),
        "fp8 vectors": Choice(wire=WirePrecision(forward=torch.float8_e4m3fn)),
        "fp8 gradients": Choice(wire=WirePrecision(backward=torch.float8_e4m3fn)),
        "fp8": Choice(
            wire=WirePrecision(forward=torch.float8_e4m3fn, backward=torch.float8_e4m3fn)
        ),
    },
}
"""The choices of each comparison; all are compared with the first."""
LEAST_WIDTHS = {"mlperf": 512, "small": 64}
"""Widths from which on layers are computed in 8 bits: in each shape the layers over the cross
network but for the last ones."""
LEAST_LIMIT = 0.0005
SMALL_DIM = 16
SMALL_DENSE_SIZES = workload.DenseSizes(
    num_dense=13,
    dense_arch=(64, SMALL_DIM),
    over_arch=(128, 64, 1),
    num_cross_layers=2,
    low_rank=32,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trainings to compare."""

    compare: Literal["precision", "rows", "products", "wire"] = "precision"
    shape: Literal["mlperf", "small"] = "mlperf"
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

    @property
    def log(self) -> ClickLogConfig:
        """The log to learn."""
        log = ClickLogConfig(
            num_train=self.batch_size * self.num_steps, num_held_out=self.num_held_out
        )
        if self.shape == "small":
            sizes = tuple(min(size, self.max_rows) for size in log.table_sizes)
            return dataclasses.replace(log, table_sizes=sizes)
        sizes = workload.table_sizes(self.max_rows)
        return dataclasses.replace(log, table_sizes=sizes, hotness=workload.HOTNESS)

    def tables(self, rows: torch.dtype) -> list[EmbeddingBagConfig]:
        """One table for each feature of the log."""
        if self.shape == "mlperf":
            configs = workload.table_configs(self.max_rows)
            return [dataclasses.replace(config, dtype=rows) for config in configs]
        return [
            EmbeddingBagConfig(
                name=f"cat_{feature}",
                num_embeddings=size,
                embedding_dim=SMALL_DIM,
                feature_names=(f"cat_{feature}",),
                dtype=rows,
            )
            for feature, size in enumerate(self.log.table_sizes)
        ]


def train_once(
    config: Config,
    name: str,
    seed: int,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    device: torch.device,
) -> Row:
    """One pass over ``batches`` with a choice, and how the model then does on ``held_out``."""
    choice = CHOICES[config.compare][name]
    autocast = None if choice.dense is torch.float32 else choice.dense
    model = workload.make_model(
        config.tables(choice.rows),
        workload.DENSE_SIZES if config.shape == "mlperf" else SMALL_DENSE_SIZES,
        table_device=device if choice.wire is None else "meta",
        device=device,
        seed=seed,
        output_dtype=choice.dense,
    )
    if choice.float8:
        use_float8_products(model, least_width=LEAST_WIDTHS[config.shape])
    if choice.wire is not None:
        placements = dict.fromkeys(table_specs(model), Placement.TABLE_WISE)
        mesh = init_device_mesh(device.type, (1,))
        shard_embeddings(model, mesh, placements, wire=choice.wire)
    tables = [p for p in model.parameters() if table_of(p) is not None]
    lr, eps = config.learning_rate, 1e-8
    of_tables = choice.optimizer(tables, lr=lr, eps=eps)
    dense = optim.DenseAdagrad(workload.dense_parameters(model), lr=lr, eps=eps, dtype=choice.dense)
    stream, loss_fn = iter(batches), F.binary_cross_entropy_with_logits
    start = time.perf_counter()
    with TrainPipeline(model, loss_fn, [of_tables, dense], autocast=autocast) as pipeline:
        losses = [pipeline.progress(stream).loss.clone() for _ in batches]
    seconds = time.perf_counter() - start
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        result: Evaluation = evaluate(model, held_out)
    last = torch.stack(losses[-100:]).mean()
    return {
        "bench": "quality",
        "compare": config.compare,
        "shape": config.shape,
        "choice": name,
        "bytes_per_row": bytes_per_row(tables[0], of_tables),
        "seed": seed,
        "auc": result.auc,
        "logloss": result.logloss,
        "train_loss": float(last),
        "train_seconds": seconds,
        "num_steps": len(batches),
        "batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
        "held_out_rows": result.num_rows,
    }


def bytes_per_row(weight: Tensor, optimizer: FusedOptimizer) -> int:
    """Bytes that a row of ``weight`` takes, with its optimizer state."""
    states = [state for state in optimizer.state[weight].values() if isinstance(state, Tensor)]
    return sum(tensor.nbytes for tensor in (weight, *states)) // len(weight)


def compare(rows: Sequence[Row], choices: dict[str, Choice], bayes_auc: float) -> list[Row]:
    """Distance of each choice that has rows from the first, and the one that is allowed."""
    first = next(iter(choices))
    aucs = {name: [row["auc"] for row in rows if row["choice"] == name] for name in choices}
    deviation = statistics.stdev(aucs[first]) if aucs[first][1:] else 0.0
    limit = max(LEAST_LIMIT, 2 * deviation)
    summaries: list[Row] = []
    for name in [name for name in choices if name != first and aucs[name]]:
        difference = statistics.fmean(aucs[name]) - statistics.fmean(aucs[first])
        is_free = choices[name].optimizer is not choices[first].optimizer
        summaries.append(
            {
                "bench": "quality_summary",
                "choice": name,
                "auc": statistics.fmean(aucs[name]),
                "least_auc": min(aucs[name]),
                "most_auc": max(aucs[name]),
                "beside": first,
                "beside_auc": statistics.fmean(aucs[first]),
                "beside_deviation": deviation,
                "difference": difference,
                "limit": None if is_free else limit,
                "passes": is_free or abs(difference) <= limit,
                "bayes_auc": bayes_auc,
            }
        )
    return summaries


def line(summary: Row) -> str:
    """A comparison, in words."""
    limit = summary["limit"]
    verdict = "nothing is required"
    if limit is not None:
        verdict = f"allowed {limit:.5f}: {'passes' if summary['passes'] else 'FAILS'}"
    return (
        f"{summary['choice']}: mean AUC {summary['auc']:.5f} ({summary['least_auc']:.5f} to "
        f"{summary['most_auc']:.5f}), {summary['difference']:+.5f} beside {summary['beside']} "
        f"({summary['beside_auc']:.5f}, standard deviation {summary['beside_deviation']:.5f}), "
        f"{verdict}"
    )


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    (batches, _), (held_out, likely) = (
        DeviceClickLog(
            ClickLog(config.log, batch_size=config.batch_size, split=split), device
        ).make()
        for split in (Split.TRAIN, Split.HELD_OUT)
    )
    labels = torch.cat([batch.labels for batch in held_out])
    bayes_auc = roc_auc(labels.numpy(), likely.numpy())
    print(
        f"{len(batches)} batches of {config.batch_size} to train and {len(held_out)} held out made "
        f"in {time.perf_counter() - start:.1f} s; the most AUC that can be expected is "
        f"{bayes_auc:.5f}\n"
        f"{'choice':29} seed      AUC  log loss  training loss  seconds",
        flush=True,
    )
    choices = CHOICES[config.compare]
    if any(choice.wire is not None for choice in choices.values()):
        store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backends, store=store, rank=0, world_size=1)
    rows: list[Row] = []
    for seed in config.seeds:
        for name in choices:
            row = train_once(config, name, seed, batches, held_out, device)
            rows.append(row)
            print(
                f"{name:29} {seed:4d}  {row['auc']:.5f}   {row['logloss']:.5f}"
                f"        {row['train_loss']:.5f} {row['train_seconds']:8.1f}",
                flush=True,
            )
            gc.collect()
            if config.output is not None:
                write_results(config.output, [*rows, *compare(rows, choices, bayes_auc)])
    if dist.is_initialized():
        dist.destroy_process_group()
    summaries = compare(rows, choices, bayes_auc)
    print("\n".join(map(line, summaries)))
    raise SystemExit(0 if all(summary["passes"] for summary in summaries) else 1)


if __name__ == "__main__":
    main()
