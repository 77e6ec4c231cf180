"""Programs of torch.export as models of ONNX."""

import itertools
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.onnx.errors import OnnxExporterError

from torchembed.export.constant_gathers import split_constant_gathers
from torchembed.export.torch_warnings import without_warnings_of_copies
from torchembed.export.traced_model import TracedModel
from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.source_lines import SourceLines

if TYPE_CHECKING:
    import onnx_ir


def to_onnx(traced: TracedModel, lines: SourceLines) -> "onnx_ir.Model":
    """The graph of ``traced`` as ONNX's, which keeps where its nodes come from.

    Raises:
        DeployError: where ONNX has nothing for an operation, and for names that it cannot have.
    """
    _check_names(traced)
    try:
        with without_warnings_of_copies():
            converted = torch.onnx.export(
                traced.program,
                input_names=list(traced.inputs.tensors),
                output_names=traced.output_names(),
                verbose=False,
            )
    except OnnxExporterError as error:
        causes = list(_causes(error))
        node = _failed_node(causes)
        operation = "one" if node is None else f"{node.target}"
        where = "" if node is None else lines.of_trace(node.meta.get("stack_trace"))
        raise DeployError(
            f"model must be made of operations that ONNX has, and {operation}{where} is none: "
            f"{causes[-1]}"
        ) from error
    assert converted is not None
    _give_names(converted.model, traced)
    split_constant_gathers(converted.model)
    return converted.model


def _give_names(model: "onnx_ir.Model", traced: TracedModel) -> None:
    """Rename what a graph computes on its way, and constants, where an input or an output has the
    name, too; in place. torch's exporter names both by operations and numbers."""
    graph = model.graph
    weights = {name for name, _ in traced.graph.named_parameters()}
    outer = {value.name for value in (*graph.inputs, *graph.outputs)}
    constants = [v for name, v in graph.initializers.items() if name not in weights]
    inner = [v for node in graph for v in node.outputs if not v.is_graph_output()]
    names = outer | weights | {value.name for value in (*constants, *inner)}
    for value in (*constants, *inner):
        name = value.name
        if name is None or name not in outer:
            continue
        is_constant = graph.initializers.get(name) is value
        if is_constant:
            del graph.initializers[name]
        tries = (f"{name}.{number}" for number in itertools.count(1))
        value.name = next(name for name in tries if name not in names)
        names.add(value.name)
        if is_constant:
            graph.register_initializer(value)


def _check_names(traced: TracedModel) -> None:
    """Raise ``DeployError`` where an input, an output and a weight have one name, as ONNX has it
    not."""
    weights = dict(traced.graph.named_parameters())
    names = Counter([*traced.inputs.tensors, *traced.output_names(), *weights])
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise DeployError(
            f"inputs, outputs and weights must have different names in ONNX, and several are named "
            f"{twice}; rename them, outputs by output_names"
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _failed_node(causes: list[BaseException]) -> torch.fx.Node | None:
    """The node that torch's exporter was at; only its frames know it."""
    for error in causes:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node):
                return node
    return None
