"""A model with its tables as one module of named tensors, which exporters trace."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import traceback as fx_traceback

from torchembed.core import dispatch
from torchembed.export.graph_inputs import GraphInputs, traced_tensors
from torchembed.export.lookups import look_up
from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.forms import Argument, ArgumentKind, Combining
from torchembed.modules.dense_part.take_apart import TakenApart


class _InterpreterOfReferences(torch.fx.Interpreter):
    """Runs a program with PyTorch's own operations in place of the library's."""

    def call_function(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        target = dispatch.references.get(target, target)
        return super().call_function(target, args, kwargs)


class Graph(nn.Module):
    """A model as a function of named tensors that gives its outputs by name.

    Its parameters have the names that they have in the model's ``state_dict``. None requires a
    gradient.
    """

    def __init__(
        self,
        parts: TakenApart,
        inputs: GraphInputs,
        tables: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """
        Args:
            tables: the whole weight of each table that the graph looks up itself, by its name in
                ``state_dict``.
        """
        super().__init__()
        dense = parts.dense
        assert dense is not None
        for name, tensor in (*dense.weights.items(), *tables.items()):
            _hold(self, name, tensor.detach().to(device))
        self._weights = tuple(dense.weights)
        self._parts, self._inputs = parts, inputs
        self._features = {feature.name: feature for feature in parts.features()}
        program = move_to_device_pass(dense.program, device)
        # Constants that the forward makes are arguments before the weights.
        constants = [
            program.constants[spec.target]
            for spec in program.graph_signature.input_specs
            if spec.target is not None
        ]
        self._constants = [constant.to(device) for constant in constants]  # type: ignore[union-attr]
        self._program = (program.graph_module,)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs, float32, by name.

        Args:
            inputs: those of the graph, in order.
        """
        dense, lookups = self._parts.dense, self._parts.recording.lookups
        assert dense is not None
        vectors = [
            inputs[self._inputs.vectors[number]]
            if self._inputs.vectors
            else self._look_up(number, inputs)
            for number in range(len(lookups))
        ]
        arguments = [self._argument(argument, inputs, vectors) for argument in dense.arguments]
        weights = [self.get_parameter(name) for name in self._weights]
        (program,) = self._program
        # Node by node, so that each operation keeps the line of the model that it comes from.
        with fx_traceback.preserve_node_meta():
            results = _InterpreterOfReferences(program).run(*self._constants, *weights, *arguments)
        return {form.name: result for form, result in zip(dense.outputs, results, strict=True)}

    def _look_up(self, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
        lookup = self._parts.recording.lookups[number]
        table = self._parts.recording.tables[lookup.table]
        feature = self._features[lookup.feature]
        return look_up(
            self.get_parameter(table.weight_name),
            inputs[feature.name],
            lengths=inputs[f"{feature.name}.lengths"] if feature.hotness is None else None,
            weights=inputs[f"{feature.name}.weights"] if lookup.is_weighted else None,
            combining=lookup.combining,
            padding_id=lookup.padding_id,
            bad_ids=table.bad_ids,
        )

    def _argument(
        self, argument: Argument, inputs: Mapping[str, Tensor], vectors: list[Tensor]
    ) -> Tensor:
        batch_size = self._batch_size(inputs)
        device = next(iter(inputs.values())).device
        match argument.kind:
            case ArgumentKind.INPUT:
                return inputs[argument.name]
            case ArgumentKind.IDS:
                ids = inputs[argument.name].long()
                is_flat = argument.shape or self._features[argument.name].hotness is None
                return ids if is_flat else ids.squeeze(1)
            case ArgumentKind.UNUSED:
                shape = [batch_size if n < 0 else n for n in argument.shape]
                dtype = getattr(torch, argument.dtype.removeprefix("torch."))
                return torch.zeros(shape, dtype=dtype, device=device)
            case ArgumentKind.LENGTHS:
                hotness = self._features[argument.name].hotness
                if hotness is None:
                    return inputs[f"{argument.name}.lengths"].long()
                return torch.full((batch_size,), hotness, dtype=torch.int64, device=device)
            case ArgumentKind.VECTORS:
                found = vectors[argument.lookup].float()
                lookup = self._parts.recording.lookups[argument.lookup]
                # Of features that came as jagged ones the program takes one id after the other.
                is_flat = lookup.combining is Combining.EACH and argument.shape
                return found.flatten(0, 1) if is_flat and found.dim() == 3 else found

    def _batch_size(self, inputs: Mapping[str, Tensor]) -> int:
        of_samples = next(form.name for form in self._inputs.forms if form.rows is None)
        return inputs[of_samples].shape[0]


def export_graph(graph: Graph, inputs: GraphInputs, device: torch.device) -> ExportedProgram:
    """``graph`` as a program of PyTorch's own operations, for any number of samples and ids.

    Raises:
        DeployError: where torch.export does not take it.
    """
    batch = Dim("batch")
    jagged = dict.fromkeys(form.rows for form in inputs.forms)
    sizes = {rows: Dim(f"ids_{number}") for number, rows in enumerate(jagged)} | {None: batch}
    shapes = {form.name: {0: sizes[form.rows]} for form in inputs.forms}
    tensors = {name: tensor.to(device) for name, tensor in traced_tensors(inputs).items()}
    with torch.no_grad():
        try:
            return torch.export.export(graph, (tensors,), dynamic_shapes=(shapes,), strict=False)
        except Exception as error:
            raise DeployError(
                "model must be one that torch.export takes together with its tables, and is not: "
                f"{error}"
            ) from error


def _hold(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Make ``tensor`` the parameter ``name``, with dots, of ``root``."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    root.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
