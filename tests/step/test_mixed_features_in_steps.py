"""One jagged feature makes no other jagged: batches with features of both kinds are captured, and
those of fixed hotness are exchanged and looked up as such."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.jagged_sequences import by_hand, by_pipeline
from tests.support.mixed_clicks import FIXED, NUM_SAMPLES, MixedModel, make_batch
from tests.support.ranks import run_on_ranks
from tests.support.tape import taped_captures
from torchembed.modules.lookup import pooled_slots
from torchembed.sharding.transport.fixed_route import FixedRoute
from torchembed.sharding.transport.jagged_route import JaggedRoute
from torchembed.training import TrainPipeline, train


@pytest.fixture
def hotness_of_lookups() -> Iterator[list[Any]]:
    """The hotness of each pooled lookup."""
    found: list[Any] = []
    original = pooled_slots.look_up_pooled

    def noted(*args: Any, **settings: Any) -> torch.Tensor:
        found.append(settings["hotness"])
        return original(*args, **settings)

    with mock.patch.object(pooled_slots, "look_up_pooled", noted):
        yield found


def test_they_are_captured_and_equal_on_one_rank(hotness_of_lookups: list[Any]) -> None:
    batches = [make_batch(seed) for seed in range(8)]
    plain, model = MixedModel(), MixedModel()
    expected = by_hand(plain, batches)
    assert (2,) * (len(FIXED) - 1) in hotness_of_lookups
    with taped_captures():
        losses, kinds = by_pipeline(model, batches)
    assert losses == expected
    assert kinds[-1] == "padded", kinds
    assert set(hotness_of_lookups) == {None, (2,) * (len(FIXED) - 1)}
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def mapped(seed: int) -> tuple[None, dict[str, Any], torch.Tensor]:
    """The batch of :func:`make_batch` as a loader may give it."""
    batch = make_batch(seed)
    fixed, history = batch["ids"].parts
    columns = fixed.values.view(len(FIXED), NUM_SAMPLES, 2)
    jagged = torchembed.JaggedTensor(history.values, history.offsets)
    ids = {**dict(zip(FIXED, columns, strict=True)), "history": jagged}
    return None, ids, batch["labels"]


class OfParts(MixedModel):
    """Called with the parts of a batch; of any number of samples."""

    def forward(self, dense: None, sparse: torchembed.MixedFeatures) -> torch.Tensor:
        pooled, found = self.bags(sparse).values(), self.items(sparse)
        return pooled.sum(1) + found["history"].to_padded_dense(4).sum((1, 2))


def trained_with_fewer_batches() -> tuple[int, list[str]]:
    """The steps of all ranks and their forms, where rank 1 has two batches fewer."""
    model, rank = OfParts(), dist.get_rank()
    torchembed.shard_embeddings(model, init_device_mesh("cpu", (2,)), plan=plan_of("table_wise"))
    batches = [mapped(2 * seed + rank) for seed in range(8 - 2 * rank)]
    model.deep.requires_grad_(False)
    loss_fn = torch.nn.functional.binary_cross_entropy_with_logits
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torchembed.optim.Adagrad([{"params": parameters}], lr=0.05)
    with TrainPipeline(model, loss_fn, [optimizer], capture=True) as pipeline:
        history = train(pipeline, batches)
        forms = {str(kind.form) for kind in pipeline.kinds}
    return history.num_steps, sorted(forms)


def test_a_rank_without_batches_is_given_empty_ones_of_their_parts() -> None:
    for num_steps, forms in run_on_ranks(2, trained_with_fewer_batches):
        assert num_steps == 8
        assert forms == ["eager", "jagged", "padded"]


def plan_of(placement: str) -> dict[str, str]:
    plan = {f"bags.embedding_bags.of_{key}": placement for key in ("history", *FIXED[1:])}
    return {**plan, "items.embeddings.item": placement}


def trained_on_ranks(placements: list[str]) -> list[Any]:
    """For each placement what differs from the plain loop, the kinds of steps, and the features
    that went by routes of fixed hotness and by others."""
    found, mesh = [], init_device_mesh("cpu", (2,))
    for placement in placements:
        plain, model = MixedModel(), MixedModel()
        for one in (plain, model):
            torchembed.shard_embeddings(one, mesh, plan=plan_of(placement))
        batches = [make_batch(2 * seed + dist.get_rank()) for seed in range(8)]
        expected = by_hand(plain, batches)
        num_fixed, num_jagged = [], []

        def note(into: list[int], kind: Any, features: int) -> Any:
            original = kind.__init__

            def noted(self: Any, *args: Any) -> None:
                into.append(len(args[1]) if kind is FixedRoute else len(args[0].keys))
                original(self, *args)

            return mock.patch.object(kind, "__init__", noted)

        with note(num_fixed, FixedRoute, 1), note(num_jagged, JaggedRoute, 0):
            losses, kinds = by_pipeline(model, batches)
        parameters = zip(plain.parameters(), model.parameters(), strict=True)
        is_equal = losses == expected and all(torch.equal(one, two) for one, two in parameters)
        found.append((is_equal, kinds, max(num_fixed, default=0), max(num_jagged, default=0)))
    return found


def test_they_are_captured_and_equal_on_two_ranks() -> None:
    placements = ["table_wise", "row_wise", "data_parallel"]
    for of_rank in run_on_ranks(2, trained_on_ranks, placements):
        for placement, (is_equal, kinds, num_fixed, num_jagged) in zip(
            placements, of_rank, strict=True
        ):
            assert is_equal, placement
            assert kinds[-1] == "padded", (placement, kinds)
            if placement != "data_parallel":
                assert num_fixed == len(FIXED) - 1
                assert num_jagged == 1
