"""A rank's part of a checkpoint, written to several files at once and read from them.

The files are those of ``torch.distributed.checkpoint``, whose own writer keeps a copy of the last
chunk of every tensor until a file is done, and loses the errors of its threads.
"""

import dataclasses
import io
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchembed.checkpoints.files import save_planner
from torchembed.checkpoints.files.in_threads import NUM_THREADS, in_threads
from torchembed.checkpoints.files.tensor_file import bytes_of


class CheckpointWriter(FileSystemWriter):
    """Writes a rank's items to at most ``NUM_THREADS`` files, in a thread each.

    Contiguous tensors on the CPU are written without a copy; of other tensors each thread copies a
    chunk at a time.
    """

    def __init__(self, files: FileSystemBase, path: str) -> None:
        # Storage calls fsync for each file that it closes.
        super().__init__(path, sync_files=False)
        self.fs, self.path = cast(Any, files), path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = _parts(plan.items)
        names = [f"{plan.storage_data.prefix}{number}.distcp" for number in range(len(parts))]
        written: list[WriteResult] = []

        def write(named: tuple[str, list[WriteItem]]) -> None:
            written.extend(self._write(*named, planner))

        in_threads(write, list(zip(names, parts, strict=True)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def _write(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        results = []
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in items:
                start, data = stream.tell(), planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    torch.save(_with_own_storage(data), cast(Any, stream))
                num_bytes = stream.tell() - start
                info = _StorageInfo(name, start, num_bytes)
                results.append(WriteResult(item.index, num_bytes, info))
        return results


class CheckpointReader(FileSystemReader):
    """Reads what a rank needs, ``NUM_THREADS`` files at once."""

    def __init__(self, files: FileSystemBase, path: str) -> None:
        super().__init__(path)
        self.fs, self.path = cast(Any, files), path

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        of_files: dict[str | os.PathLike[str], list[ReadItem]] = {}
        for item in plan.items:
            file = self.storage_data[item.storage_index].relative_path
            of_files.setdefault(file, []).append(item)
        read_file = super().read_data

        @torch.no_grad()  # a new thread begins with gradients enabled
        def read(items: list[ReadItem]) -> None:
            read_file(dataclasses.replace(plan, items=items), planner)

        in_threads(read, list(of_files.values()))
        if torch.cuda.is_initialized():
            # The threads copy on streams for which the streams of training do not wait.
            torch.cuda.synchronize()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _parts(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide ``items`` into lists of about equal size in bytes: one for each thread, or fewer where
    they would have less than a chunk each."""
    sizes = {item.index: _num_bytes(item) for item in items}
    num_parts = -(-sum(sizes.values()) // save_planner.CHUNK_BYTES)
    parts: list[list[WriteItem]] = [[] for _ in range(min(max(num_parts, 1), NUM_THREADS))]
    filled = [0] * len(parts)
    # The largest items first, each to the part that is the least full.
    for item in sorted(items, key=lambda item: -sizes[item.index]):
        emptiest = filled.index(min(filled))
        parts[emptiest].append(item)
        filled[emptiest] += sizes[item.index]
    return parts


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _with_own_storage(tensor: Tensor) -> Tensor:
    """``tensor`` on the CPU, in a storage of its own size: ``torch.save`` writes whole storages."""
    if tensor.is_cuda:
        # The training step that made the values may still run, on another stream than this
        # thread's.
        torch.cuda.synchronize(tensor.device)
    on_cpu = tensor.detach().cpu().contiguous()
    if on_cpu.untyped_storage().nbytes() == on_cpu.nbytes:
        return on_cpu
    if not on_cpu.nbytes:
        return on_cpu.clone()
    return torch.frombuffer(bytes_of(on_cpu), dtype=on_cpu.dtype).reshape(on_cpu.shape)
