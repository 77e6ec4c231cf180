"""Plots losses and scores over training steps."""

from pathlib import Path
from typing import NamedTuple

from torchembed.training.history import History
from torchembed.training.quality import Evaluation, RegressionEvaluation


class _Curve(NamedTuple):
    """Held-out losses and scores of a task, at their steps."""

    label: str
    color: str
    steps: list[int]
    losses: list[float]
    scores: list[float]


def plot_history(
    history: History, path: Path, *, title: str = "", bayes_auc: float | None = None
) -> None:
    """Draw training loss, and held-out loss and AUC, over steps into a PNG at ``path``.

    Of several tasks each has a curve; one that predicts numbers of its mean squared error and R².

    Args:
        history: the run.
        path: the file to write.
        title: title of the figure.
        bayes_auc: the best AUC that any model can reach on these rows, where known; a dashed line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = _curves(history)
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, score_axes = figure.subplots(2, 1, sharex=True)
    if title:
        figure.suptitle(title)
    loss_axes.plot(
        [point.step for point in history.losses],
        [point.loss for point in history.losses],
        color="tab:blue",
        label="training",
    )
    for label, color, steps, losses, scores in curves:
        loss_axes.plot(steps, losses, color=color, marker="o", label=label)
        score_axes.plot(steps, scores, color=color, marker="o", label=label)
    if bayes_auc is not None:
        score_axes.axhline(
            bayes_auc, color="tab:gray", linestyle="--", label=f"Bayes {bayes_auc:.4f}"
        )
    is_of_clicks = [curve.label for curve in curves] in ([], ["held out"])
    loss_axes.set_ylabel("log loss (nats per sample)" if is_of_clicks else "loss")
    score_axes.set_ylabel("AUC (area under ROC)" if is_of_clicks else "AUC or R²")
    score_axes.set_xlabel("training steps")
    for axes in (loss_axes, score_axes):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path)


_COLORS = ("orange", "green", "red", "purple", "brown", "pink", "olive", "cyan")


def _curves(history: History) -> list[_Curve]:
    """The curves of the held-out points, one for each task."""
    points: dict[str, list[tuple[int, Evaluation | RegressionEvaluation]]] = {}
    for step, found in history.held_out:
        named = {"held out": found} if isinstance(found, Evaluation) else found
        for task, evaluation in named.items():
            points.setdefault(task, []).append((step, evaluation))
    return [
        _Curve(
            task,
            f"tab:{_COLORS[number % len(_COLORS)]}",
            [step for step, _ in of_task],
            [e.logloss if isinstance(e, Evaluation) else e.mse for _, e in of_task],
            [e.score for _, e in of_task],
        )
        for number, (task, of_task) in enumerate(points.items())
    ]
