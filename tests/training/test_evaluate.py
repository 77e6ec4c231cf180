"""Metrics against scikit-learn's, and what evaluation leaves behind."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from tests.support.tiny_model import TinyModel, make_batches
from tests.support.tolerance import relative_error
from torchembed.training import evaluate
from torchembed.training.quality import click_quality


def assert_like_sklearn(auc: float, logloss: float, logits: np.ndarray, labels: np.ndarray) -> None:
    """The same AUC, and log loss as float64.

    Scikit-learn takes logarithms of probabilities: four roundings of one, or of its difference from
    1, which leave an error the greater the smaller what is left is. Terms are of one sign; both add
    them up in chunks, so that one takes part in at most 128 sums.
    """
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert auc == roc_auc_score(labels, logits)
    expected = log_loss(labels, probabilities)
    left = np.where(labels == 1, probabilities, 1 - probabilities)
    of_logarithms = (relative_error(4, torch.float64) / left).mean()
    of_sums = relative_error(2 * 128, torch.float64) * expected
    assert abs(logloss - expected) <= of_logarithms + of_sums


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 9.0]), st.booleans()),
        min_size=2,
        max_size=60,
    ).filter(lambda rows: len({label for _, label in rows}) == 2)
)
def test_metrics_with_ties_equal_sklearns(rows: list[tuple[float, bool]]) -> None:
    logits = torch.tensor([logit for logit, _ in rows])
    labels = torch.tensor([float(label) for _, label in rows])
    result = click_quality(logits, labels)
    assert_like_sklearn(result.auc, result.logloss, logits.numpy(), labels.numpy())
    assert result.num_rows == len(rows)


def test_metrics_of_many_rows_equal_sklearns() -> None:
    logits = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(1))
    labels = (uniform < logits.sigmoid()).float()
    result = click_quality(logits, labels)
    assert_like_sklearn(result.auc, result.logloss, logits.numpy(), labels.numpy())


def test_auc_of_one_kind_of_label_is_nan() -> None:
    result = click_quality(torch.tensor([0.5, -0.5]), torch.ones(2))
    assert math.isnan(result.auc)
    assert result.logloss > 0


@pytest.mark.parametrize("offset", [-800.0, 0.0, 40.0])
def test_auc_orders_logits_whose_probabilities_are_rounded_to_0_or_1(offset: float) -> None:
    logits = offset + torch.tensor([1.0, 4.0, 2.0, 3.0])
    assert click_quality(logits, torch.tensor([0.0, 1.0, 0.0, 1.0])).auc == 1
    assert click_quality(logits, torch.tensor([0.0, 1.0, 1.0, 0.0])).auc == 0.75


def test_evaluate_gathers_all_batches_in_evaluation_mode() -> None:
    model = TinyModel(is_deep=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = (8, 5, 0, 1)
    result = evaluate(model, make_batches(sizes))
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model.eval()
    with torch.no_grad():
        batches = list(make_batches(sizes))
        logits = torch.cat([model(batch.dense, batch.sparse)[:, 0] for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    assert_like_sklearn(result.auc, result.logloss, logits.numpy(), labels.numpy())
    assert result.num_rows == sum(sizes)
    evaluate(model, make_batches(sizes))
    assert not model.training


def test_each_module_gets_its_own_mode_back() -> None:
    model = TinyModel(is_deep=True)
    norm = next(module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d))
    norm.eval()
    evaluate(model, make_batches([4]))
    assert [m for m in model.modules() if not m.training] == [norm]

    def broken() -> Iterator[Any]:
        yield from make_batches([4])
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        evaluate(model, broken())
    assert [m for m in model.modules() if not m.training] == [norm]


def test_logits_that_are_not_finite_are_named() -> None:
    model = TinyModel()
    torch.nn.init.constant_(model.dense.bias, math.nan)  # type: ignore[union-attr]
    with pytest.raises(FloatingPointError, match=r"4 of 4 logits are not finite"):
        evaluate(model, make_batches([4]))


def test_no_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least one held-out row, got none"):
        evaluate(TinyModel(), [])


def test_labels_that_are_no_clicks_are_refused() -> None:
    (batch,) = make_batches([4])
    soft = batch._replace(labels=torch.tensor([0.0, 1.0, 0.5, 1.0]))
    with pytest.raises(ValueError, match=r"labels must be 0 or 1, got 0\.5 for sample 2"):
        evaluate(TinyModel(), [soft])


class OfInputs(nn.Module):
    """Gives ``num_logits`` logits for each sample of inputs ``{"x": [B]}``."""

    def __init__(self, num_logits: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_logits))

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"][:, None] * self.weight


class Popularity(nn.Module):
    """Has nothing to train: a score for each item, in a buffer or in the inputs."""

    def __init__(self, scores: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("scores", scores)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() if self.scores is None else self.scores[x]


@pytest.mark.parametrize("scores", [None, torch.tensor([3.0, 1.0, 2.0])])
def test_models_without_parameters_are_evaluated(scores: torch.Tensor | None) -> None:
    items, labels = torch.tensor([0, 1, 2]), torch.tensor([1.0, 0.0, 0.0])
    found = evaluate(Popularity(scores), [(items, labels)])
    assert found.auc == (0.0 if scores is None else 1.0)
    assert type(found.auc) is float


def test_inputs_with_labels_are_evaluated() -> None:
    x, labels = torch.tensor([-1.0, 2.0, 0.5, -0.5]), torch.tensor([0, 1, 0, 1])
    batches = [({"x": x[:3]}, labels[:3, None]), ({"x": x[3:]}, labels[3:, None])]
    assert evaluate(OfInputs(1), batches) == click_quality(x, labels.float())
    with pytest.raises(
        ValueError, match=r"one logit for each of the labels, .*\[3, 1\], got \[3, 2\]"
    ):
        evaluate(OfInputs(2), batches)
    with pytest.raises(TypeError, match=r"must be \(inputs, labels\), .* got dict of x, y"):
        evaluate(OfInputs(1), [{"x": x, "y": labels}])


class OfBatch(nn.Module):
    """Takes a mapping, and gives its loss and logits as ``form`` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.ones(())), form

    def forward(self, batch: dict[str, Any]) -> Any:
        logits = batch["x"] * self.weight
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["y"])
        given = {"a mapping": {"loss": loss, "logits": logits}, "a tuple": (loss, logits)}
        return given.get(self.form, logits)


