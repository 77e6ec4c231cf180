"""Export of all of a model but its tables."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.passes import move_to_device_pass

from torchembed.modules.dense_part.argument_tree import ArgumentTree
from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.failed_export import line_of_failure
from torchembed.modules.dense_part.fed_modules import FedFeatures, FedVectors, Vectors, fed_modules
from torchembed.modules.dense_part.forms import (
    Argument,
    ArgumentKind,
    Combining,
    DenseInput,
    Output,
)
from torchembed.modules.dense_part.outputs import OutputChoice
from torchembed.modules.dense_part.recording import Recording
from torchembed.modules.served_names import dense_tensors


class DenseExport(NamedTuple):
    """The dense part of a model.

    Attributes:
        program: takes weights, then ``arguments``; on the CPU.
        weights: by name, in order.
        arguments: where each further one comes from.
        inputs: the dense inputs among them.
        outputs: of the program, in order.
    hotness: of jagged features of which the program takes a constant number of ids of each sample.
    """

    program: ExportedProgram
    weights: dict[str, Tensor]
    arguments: tuple[Argument, ...]
    inputs: tuple[DenseInput, ...]
    outputs: tuple[Output, ...]
    hotness: dict[str, int]


class _Example(NamedTuple):
    argument: Argument
    tensor: Tensor
    dims: dict[int, Any]


class _DensePart(nn.Module):
    """A model as a function of its weights, arguments and vectors."""

    def __init__(
        self,
        model: nn.Module,
        tree: ArgumentTree,
        arguments: Sequence[Argument],
        fed: FedVectors,
        choice: OutputChoice,
        recording: Recording,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        # No submodule: its parameters are arguments here.
        self._parts = (model, tree, arguments, fed, choice, recording, dtype)

    def forward(self, weights: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
        model, tree, arguments, fed, choice, recording, dtype = self._parts
        packed, taken = recording.packed, recording.places.taken
        leaves: dict[str, object] = {
            name: FedFeatures(leaf, name)
            for name, leaf in tree.leaves.items()
            if not isinstance(leaf, Tensor)
        }
        vectors: dict[int, Vectors] = {}
        for argument, tensor in zip(arguments, tensors, strict=True):
            if argument.kind is ArgumentKind.VECTORS:
                vectors[argument.lookup] = Vectors(tensor)
            elif argument.kind is ArgumentKind.LENGTHS:
                vectors[argument.lookup] = vectors[argument.lookup]._replace(lengths=tensor)
                if argument.name in packed:
                    offsets = torch.nn.functional.pad(tensor.cumsum(0), (1, 0))
                    leaves[packed[argument.name]] = offsets
            else:
                # What tables take is no input of the program.
                is_taken = argument.name in taken
                leaves[argument.name] = tensor if is_taken else _rounded(tensor, dtype)
        fed.begin([vectors[number] for number in sorted(vectors)])
        call = torch.func.functional_call(model, weights, tuple(tree.with_leaves(leaves)))
        return list(choice.outputs(call).values())


def export_dense(
    model: nn.Module,
    tree: ArgumentTree,
    recording: Recording,
    choice: OutputChoice,
    dtype: torch.dtype | None,
) -> DenseExport:
    """Export ``model`` as it is, in evaluation mode.

    Args:
        dtype: that weights, floating-point inputs and vectors of tables are rounded to; None
            leaves them.

    Raises:
        DeployError: where it cannot be exported for any number of samples.
    """
    fed = FedVectors(recording.calls, dtype)
    batch = Dim("batch")
    examples = [
        *_leaf_examples(tree, recording, batch),
        *_fed_examples(recording, batch, model, dtype),
    ]
    arguments = [example.argument for example in examples]
    with fed_modules(model, list(recording.calls), fed), _frozen(model):
        weights = {name: _rounded(w, dtype) for name, w in dense_tensors(model).items()}
        part = _DensePart(model, tree, arguments, fed, choice, recording, dtype)
        tensors = [example.tensor for example in examples]
        with torch.no_grad():
            versions = [tensor._version for tensor in (*weights.values(), *tensors)]
            try:
                results = part(weights, tensors)
            except Exception as error:
                if dtype is None:
                    raise
                raise DeployError(
                    f"model must be one whose dense part computes in {dtype}, and is not: {error}; "
                    "give another dtype, or none"
                ) from error
            if versions != [tensor._version for tensor in (*weights.values(), *tensors)]:
                raise DeployError(
                    "model must change nothing in evaluation, and its forward changes a buffer or "
                    "an argument; do so in training alone"
                )
            shapes = dict.fromkeys(weights), [example.dims for example in examples]
            try:
                program = torch.export.export(part, (weights, tensors), dynamic_shapes=shapes)
            except DeployError:
                raise
            except Exception as error:
                others = [_with_one_more(example) for example in examples]
                where = line_of_failure(
                    error, model, part, (weights, tensors), (weights, others), shapes
                )
                raise DeployError(
                    "model must be one that torch.export takes with any number of samples, and is "
                    f"not{where}: {error}"
                ) from error
    _simplify(program)
    placeholders = _placeholders(program, len(arguments))
    kinds = [
        _argument(example, placeholder, recording)
        for example, placeholder in zip(examples, placeholders, strict=True)
    ]
    program = move_to_device_pass(program, "cpu")
    program.example_inputs = None
    inputs = [
        DenseInput(
            name=a.name,
            dtype=str(example.tensor.dtype).removeprefix("torch."),
            shape=tuple(example.tensor.shape[1:]),
        )
        for a, example in zip(kinds, examples, strict=True)
        if a.kind is ArgumentKind.INPUT
    ]
    outputs = [
        Output(name=name, shape=tuple(result.shape[1:]))
        for name, result in zip(choice.names, results, strict=True)
    ]
    for output, result in zip(outputs, results, strict=True):
        if result.dim() < 1 or result.shape[0] != recording.batch_size:
            raise DeployError(
                f"output {output.name} must have an element for each of "
                f"{recording.batch_size} samples, got shape {list(result.shape)}; leave it out by "
                "None in output_names"
            )
    hotness = _constant_hotness(examples, placeholders)
    return DenseExport(program, weights, tuple(kinds), tuple(inputs), tuple(outputs), hotness)


def _simplify(program: ExportedProgram) -> None:
    """Take out the comparisons of tensors with the dtype and the device that they had in the
    export, and what no output depends on, as labels and losses of them."""
    for node in program.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` in ``dtype`` where it has floating-point numbers and a dtype is given."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _with_one_more(example: _Example) -> Tensor:
    """The example's tensor with its first sample once more at the end."""
    tensor = example.tensor
    for dim, kind in example.dims.items():
        # Of jagged features the added bag is empty.
        if kind is not Dim.AUTO:
            first = tensor.narrow(dim, 0, 1)
            is_lengths = example.argument.kind is ArgumentKind.LENGTHS
            tensor = torch.cat([tensor, torch.zeros_like(first) if is_lengths else first], dim)
    return tensor


