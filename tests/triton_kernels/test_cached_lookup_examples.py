"""The examples in the docstrings of kernels of lookups in caches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.core.cached_lookups import CachedLookup
from torchembed.core.hash_tables import Counter
from torchembed.ops.hash_table.hashing import key_digests
from torchembed.triton_kernels import large_cached_lookup as large
from torchembed.triton_kernels.cached_lines import float8_as_float32, load_line
from torchembed.triton_kernels.cached_lookup import launch_cached_lookup
from torchembed.triton_kernels.lookup_notes import finish_notes, note_uses

BLOCK = 4


def longs(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def integers(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def counters(device: torch.device) -> Tensor:
    return torch.zeros(1, len(Counter), dtype=torch.int64, device=device)


def test_cached_lookup(device: torch.device) -> None:
    geometry = longs(device, 0, 1, 1, 2).reshape(1, 4)
    digest = key_digests(longs(device, 7))
    digests = torch.cat([torch.zeros_like(digest), digest, torch.zeros_like(digest)])
    lines = torch.tensor([[1.0], [2.0], [9.0]], device=device).view(torch.uint8)
    progress = longs(device, 0)
    rows, slots, is_missing, num_missing = launch_cached_lookup(
        CachedLookup(
            longs(device, 7, 8, 7),
            integers(device, 0, 0, -1),
            digests,
            longs(device, 0, 7, 0),
            geometry,
            lines,
            torch.float32,
            1,
            True,
            None,
            None,
            None,
            None,
            None,
            progress,
        )
    )
    assert rows.tolist() == [[2], [9], [0]] and slots.tolist() == [1, 2, -1]
    assert (is_missing.tolist(), num_missing.tolist()) == ([False, True, False], [1])
    assert progress.tolist() == [0]


@triton.jit
def _float8_kernel(codes_ptr, out_ptr):
    place = tl.arange(0, 256)
    tl.store(out_ptr + place, float8_as_float32(tl.load(codes_ptr + place)))


def test_float8_as_float32(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.zeros(256, device=device)
    _float8_kernel[(1,)](codes, out)
    expected = codes.cpu().view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert out[[0x38, 0xC4, 0x01]].tolist() == [1.0, -3.0, 2.0**-9]


@triton.jit
def _line_kernel(codes_ptr, scales_ptr, out_ptr):
    line, column = tl.arange(0, 1).to(tl.int64), tl.arange(0, 2)
    value = load_line(codes_ptr, scales_ptr, line, line >= 0, column, column < 2, 8, 4, False)
    tl.store(out_ptr + column[None, :], value)


def test_load_line(device: torch.device) -> None:
    codes = torch.tensor([0, 0, 0, 0, 2, 4, 0, 0], dtype=torch.int8, device=device)
    codes[:4] = torch.tensor([0.5], device=device).view(torch.int8)
    out = torch.zeros(2, device=device)
    _line_kernel[(1,)](codes, codes.view(torch.float32), out)
    assert out.tolist() == [1, 2]


@triton.jit
def _note_uses_kernel(tables_ptr, slots_ptr, counters_ptr, touched_ptr, epoch_ptr):
    place = tl.arange(0, 2)
    slot = tl.load(slots_ptr + place)
    table = tl.load(tables_ptr + place)
    note_uses(table, slot, slot >= 0, slot < 0, counters_ptr, touched_ptr, epoch_ptr)


def test_note_uses(device: torch.device) -> None:
    counts, touched = counters(device), longs(device, 1, 1, 1, 1)
    notes = counts, touched, longs(device, 5)
    _note_uses_kernel[(1,)](integers(device, 0, 0), longs(device, 3, -1), *notes)
    assert touched.tolist() == [1, 1, 1, 6]
    assert counts[0, [Counter.HITS, Counter.MISSES]].tolist() == [1, 1]


@triton.jit
def _finish_notes_kernel(missed_ptr, progress_ptr, num_missing_ptr, epoch_ptr):
    num_missed = tl.load(missed_ptr + tl.program_id(0))
    finish_notes(num_missed, progress_ptr, num_missing_ptr, epoch_ptr)


def test_finish_notes(device: torch.device) -> None:
    progress, num_missing, epoch = longs(device, 0), longs(device, -9), longs(device, 5)
    _finish_notes_kernel[(2,)](longs(device, 1, 2), progress, num_missing, epoch)
    assert (num_missing.tolist(), progress.tolist(), epoch.tolist()) == ([3], [0], [6])


@triton.jit
def _share_kernel(line_ptr, position_ptr, out_ptr):
    one = tl.arange(0, 1)
    line, position = tl.load(line_ptr + one), tl.load(position_ptr + one)
    tl.store(out_ptr + one, large._share_of_region(line, position, 2, 8))


def test_share_of_region(device: torch.device) -> None:
    out = longs(device, -9)
    _share_kernel[(1,)](longs(device, 5), longs(device, 17), out)
    assert out.tolist() == [18]


def test_large_cached_lookup_note(device: torch.device) -> None:
    counts, slots, num_missing = counters(device), longs(device, 0, -1, -1), longs(device, -9)
    copies, num_of_shares = integers(device, -9, -9, -9), integers(device, *[0] * 32)
    is_missing, touched = torch.zeros(3, dtype=torch.uint8, device=device), longs(device, *[1] * 4)
    epoch, progress = longs(device, 5), longs(device, 0)
    large._large_cached_lookup_note_kernel[(1,)](
        integers(device, 0, 0, -1),
        longs(device, 0, 1, 1, 4),
        integers(device, 5, -1, -1, -1, -1),
        touched,
        epoch,
        counts,
        progress,
        slots,
        is_missing,
        num_missing,
        copies,
        num_of_shares,
        3,
        REGION_BITS=2,
        BLOCK=BLOCK,
    )
    assert (slots.tolist(), copies.tolist()) == ([0, 4, -1], [5, -2, -1])
    assert counts[0, [Counter.HITS, Counter.MISSES]].tolist() == [1, 1]
    assert num_of_shares.nonzero().tolist() == [[16]]
    assert (is_missing.tolist(), num_missing.tolist()) == ([0, 1, 0], [1])
    assert (touched.tolist(), epoch.tolist(), progress.tolist()) == ([6, 1, 1, 1], [6], [0])


def test_large_cached_lookup_list(device: torch.device) -> None:
    slots, copies = longs(device, 5, 1, 6), integers(device, -2, -2, -3)
    ends, far_ids = integers(device, *[1] * 16, *[3] * 16), integers(device, -9, -9, -9)
    large._large_cached_lookup_list_kernel[(1,)](
        slots, copies, ends, far_ids, 3, REGION_BITS=2, BLOCK=BLOCK
    )
    assert far_ids.tolist() == [1, 0, 2]


@triton.jit
def _copy_rows_kernel(rows_ptr, lines_ptr, which_ptr):
    place = tl.arange(0, 4)
    line = tl.load(which_ptr + place)
    large._copy_rows(rows_ptr, place, place < 2, lines_ptr, None, line, 1, 1, 0, False, 1)


def test_copy_rows(device: torch.device) -> None:
    rows, lines = torch.full((4,), -9.0, device=device), torch.tensor([3.0, 4.0], device=device)
    _copy_rows_kernel[(1,)](rows, lines, longs(device, 1, -1, 0, 0))
    assert rows.tolist() == [4, 0, -9, -9]


def test_large_cached_lookup_read(device: torch.device) -> None:
    rows = torch.full((3,), -9.0, device=device)
    large._large_cached_lookup_read_kernel[(2,)](
        torch.tensor([1.0, 2.0], device=device),
        None,
        torch.tensor([3.0, 4.0], device=device),
        None,
        integers(device, 1, -1, -2),
        longs(device, 0, -1, 1),
        integers(device, 2, -9, -9),
        integers(device, 1),
        rows,
        3,
        DIM=1,
        STRIDE=1,
        FIRST=0,
        IS_FLOAT8=False,
        FAR_PROGRAMS=1,
        BLOCK=BLOCK,
        BLOCK_D=1,
    )
    assert rows.tolist() == [4, 0, 2]
