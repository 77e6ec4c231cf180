"""Quality as good as fp32 in the bench, and what is left of a run that is ended."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro", reason="the bench needs tyro")
import torchembed
from bench.training import quality
from bench.training.quality import CHOICES, Choice, bytes_per_row, compare
from tests.support.tolerance import relative_error
from torchembed import optim


def rows(fp32: list[float], bf16: list[float]) -> list[dict[str, object]]:
    return [
        {"choice": name, "auc": auc}
        for name, aucs in (("fp32", fp32), ("bf16", bf16))
        for auc in aucs
    ]


@pytest.mark.parametrize(
    ("fp32", "bf16", "limit", "passes"),
    [
        # All seeds alike: half a thousandth is allowed, either way.
        ([0.75] * 3, [0.7496] * 3, 5e-4, True),
        ([0.75] * 3, [0.7506] * 3, 5e-4, False),
        ([0.75] * 3, [0.7494] * 3, 5e-4, False),
        # Deviation 0.001, of three seeds: n - 1 in its denominator.
        ([0.749, 0.750, 0.751], [0.7481] * 3, 2e-3, True),
        ([0.749, 0.750, 0.751], [0.7479] * 3, 2e-3, False),
        # Means are compared, not single seeds.
        ([0.75] * 3, [0.70, 0.80], 5e-4, True),
    ],
)
def test_compare(fp32: list[float], bf16: list[float], limit: float, passes: bool) -> None:
    (found,) = compare(rows(fp32, bf16), CHOICES["precision"], bayes_auc=0.8)
    # AUCs are rounded decimals below 1, which puts a deviation off by less than two roundings of 1.
    assert found["limit"] == pytest.approx(limit, rel=0, abs=2 * relative_error(2, torch.float64))
    assert found["passes"] is passes
    assert found["bayes_auc"] == 0.8


def test_another_optimizer_is_compared_and_nothing_required_of_it() -> None:
    found = compare(
        [
            {"choice": name, "auc": auc}
            for name, auc in (
                ("fp32, Adagrad", 0.75),
                ("bf16, Adagrad", 0.7),
                ("fp32, row-wise Adagrad", 0.7),
            )
        ],
        CHOICES["rows"],
        bayes_auc=0.8,
    )
    # Choices that were not trained yet have no line.
    assert [(row["choice"], row["limit"], row["passes"]) for row in found] == [
        ("bf16, Adagrad", 5e-4, False),
        ("fp32, row-wise Adagrad", None, True),
    ]
    assert [quality.line(row).rpartition(", ")[2] for row in found] == [
        "allowed 0.00050: FAILS",
        "nothing is required",
    ]


@pytest.mark.parametrize(
    ("choice", "num_bytes"),
    [
        # Sixteen numbers of a row, and as many sums of float32, or one.
        (Choice(), 16 * 4 + 16 * 4),
        (Choice(rows=torch.float16), 16 * 2 + 16 * 4),
        (Choice(rows=torch.bfloat16, optimizer=optim.RowwiseAdagrad), 16 * 2 + 4),
    ],
)
def test_bytes_of_a_row_with_its_state(choice: Choice, num_bytes: int) -> None:
    tables = torchembed.EmbeddingBagCollection(
        quality.Config(shape="small").tables(choice.rows), device="cpu"
    )
    weights = list(tables.parameters())
    assert bytes_per_row(weights[0], choice.optimizer(weights, lr=0.1)) == num_bytes


def test_what_is_done_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aucs = iter([0.75, 0.7501, 0.7502])

    def train_once(*_: Any) -> dict[str, Any]:
        auc = next(aucs, None)
        if auc is None:
            raise KeyboardInterrupt
        choice = "bf16" if auc == 0.7501 else "fp32"
        numbers = {"auc": auc, "logloss": 0.5, "train_loss": 0.5, "train_seconds": 1.0}
        return {"choice": choice, **numbers}

    monkeypatch.setattr(quality, "train_once", train_once)
    output = tmp_path / "quality.json"
    sizes = ["--batch-size", "8", "--num-steps", "1", "--num-held-out", "64", "--max-rows", "9"]
    monkeypatch.setattr("sys.argv", ["quality", *sizes, "--output", str(output)])
    with pytest.raises(KeyboardInterrupt):
        quality.main()
    rows = json.loads(output.read_text())["rows"]
    assert [row["auc"] for row in rows] == [0.75, 0.7501, 0.7502, 0.7501]
    # Three rounded decimals and a rounded mean, all below 1.
    assert abs(rows[-1]["difference"]) <= relative_error(4, torch.float64)
    assert 0.5 < rows[-1]["bayes_auc"] < 1