def _leaf_examples(tree: ArgumentTree, recording: Recording, batch: Dim) -> Iterator[_Example]:
    for name, leaf in tree.leaves.items():
        if not isinstance(leaf, Tensor):
            continue
        if name in recording.packed.values():
            # Made of the lengths.
            continue
        if name in recording.packed:
            ids = recording.given[name].ids.long()
            yield _Example(Argument(kind=ArgumentKind.IDS, name=name), ids, {0: Dim.AUTO})
            continue
        if name in recording.places.whole:
            leaf = leaf.long()
        dims: dict[int, Any] = {}
        for dim, size in enumerate(leaf.shape):
            if size == recording.batch_size:
                dims = {dim: batch}
                break
        if not dims and name in recording.places.taken and leaf.dim():
            dims = {0: Dim.AUTO}
        argument = Argument(kind=ArgumentKind.INPUT, name=name)
        yield _Example(argument, leaf.detach(), dims)


def _fed_examples(
    recording: Recording, batch: Dim, model: nn.Module, dtype: torch.dtype | None
) -> Iterator[_Example]:
    options: dict[str, Any] = {"device": _device(model), "dtype": dtype or torch.float32}
    num_samples = recording.batch_size
    for number, lookup in enumerate(recording.lookups):
        dim = recording.tables[lookup.table].dim
        vectors = Argument(
            kind=ArgumentKind.VECTORS,
            name=lookup.feature,
            lookup=number,
            dtype="" if dtype is None else str(dtype),
        )
        hotness = recording.features[lookup.feature].hotness
        if lookup.combining is not Combining.EACH:
            yield _Example(vectors, torch.zeros(num_samples, dim, **options), {0: batch})
        elif hotness is not None:
            example = torch.zeros(num_samples, hotness, dim, **options)
            yield _Example(vectors, example, {0: batch})
        else:
            values, lengths = recording.jagged[number]
            yield _Example(vectors, _rounded(values, dtype), {0: Dim.AUTO})
            argument = Argument(kind=ArgumentKind.LENGTHS, name=lookup.feature, lookup=number)
            yield _Example(argument, lengths, {0: batch})


