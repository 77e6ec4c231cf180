"""Batches, losses and models as people write them train in captured steps as in the plain loop, bit
for bit; what cannot be is refused with what to write instead."""

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.steps_by_hand import captured_as_by_hand, losses_by_hand
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.data import Batch
from torchembed.training import BatchLoss, StepForm, TrainPipeline, train

NUM_STEPS = 8


def assert_trains_as_by_hand(
    make: Callable[[], nn.Module],
    loss_fn: Any,
    batches: list[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    form: StepForm = StepForm.GRAPH,
) -> None:
    """Compare losses and states of captured steps with those of ``loss_of`` in a plain loop."""
    with taped_captures():
        kinds, _ = captured_as_by_hand(make, make_optimizers, batches, loss_fn, loss_of)
    assert kinds[-1].form == form


class WithoutDense(TinyModel):
    """A model of ids alone, that may be given dense columns, which are none."""

    def __init__(self) -> None:
        super().__init__()
        self.dense.weight.requires_grad_(False)

    def forward(self, dense: Tensor | None, sparse: torchembed.SparseFeatures) -> Tensor:
        assert dense is None or dense.shape[1] == 0
        return self.tables(sparse).values().sum(dim=1, keepdim=True) + self.dense.bias


def loss_of_parts(model: nn.Module, batch: Batch) -> Tensor:
    return LOSS(model(batch.dense, batch.sparse)[:, 0], batch.labels)


@pytest.mark.parametrize("is_none", [False, True])
def test_batches_without_dense_columns_are_captured(is_none: bool) -> None:
    batches = [
        Batch(None if is_none or batch.dense is None else batch.dense[:, :0], *batch[1:])
        for batch in fixed_batches(NUM_STEPS)
    ]
    assert_trains_as_by_hand(WithoutDense, LOSS, batches, loss_of_parts)


class Named(NamedTuple):
    sparse: Any
    dense: Any
    labels: Any


@dataclasses.dataclass
class Record:
    labels: Any
    sparse: Any
    dense: Any


class Attributes:
    """Parts with TorchRec's names."""

    def __init__(self, dense: Any, sparse: Any, labels: Any) -> None:
        self.dense_features, self.sparse_features, self.labels = dense, sparse, labels


FORMS: dict[str, Callable[[Batch], Any]] = {
    "tuple": tuple,
    "list": list,
    "named tuple": lambda b: Named(b.sparse, b.dense, b.labels),
    "dataclass": lambda b: Record(b.labels, b.sparse, b.dense),
    "dict": lambda b: b._asdict(),
    "UserDict": lambda b: collections.UserDict(b._asdict()),
    "torchrec": lambda b: Attributes(*b),
    "int labels": lambda b: (b.dense, b.sparse, b.labels.long()),
    "labels [B, 1]": lambda b: (b.dense, b.sparse, b.labels[:, None]),
    "bool labels": lambda b: (b.dense, b.sparse, b.labels.bool()),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_dense_sparse_and_labels(form: str) -> None:
    batches = fixed_batches(NUM_STEPS)
    by_hand, model = TinyModel(is_deep=True), TinyModel(is_deep=True)
    losses = losses_by_hand(by_hand, make_optimizers(by_hand), batches, loss_of_parts)
    with (
        taped_captures(),
        TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline,
    ):
        iterator = map(FORMS[form], batches)
        found = [pipeline.progress(iterator).loss.item() for _ in batches]
    assert found == losses
    assert_same_state(model, state_of(by_hand))


def test_a_mapping_without_dense_gives_the_model_none() -> None:
    batches = [{"sparse": b.sparse, "labels": b.labels} for b in fixed_batches(NUM_STEPS)]

    def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return LOSS(model(None, batch["sparse"])[:, 0], batch["labels"])

    assert_trains_as_by_hand(WithoutDense, LOSS, batches, loss_of)


class TwoTasks(TinyModel):
    """Gives two outputs for each sample, ``[B, 2]``."""

    def __init__(self) -> None:
        super().__init__(is_deep=True)
        self.dense = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 2))


def relabeled(labels: Callable[[Batch, int], Any]) -> list[Any]:
    """Batches with labels made of a batch and its number."""
    batches = enumerate(fixed_batches(NUM_STEPS))
    return [(b.dense, b.sparse, labels(b, number)) for number, b in batches]


