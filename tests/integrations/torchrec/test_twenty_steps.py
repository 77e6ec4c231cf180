"""Twenty steps are TorchRec's, as far as two placements of TorchRec's own tables agree."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench.data import dlrm_dcnv2 as mlperf
from bench.data.dlrm_dcnv2 import DenseSizes
from torchembed import EmbeddingBagConfig, SparseFeatures, optim, shard_embeddings
from torchembed.checkpoints.exports.model_shards import ModelShards
from torchembed.data import Batch, skewed_ids
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

NUM_RANKS, NUM_STEPS, SEED = 2, 20, 5
LR = {"sgd": 0.1, "adagrad": 0.004}
EPS = 1e-8
PLACEMENTS = ("table_wise", "row_wise", "column_wise", "data_parallel")


class Shape(NamedTuple):
    """A model and its batches."""

    num_rows: tuple[int, ...]
    hotness: tuple[int, ...]
    dim: int
    sizes: DenseSizes
    batch_size: int
    """Samples of each rank."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(f"cat_{number}" for number in range(len(self.hotness)))

    def configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=key, num_embeddings=rows, embedding_dim=self.dim, feature_names=(key,)
            )
            for key, rows in zip(self.keys, self.num_rows, strict=True)
        ]

    def batch(self, step: int, rank: int) -> Batch:
        number = step * NUM_RANKS + rank
        ids = [
            skewed_ids(rows, self.batch_size * hotness, seed=feature, first=number << 24)
            for feature, (rows, hotness) in enumerate(zip(self.num_rows, self.hotness, strict=True))
        ]
        sparse = SparseFeatures(
            keys=self.keys,
            values=torch.cat(ids),
            batch_size=self.batch_size,
            hotness=self.hotness,
        )
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(self.batch_size, self.sizes.num_dense, generator=generator)
        noise = torch.randn(self.batch_size, generator=generator)
        first = ids[0].view(self.batch_size, -1)[:, 0]
        return Batch(dense, sparse, (dense.sum(dim=1) + (first % 5 - 2) + noise > 0).float())


class Trained(NamedTuple):
    """A run, float64 and on the CPU."""

    losses: Tensor
    """``[steps, ranks]``."""
    tables: Tensor
    """All elements of all tables."""
    dense: Tensor
    """All elements of the dense parameters."""


class Distances(NamedTuple):
    """Means of the absolute differences of two runs' numbers.

    Not their squares': where gradients nearly cancel, Adagrad's first step makes a rounding error
    large, and a few such elements would stand for all.
    """

    losses: float
    tables: float
    dense: float


def distances(one: Trained, other: Trained) -> Distances:
    return Distances(*(float((a - b).abs().mean()) for a, b in zip(one, other, strict=True)))


def our_optimizers(
    name: str, tables: Sequence[Tensor], dense: Sequence[Tensor]
) -> list[torch.optim.Optimizer]:
    if name == "sgd":
        return [optim.SGD(tables, lr=LR[name]), optim.DenseSGD(dense, lr=LR[name])]
    settings: Any = {"lr": LR[name], "eps": EPS}
    return [optim.Adagrad(tables, **settings), optim.DenseAdagrad(dense, **settings)]


def their_dense_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=LR[name])
    return torch.optim.Adagrad(parameters, lr=LR[name], eps=EPS)


def batches(shape: Shape) -> Iterator[Batch]:
    return (shape.batch(step, dist.get_rank()) for step in range(NUM_STEPS))


def train_ours(shape: Shape, name: str, device: torch.device) -> tuple[Trained, Trained]:
    """The weights before training, and after training with a mixture of placements."""
    model = mlperf.make_model(
        shape.configs(), shape.sizes, table_device="meta", device=device, seed=SEED
    )
    plan: Any = {
        f"embedding_bag_collection.embedding_bags.{key}": PLACEMENTS[number % len(PLACEMENTS)]
        for number, key in enumerate(shape.keys)
    }
    shard_embeddings(model, init_device_mesh(device.type, (NUM_RANKS,)), plan=plan)
    of_tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = mlperf.dense_parameters(model)
    optimizers = our_optimizers(name, of_tables, dense)
    shards = ModelShards(model)
    names = {key: f"embedding_bag_collection.embedding_bags.{key}.weight" for key in shape.keys}

    def weights(losses: Sequence[Tensor]) -> Trained:
        rows = [
            shards.rows_on_first_rank(names[config.name], 0, config.num_embeddings)
            for config in shape.configs()
        ]
        return as_trained(losses, rows, dense)

    before = weights([])
    stream = batches(shape)
    with TrainPipeline(model, F.binary_cross_entropy_with_logits, optimizers) as pipeline:
        losses = [pipeline.progress(stream).loss.clone() for _ in range(NUM_STEPS)]
        if device.type == "cuda":
            assert pipeline.engine.is_captured
    return before, weights(losses)


