"""Tables under TorchRec's managed collisions as rows by key.

A managed collision module keeps ids in buffers of its state, and their rows in an ordinary table.
The one that sorts ids (MCH) has ``_mch_sorted_raw_ids``, where the greatest number stands for none,
and beside it ``_mch_remapped_ids_mapping``, the number of each id's row. The one that probes
(MPZCH) has ``_hash_zch_identities``: the id of each row, -1 for none. Neither needs TorchRec to be
read.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.checkpoints.rows.distinct_keys import check_distinct
from torchembed.checkpoints.rows.row_source import CHUNK_BYTES, RowSource
from torchembed.tables import RowChunk, row_ranges

_SORTED_IDS, _SORTED_ROWS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"
_SORTED_COUNTS, _SORTED_STEPS = "_mch_counts", "_mch_last_access_iter"
_PROBED_IDS, _PROBED_SCORES = "_hash_zch_identities", "_hash_zch_metadata"
_NO_SORTED_ID = torch.iinfo(torch.int64).max
_NO_PROBED_ID = -1


class _Held(NamedTuple):
    """The ids that a module holds, each with the number of its row in the weight: int64 ``[n]``."""

    ids: Tensor
    rows: Tensor
    scores: Tensor | None
    touched: Tensor | None


def managed_collision_rows(
    state: Mapping[str, Tensor],
    weight: Tensor,
    *,
    prefix: str = "",
    first_row: int = 0,
    states: Mapping[str, Tensor] | None = None,
    scores: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> RowSource:
    """Rows of a table by the ids for which a managed collision module of TorchRec holds them.

    Ids are those that the module got, after ``input_hash_func`` where it has one. The row that an
    MCH module gives to all other ids, its last, is not among them.

    Args:
        state: state dict of the module, or of a model that has it; whole tensors, or those of one
            rank together with its part of the table.
        weight: ``[R, D]`` of the table, on any device. It is read when the rows are.
        prefix: of the module's buffers in ``state``, with its last dot:
            ``_managed_collision_collection._managed_collision_modules.<table>.``.
        first_row: number of the first row of ``weight`` in the whole table, which the numbers that
            an MCH module gives out count from.
        states: optimizer state by name, ``[R, D]`` or ``[R]``, of the same rows.
        scores: name of the buffer whose numbers become scores; None takes ``_mch_counts`` of MCH,
            the expiry of MPZCH, ``_hash_zch_metadata``, and no scores where there is none. The
            last step of an id's use, which MCH may keep, comes as ``touched``.
        chunk_bytes: of a chunk's tensors, at most, unless a row is larger.

    Raises:
        ValueError: if the buffers are missing, do not fit together or name rows that ``weight``
            does not have, or an id stands there more than once.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    if weight.ndim != 2:
        raise ValueError(f"weight must be [R, D], got shape {list(weight.shape)}")
    columns = {"weight": weight.detach()} | {n: s.detach() for n, s in (states or {}).items()}
    for name, column in columns.items():
        if column.ndim not in (1, 2) or len(column) != len(weight):
            raise ValueError(
                f"{name} must have {len(weight)} rows as the weight does, got shape "
                f"{list(column.shape)}"
            )
    held = _held(state, prefix, first_row, scores)
    _check_rows(held, len(weight), prefix, first_row)
    name = f"state under {prefix!r}"
    check_distinct(lambda: iter([(name, held.ids)]), len(held.ids), name)
    row_bytes = sum(column[:1].nbytes for column in columns.values()) + sum(
        8 for column in (held.ids, held.scores, held.touched) if column is not None
    )

    def chunks() -> Iterator[RowChunk]:
        ranges = row_ranges(len(held.ids), row_bytes, chunk_bytes)
        for places in ranges if len(held.ids) else [range(0)]:
            part = slice(places.start, places.stop)
            rows = held.rows[part]
            taken = {n: c[rows.to(c.device)].cpu() for n, c in columns.items()}
            yield RowChunk(
                held.ids[part].clone(),
                taken.pop("weight"),
                taken,
                None if held.scores is None else held.scores[part].clone(),
                None if held.touched is None else held.touched[part].clone(),
            )

    return RowSource(num_rows=len(held.ids), embedding_dim=weight.shape[1], chunks=chunks)


def _held(state: Mapping[str, Tensor], prefix: str, first_row: int, scores: str | None) -> _Held:
    if prefix + _SORTED_IDS in state:
        ids = _buffer(state, prefix, _SORTED_IDS)
        rows = _buffer(state, prefix, _SORTED_ROWS, len(ids)) - first_row
        is_held, default = ids != _NO_SORTED_ID, _SORTED_COUNTS
    elif prefix + _PROBED_IDS in state:
        ids = _buffer(state, prefix, _PROBED_IDS)
        rows = torch.arange(len(ids))
        is_held, default = ids != _NO_PROBED_ID, _PROBED_SCORES
    else:
        prefixes = sorted(
            name.removesuffix(ids)
            for name in state
            for ids in (_SORTED_IDS, _PROBED_IDS)
            if name.endswith(ids)
        )
        raise ValueError(
            f"state must hold {_SORTED_IDS} or {_PROBED_IDS} under prefix {prefix!r}, and holds "
            f"them under {prefixes}"
        )

    def optional(name: str) -> Tensor | None:
        if prefix + name not in state:
            return None
        return _buffer(state, prefix, name, len(ids))[is_held]

    return _Held(
        ids=ids[is_held],
        rows=rows[is_held],
        scores=(
            optional(default)
            if scores is None
            else _buffer(state, prefix, scores, len(ids))[is_held]
        ),
        touched=optional(_SORTED_STEPS),
    )


def _buffer(
    state: Mapping[str, Tensor], prefix: str, name: str, length: int | None = None
) -> Tensor:
    """A buffer of integers as int64 ``[Z]`` on the CPU.

    Raises:
        ValueError: if there is none, or it is not ``[Z]`` or ``[Z, 1]`` for ``length`` Z.
    """
    if prefix + name not in state:
        raise ValueError(f"state must hold {name} under prefix {prefix!r}, and does not")
    buffer = state[prefix + name].detach()
    is_column = buffer.ndim == 1 or (buffer.ndim == 2 and buffer.shape[1] == 1)
    is_integer = not (buffer.is_floating_point() or buffer.is_complex())
    if not is_column or not is_integer or length not in (None, len(buffer)):
        wanted = "Z" if length is None else length
        raise ValueError(
            f"{prefix}{name} must be integers [{wanted}] or [{wanted}, 1], got {buffer.dtype} "
            f"{list(buffer.shape)}"
        )
    return buffer.reshape(-1).long().cpu()


def _check_rows(held: _Held, num_rows: int, prefix: str, first_row: int) -> None:
    """Raise ``ValueError`` unless each id has a row of its own among ``num_rows``."""
    if not len(held.rows):
        return
    ordered = held.rows.sort().values
    least, greatest = int(ordered[0]), int(ordered[-1])
    if least < 0 or greatest >= num_rows:
        raise ValueError(
            f"state under {prefix!r} must name rows in [{first_row}, {first_row + num_rows}), "
            f"which weight has, got {least + first_row} to {greatest + first_row}; give the table, "
            "or the part of it, that belongs to the state"
        )
    is_repeated = ordered[1:] == ordered[:-1]
    if is_repeated.any():
        row = int(ordered[int(is_repeated.int().argmax())]) + first_row
        raise ValueError(
            f"state under {prefix!r} must give each id a row of its own, got row {row} twice"
        )