def numbers_like(batch: Batch, seed: int, *shape: int) -> Tensor:
    return torch.rand(len(batch.labels), *shape, generator=torch.Generator().manual_seed(seed))


def test_regression_takes_labels_of_any_range() -> None:
    batches = relabeled(lambda b, n: 40 * numbers_like(b, n) - 20)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1])[:, 0], batch[2])

    assert_trains_as_by_hand(TinyModel, F.mse_loss, batches, loss_of)


def test_soft_labels() -> None:
    batches = relabeled(numbers_like)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return LOSS(model(batch[0], batch[1])[:, 0], batch[2])

    assert_trains_as_by_hand(TinyModel, LOSS, batches, loss_of)
    assert_trains_as_by_hand(TinyModel, nn.BCEWithLogitsLoss(), batches, loss_of)


def test_several_tasks_in_columns() -> None:
    batches = relabeled(lambda b, n: numbers_like(b, n, 2).round())

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return LOSS(model(batch[0], batch[1]), batch[2])

    assert_trains_as_by_hand(TwoTasks, LOSS, batches, loss_of)


def test_several_tasks_by_name() -> None:
    batches = relabeled(lambda b, n: {"click": b.labels, "price": 9 * numbers_like(b, n)})

    def loss_fn(output: Tensor, labels: dict[str, Tensor]) -> Tensor:
        price = F.l1_loss(output[:, 1], labels["price"])
        return LOSS(output[:, 0], labels["click"]) + price

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model(batch[0], batch[1]), batch[2])

    assert_trains_as_by_hand(TwoTasks, loss_fn, batches, loss_of)


def test_classes_stay_whole_numbers() -> None:
    batches = relabeled(lambda b, n: b.labels.long())

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    assert_trains_as_by_hand(TwoTasks, F.cross_entropy, batches, loss_of)


WHOLE_NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as they come": lambda output, labels: F.mse_loss(output, labels.float()),
    "in one column": lambda output, labels: F.mse_loss(output.squeeze(1), labels.float()),
    "of a column": lambda output, labels: F.mse_loss(output[:, 0], labels.float()),
}


@pytest.mark.parametrize("how", WHOLE_NUMBERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_an_output_for_each_whole_number_is_compared_with_that_alone(
    how: str, dtype: torch.dtype
) -> None:
    batches = relabeled(lambda b, n: b.labels.to(dtype))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1])[:, 0], batch[2].float())

    assert_trains_as_by_hand(TinyModel, WHOLE_NUMBERS[how], batches, loss_of)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_an_output_for_one_class_alone_keeps_its_shape(loss_fn: Any) -> None:
    batches = relabeled(lambda b, n: torch.zeros_like(b.labels, dtype=torch.int64))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    assert_trains_as_by_hand(TinyModel, loss_fn, batches, loss_of)


