"""Static steps, whose batches are prepared ahead, train a sharded model as plain steps an unsharded
one; over gloo as they are, over NCCL in CUDA graphs."""

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    Case,
    assert_equal_rows,
    held_rows,
    made_mesh,
    make_model,
    make_optimizer,
)
from tests.support.sharding_matrix import on_two_nodes
from tests.support.steps_on_ranks import (
    BAD_STEP,
    MIXED,
    NO_RANK,
    NUM_STEPS,
    WithLoss,
    static_batch,
    train_plainly,
)
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.data import Batch
from torchembed.modules import MLP
from torchembed.ops.side_by_side import side_by_side
from torchembed.sharding import WireTransport
from torchembed.sharding.transport.collectives import gather_size, recorded_sizes, replayed_sizes
from torchembed.tables import TableGroup
from torchembed.training import TrainPipeline

CASES = [
    Case(placements=dict.fromkeys("abcd", "table_wise"), fixed=True),
    Case(placements=MIXED, fixed=True, optimizer="RowwiseAdagrad", reserved=8),
    Case(placements=MIXED, fixed=True, optimizer="Adam", weighted=True),
    Case(placements=dict.fromkeys("abcd", "row_wise"), fixed=True, dtype=torch.bfloat16),
    Case(placements=MIXED, fixed=True, fused=False, optimizer="SGD"),
]


def train_in_static_steps(runs: list[tuple[Case, int]]) -> list[dict[str, Any]]:
    """On a rank of gloo, in the steps that a GPU would capture: its rows after training, which
    steps were skipped, and whether the last ones took for granted what a graph does."""
    rank, results = dist.get_rank(), []
    for case, bad_rank in runs:
        model = make_model(case, "meta")
        torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
        optimizer, with_loss = make_optimizer(case, model), WithLoss(model)
        optimizers = [] if optimizer is None else [optimizer]
        batches = (static_batch(case, rank, step, bad_rank) for step in range(NUM_STEPS))
        skipped = []
        with TrainPipeline(with_loss, None, optimizers, device="cpu", capture=True) as pipeline:
            for _ in range(NUM_STEPS):
                skipped.append(0)
                try:
                    pipeline.progress(batches)
                except IndexError:
                    skipped[-1] = 1
            captured = pipeline.engine.is_captured
        results.append({"rows": held_rows(model), "skipped": skipped, "captured": captured})
    return results


class WithDense(nn.Module):
    """A model of our layers over two tables, one of them on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [
            torchembed.EmbeddingBagConfig(
                name=name, num_embeddings=20, embedding_dim=4, feature_names=(name,)
            )
            for name in ("f0", "f1")
        ]
        self.tables = torchembed.EmbeddingBagCollection(configs, device="meta")
        self.tables.reserved_columns = 4
        self.dense, self.over = MLP(3, [4]), MLP(12, [8, 1], activation_on_last=False)

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = self.tables(sparse).values()
        return self.over(side_by_side(self.dense(dense), vectors))


def train_dense(kind: str) -> list[Any]:
    """On a rank of gloo: losses, then parameters, of a model with a dense part; by ``"plain"``
    steps of a pipeline, ``"captured"`` ones, or steps ``"by hand"`` with deferred gradients."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = WithDense()
    plan = {"tables.embedding_bags.f0": "row_wise", "tables.embedding_bags.f1": "data_parallel"}
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), plan)
    optimizers = [
        torchembed.optim.Adagrad(model.tables.parameters(), lr=0.125),
        torchembed.optim.DenseAdagrad([*model.dense.parameters(), *model.over.parameters()]),
    ]
    batches = []
    for number in range(7):
        generator = torch.Generator().manual_seed(num_ranks * number + rank)
        ids = torch.randint(20, (4 * 3,), generator=generator)
        sparse = torchembed.SparseFeatures(
            keys=("f0", "f1"), values=ids, batch_size=4, hotness=(1, 2)
        )
        labels = torch.randint(2, (4,), generator=generator).float()
        batches.append(Batch(torch.rand(4, 3, generator=generator), sparse, labels))
    losses = []
    if kind == "by hand":
        loss_fn = nn.functional.binary_cross_entropy_with_logits
        for batch in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_fn(model(batch.dense, batch.sparse).squeeze(1), batch.labels)
            with DeferredWeightGradients():
                loss.backward()
                with pytest.raises(RuntimeError, match="gradients of table f1, which every rank"):
                    optimizers[0].step()
                optimizers[0].step_early()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
    else:
        iterator, loss_fn = iter(batches), nn.functional.binary_cross_entropy_with_logits
        captures = kind == "captured"
        with TrainPipeline(model, loss_fn, optimizers, device="cpu", capture=captures) as pipeline:
            losses = [pipeline.progress(iterator).loss.item() for _ in batches]
            assert pipeline.engine.is_captured == captures
    return [losses, *(parameter.tolist() for parameter in model.parameters())]


def sizes_of_one_rank_alone() -> list[list[int]]:
    """The error on the first rank for sizes, and then again while the other one waits for it."""
    rank = dist.get_rank()
    with recorded_sizes() as noted:
        found = [gather_size(size + rank, dist.group.WORLD) for size in (3, 5)]
    if rank == 0:
        with replayed_sizes(noted):
            found += [gather_size(size, dist.group.WORLD) for size in (3, 5)]
            with pytest.raises(RuntimeError, match="as before, got 5, where none is left"):
                gather_size(5, dist.group.WORLD)
        with replayed_sizes(noted), pytest.raises(RuntimeError, match="got 5, where 3 comes next"):
            gather_size(5, dist.group.WORLD)
    return [*found, *(gather_size(size, dist.group.WORLD) for size in (3, 5))]


