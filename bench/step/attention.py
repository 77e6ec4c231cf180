"""A transformer ranker's step with flash attention, and with attention whose scores are in memory.

``python -m bench.step.attention`` trains SASRec as a ranker, whose logit is the last vector of a
history times that of a candidate, through ``TrainPipeline`` in bf16. It prints the milliseconds and
the peak memory of a step for histories of each length, of torchembed's own attention and of the
same model whose attention is written out. It fails where the goals are missed, a step in a third of
the time and in 30 % of the memory, or where logits are further from those in float32 than twice
those of the written-out attention in bf16. Histories are full, so that no padding is saved.
"""

import contextlib
import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import torchembed
from bench.report.result_file import Row, write_results
from torchembed.models import Histories, Impressions, SASRec, sasrec
from torchembed.ops.padded_layout import PaddedLayout
from torchembed.training import StepResult, TrainPipeline

LEAST_SPEEDUP, MOST_MEMORY = 3.0, 0.3
_WARM_UP_STEPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the measurement."""

    lengths: tuple[int, ...] = (200, 1000, 4000)
    """Items of a history."""
    batch_sizes: tuple[int, ...] = (512, 64, 8)
    """Histories of a batch, for each of the lengths."""
    embedding_dim: int = 64
    num_heads: int = 8
    num_blocks: int = 2
    dropout: float = 0.2
    num_items: int = 100_000
    num_steps: int = 10
    """Steps that are timed together, five times."""
    device: str = "cuda"
    output: Path | None = None
    """JSON to write the rows to."""

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.batch_sizes):
            raise ValueError(
                f"batch_sizes must be one for each of the lengths {self.lengths}, got "
                f"{self.batch_sizes}"
            )


class Ranker(nn.Module):
    """A logit of each candidate: its vector times that of the history."""

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        items = torchembed.Embedding(
            config.num_items, config.embedding_dim, device=config.device, seed=0
        )
        nn.init.normal_(items.weight, std=1 / math.sqrt(config.embedding_dim))
        self.encoder = SASRec(
            items,
            embedding_dim=config.embedding_dim,
            max_length=length,
            num_blocks=config.num_blocks,
            num_heads=config.num_heads,
            dropout=config.dropout,
            dense_device=config.device,
        )

    def logits(self, batch: Impressions) -> Tensor:
        """``[B, 1]``, of one candidate for each history."""
        encoded = self.encoder(Histories(batch.items, batch.offsets, batch.items))
        users = encoded[batch.offsets[1:] - 1]
        return (users.float() * self.encoder.items(batch.candidates[:, 0])).sum(1, keepdim=True)

    def forward(self, batch: Impressions) -> Tensor:
        """The mean loss ``[]``."""
        assert batch.labels is not None
        return F.binary_cross_entropy_with_logits(self.logits(batch), batch.labels)


def eager_attention(
    query: Tensor, key_value: Tensor, layout: PaddedLayout, *, dropout: float = 0.0
) -> Tensor:
    """``causal_attention`` written out: all scores are in memory, and softmax is in float32."""
    query = layout.pad(query).transpose(1, 2)
    key, value = layout.pad(key_value).transpose(1, 3).unbind(2)
    length = query.shape[2]
    scores = query @ key.mT / math.sqrt(query.shape[3])
    is_later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    weights = scores.masked_fill(is_later, -torch.inf).softmax(3, dtype=torch.float32)
    weights = F.dropout(weights.to(value.dtype), dropout)
    return layout.pack((weights @ value).transpose(1, 2))


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "torchembed": sasrec.causal_attention,
    "eager": eager_attention,
}


@contextlib.contextmanager
def _attending(system: str) -> Iterator[None]:
    """A context in which SASRec's blocks attend as ``system`` does."""
    with mock.patch.object(sasrec, "causal_attention", ATTENTIONS[system]):
        yield


def make_batches(config: Config, length: int, batch_size: int, count: int) -> list[Impressions]:
    """Batches of full histories with random items, on the device."""
    generator = torch.Generator().manual_seed(0)

    def drawn(largest: int, *shape: int) -> Tensor:
        return torch.randint(largest, shape, generator=generator).to(config.device)

    offsets = torch.arange(batch_size + 1, device=config.device) * length
    return [
        Impressions(
            drawn(config.num_items, batch_size * length),
            offsets,
            drawn(config.num_items, batch_size, 1),
            drawn(2, batch_size, 1).float(),
        )
        for _ in range(count)
    ]


