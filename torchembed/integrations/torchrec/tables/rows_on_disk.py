"""Rows on disk as tensors that hold none of them, which TorchRec and checkpoints read and write."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torchembed.tables import DiskGroup, row_ranges

_BYTES_AT_ONCE = 1 << 26
"""The most bytes of rows that are copied in one piece."""

_aten = torch.ops.aten


class RowsOnDisk(Tensor):
    """Rows of a group of tables on disk, or of one of their optimizer states, as a tensor of the
    group's device that has no memory.

    What reads it reads the rows from where they are: slices along either dimension are such tensors
    again, ``copy_`` moves some rows at a time, and any other operation, a deep copy and a pickle
    read all rows into a tensor of their own. ``copy_`` into one writes the rows, and is the only
    operation that changes them. Reads and writes wait for a GPU and for the disk, and belong
    between steps.

    Args:
        group: of the tables.
        part: 0 for the weight, 1 for the first optimizer state, and so on.
        rows: the numbers of the rows in the group.
        columns: None for all of them.
    """

    _group: DiskGroup
    _part: int
    _rows: range
    _columns: range

    def __new__(
        cls, group: DiskGroup, part: int, rows: range, columns: range | None = None
    ) -> Self:
        stored = (group.stored_weight, *group.stored_states)[part]
        columns = range(stored.shape[1:].numel()) if columns is None else columns
        shape = (len(rows),) if stored.dim() == 1 else (len(rows), len(columns))
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=stored.dtype, device=group.device)
        made._group, made._part, made._rows, made._columns = group, part, rows, columns
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operation: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Any:
        settings = settings or {}
        own = _OWN.get(operation)
        if own is not None:
            found = own(*arguments, **settings)
            if found is not NotImplemented:
                return found
        _check_unchanged(operation, arguments)
        read = [
            tree_map_only(RowsOnDisk, RowsOnDisk.full_tensor, value)
            for value in (tuple(arguments), dict(settings))
        ]
        return operation(*read[0], **read[1])

    def full_tensor(self) -> Tensor:
        """All rows, as a tensor of their own on the same device."""
        return self._read(torch.empty(self.shape, dtype=self.dtype, device=self.device))

    def _read(self, target: Tensor) -> Tensor:
        """Copy the rows to ``target``, of the same shape."""
        for piece in self._pieces():
            target[piece.start : piece.stop].copy_(self._read_piece(piece))
        return target

    def _read_piece(self, piece: range) -> Tensor:
        """Some of the rows, on the CPU."""
        self._group.write_back()
        rows = _numbers(self._rows[piece.start : piece.stop])
        found = self._group.read_lines(rows, with_states=self._part > 0)[self._part]
        return found if found.dim() == 1 else found[:, self._columns.start : self._columns.stop]

    def _write(self, source: Tensor) -> None:
        """Write ``source``, which broadcasts to this shape, to disk."""
        group, source = self._group, source.expand(self.shape)
        stored = (group.stored_weight, *group.stored_states)
        for piece in self._pieces():
            values: list[Tensor | None] = [None] * len(stored)
            given = source[piece.start : piece.stop]
            value = given._read_piece(range(len(given))) if isinstance(given, RowsOnDisk) else given
            group.write_back()
            rows = _numbers(self._rows[piece.start : piece.stop])
            if stored[self._part].dim() == 2 and len(self._columns) < stored[self._part].shape[1]:
                whole = group.read_lines(rows)[self._part]
                whole[:, self._columns.start : self._columns.stop] = value
                value = whole
            values[self._part] = value
            group.write_lines(rows, values)

    def _pieces(self) -> Iterator[range]:
        return row_ranges(len(self._rows), self._group.line_bytes, _BYTES_AT_ONCE)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:  # type: ignore[override]
        return memo.setdefault(id(self), self.full_tensor())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        names = ", ".join(table.spec.name for table in self._group.tables)
        what = "rows" if self._part == 0 else f"state {self._part - 1} of rows"
        return f"{type(self).__name__}({what} of tables {names}, {tuple(self.shape)}, {self.dtype})"


def _numbers(rows: range) -> Tensor:
    return torch.arange(rows.start, rows.stop, device="cpu")


def _check_unchanged(operation: Any, arguments: Sequence[Any]) -> None:
    """Raise ``TypeError`` where ``operation`` would change rows on disk."""
    for value, declared in zip(arguments, operation._schema.arguments, strict=False):
        is_written = declared.alias_info is not None and declared.alias_info.is_write
        if is_written and isinstance(value, RowsOnDisk):
            raise TypeError(
                f"rows of tables on disk must be changed by copy_, got {operation}; compute their "
                "new values in a tensor of their own, and copy these"
            )


def _same(rows: RowsOnDisk) -> RowsOnDisk:
    return RowsOnDisk(rows._group, rows._part, rows._rows, rows._columns)


def _viewed(rows: RowsOnDisk, shape: Sequence[int]) -> Any:
    viewed = torch.empty(rows.shape, device="meta").view(shape)
    return _same(rows) if viewed.shape == rows.shape else NotImplemented


def _sliced(
    rows: RowsOnDisk,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    if step != 1:
        return NotImplemented
    of_dim = slice(start, end)
    if dim % rows.dim() == 0:
        return RowsOnDisk(rows._group, rows._part, rows._rows[of_dim], rows._columns)
    return RowsOnDisk(rows._group, rows._part, rows._rows, rows._columns[of_dim])


def _selected(rows: RowsOnDisk, dim: int, index: int) -> Any:
    if dim % rows.dim():
        return NotImplemented
    first = index % len(rows) if -len(rows) <= index < len(rows) else len(rows)
    return _sliced(rows, 0, first, first + 1).full_tensor().select(0, 0)


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if isinstance(target, RowsOnDisk):
        target._write(source)
        return target
    if not isinstance(source, RowsOnDisk) or target.shape != source.shape:
        return NotImplemented
    return source._read(target)


def _converted(
    rows: RowsOnDisk,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    target = torch.empty(rows.shape, dtype=dtype or rows.dtype, device=device or rows.device)
    return rows._read(target)


_OWN: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _viewed,
    _aten.slice.Tensor: _sliced,
    _aten.select.int: _selected,
    _aten.copy_.default: _copied,
    _aten._to_copy.default: _converted,
    _aten.is_pinned.default: lambda *_: False,
}
"""The operations that such tensors support; all others are ``NotImplemented``."""