def train_torchrec(
    shape: Shape, name: str, device: torch.device, sharding: str, dense: Sequence[Tensor]
) -> Trained:
    from torchrec.distributed.planner import ParameterConstraints

    from bench.step.torchrec_model import (
        as_torchrec,
        local_shards,
        make_torchrec_model,
        torchrec_dense,
        torchrec_tables,
    )

    model, optimizer = make_torchrec_model(
        shape.configs(),
        shape.sizes,
        dense,
        device=device,
        seed=SEED,
        optimizer=name,
        fused_params={"learning_rate": LR[name], "eps": EPS},
        dense_optimizer=functools.partial(their_dense_optimizer, name),
        batch_size=shape.batch_size,
        constraints={
            key: ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])
            for key in shape.keys
        },
    )
    losses = []
    for batch in batches(shape):
        optimizer.zero_grad()
        loss, _ = model(as_torchrec(batch.to(device)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    rows = []
    for config, value in torchrec_tables(model, shape.configs()):
        whole = torch.zeros(config.num_embeddings, config.embedding_dim, device=device)
        shards = local_shards(value)
        assert sharding != "row_wise" or len(shards) == 1
        for row, column, part in shards:
            whole[row : row + part.shape[0], column : column + part.shape[1]] = part
        dist.all_reduce(whole)
        rows.append(whole)
    return as_trained(losses, rows, torchrec_dense(model))


def as_trained(
    losses: Sequence[Tensor], rows: Sequence[Tensor | None], dense: Sequence[Tensor]
) -> Trained:
    mine = torch.stack(list(losses)).cpu() if losses else torch.zeros(NUM_STEPS)
    of_ranks = [torch.empty_like(mine) for _ in range(NUM_RANKS)]
    dist.all_gather(of_ranks, mine)
    return Trained(torch.stack(of_ranks, dim=1).double(), _flat(rows), _flat(dense))


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    parts = [tensor.detach().cpu().double().flatten() for tensor in tensors if tensor is not None]
    return torch.cat(parts) if parts else torch.empty(0)


def everything(device_type: str) -> dict[str, dict[str, Distances]]:
    """On a rank: for each optimizer, how far the runs are from each other; rank 0 knows it."""
    rank = dist.get_rank()
    sizes = DenseSizes(13, (64, 32, 16), (64, 32, 1), 3, 16)
    shape = Shape((50, 200, 1000, 30, 7, 400), (1, 3, 2, 10, 1, 5), 16, sizes, 64)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    found = {}
    for name in LR:
        initial = mlperf.make_model(
            shape.configs(), shape.sizes, table_device="meta", device=device, seed=SEED
        )
        dense = [p.detach().clone() for p in mlperf.dense_parameters(initial)]
        before, ours = train_ours(shape, name, device)
        by_table = train_torchrec(shape, name, device, "table_wise", dense)
        by_row = train_torchrec(shape, name, device, "row_wise", dense)
        if rank == 0:
            found[name] = {
                "drift": distances(by_table, by_row),
                "to_table_wise": distances(ours, by_table),
                "to_row_wise": distances(ours, by_row),
                "moved": distances(before, ours),
            }
    return found


def test_twenty_steps_are_torchrecs(answers: list[dict[str, Any]]) -> None:
    for name, runs in answers[0]["twenty_steps"].items():
        drift, moved = runs["drift"], runs["moved"]
        # So small that it would show if training were off by a ten-thousandth.
        assert 3 * drift.tables < 1e-4 * moved.tables, (name, runs)
        assert 3 * drift.dense < 1e-4 * moved.dense, (name, runs)
        for sharding in ("to_table_wise", "to_row_wise"):
            ours = runs[sharding]
            # Most losses are the same float32, so their drift is less than one unit of rounding.
            rounding = torch.finfo(torch.float32).eps
            assert ours.losses <= 3 * drift.losses + rounding, (name, sharding, runs)
            assert ours.tables <= 3 * drift.tables, (name, sharding, runs)
            assert ours.dense <= 3 * drift.dense, (name, sharding, runs)
