"""Plots loss and AUC over training steps."""

from pathlib import Path

from torchembed.training.history import History


def plot_history(
    history: History, path: Path, *, title: str = "", bayes_auc: float | None = None
) -> None:
    """Draw training loss and held-out AUC over steps into a PNG at ``path``.

    Args:
        history: the run.
        path: the file to write.
        title: title of the figure.
        bayes_auc: the best AUC that any model can reach on these rows, where known; a dashed line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, auc_axes = figure.subplots(2, 1, sharex=True)
    if title:
        figure.suptitle(title)
    loss_axes.plot(
        [point.step for point in history.losses],
        [point.loss for point in history.losses],
        color="tab:blue",
        label="training",
    )
    steps = [point.step for point in history.held_out]
    loss_axes.plot(
        steps,
        [point.evaluation.logloss for point in history.held_out],
        color="tab:orange",
        marker="o",
        label="held out",
    )
    loss_axes.set_ylabel("log loss (nats per sample)")
    auc_axes.plot(
        steps,
        [point.evaluation.auc for point in history.held_out],
        color="tab:orange",
        marker="o",
        label="held out",
    )
    if bayes_auc is not None:
        auc_axes.axhline(
            bayes_auc, color="tab:gray", linestyle="--", label=f"Bayes {bayes_auc:.4f}"
        )
    auc_axes.set_ylabel("AUC (area under ROC)")
    auc_axes.set_xlabel("training steps")
    for axes in (loss_axes, auc_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