def measured(config: Config, system: str, length: int, batch_size: int) -> Row:
    """Milliseconds and peak memory of a step."""
    device, is_cuda = torch.device(config.device), config.device.startswith("cuda")
    _free_memory()
    torch.manual_seed(0)
    model = Ranker(config, length)
    tables, dense = torchembed.optim.split_parameters(model.parameters())
    optimizers = [
        torchembed.optim.RowwiseAdagrad(tables, lr=0.01),
        torchembed.optim.DenseAdam(dense, lr=1e-3),
    ]
    source = itertools.cycle(make_batches(config, length, batch_size, 4))
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with (
        _attending(system),
        TrainPipeline(
            model, None, optimizers, autocast=torch.bfloat16, capture=True, self_check_every=None
        ) as pipeline,
    ):

        def step() -> StepResult:
            return pipeline.progress(source)

        _milliseconds(step, _WARM_UP_STEPS)
        of_parts = [_milliseconds(step, config.num_steps) for _ in range(5)]
        last = step()
        loss, kind = float(last.loss), last.kind.form.value
    return {
        "bench": "attention",
        "system": system,
        "length": length,
        "batch_size": batch_size,
        "step_ms": statistics.median(of_parts),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "kind": kind,
        "loss": loss,
    }


def _milliseconds(step: Callable[[], StepResult], count: int) -> float:
    """The mean over ``count`` steps, of which the last is waited for."""
    start = time.perf_counter()
    losses = [step().loss for _ in range(count)]
    float(losses[-1])
    return (time.perf_counter() - start) / count * 1e3


@torch.no_grad()
def errors(config: Config, length: int, batch_size: int) -> dict[str, float]:
    """The largest difference of each system's logits in bf16 from those in float32."""
    _free_memory()
    torch.manual_seed(0)
    model = Ranker(config, length).eval()
    batch = make_batches(config, length, min(batch_size, 4), 1)[0]
    with _attending("eager"):
        exact = model.logits(batch)
    found = {}
    for system in ATTENTIONS:
        with _attending(system), torch.autocast(torch.device(config.device).type, torch.bfloat16):
            found[system] = float((model.logits(batch) - exact).abs().max())
    found["rounding"] = float(exact.abs().max()) * torch.finfo(torch.bfloat16).eps
    return found


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compared(config: Config, length: int, batch_size: int) -> list[Row]:
    """The rows of both systems, and one that compares them."""
    error = errors(config, length, batch_size)
    rows = [measured(config, system, length, batch_size) for system in ATTENTIONS]
    ours, eager = rows
    speedup = eager["step_ms"] / ours["step_ms"]
    memory = ours["peak_bytes"] / eager["peak_bytes"] if ours["peak_bytes"] else None
    is_right = error["torchembed"] <= 2 * error["eager"] + error["rounding"]
    summary: Row = {
        "bench": "attention_summary",
        "length": length,
        "batch_size": batch_size,
        "speedup": speedup,
        "memory": memory,
        "error": error["torchembed"],
        "eager_error": error["eager"],
        "is_right": is_right,
        "meets_goals": speedup >= LEAST_SPEEDUP and (memory is None or memory <= MOST_MEMORY),
    }
    return [*rows, summary]


def line(row: Row) -> str:
    """``row`` as a line of the table."""
    if row["bench"] == "attention":
        memory = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
        return (
            f"{row['length']:6d} {row['batch_size']:6d}  {row['system']:<10} "
            f"{row['step_ms']:9.3f} {memory:>9}  {row['kind']}"
        )
    memory = "" if row["memory"] is None else f", {row['memory']:.1%} of the memory"
    return (
        f"{'':15}{row['speedup']:.2f} times as fast{memory}; largest error "
        f"{row['error']:.1e}, eager {row['eager_error']:.1e}: "
        + ("right" if row["is_right"] else "WRONG")
        + (", meets the goals" if row["meets_goals"] else ", MISSES the goals")
    )


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    print("length  batch  attention         ms       MiB  step", flush=True)
    rows: list[Row] = []
    for length, batch_size in zip(config.lengths, config.batch_sizes, strict=True):
        for row in compared(config, length, batch_size):
            rows.append(row)
            print(line(row), flush=True)
        if config.output is not None:
            write_results(config.output, rows)
    summaries = [row for row in rows if row["bench"] == "attention_summary"]
    raise SystemExit(0 if all(row["is_right"] and row["meets_goals"] for row in summaries) else 1)


if __name__ == "__main__":
    main()
