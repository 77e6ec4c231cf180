"""Changes by a loop between steps are followed at the next step where all ranks change it, and
else, with a warning, from the next batch on that is read.

Captured steps are replayed from a tape, so that a rank that replays does not see what changed.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from tests.support.tape import taped_captures
from tests.support.tiny_model import step_by_hand
from torchembed.core.ranks import joint_notices
from torchembed.data import Batch
from torchembed.modules import MLP
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

NUM_RANKS, NUM_ROWS = 2, 20
FIRST_CAPTURE, REPLAY = 3, 6
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


class Run(NamedTuple):
    """A training whose ranks ``who`` make a change before step ``at``."""

    change: str
    who: Sequence[int]
    at: int
    are_jagged: bool = False
    """True for bags of varying lengths."""
    takes_up: bool = False
    """True where all ranks call ``take_up_changes`` then."""

    @property
    def is_late(self) -> bool:
        """True if the change counts two steps later."""
        return self.who != ALL and not self.takes_up


ALL, LAST = (0, 1), (1,)
OF_ONE = ("an attribute", "a hyperparameter", "a forward hook")
RUNS = [
    *(Run(change, ALL, at) for change in CHANGES for at in (FIRST_CAPTURE, REPLAY)),
    Run("a layer", ALL, 2 * REPLAY, are_jagged=True),
    Run("a forward hook", ALL, 2 * REPLAY, are_jagged=True),
    *(Run(change, LAST, REPLAY) for change in OF_ONE),
    *(Run(change, LAST, REPLAY, takes_up=True) for change in OF_ONE),
]


SAID = {
    (True, False): "so train steps run eagerly until these are removed: Training.",
    (True, True): "from the next batch on that is read (call take_up_changes() on every rank",
    (False, True): "it has changed since steps were captured; make the change on every rank",
}
"""The warnings of a rank, by whether a hook came, and late."""


class Trained(NamedTuple):
    """A rank's losses and parameters, the calls of hooks, and the kinds of steps."""

    losses: list[float]
    parameters: list[Any]
    num_calls: int
    kinds: list[str]
    texts: list[str]
    """The warnings of the pipeline."""


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
    at = run.at + 2 * (by_hand and run.is_late)
    # A comparison calls hooks once more.
    every = None if run.change.endswith("hook") else 1
    with (
        warnings.catch_warnings(record=True) as caught,
        TrainPipeline(
            model, training.loss, optimizers, device="cpu", capture=True, self_check_every=every
        ) as pipeline,
    ):
        warnings.simplefilter("always")
        for number, batch in enumerate(batches):
            if number == at and rank in run.who:
                CHANGES[run.change](training)
            if by_hand:
                losses.append(step_by_hand(model, training.loss, optimizers, batch).item())
                continue
            if number == at and run.takes_up:
                pipeline.take_up_changes()
            result = pipeline.progress(iterator)
            losses.append(result.loss.item())
            kinds.append(str(result.kind))
    parameters = [parameter.tolist() for parameter in model.parameters()]
    texts = [str(warning.message) for warning in caught]
    return Trained(losses, parameters, training.num_calls, kinds, texts)


def on_a_rank() -> list[tuple[Trained, Trained]]:
    """For each run, the loop by hand and the pipeline."""
    with taped_captures(), mock.patch.object(joint_notices, "PATIENCE_SECONDS", 0.5):
        return [(train(run, by_hand=True), train(run, by_hand=False)) for run in RUNS]


def test_changes_of_all_ranks_are_followed_at_the_next_step_and_those_of_one_said() -> None:
    by_rank = run_on_ranks(NUM_RANKS, on_a_rank, limit_seconds=240.0)
    for run, *of_ranks in zip(RUNS, *by_rank, strict=True):
        for rank, (by_hand, found) in enumerate(of_ranks):
            what = f"{run}, on rank {rank}"
            assert found.losses == by_hand.losses, what
            assert found.parameters == by_hand.parameters, what
            assert found.num_calls == by_hand.num_calls, what
            captured = "padded" if run.are_jagged else "graph"
            assert (found.kinds[run.at] == captured) is run.is_late, what
            is_hook = run.change.endswith("hook")
            says = rank in run.who and (is_hook or run.is_late)
            assert len(found.texts) == says, f"{what}: {found.texts}"
            if says:
                assert SAID[is_hook, run.is_late] in found.texts[0], what
