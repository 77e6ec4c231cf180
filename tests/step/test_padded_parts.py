"""Parts of batches that are padded as the caller says, and models that do not ignore it."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchembed
from tests.support.histories import Batch, OfHistories, histories, kinds_as_by_hand
from tests.support.ranks import run_on_ranks
from tests.support.tape import taped_captures
from tests.support.tiny_model import KEYS, TinyModel, make_batch, make_optimizers
from torchembed.training import BatchLoss, Padding, StepKind, TrainPipeline

LENGTHS = [7, 5, 6, 7, 3, 6, 5, 7, 6, 4, 7, 2]


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


def kinds_and_warnings(*arguments: Any, **settings: Any) -> tuple[list[StepKind], list[str]]:
    """The kinds of steps that :func:`kinds_as_by_hand` takes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kinds, _ = kinds_as_by_hand(*arguments, **settings)
    return kinds, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("pad", [{"items": 0}, {"items": Padding(value=0, length=9)}])
def test_one_captured_step_takes_histories_of_any_length(pad: Any) -> None:
    kinds, said = kinds_and_warnings(histories(LENGTHS), pad=pad)
    assert [kind.form for kind in kinds] == ["eager"] * 4 + ["padded"] * 8
    assert said == []


def test_the_result_has_the_batch_as_it_was_padded() -> None:
    model, batches = OfHistories(), histories([5, 3])
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    with TrainPipeline(model, None, optimizer, capture=True, pad={"items": 0}) as pipeline:
        iterator = iter(batches)
        pipeline.progress(iterator)
        items = pipeline.progress(iterator).batch["items"]
    assert torch.equal(items[:, :3], batches[1]["items"])
    assert torch.equal(items[:, 3:], torch.zeros(8, 2, dtype=torch.int64))


def test_longer_histories_make_the_length_grow_and_are_captured_anew() -> None:
    lengths = [4, 3, 4, 3, 4, 3, 6, 5, 4, 6, 5, 6, 5, 6]
    kinds, _ = kinds_and_warnings(histories(lengths), pad={"batch['items']": 0})
    forms = [kind.form for kind in kinds]
    assert forms[4:6] == ["padded"] * 2
    assert forms[6] == "eager"
    assert forms[-2:] == ["padded"] * 2


def test_histories_longer_than_a_length_that_was_given_are_left_as_they_are() -> None:
    pad = {"items": Padding(value=0, length=4)}
    kinds, _ = kinds_and_warnings(histories([4, 3, 4, 2, 4, 3, 6, 4]), pad=pad)
    assert [kind.form for kind in kinds[4:]] == ["padded", "padded", "eager", "padded"]
    assert "shape or dtype" in str(kinds[6].why)


