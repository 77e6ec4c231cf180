"""Layouts of slots over ranks, to the number; and that a device gets them once."""

import torch

from torchembed.sharding import Placement
from torchembed.sharding.planning.plan import place_table
from torchembed.sharding.transport.layout import Layout, slot_parts
from torchembed.tables import TableSpec

SPEC = TableSpec(name="t", num_rows=5, dim=4)
# Slot 0 is by rows on ranks 0 to 2, slot 1 by columns on ranks 1 and 2.
LAYOUT = Layout(
    [
        *slot_parts(0, place_table("t", SPEC, Placement.ROW_WISE, (0, 1, 2))),
        *slot_parts(1, place_table("u", SPEC, Placement.COLUMN_WISE, (1, 2))),
    ],
    3,
)


def test_boundaries_and_bucket_rows(device: torch.device) -> None:
    boundaries, rows = LAYOUT.boundaries(device), LAYOUT.bucket_rows(device)
    assert boundaries.tolist() == [[0, 2, 4, 5], [0, 0, 5, 5], [0, 0, 0, 5]]
    assert rows.tolist() == [0, 3, 4, 6, 8]
    assert boundaries.device.type == rows.device.type == device.type
    assert boundaries.dtype == rows.dtype == torch.int64


def test_a_device_gets_them_once(device: torch.device) -> None:
    layout = Layout(slot_parts(0, place_table("t", SPEC, Placement.ROW_WISE, (0, 1, 2))), 3)
    with torch.inference_mode():
        boundaries, rows = layout.boundaries(device), layout.bucket_rows(device)
    assert not boundaries.is_inference()
    assert layout.boundaries(device) is boundaries
    assert layout.bucket_rows(device) is rows
