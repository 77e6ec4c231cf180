"""Gathers by constant indices as splits, which runtimes copy by runs."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir

_LEAST_MEAN_RUN = 2
"""Indices of a run, on average, from which a split pays off."""


def split_constant_gathers(model: "onnx_ir.Model") -> None:
    """Replace gathers from an inner axis by constant ascending indices, as those of the pairs of a
    dot interaction, by a split and a concatenation of the parts that are kept; in place.

    onnxruntime gathers from an inner axis element by element, and splits by runs.
    """
    for node in list(model.graph):
        if node.op_type == "Gather" and not node.outputs[0].is_graph_output():
            _split(model.graph, node)


def _split(graph: "onnx_ir.Graph", node: "onnx_ir.Node") -> None:
    import onnx_ir
    from onnx_ir.convenience import replace_all_uses_with

    data, indices = node.inputs
    axis = node.attributes.get_int("axis", 0)
    if data is None or indices is None or indices.const_value is None or data.shape is None:
        return
    places: Any = indices.const_value.numpy()
    size = data.shape[axis]
    if axis == 0 or not isinstance(size, int) or places.ndim != 1:
        return
    sizes = _part_sizes(places, size)
    kept = slice(1, None, 2)
    if sizes is None or len(places) < _LEAST_MEAN_RUN * len(sizes[kept]):
        return
    # ONNX has parts of no element, but there is no use in them.
    numbers = [n for n, num in enumerate(sizes) if num]
    name = f"{node.name}.sizes"
    values = np.array([sizes[n] for n in numbers], dtype=np.int64)
    sizes_value = onnx_ir.Value(
        name=name,
        shape=onnx_ir.Shape(values.shape),
        type=onnx_ir.TensorType(onnx_ir.DataType.INT64),
        const_value=onnx_ir.tensor(values, name=name),
    )
    graph.register_initializer(sizes_value)
    split = onnx_ir.node(
        "Split",
        [data, sizes_value],
        attributes={"axis": axis},
        num_outputs=len(numbers),
        name=f"{node.name}.split",
    )
    for number, part in zip(numbers, split.outputs, strict=True):
        part.name = f"{split.name}.{number}"
    parts = [part for n, part in zip(numbers, split.outputs, strict=True) if n % 2]
    joined = onnx_ir.node("Concat", parts, attributes={"axis": axis}, name=f"{node.name}.joined")
    before, after = node.outputs[0], joined.outputs[0]
    after.name, after.shape, after.type = before.name, before.shape, before.type
    for new in (split, joined):
        new.metadata_props.update(node.metadata_props)
    graph.insert_before(node, [split, joined])
    replace_all_uses_with(before, after)
    graph.remove(node, safe=True)
    if indices.is_initializer() and not indices.uses() and indices.name is not None:
        del graph.initializers[indices.name]  # of which runtimes would warn


def _part_sizes(places: np.ndarray, size: int) -> list[int] | None:
    """Sizes of parts of ``size`` elements that are in turn left out and kept; None where ``places``
    do not ascend.

    For places 1, 2, 5 of 6 they are 1, 2, 2, 1: element 0 is left out, then come 1 and 2, then 3
    and 4, which are left out, and 5.
    """
    if not len(places) or (np.diff(places) <= 0).any() or places[0] < 0 or places[-1] >= size:
        return None
    first = np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1)
    begins = places[first]
    ends = places[np.append(first[1:], len(places)) - 1] + 1
    bounds = np.append(np.stack([begins, ends], axis=1).reshape(-1), size)
    return np.diff(bounds, prepend=0).tolist()