class Unmasked(OfHistories):
    """Takes padding for items."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.Embedding(23, 4, seed=0)

    def forward(self, batch: Batch) -> Tensor:
        logits = self.over(self.items(batch["items"]).mean(1).repeat(1, 2))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["label"])


class Drops(OfHistories):
    """Draws random numbers in training, and does not mask where it normalizes."""

    def __init__(self, *, normalizes: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if normalizes else nn.Identity()

    def forward(self, batch: Batch) -> Tensor:
        items = batch["items"]
        vectors = self.norm(self.items(items).transpose(1, 2)).transpose(1, 2)
        history = F.dropout(vectors * (items != 0).unsqueeze(2), 0.5, self.training).sum(1)
        logits = self.over(torch.cat([history, history], dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["label"])


class Counts(OfHistories):
    """Has as many positions as histories have items."""

    def forward(self, batch: Batch) -> Tensor:
        assert batch["items"].shape[1] <= 7, "there are 7 positions"
        return super().forward(batch)


def normalized() -> nn.Module:
    return Drops(normalizes=True)


@pytest.mark.parametrize(
    ("make", "length", "what"),
    [
        (Unmasked, None, "the output of items (Embedding)|the output of over.0 (Linear)"),
        (normalized, None, "the output of over.0 (Linear)"),
        (Counts, 8, "AssertionError: there are 7 positions"),
    ],
)
def test_a_model_that_does_not_ignore_the_padding_is_named_and_trained_as_it_is(
    make: Callable[[], nn.Module], length: int | None, what: str
) -> None:
    pad = {"items": Padding(value=0, length=length)}
    kinds, said = kinds_and_warnings(histories(LENGTHS), make, pad=pad)
    assert {kind.form for kind in kinds} == {"eager"}  # also where a layout recurs, so soon
    (warning,) = said
    assert warning.startswith("the model computes other numbers for batches that are padded")
    assert any(name in warning for name in what.split("|"))
    assert any(str(kind.why).startswith("the model does not ignore padding") for kind in kinds)


def test_random_numbers_make_no_difference() -> None:
    model = Drops(normalizes=False)
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    with TrainPipeline(model, None, optimizer, capture=True, pad={"items": 0}) as pipeline:
        iterator = iter(histories(LENGTHS))
        kinds = [pipeline.progress(iterator).kind for _ in LENGTHS]
    assert kinds[-1].form == "padded"
    assert all(module.training for module in model.modules())


def test_without_the_self_check_nothing_is_compared() -> None:
    model = Unmasked()
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    settings: dict[str, Any] = {"pad": {"items": 0}, "self_check_every": None}
    with TrainPipeline(model, None, optimizer, capture=True, **settings) as pipeline:
        iterator = iter(histories(LENGTHS))
        kinds = [pipeline.progress(iterator).kind for _ in LENGTHS]
    assert kinds[-1].form == "padded"


class WithHistory(TinyModel):
    """Jagged clicks beside a history of numbers, of which NaN is none."""

    def forward(self, batch: Batch) -> Tensor:
        numbers = batch["numbers"]
        known = torch.stack([numbers.nan_to_num().sum(1), (numbers == numbers).sum(1)], dim=1)
        logits = super().forward(known, batch["ids"])[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["label"])


def test_jagged_batches_are_padded_too() -> None:
    batches = []
    for seed, length in enumerate(LENGTHS):
        click = make_batch(8, seed)
        numbers = torch.full((8, length), 0.5)
        batches.append({"ids": click.sparse, "numbers": numbers, "label": click.labels})
    kinds, said = kinds_and_warnings(batches, WithHistory, pad={"numbers": float("nan")})
    assert kinds[0].form == "jagged"
    assert [kind.form for kind in kinds[-4:]] == ["padded"] * 4
    assert said == []


@pytest.mark.parametrize(
    ("pad", "error", "message"),
    [
        ("items", TypeError, "pad must be a mapping from parts of a batch to values"),
        ({"": 0}, TypeError, "pad must name parts of a batch by their path"),
        ({3: 0}, TypeError, "pad must name parts of a batch by their path"),
        ({"items": "0"}, TypeError, "value must be a number, got str"),
    ],
)
def test_pad_is_checked_at_once(pad: Any, error: type[Exception], message: str) -> None:
    model = OfHistories()
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    with pytest.raises(error, match=message):
        TrainPipeline(model, None, optimizer, pad=pad)


def test_a_length_is_at_least_1() -> None:
    with pytest.raises(ValueError, match="length must be at least 1, or None, got 0"):
        Padding(value=0, length=0)


@pytest.mark.parametrize(
    ("pad", "error", "message"),
    [
        ({"history": 0}, ValueError, "pad names 'history', which the batch does not have; its"),
        ({"items.x": 0}, ValueError, "its parts are batch['items'], batch['label']"),
        ({"mode": 0}, TypeError, "a tensor with a dimension to pad, got a str"),
        ({"scale": 0}, TypeError, "a tensor with a dimension to pad, got a number []"),
        ({"items": 0.5}, ValueError, "pad must give a value that torch.int64 has for 'items'"),
    ],
)
def test_pad_is_checked_against_batches(pad: Any, error: type[Exception], message: str) -> None:
    model, batches = OfHistories(), histories([5], mode="train", scale=torch.ones(()))
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    with (
        TrainPipeline(model, None, optimizer, capture=True, pad=pad) as pipeline,
        pytest.raises(error, match=re.escape(message)),
    ):
        pipeline.progress(iter(batches))


def test_parts_of_named_forms_are_found_by_their_names() -> None:
    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return output + 0 * batch[1].sum()

    model = OfHistories()
    batches = [({"histories": [batch]}, batch["label"]) for batch in histories(LENGTHS)]

    class OfFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> Tensor:
            return self.model(batch[0]["histories"][0])

    outer = OfFirst()
    optimizer = torchembed.optim.Adagrad.with_dense(outer.parameters(), lr=0.05)
    pad = {"[0].histories[0].items": 0}
    with TrainPipeline(outer, BatchLoss(loss_fn), optimizer, capture=True, pad=pad) as pipeline:
        iterator = iter(batches)
        kinds = [pipeline.progress(iterator).kind for _ in batches]
    assert kinds[-1].form == "padded"


class Sessions:
    """Histories of a class with a ``to`` of its own."""

    def __init__(self, items: Tensor, label: Tensor, kind: str) -> None:
        self.items, self.label, self.kind = items, label, kind

    def to(self, device: torch.device) -> "Sessions":
        return Sessions(self.items.to(device), self.label.to(device), self.kind)


class OfSessions(OfHistories):
    def forward(self, batch: Any) -> Tensor:
        factor = {"view": 1, "click": 2}[batch.kind]
        return super().forward({"items": batch.items, "label": batch.label, "factor": factor})


def test_objects_with_strings_that_take_turns_are_padded() -> None:
    batches = [
        Sessions(batch["items"], batch["label"], ("view", "click")[seed % 2])
        for seed, batch in enumerate(histories(LENGTHS * 2))
    ]
    kinds, said = kinds_and_warnings(batches, OfSessions, pad={"items": 0})
    assert [kind.form for kind in kinds[-6:]] == ["padded"] * 6
    assert said == []


def forms_on_ranks() -> list[tuple[list[str], bool, list[str]]]:
    """The forms of steps on batches whose histories have other lengths on each rank, whether they
    equal eager ones, and the warnings; of a model that ignores padding, and of one that does not,
    and of both under ``DistributedDataParallel``.
    """
    rank, found = dist.get_rank(), []
    for is_wrapped, pads_numbers in itertools.product((False, True), (float("nan"), 1.0)):
        results = []
        for capture in (False, True):
            torch.manual_seed(0)
            model: nn.Module = WithHistory()
            plan = {f"tables.embedding_bags.{key}": "row_wise" for key in KEYS}
            torchembed.shard_embeddings(model, init_device_mesh("cpu", (2,)), plan)
            if is_wrapped:
                model = DistributedDataParallel(model)
            batches = []
            for seed, length in enumerate(LENGTHS[rank:] + LENGTHS):
                click = make_batch(8, 2 * seed + rank)
                sparse = torchembed.SparseFeatures(
                    keys=KEYS,
                    values=torch.arange(16) % 7 + seed % 7,
                    hotness=(1, 1),
                    batch_size=8,
                )
                numbers = torch.full((8, length), 0.5)
                batches.append({"ids": sparse, "numbers": numbers, "label": click.labels})
            del batches[23:]
            settings: dict[str, Any] = {"capture": capture, "pad": {"numbers": pads_numbers}}
            with (
                warnings.catch_warnings(record=True) as caught,
                TrainPipeline(model, None, make_optimizers(model), **settings) as pipeline,
            ):
                warnings.simplefilter("always")
                iterator, losses, forms = iter(batches), [], []
                for _ in range(23):
                    result = pipeline.progress(iterator)
                    losses.append(result.loss.item())
                    forms.append(str(result.kind.form))
            said = [str(warning.message) for warning in caught]
            results.append((losses, forms, said))
        (expected, _, _), (losses, forms, said) = results
        found.append((forms, losses == expected, said))
    return found


def test_ranks_pad_alike_or_not_at_all() -> None:
    first, second = run_on_ranks(2, forms_on_ranks)
    assert [forms for forms, _, _ in first] == [forms for forms, _, _ in second]
    assert all(is_equal for _, is_equal, _ in (*first, *second))
    for place in (0, 2):  # of the model by itself, and under DistributedDataParallel
        (ignores, _, said), (does_not, _, warned) = first[place : place + 2]
        assert ignores[-4:] == ["padded"] * 4
        assert said == second[place][2] == []
        assert set(does_not) == {"eager"}
        assert len(warned) == len(second[place + 1][2]) == 1
