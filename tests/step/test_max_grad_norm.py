"""``TrainPipeline(max_grad_norm=...)`` beside ``torch.nn.utils.clip_grad_norm_`` in a plain loop
over torch's own modules: in every kind of step, of one rank and of several that share tables."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from tests.support.tape import taped_captures
from tests.support.tolerance import assert_follows, assert_same_bits
from torchembed.optim import clip_grad_norm_
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

ROWS = {"a": 7, "b": 9, "c": 6, "d": 5}
PLACEMENTS = {"a": "column_wise", "b": "row_wise", "c": "table_wise", "d": "data_parallel"}
DIM, NUM_SAMPLES, NUM_STEPS, LR = 4, 4, 9, 0.5
NEVER_CLIPS = 1e9

Batch = dict[str, Any]


class Clicks(nn.Module):
    """The loss of pooled vectors, of our tables or torch's, under two layers."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
        """``dtype``: of torch's tables; None for ours."""
        super().__init__()
        configs = [
            torchembed.EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=(name,)
            )
            for name, rows in ROWS.items()
        ]
        made_on = "cpu" if dtype is not None else device
        self.tables: Any = torchembed.EmbeddingBagCollection(configs, device=made_on)
        if dtype is not None:
            of_ours = {t.spec.name: t.parameter.detach() for t in self.tables.table_set.tables}
            self.tables = nn.ModuleDict(
                {
                    name: nn.EmbeddingBag.from_pretrained(
                        rows.to(dtype, copy=True), freeze=False, mode="sum"
                    )
                    for name, rows in of_ours.items()
                }
            )
        self.first, self.last = nn.Linear(4 * DIM + 2, 5), nn.Linear(5, 1)
        for number, parameter in enumerate([*self.first.parameters(), *self.last.parameters()]):
            pattern = torch.arange(parameter.numel()) + number
            parameter.data.copy_((pattern % 7 - 3).view(parameter.shape) / 4)
        for layer in (self.first, self.last):
            layer.to(made_on if dtype is None else "cpu", dtype or torch.float32)

    def forward(self, batch: Batch) -> Tensor:
        sparse = batch["sparse"]
        if isinstance(self.tables, nn.ModuleDict):
            columns = []
            for number, key in enumerate(sparse.keys):
                offsets = offsets_of(sparse)[number * NUM_SAMPLES :][: NUM_SAMPLES + 1]
                ids = sparse.values[offsets[0] : offsets[-1]]
                columns.append(self.tables[key](ids, (offsets - offsets[0])[:-1]))
            vectors = torch.cat(columns, dim=1)
        else:
            vectors = self.tables(sparse).values()
        dense, labels = batch["dense"].to(vectors.dtype), batch["labels"].to(vectors.dtype)
        hidden = torch.tanh(self.first(torch.cat([dense, vectors], dim=1)))
        # A sum, so that norms are large.
        return F.binary_cross_entropy_with_logits(self.last(hidden)[:, 0], labels, reduction="sum")


