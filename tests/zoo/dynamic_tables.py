"""Models over dynamic tables, whose ids are any 64-bit integers that come and go.

``DYNAMIC`` has collections, which ranks share too; ``DYNAMIC_MODULES`` modules of one table.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.zoo.batches import bags_between_offsets, histories, jagged_sessions, keys
from tests.zoo.entries import Case, Family, adagrad, parts, placed
from tests.zoo.histories_in_tables import ModulesOfHistory, SumsOfSessions
from tests.zoo.ranker import Ranker, with_adam
from tests.zoo.sizes import Sizes
from torchembed import (
    LFU,
    CountMinSketch,
    DecayingLFU,
    Dynamic,
    EpochLFU,
    MinimumCount,
    Probability,
    SparseFeatures,
)
from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.data import Batch

DYNAMIC = Family("dynamic")
DYNAMIC_MODULES = Family("dynamic modules")


def capacity(sizes: Sizes) -> int:
    """Rows of a table: few enough for batches to evict."""
    return 3 * sizes.batch_size


def hashes(ids: Tensor, step: int, sizes: Sizes) -> Tensor:
    """``ids`` in ``[0, num_rows)`` as numbers among all 64-bit ones. Some come often; which ones
    do wanders from step to step."""
    places = (ids.double() / sizes.num_rows).square() * (6 * sizes.batch_size)
    return (places.long() + step * (sizes.batch_size // 2)) * signed64(GOLDEN)


def _clicks(sizes: Sizes, count: int, *, is_jagged: bool, is_weighted: bool = False) -> list[Batch]:
    found = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        hotness = tuple(1 + number % 3 for number in range(sizes.num_features))
        lengths = torch.tensor(hotness).repeat_interleave(sizes.batch_size)
        if is_jagged:
            lengths = torch.randint(4, lengths.shape, generator=generator)
        num_ids = int(lengths.sum())
        bags: dict[str, Any] = {"hotness": hotness}
        if is_jagged:
            bags = {"offsets": F.pad(lengths.cumsum(0), (1, 0))}
        if is_weighted:
            bags["weights"] = torch.rand(num_ids, generator=generator)
        ids = torch.randint(sizes.num_rows, (num_ids,), generator=generator)
        # Those of the last feature are rows of a static table.
        is_static = torch.arange(len(lengths)) >= len(lengths) - sizes.batch_size
        values = torch.where(is_static.repeat_interleave(lengths), ids, hashes(ids, step, sizes))
        sparse = SparseFeatures(
            keys=keys(sizes), values=values, batch_size=sizes.batch_size, **bags
        )
        dense = torch.randn(sizes.batch_size, sizes.num_dense, generator=generator)
        labels = torch.randint(2, (sizes.batch_size,), generator=generator).float()
        found.append(Batch(dense, sparse, labels).to(sizes.device))
    return found


def hashed_bags(sizes: Sizes, count: int) -> list[Batch]:
    """Clicks with one, two or three ids of each feature; all are hashes but those of the last."""
    return _clicks(sizes, count, is_jagged=False)


def hashed_jagged_bags(sizes: Sizes, count: int) -> list[Batch]:
    """Clicks with up to three such ids of each feature."""
    return _clicks(sizes, count, is_jagged=True)


def hashed_weighted_bags(sizes: Sizes, count: int) -> list[Batch]:
    """Clicks with such ids and a weight of each."""
    return _clicks(sizes, count, is_jagged=False, is_weighted=True)


def hashed_sessions(sizes: Sizes, count: int) -> list[dict[str, Any]]:
    """Histories, targets and categories of any length, by hashes."""
    found: list[dict[str, Any]] = []
    for step, session in enumerate(jagged_sessions(sizes, count)):
        features = session["features"]
        assert isinstance(features, SparseFeatures)
        values = hashes(features.values, step, sizes)
        found.append({**session, "features": dataclasses.replace(features, values=values)})
    return found


def hashed(
    sizes: Sizes, dynamic: Dynamic, *, pooling: str = "sum", is_weighted: bool = False
) -> Ranker:
    """Layers over pooled vectors of dynamic tables, one of which two features share, and of a
    static one."""
    *names, last = keys(sizes)
    features = [tuple(names[:2]), *((name,) for name in names[2:]), (last,)]
    collection = torchembed.EmbeddingBagCollection(
        [
            torchembed.EmbeddingBagConfig(
                name=of[0],
                num_embeddings=sizes.num_rows if of == (last,) else capacity(sizes),
                embedding_dim=sizes.dim,
                feature_names=of,
                pooling=pooling,  # type: ignore[arg-type]
                dynamic=None if of == (last,) else dynamic,
            )
            for of in features
        ],
        is_weighted=is_weighted,
        device=sizes.device,
    )
    return Ranker(sizes, collection)


POLICIES = {
    "hashes, LRU": Dynamic(),
    "hashes, LFU": Dynamic(eviction=LFU()),
    "hashes, decaying LFU": Dynamic(eviction=DecayingLFU(rate=0.5, steps_per_decay=4)),
    "hashes, epochs": Dynamic(eviction=EpochLFU(steps_per_epoch=3)),
    "hashes, time to live": Dynamic(ttl_steps=3, sweep_steps=2),
    "hashes, minimum count": Dynamic(eviction=LFU(), admission=MinimumCount(2)),
    "hashes, sketch": Dynamic(admission=CountMinSketch(threshold=2, width=4096)),
    "hashes, probability": Dynamic(admission=Probability(threshold=2)),
}


def _of_policy(dynamic: Dynamic) -> Any:
    def make(sizes: Sizes) -> Case:
        return with_adam(hashed(sizes, dynamic))

    return make


for _name, _dynamic in POLICIES.items():
    DYNAMIC.habit(_name, hashed_bags)(_of_policy(_dynamic))


@DYNAMIC.habit("hashes between offsets", hashed_jagged_bags)
def hashes_between_offsets(sizes: Sizes) -> Case:
    """Bags of any length."""
    return with_adam(hashed(sizes, Dynamic(deletion_log=100)))


@DYNAMIC.habit("means of hashes", hashed_jagged_bags)
def means_of_hashes(sizes: Sizes) -> Case:
    """Ids without a row count in the mean, by zeros."""
    return with_adam(hashed(sizes, Dynamic(eviction=LFU()), pooling="mean"))


@DYNAMIC.habit("weighted hashes", hashed_weighted_bags)
def weighted_hashes(sizes: Sizes) -> Case:
    """Sums by weights of ids."""
    return with_adam(hashed(sizes, Dynamic(), is_weighted=True))


@DYNAMIC.habit("hashes by torch's optimizer", hashed_bags)
def hashes_by_torchs_optimizer(sizes: Sizes) -> Case:
    """Dense gradients; no step gives a row back, so that ids of a full table are refused."""
    model = placed(hashed(sizes, Dynamic(admission=Probability(threshold=2))))
    return Case(model=model, optimizers=[torch.optim.Adagrad(model.parameters(), lr=0.05)])


@DYNAMIC.habit("hashes evaluated between steps", hashed_bags)
def hashes_evaluated_between_steps(sizes: Sizes) -> Case:
    """Evaluation of ids that training has not met, which inserts none."""
    case = with_adam(hashed(sizes, Dynamic(ttl_steps=4)))
    unknown = hashed_bags(sizes, 40)[-1]
    assert unknown.dense is not None
    losses: list[Tensor] = []

    def evaluate(step: int, _: Tensor) -> None:
        if step % 3 == 2:
            case.model.eval()
            with torch.no_grad():
                losses.append(case.model(unknown.dense, unknown.sparse).sum())
            case.model.train()

    case.after_step, case.kept = evaluate, lambda: {"evaluated": torch.stack(losses)}
    return case


@DYNAMIC.model("history of hashes", hashed_sessions, computes_loss=True)
class HistoryOfHashes(SumsOfSessions):
    """Vectors of histories of any length."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, num_embeddings=capacity(sizes), dynamic=Dynamic(eviction=LFU()))


