"""What a loop changes between steps, on all ranks or on one alone, is followed at the next step.

Ranks agree on each batch when it is read, two batches ahead. Captured steps are replayed from a
tape, so that a rank that replays does not see what changed.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from tests.support.tape import taped_captures
from tests.support.tiny_model import step_by_hand
from torchembed.data import Batch
from torchembed.modules import MLP
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

NUM_RANKS, NUM_ROWS = 2, 20
FIRST_CAPTURE, SECOND_CAPTURE, REPLAY = 3, 4, 6
"""Steps before which something is changed."""
PLACEMENTS = ("row_wise", "data_parallel", "column_wise", "table_wise")


class Model(nn.Module):
    """Tables of each placement, our dense layers, which defer gradients of weights, and torch's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [
            torchembed.EmbeddingBagConfig(
                name=name, num_embeddings=NUM_ROWS, embedding_dim=4, feature_names=(name,)
            )
            for name in PLACEMENTS
        ]
        self.tables = torchembed.EmbeddingBagCollection(configs, device="meta")
        self.over = MLP(4 * len(PLACEMENTS) + 2, [8, 8])
        self.last, self.dropout = nn.Linear(8, 1), nn.Dropout(0.25)
        self.factor = 1.0

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = self.tables(sparse).values()
        return self.last(self.dropout(self.over(torch.cat([dense, vectors], dim=1)))) * self.factor


