"""Programs of torch.export as models of ONNX."""

import traceback
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
        DeployError: where ONNX has nothing for an operation.
    """
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
    split_constant_gathers(converted.model)
    return converted.model


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
