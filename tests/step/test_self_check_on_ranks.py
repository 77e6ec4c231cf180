"""Captured steps of several ranks are compared with the model, over gloo by tapes in place of
graphs."""

import dataclasses
import itertools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from tests.support.tape import taped_captures
from tests.support.tiny_model import KEYS, TinyModel, fixed_batch
from tests.support.tiny_training import LOSS
from torchembed.training import TrainPipeline

NUM_STEPS = 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model whose forward may count its calls, which no graph does."""

    own_ids: bool = False
    """Forward looks up ids that it computes, and the ranks exchange them in it."""
    ddp: Mapping[str, Any] | None = None
    """Settings of the ``DistributedDataParallel`` around the model."""
    counts_on: tuple[int, ...] = ()
    """The ranks whose forward counts."""


CASES = [
    Case(own_ids=True),
    Case(ddp={}),
    Case(own_ids=True, ddp={"gradient_as_bucket_view": True}),
]


class Model(TinyModel):
    """Has batch norm, whose statistics ``DistributedDataParallel`` broadcasts."""

    def __init__(self, case: Case) -> None:
        super().__init__(is_deep=True, device="meta")
        self._own_ids = case.own_ids
        counts = dist.get_rank() in case.counts_on
        self._factors = itertools.count(1.0) if counts else itertools.repeat(1.0)

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        if self._own_ids:
            sparse = dataclasses.replace(sparse, values=sparse.values // 2)
        vectors = self.tables(sparse).values() * next(self._factors)
        return self.dense(torch.cat([dense, vectors], dim=1))


class Trained(NamedTuple):
    is_captured: bool
    said: list[str]
    numbers: list[object]
    """The losses, then what the model holds."""


def train(case: Case, *, capture: bool) -> Trained:
    """On a rank of gloo."""
    model: nn.Module = Model(case)
    plan = dict.fromkeys((f"tables.embedding_bags.{key}" for key in KEYS), "row_wise")
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), plan)
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.125)
    if case.ddp is not None:
        model = DistributedDataParallel(model, **case.ddp)
    batches = iter([fixed_batch(8, 2 * step + dist.get_rank()) for step in range(NUM_STEPS)])
    with (
        taped_captures(),
        warnings.catch_warnings(record=True) as caught,
        TrainPipeline(
            model, LOSS, optimizer, device="cpu", capture=capture, self_check_every=2
        ) as pipeline,
    ):
        warnings.simplefilter("always")
        numbers: list[object] = [pipeline.progress(batches).loss.item() for _ in range(NUM_STEPS)]
        is_captured = pipeline.engine.is_captured
    numbers += [tensor.detach().tolist() for tensor in (*model.parameters(), *model.buffers())]
    return Trained(is_captured, [str(warning.message) for warning in caught], numbers)


def train_all() -> list[list[Trained]]:
    """For each case: what equals the model, captured and not, and what differs on some ranks."""
    found = []
    for case in CASES:
        of_both = dataclasses.replace(case, counts_on=(0, 1))
        of_one = dataclasses.replace(case, counts_on=(1,))
        changed = [train(other, capture=True) for other in (of_both, of_one)]
        found.append([train(case, capture=False), train(case, capture=True), *changed])
    return found


def test_captured_steps_of_ranks_are_compared_with_the_model() -> None:
    for rank, of_rank in enumerate(run_on_ranks(2, train_all)):
        for case, (plain, captured, of_both, of_one) in zip(CASES, of_rank, strict=True):
            assert captured == plain._replace(is_captured=True), case
            assert plain.said == [], case
            for changed in (of_both, of_one):
                assert not changed.is_captured, case
                (only,) = changed.said
                assert "the graph of the train step computes other numbers than the mod" in only
            assert "dense.0 (Linear) has the norm" in of_both.said[0], case
            # The mean of the gradients is of all ranks.
            what = "the gradient of" if rank == 0 else "dense.0 (Linear) has the norm"
            assert what in of_one.said[0], case
