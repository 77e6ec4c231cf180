"""The model that torchembed's pipeline trains: a TorchRec model whose collections are replaced by
views during each forward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.trees import Tree
from torchembed.integrations.torchrec.batches.conversion import (
    ReadItem,
    RestoredFeatures,
    TorchrecBatchForm,
)
from torchembed.integrations.torchrec.sharded.kernels import DenseKernel
from torchembed.integrations.torchrec.trained_model.collection_views import collection_view
from torchembed.integrations.torchrec.trained_model.dense_parameters import (
    AliasedParameter,
    DenseParameters,
)
from torchembed.integrations.torchrec.trained_model.fused_layers import fused_forwards
from torchembed.integrations.torchrec.trained_model.tables_optimizer import TablesOptimizer
from torchembed.integrations.torchrec.trained_model.unwrapped_model import UnwrappedModel
from torchembed.sharding.transport.table_ranks import TableRanks


class PipelineModel(nn.Module):
    """Returns the model's loss and output for a batch of :class:`BatchReader`.

    The user's model does not contain it, and nothing in it is changed between forwards.

    Args:
        model: the user's.
        ranks: all ranks.
        fuses_layers: whether layers are computed by torchembed's fused operations where it has any.

    Attributes:
        views: torchembed's collections over the tables of the model's.
        table_optimizers: for each fused kernel, the optimizer of its tables.
        dense: aliases of the dense parameters.
    """

    def __init__(self, model: UnwrappedModel, ranks: TableRanks, *, fuses_layers: bool) -> None:
        super().__init__()
        self.inner = model.inner
        self._sharded = [sharded for _, sharded in model.collections]
        self.views = [collection_view(sharded, ranks) for sharded in self._sharded]
        # Registered, so that the pipeline finds the collections among the modules.
        self.collections = nn.ModuleList(self.views)
        self._layers = fused_forwards(self.inner) if fuses_layers else []
        self._form = TorchrecBatchForm()
        self.table_optimizers: list[TablesOptimizer] = []
        replicated: list[AliasedParameter] = []
        for kernel in (kernel for sharded in self._sharded for kernel in sharded.kernels):
            if isinstance(kernel, DenseKernel):
                replicated += _aliased_tables(kernel)
            else:
                self.table_optimizers.append(TablesOptimizer(kernel.tables))
        averaged: list[Tensor] = []
        if ranks.mesh.size() > 1:
            averaged += [pair.parameter for pair in replicated]
            averaged += model.averaged_parameters()
        self.dense = DenseParameters(model.dense_parameters(), replicated, averaged, ranks)

    def forward(self, item: ReadItem) -> tuple[Tensor, Tree]:
        batch, restored = self._form.restore(item[0])
        with self._replaced_forwards(restored):
            losses, output = torch.func.functional_call(
                self.inner, self.dense.aliases_by_name, (batch,), tie_weights=False
            )
        return torch.sum(losses, dim=0), output

    def batch_of(self, item: ReadItem) -> Tree:
        """The batch of ``item`` in the user's form."""
        return self._form.restore(item[0])[0]

    @contextlib.contextmanager
    def _replaced_forwards(self, restored: RestoredFeatures) -> Iterator[None]:
        """Replace the forwards of TorchRec's collections by those of their views, which take the
        features that were ``restored``, and the forwards of layers by fused ones."""
        replaced: list[tuple[nn.Module, Callable[..., Tree]]] = [*self._layers]
        for sharded, view in zip(self._sharded, self.views, strict=True):
            replaced.append((sharded, _ViewForward(view, restored)))
        before = [vars(module).get("forward") for module, _ in replaced]
        for module, forward in replaced:
            module.forward = forward
        try:
            yield
        finally:
            for (module, _), forward in zip(replaced, before, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward


class _ViewForward(NamedTuple):
    """Forward of a collection that is replaced by a view."""

    view: nn.Module
    restored: RestoredFeatures

    def __call__(self, features: Tree) -> Tree:
        # The view recognizes a batch that was looked up ahead by its own tensors, so it takes what
        # the KeyedJaggedTensor was made of.
        _, original = self.restored.get(id(features), (None, features))
        return self.view(original)


def _aliased_tables(kernel: DenseKernel) -> list[AliasedParameter]:
    """Pairs of the parameters that TorchRec's optimizers know and the tables' own."""
    tables = [table for group in kernel.tables.groups for table in group.tables]
    for table in tables:
        table.parameter.requires_grad_(kernel.tables.weights.requires_grad)
    return [
        AliasedParameter(kernel.parameter_of(table.spec.name), table.parameter) for table in tables
    ]
