"""The division of a state into the chunks that are written, and later read, at once."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torchembed.tables import row_ranges

CHUNK_BYTES = 1 << 26
"""Limit of a chunk, which is copied whole from a device, and read whole where part of it is needed.
"""


class ChunkedSavePlanner(DefaultSavePlanner):
    """Writes each rank's part of a tensor in chunks of rows of at most ``CHUNK_BYTES``, or one row.

    So neither saving nor loading under another plan needs memory for a second copy of a table.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._sources: dict[MetadataIndex, tuple[WriteItem, slice]] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [chunk for item in plan.items for chunk in self._chunks(item)]
        # Torch's planner resolves items by its own plan, which must list the chunks too.
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _chunks(self, item: WriteItem) -> Iterator[WriteItem]:
        data = item.tensor_data
        if data is None or not data.chunk.sizes:
            yield item
            return
        num_rows, *row = data.chunk.sizes
        row_bytes = torch.Size(row).numel() * data.properties.dtype.itemsize
        parts = list(row_ranges(num_rows, row_bytes, CHUNK_BYTES))
        if len(parts) <= 1:
            yield item
            return
        first, *others = data.chunk.offsets
        for numbers in parts:
            rows = slice(numbers.start, numbers.stop)
            offsets = torch.Size([first + numbers.start, *others])
            chunk = ChunkStorageMetadata(offsets, torch.Size([len(numbers), *row]))
            part = WriteItem(
                index=MetadataIndex(item.index.fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=dataclasses.replace(data, chunk=chunk),
            )
            self._sources[part.index] = item, rows
            yield part

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index not in self._sources:
            return super().resolve_data(write_item)
        item, rows = self._sources[write_item.index]
        whole = super().resolve_data(item)
        assert isinstance(whole, Tensor)
        return whole[rows]
