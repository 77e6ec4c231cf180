"""Checks of indices before an operation reads them: on a GPU one out of range ends the process."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._ops import OpOverload


def check_indices(func: "OpOverload", args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check the indices that ``func`` is going to be called with. Waits for a GPU.

    Raises:
        IndexError: if one is outside what it indexes.
        ValueError: if lengths do not add up to the size that is given for them.
    """
    check = _CHECKS.get(func._schema.name)
    if check is None:
        return
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    check(func._schema.name, given)


def _check(name: str, index: Tensor, size: int, *, counts_from_end: bool = True) -> None:
    if not index.numel() or index.is_meta:
        return
    least, most = (int(bound) for bound in index.aminmax())
    if most >= size or least < (-size if counts_from_end else 0):
        wrong = most if most >= size else least
        raise IndexError(f"{name}: index {wrong} is out of bounds for size {size}")


def _along_dim(name: str, given: dict[str, Any]) -> None:
    tensor, index = given["self"], given["index"]
    size = tensor.shape[given["dim"]] if tensor.dim() else 1
    _check(name, index, size, counts_from_end=False)


def _of_dims(name: str, given: dict[str, Any]) -> None:
    indices = given["indices"]
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return  # a mask has as many elements as there are, and takes several dimensions
    for index, size in zip(indices, given["self"].shape, strict=False):
        if index is not None:
            _check(name, index, size)


def _of_rows(name: str, given: dict[str, Any]) -> None:
    _check(name, given["indices"], given["weight"].shape[0], counts_from_end=False)


def _of_elements(name: str, given: dict[str, Any]) -> None:
    _check(name, given["index"], given["self"].numel())


def _repeats(name: str, given: dict[str, Any]) -> None:
    size = given.get("output_size")
    if size is not None:
        _check_sum(name, int(given["repeats"].sum()), size)


def _jagged(name: str, given: dict[str, Any]) -> None:
    if given.get("total_L") is not None:
        _check_sum(name, int(given["offsets"][-1][-1]), given["total_L"])


def _check_sum(name: str, found: int, size: int) -> None:
    if found != size:
        raise ValueError(f"{name}: lengths add up to {found}, and not to the given size {size}")


_Check = Callable[[str, dict[str, Any]], None]
_ALONG_DIM = (
    *("gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
)
_CHECKS: dict[str, _Check] = {
    **{f"aten::{name}{end}": _along_dim for name in _ALONG_DIM for end in ("", "_")},
    **{
        f"aten::{name}": _of_dims
        for name in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")
    },
    "aten::embedding": _of_rows,
    "aten::take": _of_elements,
    "aten::repeat_interleave": _repeats,
    "aten::_padded_dense_to_jagged_forward": _jagged,
}
