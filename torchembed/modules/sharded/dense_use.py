"""The dense part of a model, which every rank holds whole."""

from collections.abc import Mapping

import torch
from torch import nn

from torchembed.sharding.planning.dense_costs import DenseUse
from torchembed.sharding.planning.table_use import TableUse
from torchembed.tables import table_of


def dense_parameters(model: nn.Module, uses: Mapping[str, TableUse]) -> list[nn.Parameter]:
    """All parameters except those of the tables that ``uses`` names."""
    named = model.named_parameters()
    return [parameter for name, parameter in named if name.removesuffix(".weight") not in uses]


def dense_use(
    model: nn.Module, uses: Mapping[str, TableUse], autocast: torch.dtype | None
) -> DenseUse | None:
    """The use of the dense parameters, for the planner's costs; None for a model without any.

    Args:
        uses: the tables, by name.
        autocast: dtype in which the model computes, where it is not that of its parameters.
    """
    parameters = [p for p in dense_parameters(model, uses) if table_of(p) is None]
    if not parameters:
        return None
    torchs = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    looked_up = set(map(id, torchs))
    # A parameter of two dimensions is taken for a layer's weight, unless torch looks it up by rows.
    matrices = [p for p in parameters if p.dim() == 2 and id(p) not in looked_up]
    return DenseUse(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_layers=len(matrices),
        num_weights=sum(matrix.numel() for matrix in matrices),
        dtype=autocast or parameters[0].dtype,
        allows_tf32=bool(torch.backends.cuda.matmul.allow_tf32),
    )
