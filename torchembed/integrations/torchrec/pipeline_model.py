"""A TorchRec model as our pipeline trains it: its collections replaced by ours in each forward."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchembed.integrations.torchrec.adopted import adopted, kernels_of
from torchembed.integrations.torchrec.batches import TorchrecForm
from torchembed.integrations.torchrec.dense_parameters import DenseParameters, Leaf
from torchembed.integrations.torchrec.fused_layers import fused_forwards
from torchembed.integrations.torchrec.model_parts import Parts
from torchembed.integrations.torchrec.tables import DenseTables, FusedTables
from torchembed.integrations.torchrec.tables_optimizer import TablesOptimizer
from torchembed.sharding.transport.ranks import Ranks
from torchembed.tables import Table


class PipelineModel(nn.Module):
    """Called with a batch of :class:`BatchReader`, gives the loss and the output of the model.

    It is no part of the user's model, in which nothing is changed between forwards.

    Args:
        parts: of the user's model.
        ranks: all of them.
        fuses_layers: whether layers are computed by our operations where we have them.
    """

    def __init__(self, parts: Parts, ranks: Ranks, *, fuses_layers: bool) -> None:
        super().__init__()
        self.inner = parts.inner
        self.adopted = [adopted(sharded, ranks) for _, sharded in parts.collections]
        self.collections = nn.ModuleList(self.adopted)
        self._sharded = [sharded for _, sharded in parts.collections]
        self._layers = fused_forwards(self.inner) if fuses_layers else []
        self._form = TorchrecForm()
        self.optimizers_of_tables: list[TablesOptimizer] = []
        replicated: list[Leaf] = []
        for kernel in (kernel for sharded in self._sharded for kernel in kernels_of(sharded)):
            tables = kernel._emb_module
            if isinstance(tables, FusedTables):
                self.optimizers_of_tables.append(TablesOptimizer(tables))
            else:
                replicated += _leaves(kernel, tables)
        averaged: list[Tensor] = []
        if ranks.mesh.size() > 1:
            averaged += [leaf.parameter for leaf in replicated]
            averaged += parts.averaged_parameters()
        self.dense = DenseParameters(parts.dense_parameters(), replicated, averaged, ranks)

    def forward(self, item: tuple[Any]) -> tuple[Tensor, Any]:
        batch, made = self._form.restored(item[0])
        by_name = self.dense.by_name
        with self._ours_in_place(made):
            losses, output = torch.func.functional_call(
                self.inner, by_name, (batch,), tie_weights=False
            )
        return torch.sum(losses, dim=0), output

    def restored(self, item: tuple[Any]) -> Any:
        """The batch, in the user's form."""
        return self._form.restored(item[0])[0]

    @contextlib.contextmanager
    def _ours_in_place(self, made: dict[int, tuple[Any, Any]]) -> Iterator[None]:
        """Meanwhile calls of TorchRec's collections are calls of ours, with what the features that
        they are given were ``made`` of, and layers are ours."""
        replaced: list[tuple[nn.Module, Any]] = [*self._layers]
        for sharded, ours in zip(self._sharded, self.adopted, strict=True):
            replaced.append((sharded, _Forward(ours, made)))
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


class _Forward(NamedTuple):
    """What is called in the place of a collection's forward."""

    ours: nn.Module
    made: dict[int, tuple[Any, Any]]

    def __call__(self, features: Any) -> Any:
        _, known = self.made.get(id(features), (None, features))
        return self.ours(known)


def _leaves(kernel: Any, tables: DenseTables) -> Sequence[Leaf]:
    held: list[Table] = [table for group in tables.groups for table in group.tables]
    for table in held:
        table.parameter.requires_grad_(tables.weights.requires_grad)
    return [Leaf(kernel._param_per_table[table.spec.name], table.parameter) for table in held]