@pytest.mark.parametrize("is_mapping", [False, True])
def test_weights_of_samples(is_mapping: bool) -> None:
    def loss_fn(output: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return LOSS(output, labels, weights)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        dense, sparse, labels, weights = batch.values() if is_mapping else batch
        return loss_fn(model(dense, sparse)[:, 0], labels, weights)

    batches: list[Any] = [
        (*batch, numbers_like(batch, number)) for number, batch in enumerate(fixed_batches(8))
    ]
    if is_mapping:
        names = "dense", "sparse", "labels", "weights"
        batches = [dict(zip(names, batch, strict=True)) for batch in batches]
    assert_trains_as_by_hand(TinyModel, loss_fn, batches, loss_of)


class OfIds(nn.Module):
    """A model of one argument: ids ``[B, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torchembed.EmbeddingBag(50, 4, mode="sum")
        self.over = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(self.bag(ids))[:, 0]


def pairs() -> list[tuple[Tensor, Tensor]]:
    return [(b.sparse.values[:16].view(8, 2), b.labels) for b in fixed_batches(NUM_STEPS)]


def test_inputs_and_labels() -> None:
    assert_trains_as_by_hand(OfIds, LOSS, pairs(), lambda model, b: LOSS(model(b[0]), b[1]))


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda logits: (logits, logits * 2),
    "list": lambda logits: [logits, logits * 2],
    "dict": lambda logits: {0: logits, 1: logits * 2},
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_models_may_give_several_outputs(kind: str) -> None:
    class Several(OfIds):
        def forward(self, ids: Tensor) -> Any:
            return OUTPUTS[kind](super().forward(ids))

    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        return LOSS(output[0] + output[1], labels)

    def of_batch(output: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(output, batch[1])

    class OfBatch(Several):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
            return super().forward(batch[0])

    assert_trains_as_by_hand(Several, loss_fn, pairs(), lambda m, b: loss_fn(m(b[0]), b[1]))
    assert_trains_as_by_hand(OfBatch, BatchLoss(of_batch), pairs(), lambda m, b: of_batch(m(b), b))


WHOLE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda ids, y: {"x": ids, "y": y, "z": None},
    "five parts": lambda ids, y: (ids, y, None, (), 3),
    "dataclass": lambda ids, y: Record(y, ids, None),
}


@pytest.mark.parametrize("form", WHOLE)
def test_a_loss_of_the_whole_batch_takes_any_form(form: str) -> None:
    def parts(batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Record):
            return batch.sparse, batch.labels
        return (batch["x"], batch["y"]) if form == "dict" else batch[:2]

    class OfBatch(OfIds):
        def forward(self, batch: Any) -> Any:
            return super().forward(parts(batch)[0])

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return LOSS(output, parts(batch)[1])

    batches = [WHOLE[form](*pair) for pair in pairs()]
    assert_trains_as_by_hand(OfBatch, BatchLoss(loss_fn), batches, lambda m, b: loss_fn(m(b), b))


@dataclasses.dataclass
class WithLoss:
    loss: Tensor


GIVEN: dict[str, Callable[[Tensor], Any]] = {
    "loss": lambda loss: loss,
    "tuple": lambda loss: (loss, loss.detach(), {}),
    "list": lambda loss: [loss],
    "dict": lambda loss: {"loss": loss, "n": 3},
    "object": WithLoss,
    "[1]": lambda loss: loss[None],
}


@pytest.mark.parametrize("given", GIVEN)
def test_models_may_give_their_loss(given: str) -> None:
    class Model(OfIds):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
            return GIVEN[given](LOSS(super().forward(batch[0]), batch[1]))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, OfIds)
        return LOSS(OfIds.forward(model, batch[0]), batch[1])

    assert_trains_as_by_hand(Model, None, pairs(), loss_of)


def test_one_optimizer_needs_no_list() -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.125)

    found = []
    for is_listed in (False, True):
        model = OfIds()
        optimizer = optimizer_of(model)
        pipeline = TrainPipeline(model, LOSS, [optimizer] if is_listed else optimizer, capture=True)
        with pipeline:
            iterator = iter(pairs())
            found.append([pipeline.progress(iterator).loss.item() for _ in range(NUM_STEPS)])
    assert found[0] == found[1]


def test_a_data_loader_is_iterated_once_more_after_its_end() -> None:
    stacked = [torch.stack(parts).flatten(0, 1) for parts in zip(*pairs(), strict=True)]
    dataset = torch.utils.data.TensorDataset(*stacked)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    by_hand, model = OfIds(), OfIds()
    optimizers = make_optimizers(by_hand)
    losses = losses_by_hand(
        by_hand, optimizers, [*loader, *loader], lambda m, b: LOSS(m(b[0]), b[1])
    )
    found = []
    with TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline:
        for _ in range(2):
            with pytest.raises(StopIteration):  # noqa: PT012 - how a pipeline says that it is done
                while True:
                    found.append(pipeline.progress(loader).loss.item())
    assert found == losses


def test_train_takes_what_the_pipeline_takes() -> None:
    by_hand, model = OfIds(), OfIds()
    losses_by_hand(by_hand, make_optimizers(by_hand), pairs(), lambda m, b: LOSS(m(b[0]), b[1]))
    with TrainPipeline(model, LOSS, make_optimizers(model), capture=True) as pipeline:
        history = train(pipeline, pairs())
    assert (history.num_steps, history.num_samples) == (NUM_STEPS, 8 * NUM_STEPS)
    assert_same_state(model, state_of(by_hand))


def progressed(model: nn.Module, loss_fn: Any, batch: Any) -> None:
    TrainPipeline(model, loss_fn, make_optimizers(model)).progress(iter([batch]))


ONE = fixed_batches(1)[0]
IDS, CLICKS = pairs()[0]


@pytest.mark.parametrize(
    ("loss_fn", "batch", "error", "message"),
    [
        (LOSS, {"x": IDS, "y": CLICKS}, TypeError, r"got dict of x, y\. For .*BatchLoss\(loss_fn"),
        (LOSS, {**ONE._asdict(), "x": 1}, TypeError, "got dict of dense, labels, sparse, x"),
        (LOSS, (IDS,) * 5, TypeError, r"must be \(inputs, labels\), .* got 5 parts"),
        (LOSS, 3, TypeError, "got int"),
        (
            LOSS,
            (IDS, IDS[:, 0], CLICKS),
            ValueError,
            r"got \[8\]\. A batch of 3 parts is .*BatchLoss",
        ),
        (LOSS, (ONE.dense, ONE.sparse, 2 * CLICKS - 1), ValueError, "from 0 to 1 .* got -1 for"),
        (
            LOSS,
            (IDS, CLICKS[:, None].repeat(1, 2)),
            ValueError,
            r"labels must be one for each output of the model .* \[8\], got \[8, 2\]; give a",
        ),
        (
            nn.BCEWithLogitsLoss(),
            (IDS, CLICKS[:, None].repeat(1, 2)),
            ValueError,
            "labels must be o",
        ),
        (LOSS, (IDS, {"a": CLICKS}), TypeError, "tensor of labels, got dict; give MultiTaskLoss"),
        (F.cross_entropy, (*ONE, CLICKS), TypeError, "weight of each class, and not of samples"),
        (LOSS, (*ONE, CLICKS[:3]), ValueError, "all parts must have one number .* 8, 8 and 8, 3"),
        (nn.BCEWithLogitsLoss, ONE, TypeError, r"got BCEWithLogitsLoss; make one: BCEWithLogitsL"),
        (
            5,
            ONE,
            TypeError,
            "must be a function of .* BatchLoss of .* or None .* int",
        ),
        (BatchLoss(lambda output, batch: output), IDS, ValueError, r"loss_fn must give one loss"),
        (
            BatchLoss(lambda output, batch: cast("Tensor", 3)),
            IDS,
            TypeError,
            "must give the loss.* int;",
        ),
        (None, IDS, ValueError, r"model must give one loss \[\] .* \[8\]; take its mean, or give"),
    ],
)
def test_what_is_refused_says_what_to_write(
    loss_fn: Any, batch: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        progressed(OfIds(), loss_fn, batch)


@pytest.mark.parametrize("given", [{"logits": torch.zeros(8)}, 0.5, (), None])
def test_a_model_that_gives_no_loss_is_refused(given: Any) -> None:
    class Model(OfIds):
        def forward(self, ids: Tensor) -> Any:
            return given

    kind = type(given).__name__
    with pytest.raises(TypeError, match=rf"first of a tuple or list, or named loss, got {kind};"):
        progressed(Model(), None, IDS)


def test_what_is_no_optimizer_or_no_iterable_is_refused() -> None:
    model = OfIds()
    with pytest.raises(TypeError, match=r"optimizer or several in a list, got float; make one"):
        TrainPipeline(model, LOSS, 0.125)  # type: ignore[arg-type]
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model))
    with pytest.raises(TypeError, match=r"batches must be an iterator or an iterable .* got int"):
        pipeline.progress(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"function of \(output, batch\), got int"):
        BatchLoss(3)  # type: ignore[arg-type]


def test_a_batch_in_place_of_batches_is_refused() -> None:
    model = OfIds()
    pipeline = TrainPipeline(model, LOSS, make_optimizers(model), capture=True)
    for batch in ({"ids": IDS}, IDS):
        with pytest.raises(TypeError, match=r"or iter\(\[batch\]\) for one batch, got (dict|Tens)"):
            pipeline.progress(batch)
    with pytest.raises(TypeError, match="got Tensor; give a list or an iterator of batches"):
        pipeline.progress((IDS, CLICKS))


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        (
            OfIds,
            {},
            TypeError,
            r"model must be a torch.nn.Module, got OfIds; make one: OfIds\(...\)",
        ),
        (LOSS, {}, TypeError, "model must be a torch.nn.Module, got function"),
        (nn.Identity(), {}, ValueError, "model must have parameters"),
        (
            OfIds(),
            {"autocast": "bf16"},
            TypeError,
            "autocast must be a dtype, as torch.bfloat16, or None, got 'bf",
        ),
        (OfIds(), {"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a number or None"),
        (OfIds(), {"max_grad_norm": -1.0}, ValueError, "max_grad_norm must not be negative"),
        (OfIds(), {"timeout_seconds": 0}, ValueError, "timeout_seconds must be positive, got 0"),
    ],
)
def test_other_arguments_are_refused(
    model: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TrainPipeline(model, LOSS, [], **settings)


class Moving:
    """A batch of a class of the user's own."""

    def __init__(self, ids: Tensor, labels: Tensor) -> None:
        self.ids, self.labels, self.name = ids, labels, "clicks"

    def to(self, device: torch.device) -> "Moving":
        return type(self)(self.ids.to(device), self.labels.to(device))


class MovingItself(Moving):
    def to(self, device: torch.device, non_blocking: bool = False) -> None:  # type: ignore[override]
        self.ids = self.ids.to(device, non_blocking=non_blocking)
        self.labels = self.labels.to(device, non_blocking=non_blocking)


class Smoothing(Moving):
    """Changes its labels when it is moved."""

    def to(self, device: torch.device, **_: bool) -> "Smoothing":
        return Smoothing(self.ids.to(device), self.labels.to(device) * 0.75)


class OfAttributes(OfIds):
    def forward(self, batch: Any) -> Tensor:
        return LOSS(super().forward(batch.ids), batch.labels)


@pytest.mark.parametrize(
    ("kind", "form"),
    [(Moving, "graph"), (MovingItself, "graph"), (Smoothing, "eager")],
)
def test_batches_of_own_classes_are_captured_unless_moving_them_does_more(
    kind: type[Moving], form: StepForm
) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        moved = batch.to(torch.device("cpu"))
        return model(batch if moved is None else moved)

    batches = [kind(*pair) for pair in pairs()]
    assert_trains_as_by_hand(OfAttributes, None, batches, loss_of, form)


def test_a_step_on_a_batch_whose_moving_does_more_says_so() -> None:
    model = OfAttributes()
    with TrainPipeline(model, None, make_optimizers(model), capture=True) as pipeline:
        kind = pipeline.progress(iter([Smoothing(*pairs()[0])])).kind
    assert str(kind).startswith("eager (batch: its method to does more than move tensors")


@pytest.mark.parametrize(
    "kind", [collections.UserDict, collections.OrderedDict, types.MappingProxyType]
)
def test_mappings_stay_of_their_class(kind: type) -> None:
    class Model(OfIds):
        def forward(self, batch: Any) -> Tensor:
            assert type(batch) is kind
            return LOSS(super().forward(batch["ids"]), batch["labels"])

    batches = [kind({"ids": ids, "labels": labels}) for ids, labels in pairs()]
    assert_trains_as_by_hand(Model, None, batches, lambda model, batch: model(batch))


def test_a_number_that_changes_is_trained_eagerly_and_named() -> None:
    class Model(OfIds):
        def forward(self, batch: Any) -> Tensor:
            return LOSS(super().forward(batch["ids"]), batch["labels"]) / (1 + batch["step"])

    batches = [{"ids": x, "labels": y, "step": n} for n, (x, y) in enumerate(pairs())]
    assert_trains_as_by_hand(Model, None, batches, lambda m, b: m(b), StepForm.EAGER)
    model = Model()
    with TrainPipeline(model, None, make_optimizers(model), capture=True) as pipeline:
        iterator = iter(batches)
        kinds = [pipeline.progress(iterator).kind for _ in batches]
    assert str(kinds[1]).startswith("eager (batch['step']: has another value than in captured")
    assert len(set(kinds[1:])) == 1
