"""Reasons why a batch cannot be trained by captured steps, found in its layout."""

from collections.abc import Hashable, Mapping

from torch import Tensor

from torchembed.core.trees import Tree, is_plain_value, nodes_by_path
from torchembed.step.batches.batch_layout import is_features, is_part, shape_of, sparse_features
from torchembed.step.stages import Reason


def part_layouts(batch: Tree) -> dict[str, Hashable]:
    """The layout of each part of ``batch`` that holds no others, by its path in the batch: all but
    what may differ between batches of one captured step."""
    return {path: _layout_of_part(part) for path, part in nodes_by_path(batch, is_part).items()}


def _layout_of_part(part: object) -> Hashable:
    if isinstance(part, Tensor):
        return "shape or dtype", part.shape, part.dtype
    if is_features(part):
        return "features, hotness or number of samples", shape_of(part)
    return ("value", type(part), part) if is_plain_value(part) else ("class", type(part))


def reason_of_layout(batch: Tree, known: Mapping[str, Hashable] | None) -> Reason | None:
    """The reason why ``batch`` has not the layout that captured steps take; None where it has.

    Args:
        known: :func:`part_layouts` of a batch that has set the layout for its kind of step; None
            where there is none.
    """
    nodes = nodes_by_path(batch, is_part)
    for path, part in nodes.items():
        if not (is_part(part) or is_plain_value(part)):
            return Reason(
                f"is a {type(part).__name__}; captured steps take tensors, sparse features, "
                "numbers and strings in tuples, lists, mappings, dataclasses and objects with a "
                "method to",
                f"batch{path}",
            )
    found = part_layouts(batch)
    if known is not None and found.keys() == known.keys():
        for path, layout in found.items():
            if layout != known[path]:
                return Reason(_difference(layout), f"batch{path}")
    if known is not None and found.keys() != known.keys():
        return Reason("the batch has other parts than those of captured steps")
    if found == known:
        return None
    if sparse_features(batch):
        return Reason("the batch has no samples, or a tensor of length 0")
    return Reason("the batch has a tensor of length 0")


def _difference(layout: Hashable) -> str:
    assert isinstance(layout, tuple)
    what = layout[0]
    if what == "value":
        return (
            "has another value than in captured steps, which repeat what Python did with it; make "
            "it a tensor where the model reads it, else leave it out of the batch"
        )
    return f"has another {what} than in captured steps"
