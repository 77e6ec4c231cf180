"""Quality of several tasks: against scikit-learn's, over ranks, and in what a run keeps of it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, mean_squared_error, r2_score, roc_auc_score
from torch import Tensor, nn

from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import TinyModel, make_batches, make_optimizers
from tests.support.tolerance import relative_error
from torchembed.core import ranks
from torchembed.data import Batch
from torchembed.training import (
    EarlyStop,
    Evaluation,
    History,
    MetricsWriter,
    MultiTaskLoss,
    RegressionEvaluation,
    Task,
    TaskEvaluations,
    TaskKind,
    TrainPipeline,
    evaluate,
    plot_history,
    read_metrics,
    train,
)

TASKS = (
    Task(name="like", kind=TaskKind.BINARY),
    Task(name="rating", kind=TaskKind.REGRESSION, mask="is_rated"),
)
FOUND = TaskEvaluations(
    like=Evaluation(auc=0.75, logloss=0.5, num_rows=8),
    rating=RegressionEvaluation(mse=2.0, r2=0.25, num_rows=4),
)


class OfTwo(TinyModel):
    """The model's logit, and twice that, as two tasks."""

    def forward(self, dense: Tensor, sparse: Any) -> Any:
        logits = super().forward(dense, sparse)
        return {"like": logits, "rating": 2 * logits[:, 0]}


def batches(*sizes: int) -> list[Batch]:
    """Batches of labels by name; ratings that are not known are NaN."""
    found = []
    for number, batch in enumerate(make_batches(sizes)):
        generator = torch.Generator().manual_seed(number)
        is_rated = torch.rand(len(batch.labels), generator=generator) < 0.5
        rating = torch.rand(len(batch.labels), generator=generator).where(is_rated, torch.nan)
        labels = {"like": batch.labels, "rating": rating, "is_rated": is_rated}
        found.append(batch._replace(labels=labels))
    return found


def evaluated(*sizes: int) -> dict[str, Any]:
    """The evaluation of this rank's part of batches, as plain numbers."""
    part = batches(*sizes)[ranks.rank() :: ranks.world_size()]
    found = evaluate(OfTwo(is_deep=True), part, tasks=TASKS)
    return {task: of_task._asdict() for task, of_task in found.items()}


def test_metrics_equal_sklearns() -> None:
    sizes = (40, 17, 0, 1)
    model, of_all = OfTwo(is_deep=True), batches(*sizes)
    found = evaluate(model, of_all, tasks=TASKS)
    assert model.training
    with torch.no_grad():
        outputs = [model.eval()(batch.dense, batch.sparse) for batch in of_all]
    logits = torch.cat([output["like"][:, 0] for output in outputs]).double()
    likes = torch.cat([batch.labels["like"] for batch in of_all])
    like, rating = found["like"], found["rating"]
    assert isinstance(like, Evaluation) and isinstance(rating, RegressionEvaluation)
    assert like.auc == roc_auc_score(likes, logits)
    # Either takes logarithms of what is left of probabilities, here more than a thousandth each.
    left = logits.sigmoid().where(likes > 0, (-logits).sigmoid())
    assert left.min() > 1e-3
    allowed = relative_error(4, torch.float64) * 1e3 + relative_error(2 * 58, torch.float64)
    assert like.logloss == pytest.approx(log_loss(likes, logits.sigmoid()), rel=0, abs=allowed)
    is_rated = torch.cat([batch.labels["is_rated"] for batch in of_all])
    ratings = torch.cat([batch.labels["rating"] for batch in of_all])[is_rated].double()
    predicted = torch.cat([output["rating"] for output in outputs])[is_rated].double()
    assert (like.num_rows, rating.num_rows) == (58, int(is_rated.sum()))
    # Differences, their squares and sums of these, all of one sign; then quotients.
    of_sums = 2 * relative_error(rating.num_rows + 4, torch.float64)
    assert rating.mse == pytest.approx(mean_squared_error(ratings, predicted), rel=of_sums)
    variance = float(ratings.var(correction=0))
    # The mean that the variance is about is rounded as well.
    of_quotient = 4 * of_sums * (1 + rating.mse / variance)
    assert rating.r2 == pytest.approx(r2_score(ratings, predicted), rel=0, abs=of_quotient)


def test_ranks_share_their_rows() -> None:
    sizes = (8, 5, 3)
    of_ranks = run_on_ranks(2, evaluated, *sizes)
    whole = evaluated(*sizes)
    assert of_ranks[0] == of_ranks[1]
    for task, metrics in whole.items():
        # The same rows in another order.
        assert of_ranks[0][task] == pytest.approx(
            metrics, rel=2 * relative_error(32, torch.float32)
        )


