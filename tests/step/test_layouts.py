"""Batches of several layouts: each that recurs has a captured step, which equals the plain loop."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.histories import Batch, OfHistories, histories, kinds_as_by_hand
from tests.support.ranks import run_on_ranks
from tests.support.tape import taped_captures
from tests.support.tiny_model import KEYS, NUM_ROWS, TinyModel, make_optimizers
from torchembed.step.batches.prefetch import Prefetch
from torchembed.training import StepForm, TrainPipeline


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


@pytest.mark.parametrize(
    "lengths",
    [
        [5, 7] * 8,
        [5, 5, 7, 7, 7] * 4,
        [5, 7, 6] * 7,
        # Each comes in one of the two input buffers alone, or in both, prepared ahead or not.
        [5, 7, 7, 5, 5, 6, 5, 5, 6, 7, 6, 6, 7, 5, 7, 7, 6, 5, 5, 7, 6, 6, 7, 5],
    ],
)
@pytest.mark.parametrize("copies", [False, True])
def test_each_layout_that_recurs_is_captured(lengths: list[int], copies: bool) -> None:
    kinds, pipeline = kinds_as_by_hand(histories(lengths, copies=copies))
    forms = [kind.form for kind in kinds]
    assert forms[-3:] == [StepForm.GRAPH] * 3
    # A layout that came once is eager and says what is new.
    second = lengths.index(next(length for length in lengths if length != lengths[0]))
    assert str(kinds[second].why) == (
        "batch['items']: has another shape or dtype than in captured steps"
    )
    assert pipeline.num_captures <= 2 * len(set(lengths))


def test_the_host_prepares_nothing_once_layouts_that_take_turns_are_captured() -> None:
    model, batches = OfHistories(), histories([5, 7, 6] * 12)
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    with TrainPipeline(model, None, optimizer, capture=True) as pipeline:
        iterator = iter(batches)
        for _ in range(28):
            pipeline.progress(iterator)
        with mock.patch.object(Prefetch, "prepare", side_effect=AssertionError):
            kinds = [pipeline.progress(iterator).kind for _ in range(8)]
    assert {kind.form for kind in kinds} == {"graph"}


def test_layouts_beyond_the_most_are_eager_and_said() -> None:
    kinds, pipeline = kinds_as_by_hand(histories([5, 7, 6] * 7), max_layouts=2)
    assert [kind.form for kind in kinds[-3:]] == ["graph", "graph", "eager"]
    assert str(kinds[-1].why) == (
        "batch['items']: has another shape or dtype than in captured steps; there are steps for 2 "
        "layouts, as many as max_layouts says"
    )
    assert pipeline.num_captures == 4


def test_where_all_batches_have_other_layouts_by_now_steps_are_captured_anew() -> None:
    lengths = [5, 7] * 6 + [3, 4] * 10
    kinds, _ = kinds_as_by_hand(histories(lengths), max_layouts=2)
    assert [kind.form for kind in kinds[10:12]] == ["graph"] * 2
    assert [kind.form for kind in kinds[-2:]] == ["graph"] * 2


def test_numbers_that_recur_are_captured_and_others_eager() -> None:
    factors = [1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, True, 1.0]
    batches = [
        {**batch, "factor": factor}
        for batch, factor in zip(histories([5] * len(factors)), factors, strict=True)
    ]
    kinds, _ = kinds_as_by_hand(batches)
    assert [kind.form for kind in kinds[-4:]] == ["graph"] * 2 + ["eager"] * 2
    assert "batch['factor']: has another value" in str(kinds[-1].why)
    counted = [{**batch, "factor": number} for number, batch in enumerate(histories([5] * 8))]
    kinds, pipeline = kinds_as_by_hand(counted)
    assert [kind.form for kind in kinds] == ["eager"] * 8
    assert pipeline.num_captures == 0


@pytest.mark.parametrize("most", [0, -1])
def test_there_is_at_least_one_layout(most: int) -> None:
    model = OfHistories()
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    with pytest.raises(ValueError, match=f"max_layouts must be at least 1, got {most}"):
        TrainPipeline(model, None, optimizer, max_layouts=most)


class OnRanks(TinyModel):
    """Two sharded tables, whose bags have one size or another, and histories of numbers."""

    def forward(self, batch: Batch) -> Tensor:
        numbers = torch.stack([batch["numbers"].mean(1), batch["numbers"].amax(1)], dim=1)
        logits = super().forward(numbers, batch["ids"])[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["label"])


def of_rank(hotness: Sequence[int], lengths: Sequence[int]) -> list[Batch]:
    batches = []
    for seed, (hot, length) in enumerate(zip(hotness, lengths, strict=True)):
        generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
        ids = torch.randint(NUM_ROWS, (8 * (hot + 1),), generator=generator)
        sparse = torchembed.SparseFeatures(keys=KEYS, values=ids, hotness=(hot, 1), batch_size=8)
        numbers = torch.randint(4, (8, length), generator=generator).float()
        label = torch.randint(2, (8,), generator=generator).float()
        batches.append({"ids": sparse, "numbers": numbers, "label": label})
    return batches


def trained_on_ranks(capture: bool, batches: list[Batch], **settings: Any) -> tuple[Any, list[str]]:
    """Losses and the dense weights, and the kinds of steps."""
    torch.manual_seed(0)
    model = OnRanks()
    plan = {f"tables.embedding_bags.{key}": "row_wise" for key in KEYS}
    torchembed.shard_embeddings(model, init_device_mesh("cpu", (2,)), plan)
    with TrainPipeline(
        model, None, make_optimizers(model), capture=capture, **settings
    ) as pipeline:
        iterator, losses, kinds = iter(batches), [], []
        for _ in batches:
            result = pipeline.progress(iterator)
            losses.append(result.loss.item())
            kinds.append(str(result.kind))
    assert isinstance(model.dense, nn.Linear)
    rows = [tensor.to_local().tolist() for tensor in model.tables.state_dict().values()]
    return (losses, model.dense.weight.tolist(), rows), kinds


def kinds_on_ranks() -> list[list[str]]:
    """The kinds of steps, each equal to eager ones: with layouts that are the same on both ranks,
    with other ones on each, and with too many of these."""
    rank = dist.get_rank()
    cases: list[tuple[list[int], list[int], dict[str, Any]]] = [
        ([1, 2, 2, 3] * 6, [5, 7, 5, 5] * 6, {}),
        ([1] * 28, ([5, 7, 5, 7] if rank else [5, 5, 7, 7]) * 7, {}),
        ([1] * 28, ([5, 7, 5, 7] if rank else [5, 5, 7, 7]) * 7, {"max_layouts": 3}),
        ([1 + rank] * 8, [5] * 8, {}),
    ]
    found = []
    for hotness, lengths, settings in cases:
        batches = of_rank(hotness, lengths)
        expected, _ = trained_on_ranks(False, batches)
        trained, kinds = trained_on_ranks(True, batches, **settings)
        assert trained == expected
        found.append(kinds)
    return found


def test_ranks_capture_the_layouts_that_come_together() -> None:
    first, second = run_on_ranks(2, kinds_on_ranks)
    same, others, too_many, unlike = first
    assert same == second[0]
    assert same[-4:] == ["graph"] * 4
    assert others[-4:] == second[1][-4:] == ["graph"] * 4
    assert too_many[-4:] == second[2][-4:]
    assert too_many[-4:].count("graph") == 3
    said = "eager (the ranks' batches have other layouts together than in captured steps"
    assert sum(kind.startswith(said) for kind in too_many[-4:]) == 1
    # Ranks whose features differ in hotness look up eagerly.
    assert {kind.partition(" ")[0] for kind in (*unlike, *second[3])} == {"eager"}