@DYNAMIC_MODULES.model("padded history of hashes", histories, computes_loss=True)
class PaddedHistoryOfHashes(ModulesOfHistory):
    """Modules of two policies."""

    def __init__(self, sizes: Sizes) -> None:
        lru, epochs = Dynamic(), Dynamic(eviction=EpochLFU(steps_per_epoch=4))
        of_modules = ({"dynamic": policy} for policy in (epochs, lru, lru))
        super().__init__(sizes, capacity(sizes), *of_modules)


@DYNAMIC_MODULES.habit("a dynamic bag between offsets", bags_between_offsets)
def dynamic_bag_between_offsets(sizes: Sizes) -> Case:
    """Weighted sums of ids whose number varies."""
    return Case(model=(model := WeightedBag(sizes)), optimizers=[adagrad(model)], loss_fn=None)


class WeightedBag(nn.Module):
    """A logit from a weighted sum."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rows, dynamic = capacity(sizes), Dynamic(admission=MinimumCount(2))
        self.bag = torchembed.EmbeddingBag(
            rows, sizes.dim, mode="sum", device=sizes.device, seed=0, dynamic=dynamic
        )
        self.logit = nn.Linear(sizes.dim, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.bag(batch["values"], batch["offsets"], batch["weights"])
        return F.binary_cross_entropy_with_logits(self.logit(vectors)[:, 0], batch["label"])


@DYNAMIC_MODULES.habit("gradients of a dynamic table added over two steps", histories)
def gradients_added_over_two_steps(sizes: Sizes) -> Case:
    """A table that is updated by every other step, while others are by each."""
    model = PaddedHistoryOfHashes(sizes)
    _, dense = parts(model)
    rare = _EveryOther([model.targets.weight], lr=0.05)
    often = torchembed.optim.Adagrad([model.means.weight, model.maxima.weight], lr=0.05)
    optimizers = [rare, often, torch.optim.SGD(dense, lr=0.1)]
    return Case(model=model, optimizers=optimizers, loss_fn=None)


class _EveryOther(torchembed.optim.Adagrad):
    """Takes every second step alone, and keeps gradients until then."""

    num_calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.num_calls % 2 == 0:
            super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        return super().step(closure) if self.num_calls % 2 == 0 else None