def _device(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """A context in which no parameter requires a gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _constant_hotness(
    examples: Sequence[_Example], placeholders: Sequence[torch.fx.Node]
) -> dict[str, int]:
    """The features of which the program takes as many ids as samples, or a multiple of them."""
    found: dict[str, int] = {}
    num_samples = _samples(examples, placeholders)
    for (argument, _, dims), placeholder in zip(examples, placeholders, strict=True):
        if argument.kind is not ArgumentKind.VECTORS or dims[0] is not Dim.AUTO:
            continue
        size = placeholder.meta["val"].shape[0]
        if isinstance(size, int):
            raise DeployError(
                f"model must take any number of ids of the jagged feature {argument.name}, and "
                f"takes {size} alone; give it a fixed hotness"
            )
        ratio = size.node.expr / num_samples.node.expr
        if ratio.is_Integer:
            found[argument.name] = int(ratio)
    return found


def _samples(examples: Sequence[_Example], placeholders: Sequence[torch.fx.Node]) -> Any:
    """The number of samples, as the program knows it."""
    for example, placeholder in zip(examples, placeholders, strict=True):
        for dim, kind in example.dims.items():
            if kind is not Dim.AUTO:
                return placeholder.meta["val"].shape[dim]
    raise AssertionError("no argument has a row for each sample")


def _placeholders(program: ExportedProgram, num_arguments: int) -> list[torch.fx.Node]:
    """The places of the last arguments in the graph."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    return nodes[len(nodes) - num_arguments :]


def _argument(example: _Example, placeholder: torch.fx.Node, recording: Recording) -> Argument:
    argument, tensor, places = example.argument, example.tensor, recording.places
    if argument.lookup in recording.jagged and argument.kind is ArgumentKind.VECTORS:
        return dataclasses.replace(argument, shape=(-1, tensor.shape[1]))
    if argument.kind is not ArgumentKind.INPUT:
        return argument
    if not placeholder.users:
        shape = tuple(-1 if dim in example.dims else n for dim, n in enumerate(tensor.shape))
        return Argument(
            kind=ArgumentKind.UNUSED, name=argument.name, shape=shape, dtype=str(tensor.dtype)
        )
    if argument.name in places.whole:
        if tensor.dim() > 2:
            raise DeployError(
                f"ids {argument.name} must be [B] or [B, n] where the model uses them beside its "
                f"tables, got {list(tensor.shape)}"
            )
        return Argument(kind=ArgumentKind.IDS, name=argument.name, shape=tuple(tensor.shape[1:]))
    if argument.name in places.taken:
        raise DeployError(
            f"{argument.name} must be used by tables alone, or be one id or several of each "
            "sample, all of them looked up; give what else is made of it as another argument"
        )
    if 0 not in example.dims:
        raise DeployError(
            f"{argument.name} must have a row for each of {recording.batch_size} samples, got "
            f"shape {list(tensor.shape)}"
        )
    return argument