def left_over() -> list[str]:
    """The models that this process still holds."""
    gc.collect()
    kinds = [type(found) for found in gc.get_objects()]
    return [kind.__name__ for kind in kinds if issubclass(kind, (nn.Parameter, TableGroup))]


def on_a_rank(runs: list[tuple[Case, int]]) -> tuple[Any, ...]:
    """All that gloo's ranks do, in one launch."""
    of_dense = [train_dense(kind) for kind in ("plain", "captured", "by hand")]
    return train_in_static_steps(runs), of_dense, sizes_of_one_rank_alone(), left_over()


def train_in_graphs(
    cases: list[Case], bad_rank: int, looks_up: Sequence[str] = ("batch",)
) -> list[dict[str, Any]]:
    """On a rank of NCCL: its rows after training, what was raised, and whether graphs ran."""
    rank, results = dist.get_rank(), []
    for case in cases:
        model = make_model(case, "meta")
        plan, mesh = case.plan(dist.get_world_size()), case.mesh("cuda")
        torchembed.shard_embeddings(model, mesh, plan, transport=case.transport)
        optimizer, with_loss = make_optimizer(case, model), WithLoss(model, looks_up)
        optimizers = [] if optimizer is None else [optimizer]
        pipeline = TrainPipeline(with_loss, None, optimizers, device=f"cuda:{rank}")
        batches = (static_batch(case, rank, step, bad_rank) for step in range(NUM_STEPS))
        errors = []
        # Graphs are destroyed before the process group, which would wait for them.
        with pipeline:
            while True:
                try:
                    pipeline.progress(batches)
                except IndexError as error:
                    errors.append(str(error))
                except StopIteration:
                    break
            captured = pipeline.engine.is_captured
        results.append({"rows": held_rows(model), "errors": errors, "captured": captured})
    del model, with_loss, optimizer, optimizers, pipeline
    assert left_over() == []
    return results


def test_static_steps_equal_plain_ones() -> None:
    runs = [*((case, NO_RANK) for case in CASES), *((case, 1) for case in CASES[1:3])]
    results, of_dense, sizes, left = zip(*run_on_ranks(2, on_a_rank, runs), strict=True)
    assert left == ([], []), "models outlive their last reference"
    assert sizes == ([[3, 4], [5, 6]] * 2 + [[3, 3], [5, 5]], [[3, 4], [5, 6], [3, 3], [5, 5]])
    for plain, captured, by_hand in of_dense:
        assert captured == plain
        assert by_hand == plain
    for number, (case, bad_rank) in enumerate(runs):
        of_ranks = [rank_results[number] for rank_results in results]
        expected = train_plainly(case, 2, bad_rank)
        assert_equal_rows([result["rows"] for result in of_ranks], expected, str(case))
        skipped = [int(step == BAD_STEP and bad_rank == 1) for step in range(NUM_STEPS)]
        assert [result["skipped"] for result in of_ranks] == [skipped, skipped]
        assert all(result["captured"] for result in of_ranks)


def test_static_steps_on_two_nodes_equal_plain_ones() -> None:
    runs = [(case, bad_rank) for case in on_two_nodes(CASES[1:3]) for bad_rank in (NO_RANK, 1)]
    results = run_on_ranks(4, train_in_static_steps, runs)
    for number, (case, bad_rank) in enumerate(runs):
        of_ranks = [rank_results[number] for rank_results in results]
        expected = train_plainly(case, 4, bad_rank)
        assert_equal_rows([result["rows"] for result in of_ranks], expected, str(case))
        skipped = [int(step == BAD_STEP and bad_rank == 1) for step in range(NUM_STEPS)]
        assert [result["skipped"] for result in of_ranks] == [skipped] * 4
        assert all(result["captured"] for result in of_ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", WireTransport)
def test_graphs_equal_plain_steps_on_all_gpus(transport: WireTransport) -> None:
    num_ranks = torch.cuda.device_count()
    cases = [dataclasses.replace(case, transport=transport) for case in CASES]
    if transport is WireTransport.COLLECTIVE and num_ranks in (4, 8):
        cases += on_two_nodes(CASES)
    for bad_rank in (num_ranks - 1, NO_RANK):
        results = run_on_ranks(
            num_ranks, train_in_graphs, cases, bad_rank, backend="cpu:gloo,cuda:nccl"
        )
        for number, case in enumerate(cases):
            of_ranks = [rank_results[number] for rank_results in results]
            expected = train_plainly(case, num_ranks, bad_rank, "cuda")
            assert_equal_rows([result["rows"] for result in of_ranks], expected, str(case))
            assert all(result["captured"] for result in of_ranks), case
            for rank, result in enumerate(of_ranks):
                errors = result["errors"]
                assert len(errors) == (bad_rank < num_ranks), errors
                if errors:
                    mine = f"value {2**20};" if rank == bad_rank else "another rank's batch"
                    assert mine in errors[0]


@pytest.mark.gpu
@pytest.mark.parametrize("looks_up", [("derived", "batch"), ("derived",)])
def test_ids_of_forward_and_those_looked_up_ahead_on_all_gpus(looks_up: Sequence[str]) -> None:
    cases = [dataclasses.replace(CASES[1], transport=transport) for transport in WireTransport]
    num_ranks = torch.cuda.device_count()
    for plain, pushed in run_on_ranks(
        num_ranks, train_in_graphs, cases, NO_RANK, looks_up, backend="cpu:gloo,cuda:nccl"
    ):
        assert plain["captured"]
        assert pushed["captured"]
        assert plain["rows"].keys() == pushed["rows"].keys()
        for name, (_, rows, states) in plain["rows"].items():
            _, pushed_rows, pushed_states = pushed["rows"][name]
            for one, other in zip((rows, *states), (pushed_rows, *pushed_states), strict=True):
                np.testing.assert_array_equal(one, other)
