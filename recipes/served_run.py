"""``ServedRun``: what of a run ``python -m recipes.serve`` deploys and asks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchembed import SparseFeatures
from torchembed.training import CheckpointFolder, TrainingRun

NUM_EXAMPLES = 16
"""Samples that a model is deployed with."""
NUM_ASKED = 2
"""Samples of a request."""


class ServedRun(NamedTuple):
    """The model of a run as servers are to answer from it."""

    checkpoints: Path
    """The folder of the checkpoint."""
    num_steps: int
    """The number of steps after which it was saved."""
    load_model: Callable[[], nn.Module]
    """Gives the model on the CPU, with the weights of that checkpoint."""
    examples: tuple[Any, ...]
    """Arguments of its ``forward``, of several samples."""
    request: Mapping[str, Tensor]
    """The inputs of a request of two samples, by name: ids int64, lengths int32, floats float32."""
    output: str | Mapping[str, str] = "sigmoid"
    """Treatment of the outputs, as of :func:`torchembed.serving.models.deploy`."""
    output_names: Sequence[str] | None = None
    """Names of the outputs; None for those that the model gives."""


def newest_step(checkpoints: Path) -> int:
    """The number of steps of the newest checkpoint in a folder.

    Raises:
        FileNotFoundError: where there is none.
    """
    steps = CheckpointFolder(checkpoints).steps()
    if not steps:
        raise no_checkpoint(checkpoints)
    return steps[-1]


def load_weights(model: nn.Module, checkpoints: Path, num_steps: int) -> nn.Module:
    """Load the weights of the checkpoint of ``num_steps`` into ``model``, which it returns."""
    CheckpointFolder(checkpoints).load(TrainingRun(model=model), num_steps)
    return model


def no_checkpoint(folder: Path) -> FileNotFoundError:
    """The error for a folder of a run without a checkpoint."""
    return FileNotFoundError(
        f"a run must have saved a checkpoint to be served, and there is none in {folder}; go on "
        "with it by --resume, or name another run"
    )


def click_request(dense: Tensor | None, features: SparseFeatures) -> dict[str, Tensor]:
    """The request of the first samples of a batch of clicks.

    Args:
        dense: ``[B, num_dense]``; left out where there is no column.
        features: of ``B`` samples.
    """
    inputs = {}
    if dense is not None and dense.shape[1]:
        inputs["dense_features"] = dense[:NUM_ASKED]
    lengths = features.lengths()
    begins = lengths.flatten().cumsum(0).view_as(lengths) - lengths
    for key, counts, (begin, *_) in zip(features.keys, lengths, begins.tolist(), strict=True):
        ids = features.values[begin : begin + int(counts[:NUM_ASKED].sum())].long()
        if features.hotness is None:
            inputs |= {key: ids, f"{key}.lengths": counts[:NUM_ASKED].int()}
        else:
            inputs[key] = ids.view(NUM_ASKED, -1)
    return inputs