class Training:
    """A model, sharded over all ranks, with its optimizers and what a loop may change of them."""

    def __init__(self) -> None:
        self.model, self.weight, self.num_calls = Model(), 0.5, 0
        plan = {f"tables.embedding_bags.{name}": name for name in PLACEMENTS}
        torchembed.shard_embeddings(self.model, made_mesh("cpu", 1), plan)
        parameters = list(self.model.parameters())
        # Its updates sum over the ranks that hold columns of a row.
        of_tables = torchembed.optim.RowwiseAdagrad(
            [{"params": [p for p in parameters if table_of(p) is not None]}], lr=0.125
        )
        dense = torchembed.optim.DenseAdagrad([p for p in parameters if table_of(p) is None])
        self.optimizers: list[torch.optim.Optimizer] = [of_tables, dense]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        weight = self.weight
        loss = nn.functional.binary_cross_entropy_with_logits(logits.reshape(-1), labels)
        return loss + weight * logits.square().mean()

    def note(self, *_: object) -> None:
        self.num_calls += 1

    def halve(self, gradient: Tensor) -> Tensor:
        self.num_calls += 1
        return gradient / 2

    def clip_rows(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        assert isinstance(optimizer, torchembed.optim.FusedOptimizer)
        self.num_calls += 1
        for recorded in optimizer.recorded():
            recorded.gradients[0].clamp_(-0.01, 0.01)


def change_attribute(training: Training) -> None:
    training.model.factor = 0.5


def change_dropout(training: Training) -> None:
    training.model.dropout.p = 0.5


def replace_layer(training: Training) -> None:
    training.model.dropout = nn.Sequential(nn.GELU(), nn.LayerNorm(8))  # type: ignore[assignment]


def change_loss(training: Training) -> None:
    training.weight = 0.25


def change_hyperparameter(training: Training) -> None:
    for optimizer in training.optimizers:
        optimizer.param_groups[0]["eps"] = 0.125


def hook_forward(training: Training) -> None:
    training.model.over.register_forward_hook(training.note)


def hook_gradient(training: Training) -> None:
    training.model.over[0].weight.register_hook(training.halve)


def hook_step(training: Training) -> None:
    training.optimizers[0].register_step_pre_hook(training.clip_rows)


CHANGES: dict[str, Callable[[Training], None]] = {
    "an attribute": change_attribute,
    "a dropout's rate": change_dropout,
    "a layer": replace_layer,
    "the loss's weight": change_loss,
    "a hyperparameter": change_hyperparameter,
    "a forward hook": hook_forward,
    "a gradient hook": hook_gradient,
    "a step pre-hook": hook_step,
}
SAID = {
    "an attribute": "factor of model Model: it has changed",
    "a dropout's rate": "p of module dropout: it has changed",
    "a layer": "dropout of model Model: it has changed",
    "the loss's weight": "weight of",
    "a hyperparameter": "eps of parameter group 0 of optimizer 0, RowwiseAdagrad: it has changed",
    "a forward hook": "Training.note (forward hook of module over)",
    "a gradient hook": "Training.halve (gradient hook of parameter over.0.weight)",
    "a step pre-hook": "Training.clip_rows (step pre-hook of optimizer RowwiseAdagrad)",
}
"""What the kind of steps names that call the model for a change."""


class Run(NamedTuple):
    """A training whose ranks ``who`` make a change before step ``at``."""

    change: str
    who: Sequence[int]
    at: int
    are_jagged: bool = False
    """True for bags of varying lengths."""


ALL, LAST = (0, 1), (1,)
RUNS = [
    *(Run(change, ALL, REPLAY) for change in CHANGES),
    *itertools.starmap(
        Run, itertools.product(CHANGES, [LAST], (FIRST_CAPTURE, SECOND_CAPTURE, REPLAY))
    ),
    Run("an attribute", LAST, 2 * REPLAY, are_jagged=True),
    Run("a step pre-hook", LAST, 2 * REPLAY, are_jagged=True),
]


class Trained(NamedTuple):
    """A rank's losses and parameters, the calls of hooks, and the kinds of steps."""

    losses: list[float]
    parameters: list[Any]
    num_calls: int
    kinds: list[str]


def batches_of(rank: int, run: Run) -> list[Batch]:
    found = []
    for number in range(run.at + 5):
        generator = torch.Generator().manual_seed(NUM_RANKS * number + rank)
        lengths = torch.randint(3, (4 * len(PLACEMENTS),), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        hotness = (1, 2, 3, 1)
        num_ids = int(offsets[-1]) if run.are_jagged else 4 * sum(hotness)
        sparse = torchembed.SparseFeatures(
            keys=PLACEMENTS,
            values=torch.randint(NUM_ROWS, (num_ids,), generator=generator),
            batch_size=4,
            offsets=offsets if run.are_jagged else None,
            hotness=None if run.are_jagged else hotness,
        )
        labels = torch.randint(2, (4,), generator=generator).float()
        found.append(Batch(torch.rand(4, 2, generator=generator), sparse, labels))
    return found


def train(run: Run, *, by_hand: bool) -> Trained:
    rank, training = dist.get_rank(), Training()
    torch.manual_seed(rank)
    losses, kinds, batches = [], [], batches_of(rank, run)
    iterator, model, optimizers = iter(batches), training.model, training.optimizers
    # A comparison calls hooks once more.
    every = None if run.change.endswith("hook") else 1
    with TrainPipeline(
        model, training.loss, optimizers, device="cpu", capture=True, self_check_every=every
    ) as pipeline:
        for number, batch in enumerate(batches):
            if number == run.at and rank in run.who:
                CHANGES[run.change](training)
            if by_hand:
                losses.append(step_by_hand(model, training.loss, optimizers, batch).item())
                continue
            result = pipeline.progress(iterator)
            losses.append(result.loss.item())
            kinds.append(str(result.kind))
    parameters = [parameter.tolist() for parameter in model.parameters()]
    return Trained(losses, parameters, training.num_calls, kinds)


def on_a_rank() -> list[tuple[Trained, Trained]]:
    """For each run, the loop by hand and the pipeline."""
    with taped_captures():
        return [(train(run, by_hand=True), train(run, by_hand=False)) for run in RUNS]


@pytest.mark.filterwarnings("ignore:no CUDA graph can call hooks")
def test_changes_of_all_ranks_or_one_are_followed_at_the_next_step() -> None:
    by_rank = run_on_ranks(NUM_RANKS, on_a_rank, limit_seconds=240.0)
    for run, *of_ranks in zip(RUNS, *by_rank, strict=True):
        for rank, (by_hand, found) in enumerate(of_ranks):
            what = f"{run}, on rank {rank}"
            assert found.losses == by_hand.losses, what
            assert found.parameters == by_hand.parameters, what
            assert found.num_calls == by_hand.num_calls, what
        if run.who == LAST and run.at >= REPLAY:
            captured = "padded" if run.are_jagged else "graph"
            replayed, called = (found.kinds[run.at : run.at + 2] for _, found in of_ranks)
            assert replayed == [captured] * 2, f"{run}: {replayed}"
            assert all(SAID[run.change] in kind for kind in called), f"{run}: {called}"
