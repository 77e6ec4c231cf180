"""A model traced for an exporter, from live modules or ranks that share them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram

from torchembed.core.ranks.collective_errors import decide_on_first_rank
from torchembed.export.graph import Graph, export_graph
from torchembed.export.graph_inputs import GraphInputs, graph_inputs
from torchembed.export.sources import used_tables
from torchembed.modules.dense_part.take_apart import TakenApart, take_apart


class TracedModel(NamedTuple):
    """A model as a graph of named tensors, and what it was made of.

    Attributes:
        program: of PyTorch's own operations, for any number of samples and ids.
    """

    parts: TakenApart
    inputs: GraphInputs
    graph: Graph
    program: ExportedProgram

    def output_names(self) -> list[str]:
        """The outputs, in order."""
        assert self.parts.dense is not None
        return [form.name for form in self.parts.dense.outputs]


def trace_model(
    model: nn.Module,
    examples: object,
    *,
    with_tables: bool,
    output: str | Mapping[str, str],
    output_names: Sequence[str | None] | None,
    device: torch.device,
    what: str,
) -> TracedModel | None:
    """Trace ``model``; None on other ranks than 0. Collective.

    Args:
        with_tables: whether the graph looks vectors up, or takes them.
        device: of the graph.
        what: the action, for errors.
        model, examples, output, output_names: as of :func:`take_apart`.

    Raises:
        DeployError: where that cannot be done.
    """
    parts = take_apart(model, examples, output, output_names, what)
    tables = used_tables(parts) if with_tables else {}
    traced: list[TracedModel] = []

    def trace() -> None:
        inputs = graph_inputs(parts, with_tables=with_tables)
        graph = Graph(parts, inputs, tables, device)
        traced.append(TracedModel(parts, inputs, graph, export_graph(graph, inputs, device)))

    decide_on_first_rank(trace, what)
    return traced[0] if traced else None
