"""``MultiTaskLoss`` against its formula, and in a pipeline."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.tiny_model import TinyModel, make_batches, make_optimizers
from tests.support.tolerance import assert_follows
from torchembed.data.tasks import task_labels
from torchembed.training import MultiTaskLoss, Task, TaskKind, TrainPipeline

TASKS = (
    Task(name="like", kind=TaskKind.BINARY, weight=2.0),
    Task(name="rating", kind=TaskKind.REGRESSION, weight=0.25, mask="is_rated"),
    Task(name="buy", kind=TaskKind.BINARY, mask="is_shown"),
)
LOSS = MultiTaskLoss(TASKS)
NUM_SAMPLES = 32


def made_labels() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(2, NUM_SAMPLES, generator=generator) < 0.5
    rating = 5 * torch.rand(NUM_SAMPLES, generator=generator)
    buy = torch.rand(NUM_SAMPLES, generator=generator)
    return {
        "like": torch.randint(2, (NUM_SAMPLES,), generator=generator).float(),
        "rating": rating.where(masks[0], torch.nan),
        "buy": buy.where(masks[1], 7.0),
        "is_rated": masks[0],
        "is_shown": masks[1],
    }


def formula(outputs: Tensor, labels: dict[str, Tensor], weights: Tensor | None) -> list[Tensor]:
    """The loss of each task, sample by sample."""
    found = []
    for task, output in zip(TASKS, outputs, strict=True):
        known = range(NUM_SAMPLES) if task.mask is None else labels[task.mask].nonzero()[:, 0]
        total = outputs.new_zeros(())
        for n in known:
            label, x = labels[task.name][n].to(outputs.dtype), output[n]
            if task.kind is TaskKind.BINARY:
                loss = -label * F.logsigmoid(x) - (1 - label) * F.logsigmoid(-x)
            else:
                loss = (x - label) ** 2
            total = total + loss * (1 if weights is None else weights[n].to(outputs.dtype))
        found.append(total / max(len(known), 1))
    return found


@pytest.mark.parametrize("is_weighted", [False, True])
def test_follows_the_formula(is_weighted: bool) -> None:
    labels = made_labels()
    logits = torch.randn(3, NUM_SAMPLES, generator=torch.Generator().manual_seed(1))
    weights = torch.rand(NUM_SAMPLES) if is_weighted else None

    def expected(dtype: torch.dtype) -> list[Tensor]:
        leaves = logits.to(dtype).requires_grad_()
        losses = formula(leaves, labels, weights)
        total = 2 * losses[0] + 0.25 * losses[1] + losses[2]
        return [*losses, total, torch.autograd.grad(total, leaves)[0]]

    leaves = logits.clone().requires_grad_()
    # Columns [B, 1] count as [B]; the first is that of an output without a task.
    outputs = {"unused": leaves[0], "like": leaves[0][:, None]}
    outputs |= {"rating": leaves[1], "buy": leaves[2]}
    given = (outputs, labels, None if weights is None else weights[:, None])
    total = LOSS(*given)
    grad = torch.autograd.grad(total, leaves)[0]
    for which, actual in enumerate([*LOSS.by_task(*given).values(), total, grad]):
        assert_follows(actual, lambda dtype, which=which: expected(dtype)[which])


def test_no_known_label_is_no_loss() -> None:
    labels = made_labels() | {"is_rated": torch.zeros(NUM_SAMPLES, dtype=torch.bool)}
    outputs = {task.name: torch.zeros(NUM_SAMPLES, requires_grad=True) for task in TASKS}
    losses = LOSS.by_task(outputs, labels)
    assert losses["rating"] == 0
    losses["rating"].backward()
    grad = outputs["rating"].grad
    assert grad is not None and not grad.any()


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (torch.zeros(32), TypeError, r"give a mapping .* got Tensor and no output of task like$"),
        ({"like": torch.zeros(32)}, ValueError, r"for each task, got \['like'\] without task rati"),
        (
            {"like": torch.zeros(32, 2)},
            ValueError,
            r"^the output of task like must be \[B\] or \[B, 1\] for labels \[32\], got \[32, 2\]$",
        ),
    ],
)
def test_outputs_that_do_not_fit_are_named(
    output: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LOSS(output, made_labels())


class OfTwo(TinyModel):
    """The model's logit, and twice that, as two tasks."""

    def forward(self, dense: Tensor, sparse: Any) -> Any:
        logits = super().forward(dense, sparse)
        return {"like": logits, "rating": 2 * logits[:, 0]}


OF_TWO = MultiTaskLoss(
    [
        Task(name="like", kind=TaskKind.BINARY),
        Task(name="rating", kind=TaskKind.REGRESSION, weight=0.5, mask="is_rated"),
    ]
)


def batches(*sizes: int) -> list[dict[str, Any]]:
    """Batches as mappings, whose labels are by name and of several dtypes."""
    return [
        {
            "dense": batch.dense,
            "sparse": batch.sparse,
            "labels": {
                "like": batch.labels.long(),
                "rating": batch.dense[:, 1:].double(),
                "is_rated": batch.labels.int(),
            },
        }
        for batch in make_batches(sizes)
        if batch.dense is not None
    ]


def test_a_pipeline_equals_the_loop_by_hand() -> None:
    found, expected = OfTwo(is_deep=True), OfTwo(is_deep=True)
    optimizers = make_optimizers(expected)
    losses = []
    for batch in batches(8, 8, 8, 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        labels = task_labels(batch["labels"], OF_TWO.tasks)
        loss = OF_TWO(expected(batch["dense"], batch["sparse"]), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    stream = iter(batches(8, 8, 8, 3))
    with TrainPipeline(found, OF_TWO, make_optimizers(found)) as pipeline:
        results = [pipeline.progress(stream) for _ in losses]
        assert [result.loss.item() for result in results] == losses
        assert results[-1].output is not None and set(results[-1].output) == {"like", "rating"}
    for name, parameter in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (
            torch.zeros(8),
            TypeError,
            r"labels must be a mapping with a tensor .*got Tensor",
        ),
        ({"like": torch.zeros(8)}, ValueError, r"got \['like'\] without \['rating', 'is_rated'\]"),
        ({"like": 2 * torch.ones(8)}, ValueError, "labels of task like must be from 0 to 1"),
    ],
)
def test_a_pipeline_names_labels_that_do_not_fit(
    labels: Any, error: type[Exception], message: str
) -> None:
    (batch,) = batches(8)
    if isinstance(labels, dict) and "0 to 1" in message:
        labels = batch["labels"] | labels
    model = OfTwo()
    with (
        TrainPipeline(model, OF_TWO, make_optimizers(model)) as pipeline,
        pytest.raises(error, match=message),
    ):
        pipeline.progress(iter([batch | {"labels": labels}]))


def test_weights_of_samples_are_factors() -> None:
    (batch,) = batches(8)
    weights = torch.rand(8)
    model = OfTwo()
    labels = task_labels(batch["labels"], OF_TWO.tasks)
    expected = OF_TWO(model(batch["dense"], batch["sparse"]), labels, weights).item()
    with TrainPipeline(model, OF_TWO, make_optimizers(model)) as pipeline:
        result = pipeline.progress(iter([batch | {"weights": weights}]))
        assert result.loss.item() == expected
