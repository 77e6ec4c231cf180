"""Requirements of ``cached_lookup`` on its arguments."""

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.cached_lookups import LINE_DTYPES, CachedLookup, line_bytes
from torchembed.core.hash_tables import Counter
from torchembed.ops.hash_table.checks import check_find_slots, check_find_slots_contents

_OF_TABLES = "make the tables by empty_hash_tables"


def check_cached_lookup(call: CachedLookup) -> None:
    check_find_slots(call.keys, call.tables, call.digests, call.slot_keys, call.geometry)
    if call.line_dtype not in LINE_DTYPES:
        names = ", ".join(checks.dtype_name(dtype) for dtype in LINE_DTYPES)
        raise TypeError(f"line_dtype must be one of {names}, got {call.line_dtype}")
    if call.dim < 1:
        raise ValueError(f"dim must be at least 1, got {call.dim}")
    _check_lines("lines", call.lines, call)
    checks.check_reachable("lines", call.lines, "keys", call.keys)
    if call.lines.shape[0] < call.digests.numel():
        raise ValueError(
            f"lines must have a row for each of {call.digests.numel()} slots, got "
            f"{call.lines.shape[0]}"
        )
    if (call.copies is None) != (call.copy_of_line is None):
        raise ValueError("copies and copy_of_line must both be given, or neither")
    if call.copies is not None and call.copy_of_line is not None:
        _check_lines("copies", call.copies, call)
        checks.check_same_device("keys", call.keys, copies=call.copies)
        _check_vector("copy_of_line", call.copy_of_line, torch.int32, call.lines.shape[0], call)
    if call.touched is not None and call.epoch is None:
        raise ValueError("epoch must be given where touched is, got None")
    if call.epoch is not None and call.counters is None:
        raise ValueError("counters must be given where epoch is, got None")
    if call.touched is not None:
        _check_vector("touched", call.touched, torch.int64, call.digests.numel(), call)
    if call.epoch is not None:
        _check_vector("epoch", call.epoch, torch.int64, 1, call)
    if call.counters is not None:
        checks.check_dtype("counters", call.counters, (torch.int64,), _OF_TABLES)
        shape = call.geometry.shape[0], len(Counter)
        checks.check_memory(
            "counters", call.counters, shape, "tables, one for each Counter", "keys", call.keys
        )
    _check_vector("progress", call.progress, torch.int64, 1, call)


def check_cached_lookup_contents(call: CachedLookup) -> None:
    check_find_slots_contents(call.keys, call.tables, call.digests, call.slot_keys, call.geometry)


def _check_lines(name: str, lines: Tensor, call: CachedLookup) -> None:
    checks.check_dtype(name, lines, (torch.uint8,), "call .view(torch.uint8)")
    checks.check_dim(name, lines, 2)
    num_bytes = line_bytes(call.line_dtype, call.dim)
    if lines.shape[1] != num_bytes:
        raise ValueError(
            f"{name} must have {num_bytes} bytes a row for {call.dim} elements of "
            f"{checks.dtype_name(call.line_dtype)}, got {lines.shape[1]}"
        )
    checks.check_contiguous(name, lines)


def _check_vector(
    name: str, tensor: Tensor, dtype: torch.dtype, numel: int, call: CachedLookup
) -> None:
    advice = "call .int()" if dtype == torch.int32 else "call .long()"
    checks.check_dtype(name, tensor, (dtype,), advice)
    checks.check_memory(name, tensor, (numel,), "elements", "keys", call.keys)
