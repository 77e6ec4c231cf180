"""What of a model is its dense part, that every rank holds whole."""

from collections.abc import Mapping

import torch
from torch import nn

from torchembed.sharding.planning.costs import TableUse
from torchembed.sharding.planning.dense_costs import DenseUse
from torchembed.tables import table_of


def dense_parameters(model: nn.Module, uses: Mapping[str, TableUse]) -> list[nn.Parameter]:
    """All parameters but those of the tables that ``uses`` names."""
    named = model.named_parameters()
    return [parameter for name, parameter in named if name.removesuffix(".weight") not in uses]


def dense_use(
    model: nn.Module, uses: Mapping[str, TableUse], autocast: torch.dtype | None
) -> DenseUse | None:
    """What the planner's costs want to know of them; None where there are none.

    Args:
        uses: the tables, by name.
        autocast: in which the model computes, where that is not its parameters' dtype.
    """
    parameters = [p for p in dense_parameters(model, uses) if table_of(p) is None]
    if not parameters:
        return None
    torchs = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    looked_up = set(map(id, torchs))
    matrices = [p for p in parameters if p.dim() == 2 and id(p) not in looked_up]
    return DenseUse(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_layers=len(matrices),
        num_weights=sum(matrix.numel() for matrix in matrices),
        dtype=autocast or parameters[0].dtype,
        allows_tf32=bool(torch.backends.cuda.matmul.allow_tf32),
    )