class OfBatch(nn.Module):
    """Takes a mapping, and gives a loss beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x = batch["x"] * self.weight
        return x.sum(), {"like": x, "rating": -x}


def test_models_that_take_the_whole_batch_are_evaluated() -> None:
    x = torch.tensor([-1.0, 2.0, 0.5])
    labels = {"like": torch.tensor([0, 1, 1]), "rating": -x, "is_rated": torch.ones(3)}
    batch = {"x": x, "labels": labels}

    def predictions(output: Any, batch: Any) -> Any:
        return output[1], batch["labels"]

    found = evaluate(OfBatch(), [batch], tasks=TASKS, predictions=predictions)
    like = found["like"]
    assert isinstance(like, Evaluation) and like.auc == 1.0
    assert found["rating"] == RegressionEvaluation(0.0, 1.0, 3)
    with pytest.raises(
        TypeError, match=r"^predictions must give outputs and labels by name, got T"
    ):
        evaluate(OfBatch(), [batch], tasks=TASKS, predictions=lambda output, _: output[0])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"like": torch.full((8,), 0.5)},
            ValueError,
            r"^task like: labels must be 0 or 1, got 0.5",
        ),
        (
            {"is_rated": torch.zeros(8)},
            ValueError,
            "^task rating: there must be at least one held-",
        ),
        ({"share": torch.zeros(8)}, ValueError, r"got some of unknown tasks \['share'\]"),
        ({"like": torch.zeros(8, 3)}, ValueError, r"labels of task like must be \[B\] or \[B, 1\]"),
        (None, TypeError, r"labels must be a mapping .* \['like', 'rating'\], got Tensor"),
    ],
)
def test_labels_that_do_not_fit_are_named(
    changed: dict[str, Tensor] | None, error: type[Exception], message: str
) -> None:
    (batch,) = batches(8)
    labels = torch.zeros(8) if changed is None else batch.labels | changed
    with pytest.raises(error, match=message):
        evaluate(OfTwo(), [batch._replace(labels=labels)], tasks=TASKS)


def test_missing_tasks_and_outputs_are_named() -> None:
    (batch,) = batches(8)
    tasks = [*TASKS, Task(name="share", kind=TaskKind.BINARY)]
    labels = batch.labels | {"share": torch.zeros(8)}
    with pytest.raises(ValueError, match=r"give an output for each task, .* without task share"):
        evaluate(OfTwo(), [batch._replace(labels=labels)], tasks=tasks)
    with pytest.raises(TypeError, match="model must give a mapping with an output for each task"):
        evaluate(TinyModel(), [batch], tasks=TASKS)
    with pytest.raises(ValueError, match="or give tasks"):
        evaluate(OfTwo(), [batch._replace(labels=torch.zeros(8))])
    model = OfTwo()
    torch.nn.init.constant_(model.dense.bias, math.nan)  # type: ignore[union-attr]
    with pytest.raises(FloatingPointError, match="task like: 8 of 8 logits are not finite"):
        evaluate(model, [batch], tasks=TASKS)


def test_equal_labels_have_no_r2() -> None:
    batch = batches(8)[0]
    labels = batch.labels | {"rating": torch.ones(8), "is_rated": torch.ones(8)}
    found = evaluate(OfTwo(), [batch._replace(labels=labels)], tasks=TASKS)["rating"]
    assert isinstance(found, RegressionEvaluation) and math.isnan(found.r2) and found.mse > 0


def test_scores_are_of_a_task_or_the_mean() -> None:
    assert (FOUND.score("like"), FOUND.score("rating"), FOUND.score()) == (0.75, 0.25, 0.5)
    with pytest.raises(
        ValueError, match=r"^task must be one of \['like', 'rating'\], or None for "
    ):
        FOUND.score("share")
    stop = EarlyStop(patience=1, score_name="mean score")
    assert stop.update(1, FOUND.score())
    worse = TaskEvaluations(FOUND, rating=RegressionEvaluation(2.0, 0.125, 4))
    assert not stop.update(2, worse.score())
    assert stop.reason == "mean score no better than at step 1 in 1 evaluations"
    assert not EarlyStop(target_auc=0.75).update(1, math.nan)
    assert EarlyStop(patience=1).update(2, worse.score("like"))


def test_a_run_keeps_the_evaluations_of_tasks(tmp_path: Path) -> None:
    model = OfTwo(is_deep=True)
    with (
        MetricsWriter(tmp_path) as metrics,
        TrainPipeline(model, MultiTaskLoss(TASKS), make_optimizers(model)) as pipeline,
    ):
        history = train(pipeline, batches(8, 8), history=History(read_loss_every=1))
        for found in (evaluate(model, batches(16), tasks=TASKS), FOUND):
            history.add_evaluation(found)
            metrics.write(history.num_steps, **found.scalars())
    last = read_metrics(tmp_path)[-1]
    scalars = {"like/auc": 0.75, "like/logloss": 0.5, "rating/mse": 2.0, "rating/r2": 0.25}
    assert {name: value for name, value in last.items() if "/" in name} == scalars
    restored = History()
    restored.load_state_dict(history.state_dict())
    assert restored.held_out == history.held_out
    assert type(restored.held_out[1].evaluation["rating"]) is RegressionEvaluation  # type: ignore[index]
    path = tmp_path / "training.png"
    plot_history(history, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert np.isfinite([point.loss for point in history.losses]).all()
