"""The picture can be drawn of any history."""

from pathlib import Path

import pytest

from torchembed.training import Evaluation, HeldOutPoint, History, LossPoint, plot_history


@pytest.mark.parametrize("num_points", [0, 1, 3])
@pytest.mark.parametrize("bayes_auc", [None, 0.8])
def test_plot_writes_a_png(num_points: int, bayes_auc: float | None, tmp_path: Path) -> None:
    history = History(
        losses=[LossPoint(10 * i, 0.7 - 0.1 * i) for i in range(num_points)],
        held_out=[HeldOutPoint(10 * i, Evaluation(0.6, 0.5, 9)) for i in range(num_points)],
    )
    path = tmp_path / "training.png"
    plot_history(history, path, title="a title", bayes_auc=bayes_auc)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
