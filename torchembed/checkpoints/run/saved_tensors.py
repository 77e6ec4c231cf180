"""The tensors of a checkpoint, of which a rank may read any rows by itself."""

import io
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torchembed.checkpoints.run import database_form
from torchembed.checkpoints.run.saved_databases import SavedDatabases
from torchembed.stores import RowStore


class SavedTensors:
    """Whole tensors by name, as all ranks that saved wrote them in pieces.

    Of each tensor the pieces that were read last are kept, of the size in which they were written,
    so that rows that are read in ascending order are read once.

    Attributes:
        entries: what was saved, by name.
        databases: what of it is in databases.
    """

    def __init__(
        self,
        metadata: Metadata,
        storage: FileSystemBase,
        path: str,
        open_database: Callable[[str], RowStore],
    ) -> None:
        """
        Args:
            metadata: of the checkpoint.
            storage: where its files are.
            path: of the folder with the files.
            open_database: opens a database by the name of its folder there.
        """
        self.entries: dict[str, STORAGE_TYPES] = dict(metadata.state_dict_metadata)
        self._places, self._storage, self._path = metadata.storage_data, storage, path
        self._kept: dict[str, dict[torch.Size, Tensor]] = {}
        self.databases = SavedDatabases((), open_database)
        forms = [self.whole(key) for key in self.entries if key.startswith(database_form.DATABASES)]
        saved = [database for form in forms for database in database_form.parse(form)]
        self.databases = SavedDatabases(saved, open_database)
        self.entries |= self.databases.entries

    def size(self, name: str) -> torch.Size:
        """Shape of a whole tensor."""
        return self._entry(name).size

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).properties.dtype

    def rows(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """Some consecutive rows of a tensor, and of these some columns, or all; on the CPU.

        Raises:
            OSError: if a file cannot be read.
        """
        if name in self.databases:
            return self.databases.rows(name, rows, columns, self.rows)
        entry = self._entry(name)
        size = [len(rows), *entry.size[1:]]
        first = [rows.start, *(0 for _ in entry.size[1:])]
        if columns is not None:
            size[1], first[1] = len(columns), columns.start
        found = torch.empty(size, dtype=entry.properties.dtype)
        known, kept = self._kept.get(name, {}), {}
        for chunk in entry.chunks:
            begins = [max(own, at) for own, at in zip(first, chunk.offsets, strict=True)]
            ends = [
                min(own + length, at + chunk_length)
                for own, length, at, chunk_length in zip(
                    first, size, chunk.offsets, chunk.sizes, strict=True
                )
            ]
            spans = list(zip(begins, ends, strict=True))
            if any(begin >= end for begin, end in spans):
                continue
            piece = known.get(chunk.offsets)
            if piece is None:
                piece = self._read(MetadataIndex(name, chunk.offsets))
            kept[chunk.offsets] = piece
            found[_slices(spans, first)] = piece[_slices(spans, chunk.offsets)]
        self._kept[name] = kept
        return found

    def whole(self, name: str) -> Tensor:
        """All of a tensor; on the CPU."""
        return self.rows(name, range(self.size(name)[0]))

    def forget(self) -> None:
        """Give the memory of the pieces back that were read last."""
        self._kept.clear()
        self.databases.forget()

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self.entries[name]
        assert isinstance(entry, TensorStorageMetadata), name
        return entry

    def _read(self, index: MetadataIndex) -> Tensor:
        place = self._places[index]
        with self._storage.create_stream(f"{self._path}/{place.relative_path}", "rb") as stream:
            stream.seek(place.offset)
            data = stream.read(place.length)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _slices(spans: list[tuple[int, int]], first: "torch.Size | list[int]") -> tuple[slice, ...]:
    return tuple(slice(b - at, e - at) for (b, e), at in zip(spans, first, strict=True))
