"""Dense weights that a captured step updates while backward goes on."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.data import Batch
from torchembed.modules import MLP, LowRankCross
from torchembed.optim import DenseAdam
from torchembed.step.dense_updates import EarlyUpdates
from torchembed.step.engines.static_engine import StaticEngine
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

pytestmark = pytest.mark.gpu

WIDTH, NUM_ROWS, BATCH_SIZE = 256, 50, 96


class Model(nn.Module):
    """Wide enough for early updates of five weights: two of ``first``, two of ``cross``, and that
    of ``last``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        config = torchembed.EmbeddingBagConfig(
            name="t", num_embeddings=NUM_ROWS, embedding_dim=WIDTH, feature_names=("f",)
        )
        self.tables = torchembed.EmbeddingBagCollection([config])
        self.first = MLP(4, [WIDTH, WIDTH, WIDTH])
        self.cross = LowRankCross(WIDTH, 1, WIDTH)
        self.last = MLP(WIDTH, [WIDTH, 1], activation_on_last=False)

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        x = self.first(dense) + self.tables(sparse).values()
        if self.kind == "read later":
            x = F.linear(x, self.last[0].weight.detach())
        x = self.cross(x)
        if self.kind == "shared":
            x = self.last[0](x)
        return self.last(x)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for seed in range(count):
        ids = torch.randint(NUM_ROWS, (2 * BATCH_SIZE,), generator=generator)
        sparse = torchembed.SparseFeatures(
            keys=("f",), values=ids, batch_size=BATCH_SIZE, hotness=(2,)
        )
        labels = (normal(BATCH_SIZE, seed=seed) > 0).float()
        found.append(Batch(normal(BATCH_SIZE, 4, seed=100 + seed), sparse, labels))
    return found


def trained(kind: str, capture: bool, device: torch.device) -> tuple[list[Tensor], TrainPipeline]:
    model = Model(kind).to(device)
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    optimizers = [
        torchembed.optim.Adagrad(tables, lr=0.1),
        DenseAdam(dense, lr=0.01, dtype=torch.bfloat16),
    ]
    pipeline = TrainPipeline(
        model,
        F.binary_cross_entropy_with_logits,
        optimizers,
        autocast=torch.bfloat16,
        capture=capture,
    )
    iterator = iter(batches(12))
    losses = [pipeline.progress(iterator).loss.clone() for _ in range(12)]
    state = [p.detach() for p in model.parameters()]
    state += [t for entry in optimizers[1].state.values() for t in entry.values()]
    return [torch.stack(losses), *state], pipeline


@pytest.mark.parametrize(("kind", "num_early"), [("plain", 5), ("read later", 4), ("shared", 0)])
def test_they_change_nothing(kind: str, num_early: int, device: torch.device) -> None:
    expected, _ = trained(kind, False, device)
    found, pipeline = trained(kind, True, device)
    engine = pipeline.engine
    assert isinstance(engine, StaticEngine)
    assert engine.is_captured
    assert engine.step is not None
    updates = engine.step.dense_updates
    assert isinstance(updates, EarlyUpdates)
    assert updates.num_early == num_early
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)
    pipeline.close()


def test_hooks_come_after_all_of_an_eager_step(device: torch.device) -> None:
    sums = {}
    for capture in (False, True):
        model = Model("plain").to(device)
        dense = [p for p in model.parameters() if table_of(p) is None]
        tables = [p for p in model.parameters() if table_of(p) is not None]
        optimizer = DenseAdam(dense, lr=0.01)
        found = torch.zeros((), device=device)

        def add_up(*_: object, dense: list[Tensor] = dense, found: Tensor = found) -> None:
            found += torch.stack([p.detach().double().sum() for p in dense]).sum().float()

        optimizer.register_step_post_hook(add_up)
        optimizers = [torchembed.optim.Adagrad(tables, lr=0.1), optimizer]
        loss_fn = F.binary_cross_entropy_with_logits
        iterator = iter(batches(12))
        says = pytest.warns(UserWarning, match="no CUDA graph can call hooks")
        with (
            says if capture else contextlib.nullcontext(),
            TrainPipeline(model, loss_fn, optimizers, capture=capture) as pipeline,
        ):
            for _ in range(12):
                pipeline.progress(iterator)
        sums[capture] = found
    assert_same_bits(sums[True], sums[False])