PREDICTIONS: dict[str, Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]] = {
    "a mapping": lambda output, batch: (output["logits"], batch["y"]),
    "a tuple": lambda output, batch: (output[1], batch["y"]),
    "logits": lambda output, batch: (output, batch["y"]),
}


@pytest.mark.parametrize("form", PREDICTIONS)
def test_models_that_take_the_whole_batch_are_evaluated(form: str) -> None:
    x, y = torch.tensor([-1.0, 2.0, 0.5, -0.5]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    batches = [{"x": x[:3], "y": y[:3], "name": "a"}, {"x": x[3:], "y": y[3:], "name": "b"}]
    model = OfBatch(form)
    assert evaluate(model, batches, predictions=PREDICTIONS[form]) == click_quality(x, y)
    assert model.training
    with pytest.raises(TypeError, match=r"with the whole batch, give predictions=lambda output,"):
        evaluate(model, batches)


@pytest.mark.parametrize(
    ("predictions", "error", "message"),
    [
        (
            lambda output, _: output["loss"],
            TypeError,
            r"two tensors, \(logits, labels\), got Tensor",
        ),
        (lambda output, _: (output["logits"], None), TypeError, "got Tensor, NoneType"),
        (
            lambda output, batch: (output["loss"], batch["y"]),
            ValueError,
            r"one logit for each label, got logits \[\] and labels \[2\]",
        ),
    ],
)
def test_what_is_no_prediction_is_refused(
    predictions: Any, error: type[Exception], message: str
) -> None:
    batch = {"x": torch.zeros(2), "y": torch.zeros(2)}
    with pytest.raises(error, match=message):
        evaluate(OfBatch("a mapping"), [batch], predictions=predictions)
