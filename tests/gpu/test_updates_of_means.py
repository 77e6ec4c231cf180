"""Dense weights that a captured step of several ranks updates while means of others are on their
way."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.values import normal
from torchembed.data import Batch
from torchembed.modules import MLP, LowRankCross
from torchembed.optim import DenseAdam
from torchembed.sharding import WireTransport
from torchembed.sharding.wire import BUCKET_BYTES
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

pytestmark = pytest.mark.gpu

WIDTH, NUM_ROWS, BATCH_SIZE, NUM_STEPS = 1024, 50, 96, 8


class Model(nn.Module):
    """A model of several buckets, some layers torch's own; the gradient of one layer's weight is
    computed from another parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [
            torchembed.EmbeddingBagConfig(
                name=name, num_embeddings=NUM_ROWS, embedding_dim=WIDTH, feature_names=(name,)
            )
            for name in ("a", "b")
        ]
        self.tables = torchembed.EmbeddingBagCollection(configs, device="meta")
        self.first = MLP(4, [WIDTH, WIDTH, WIDTH])
        self.between = nn.Linear(WIDTH, WIDTH)
        self.learned = nn.Parameter(torch.randn(BATCH_SIZE, WIDTH) / 10)
        self.of_learned = MLP(WIDTH, [WIDTH])
        self.cross = LowRankCross(WIDTH, 2, 512)
        self.last = MLP(WIDTH, [WIDTH, 1], activation_on_last=False)

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        a, b = self.tables(sparse).values().split(WIDTH, dim=1)
        b = b + self.of_learned(self.learned)
        return self.last(self.cross(self.between(self.first(dense) + a) + b))


def batches() -> list[Batch]:
    found = []
    for number in range(NUM_STEPS):
        seed = number * dist.get_world_size() + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(NUM_ROWS, (3 * BATCH_SIZE,), generator=generator)
        sparse = torchembed.SparseFeatures(
            keys=("a", "b"), values=ids, batch_size=BATCH_SIZE, hotness=(2, 1)
        )
        labels = (normal(BATCH_SIZE, seed=seed) > 0).float()
        found.append(Batch(normal(BATCH_SIZE, 4, seed=100 + seed), sparse, labels))
    return found


def train(transport: WireTransport, dtype: torch.dtype | None, capture: bool) -> list[Any]:
    """On a rank: losses, dense parameters and their state, each as the sum of its bits."""
    device = torch.device("cuda", dist.get_rank())
    model = Model()
    for module in (model.first, model.between, model.of_learned, model.cross, model.last):
        module.to(device)
    model.learned.data = model.learned.data.to(device)
    plan = {"tables.embedding_bags.a": "row_wise", "tables.embedding_bags.b": "data_parallel"}
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torchembed.shard_embeddings(model, mesh, plan, transport=transport)
    dense = [p for p in model.parameters() if table_of(p) is None]
    assert 2 * sum(p.numel() for p in dense) > 3 * BUCKET_BYTES
    tables = [p for p in model.parameters() if table_of(p) is not None]
    optimizers = [
        torchembed.optim.Adagrad(tables, lr=0.1),
        DenseAdam(dense, lr=0.01, dtype=dtype),
    ]
    pipeline = TrainPipeline(
        model,
        F.binary_cross_entropy_with_logits,
        optimizers,
        device=device,
        autocast=torch.bfloat16,
        capture=capture,
    )
    iterator = iter(batches())
    with pipeline:
        losses = [pipeline.progress(iterator).loss.clone() for _ in range(NUM_STEPS)]
        assert pipeline.engine.is_captured == capture
    found = [torch.stack(losses), *(p.detach() for p in dense)]
    found += [t for entry in optimizers[1].state.values() for t in entry.values()]
    kinds = {2: torch.int16, 4: torch.int32}
    return [int(t.view(kinds[t.element_size()]).long().sum()) for t in found]


def on_a_rank() -> list[list[Any]]:
    return [
        train(transport, dtype, capture)
        for transport in WireTransport
        for dtype in (torch.bfloat16, None)
        for capture in (False, True)
    ]


def test_they_change_nothing() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs, and 1 is here")
    for found in run_on_ranks(2, on_a_rank, backend="cpu:gloo,cuda:nccl"):
        for plain, captured in zip(found[::2], found[1::2], strict=True):
            assert captured == plain
