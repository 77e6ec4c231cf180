"""The inputs of an exported graph: their names, shapes and examples."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.forms import ArgumentKind, Combining, Feature, Lookup
from torchembed.modules.dense_part.recording import GivenIds
from torchembed.modules.dense_part.take_apart import TakenApart


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphInput:
    """An input of an exported graph.

    Attributes:
        name: as of the request's array that servers of torchembed take.
        dtype: of the tensor.
        shape: without the first dim.
        rows: what the first dim counts: the name of a jagged feature for its ids, None for samples.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: str | None = None


class GraphInputs(NamedTuple):
    """The inputs of a graph, in order, with examples of each.

    Attributes:
        forms: of the inputs.
        tensors: of the examples, by name, on the CPU.
        vectors: the name of the input that holds the vectors of each lookup; none where the graph
            looks them up.
    """

    forms: tuple[GraphInput, ...]
    tensors: dict[str, Tensor]
    vectors: dict[int, str]


def graph_inputs(parts: TakenApart, *, with_tables: bool) -> GraphInputs:
    """The inputs of the graph of a model; on rank 0.

    Raises:
        DeployError: where several would have one name.
    """
    assert parts.dense is not None
    dense_inputs, arguments = parts.dense.inputs, parts.dense.arguments
    lookups = parts.recording.lookups
    vectors = {} if with_tables else vector_names(lookups)
    forms: list[GraphInput] = []
    tensors: dict[str, Tensor] = {}
    # Ids that the dense part takes are inputs also of graphs without tables.
    as_ids = {a.name for a in arguments if a.kind is ArgumentKind.IDS}
    with_lengths = {a.name for a in arguments if a.kind is ArgumentKind.LENGTHS}

    def add(name: str, tensor: Tensor, rows: str | None = None) -> None:
        if name in tensors:
            raise DeployError(f"inputs must have different names, and several are named {name}")
        tensors[name] = tensor.detach().cpu().contiguous()
        shape = tuple(tensor.shape[1:])
        forms.append(GraphInput(name=name, dtype=tensor.dtype, shape=shape, rows=rows))

    for form in dense_inputs:
        leaf = parts.tree.leaves[form.name]
        assert isinstance(leaf, Tensor)
        add(form.name, leaf)
    for feature in parts.features():
        given = parts.recording.given[feature.name]
        if with_tables:
            for name, tensor, is_of_ids in _feature_tensors(feature, given):
                add(name, tensor, feature.name if is_of_ids else None)
            continue
        if feature.name in as_ids:
            add(feature.name, given.ids, feature.name if feature.hotness is None else None)
        for number, lookup in enumerate(lookups):
            if lookup.feature == feature.name:
                dim = parts.recording.tables[lookup.table].dim
                shape = vectors_shape(lookup, feature, given, parts.recording.batch_size)
                is_of_ids = lookup.combining is Combining.EACH and feature.hotness is None
                # As of freshly trained tables; what they are does not matter.
                drawn = torch.linspace(-1, 1, shape[0] * dim).reshape(shape[0], dim)
                example = drawn if len(shape) == 1 else drawn.unsqueeze(1).expand(*shape, dim)
                add(vectors[number], example, feature.name if is_of_ids else None)
        if feature.name in with_lengths and given.lengths is not None and feature.hotness is None:
            add(f"{feature.name}.lengths", given.lengths.int())
    return GraphInputs(tuple(forms), tensors, vectors)


def _feature_tensors(feature: Feature, given: GivenIds) -> Iterator[tuple[str, Tensor, bool]]:
    """The name and tensor of each input of a feature, and whether it has a row for each id."""
    is_jagged = feature.hotness is None
    shape = (-1,) if feature.hotness is None else (-1, feature.hotness)
    yield feature.name, given.ids.reshape(shape), is_jagged
    if is_jagged:
        assert given.lengths is not None
        yield f"{feature.name}.lengths", given.lengths.int(), False
    if feature.is_weighted:
        assert given.weights is not None
        yield f"{feature.name}.weights", given.weights.float().reshape(shape), is_jagged


def vectors_shape(
    lookup: Lookup, feature: Feature, given: GivenIds, batch_size: int
) -> tuple[int, ...]:
    """The shape of a lookup's vectors without their dim: ``[B]``, ``[B, hotness]`` or ``[L]``."""
    if lookup.combining is not Combining.EACH:
        return (batch_size,)
    return (len(given.ids),) if feature.hotness is None else (batch_size, feature.hotness)


def vector_names(lookups: list[Lookup]) -> dict[int, str]:
    """The name of the input that holds the vectors of each lookup: of the feature, of its table too
    where several tables look it up, and of what becomes of vectors where one does so twice."""
    names = [
        (
            f"{u.feature}.vectors",
            f"{u.feature}.{u.table}.vectors",
            f"{u.feature}.{u.table}.{u.combining.value}.vectors",
        )
        for u in lookups
    ]
    counts = Counter(name for of_lookup in names for name in set(of_lookup))
    return {
        number: next((name for name in of_lookup if counts[name] == 1), of_lookup[-1])
        for number, of_lookup in enumerate(names)
    }


def traced_tensors(inputs: GraphInputs) -> dict[str, Tensor]:
    """The examples, with 2 ids of each jagged feature that has fewer: a tracer takes a size of 0 or
    1 for a constant."""
    tensors = dict(inputs.tensors)
    for form in inputs.forms:
        if form.rows is not None and len(inputs.tensors[form.name]) < 2:
            tensors[form.name] = torch.zeros(2, *form.shape, dtype=form.dtype)
            lengths = torch.zeros_like(inputs.tensors[f"{form.rows}.lengths"])
            lengths[0] = 2
            tensors[f"{form.rows}.lengths"] = lengths
    return tensors


def of_samples(
    forms: tuple[GraphInput, ...], tensors: Mapping[str, Tensor], samples: Tensor
) -> dict[str, Tensor]:
    """The inputs of some samples, which may come several times.

    Args:
        samples: int64 ``[N]``, numbers of samples of ``tensors``.
    """
    found: dict[str, Tensor] = {}
    for form in forms:
        tensor = tensors[form.name]
        if form.rows is None:
            found[form.name] = tensor[samples]
            continue
        lengths = tensors[f"{form.rows}.lengths"].long()
        starts = lengths.cumsum(0) - lengths
        places = [torch.arange(int(starts[n]), int(starts[n] + lengths[n])) for n in samples]
        found[form.name] = tensor[torch.cat([torch.zeros(0, dtype=torch.int64), *places])]
    return found