def offsets_of(sparse: torchembed.SparseFeatures) -> Tensor:
    if sparse.offsets is not None:
        return sparse.offsets
    assert sparse.hotness is not None
    lengths = torch.tensor(sparse.hotness).repeat_interleave(NUM_SAMPLES)
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def make_batch(rank: int, step: int, *, jagged: bool, device: torch.device | str = "cpu") -> Batch:
    """Bags with repeated ids, also across bags and ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    num_bags = len(ROWS) * NUM_SAMPLES
    lengths = torch.full((num_bags,), 2)
    if jagged:
        lengths = torch.randint(4, (num_bags,), generator=generator)
    values = torch.randint(5, (int(lengths.sum()),), generator=generator)
    sparse = torchembed.SparseFeatures(
        keys=tuple(ROWS),
        values=values,
        batch_size=NUM_SAMPLES,
        hotness=None if jagged else (2,) * len(ROWS),
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]) if jagged else None,
    )
    return {
        "dense": torch.randn(NUM_SAMPLES, 2, generator=generator).to(device),
        "sparse": sparse.to(device),
        "labels": torch.randint(2, (NUM_SAMPLES,), generator=generator).float().to(device),
    }


@functools.cache
def expected(max_norm: float, num_ranks: int, *, jagged: bool, dtype: torch.dtype) -> list[Tensor]:
    """Parameters after a plain loop over torch's modules, tables first."""
    model = Clicks("cpu", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [model(make_batch(rank, step, jagged=jagged)) for rank in range(num_ranks)]
        torch.stack(losses).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        assert (norm > max_norm) == (max_norm < NEVER_CLIPS)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_trained(
    parameters: Sequence[Tensor], max_norm: float, num_ranks: int, *, jagged: bool
) -> None:
    def formula(dtype: torch.dtype) -> Tensor:
        found = expected(max_norm, num_ranks, jagged=jagged, dtype=dtype)
        return torch.cat([parameter.flatten() for parameter in found])

    assert_follows(torch.cat([p.detach().cpu().flatten() for p in parameters]), formula)


def make_optimizers(model: nn.Module, *, fused: bool) -> list[torch.optim.Optimizer]:
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    if not fused:
        return [torch.optim.SGD([*tables, *dense], lr=LR)]
    return [
        torchembed.optim.SGD([{"params": tables}], lr=LR),
        torchembed.optim.DenseSGD(dense, lr=LR),
    ]


def train(
    model: nn.Module,
    max_norm: float | None,
    *,
    jagged: bool = False,
    capture: bool | None = None,
    fused: bool = True,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> bool:
    """Train by a pipeline; True where its last steps were captured."""
    optimizers = make_optimizers(model, fused=fused)
    batches = (make_batch(rank, step, jagged=jagged, device=device) for step in range(NUM_STEPS))
    with TrainPipeline(
        model, None, optimizers, device=device, capture=capture, max_grad_norm=max_norm
    ) as pipeline:
        for _ in range(NUM_STEPS):
            pipeline.progress(batches)
        return pipeline.engine.is_captured


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [0.25, NEVER_CLIPS])
def test_the_loop_with_torchs_clipping(
    capture: bool, jagged: bool, fused: bool, max_norm: float, device: torch.device
) -> None:
    model = Clicks(device)
    is_captured = train(model, max_norm, jagged=jagged, capture=capture, fused=fused, device=device)
    assert is_captured == capture
    assert_trained(list(model.parameters()), max_norm, 1, jagged=jagged)


@pytest.mark.parametrize("max_norm", [0.25, NEVER_CLIPS])
def test_replays_of_what_the_dispatcher_was_called_for(max_norm: float) -> None:
    model = Clicks("cpu")
    with taped_captures():
        assert train(model, max_norm, capture=True)
    assert_trained(list(model.parameters()), max_norm, 1, jagged=False)


def test_what_is_not_clipped_keeps_its_bits(device: torch.device) -> None:
    clipped, plain = Clicks(device), Clicks(device)
    train(clipped, NEVER_CLIPS, device=device)
    train(plain, None, device=device)
    for one, other in zip(clipped.parameters(), plain.parameters(), strict=True):
        assert_same_bits(one, other)


def on_a_rank(num_ranks: int, device_type: str) -> list[tuple[Any, ...]]:
    """On a rank: its parameters by name, as whole tables, after each way to train."""
    rank, results = dist.get_rank(), []
    device = device_type if device_type == "cpu" else f"cuda:{rank}"
    plan = {f"tables.embedding_bags.{name}": value for name, value in PLACEMENTS.items()}

    def sharded() -> Clicks:
        model = Clicks(device)
        torchembed.shard_embeddings(model, made_mesh(device_type, 1), plan)
        return model

    for capture, jagged, fused, max_norm in (
        (False, False, True, 0.25),
        (True, False, True, 0.25),
        (True, True, True, 0.25),
        (True, False, False, 0.25),
        (True, False, True, NEVER_CLIPS),
        (True, False, True, None),
    ):
        model = sharded()
        is_captured = train(
            model,
            max_norm,
            jagged=jagged,
            capture=capture,
            fused=fused,
            rank=rank,
            device=device,
        )
        assert is_captured == capture
        results.append(whole_parameters(model))
    model = sharded()
    optimizers = make_optimizers(model, fused=True)
    with pytest.raises(RuntimeError, match=r"is sharded, .* pass group=, the ranks of its mesh"):
        clip_grad_norm_(model.parameters(), 0.25)
    for step in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(make_batch(rank, step, jagged=False, device=device)).backward()
        clip_grad_norm_(model.parameters(), 0.25, group=dist.group.WORLD)
        for optimizer in optimizers:
            optimizer.step()
    results.append(whole_parameters(model))
    return results


def whole_parameters(model: Clicks) -> tuple[Any, ...]:
    """This rank's tables, as name, first row, first column and rows, and the dense parameters."""
    tables = [
        (t.spec.name, t.first_row, t.first_column, t.parameter.detach().cpu())
        for t in model.tables.table_set.tables
    ]
    dense = [p.detach().cpu() for p in [*model.first.parameters(), *model.last.parameters()]]
    return tables, dense


def assembled(of_ranks: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """All parameters, tables first; what several ranks hold must be equal."""
    wholes = {name: torch.full((rows, DIM), torch.nan) for name, rows in ROWS.items()}
    for tables, dense in of_ranks:
        for one, other in zip(dense, of_ranks[0][1], strict=True):
            assert_same_bits(one, other)
        for name, first_row, first_column, rows in tables:
            part = wholes[name][first_row:, first_column:][: rows.shape[0], : rows.shape[1]]
            assert PLACEMENTS[name] == "data_parallel" or part.isnan().all()
            part.copy_(rows)
    return [*wholes.values(), *of_ranks[0][1]]


def check_on_ranks(num_ranks: int, device_type: str, backend: str) -> None:
    results = run_on_ranks(num_ranks, on_a_rank, num_ranks, device_type, backend=backend)
    ways = [assembled(of_ranks) for of_ranks in zip(*results, strict=True)]
    eager, static, jagged, not_fused, unclipped, plain, by_hand = ways
    for way in (eager, static, not_fused, by_hand):
        assert_trained(way, 0.25, num_ranks, jagged=False)
    assert_trained(jagged, 0.25, num_ranks, jagged=True)
    for one, other in zip(unclipped, plain, strict=True):
        assert_same_bits(one, other)


def test_sharded_tables_on_two_ranks() -> None:
    check_on_ranks(2, "cpu", "gloo")


@pytest.mark.gpu
def test_sharded_tables_on_all_gpus() -> None:
    check_on_ranks(torch.cuda.device_count(), "cuda", "cpu:gloo,cuda:nccl")


def test_a_negative_bound_is_refused() -> None:
    model = Clicks("cpu")
    with pytest.raises(ValueError, match="max_grad_norm must not be negative, got -1"):
        TrainPipeline(model, None, make_optimizers(model, fused=True), max_grad_norm=-1.0)


class SeparateModules(nn.Module):
    """Four tables of modules of their own, which one pass updates where they are ours."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """``dtype``: of torch's modules; None for ours."""
        super().__init__()
        bags = [torchembed.EmbeddingBag(9, DIM, mode="sum", seed=seed) for seed in range(4)]
        of_torch = [
            nn.EmbeddingBag.from_pretrained(
                bag.weight.detach().to(dtype or torch.float32, copy=True), freeze=False, mode="sum"
            )
            for bag in bags
        ]
        self.bags = nn.ModuleList(bags if dtype is None else of_torch)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = [bag(ids[:, number]) for number, bag in enumerate(self.bags)]
        return torch.tanh(torch.stack(vectors).sum(0)).square().sum()


def test_tables_of_separate_modules() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(9, (8, 4, 2), generator=generator) for _ in range(NUM_STEPS)]

    def formula(dtype: torch.dtype) -> Tensor:
        model = SeparateModules(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for ids in batches:
            optimizer.zero_grad()
            model(ids).backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25) > 0.25
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in model.parameters()])

    for capture in (False, True):
        model = SeparateModules()
        optimizers = [torchembed.optim.SGD(model.parameters(), lr=LR)]
        iterator = iter(batches)
        with (
            taped_captures(),
            TrainPipeline(
                model, None, optimizers, device="cpu", capture=capture, max_grad_norm=0.25
            ) as pipeline,
        ):
            for _ in batches:
                pipeline.progress(iterator)
            assert pipeline.engine.is_captured == capture
        assert_follows(torch.cat([p.detach() for p in model.parameters()]), formula)
