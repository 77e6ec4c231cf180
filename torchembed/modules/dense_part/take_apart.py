"""``take_apart``: a model as its lookups in tables and its dense part."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import raise_on_all_ranks
from torchembed.modules.dense_part.argument_tree import ArgumentTree
from torchembed.modules.dense_part.dense_export import DenseExport, export_dense
from torchembed.modules.dense_part.forms import Feature
from torchembed.modules.dense_part.outputs import OutputChoice
from torchembed.modules.dense_part.recording import Recording


class TakenApart(NamedTuple):
    """The parts of a model.

    Attributes:
        model: outside of DistributedDataParallel.
        tree: the examples.
        recording: its run with them.
        choice: of the outputs.
        dense: its dense part on rank 0, None on other ranks.
    """

    model: nn.Module
    tree: ArgumentTree
    recording: Recording
    choice: OutputChoice
    dense: DenseExport | None

    def features(self) -> list[Feature]:
        """The features that tables look up, each once; on rank 0."""
        assert self.dense is not None
        used = {lookup.feature for lookup in self.recording.lookups}
        # Some came as jagged ones, and are none.
        hotness = self.dense.hotness
        return [
            dataclasses.replace(feature, hotness=hotness.get(name, feature.hotness))
            for name, feature in self.recording.features.items()
            if name in used
        ]


def take_apart(
    model: nn.Module,
    examples: object,
    output: str | Mapping[str, str],
    output_names: Sequence[str | None] | None,
    what: str,
    dtype: torch.dtype | None = None,
) -> TakenApart:
    """Run ``model`` with ``examples`` and export its dense part, in evaluation mode; collective.

    The model is left as it was.

    Args:
        examples: arguments of ``forward``, a tuple for several; each rank has its own, of equal
            form.
        output, output_names: as of :class:`OutputChoice`.
        what: the action, for errors.
        dtype: as of :func:`export_dense`.

    Raises:
        DeployError: where the model cannot be taken apart.
    """
    whole = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    with _evaluating(whole):
        tree = raise_on_all_ranks(lambda: ArgumentTree(whole, examples), what)
        recording = raise_on_all_ranks(lambda: Recording(whole, tree), what)
        choice = raise_on_all_ranks(lambda: OutputChoice(output, output_names), what)
        dense = raise_on_all_ranks(
            lambda: (
                export_dense(whole, tree, recording, choice, dtype) if ranks.rank() == 0 else None
            ),
            what,
        )
    return TakenApart(whole, tree, recording, choice, dense)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which all modules are in evaluation mode."""
    trained = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True
