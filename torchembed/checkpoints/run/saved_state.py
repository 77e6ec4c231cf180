"""A checkpoint to load from, and its comparison with the run that loads it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from torchembed.checkpoints.run.saved_tensors import SavedTensors
from torchembed.core.ranks.cpu_group import CpuGroup


class SavedState(NamedTuple):
    """A checkpoint to load from."""

    name: str
    """For errors."""
    tensors: SavedTensors
    """The saved tensors; each rank may read rows of them by itself."""
    num_ranks: int
    """Number of ranks that saved it."""
    read: Callable[[dict[str, object]], None]
    """Fills the tensors of a dict in place and replaces its other values; every rank calls it."""
    group: CpuGroup
    """All ranks that load."""
    local_folder: Callable[[str], Path]
    """The local folder of a database, by the name of its folder in the checkpoint."""

    @property
    def what(self) -> str:
        """The loading, as "could not ..." goes on."""
        return f"load {self.name}"

    @property
    def entries(self) -> Mapping[str, STORAGE_TYPES]:
        """Metadata of ``torch.distributed.checkpoint`` for each tensor and object, by name."""
        return self.tensors.entries


def mismatches(key: str, value: object, saved: SavedState) -> Iterator[str]:
    """Reasons why ``key`` cannot be loaded into ``value``."""
    if key not in saved.entries:
        yield f"{key} was not saved"
        return
    entry = saved.entries[key]
    if not isinstance(value, Tensor) or not isinstance(entry, TensorStorageMetadata):
        if isinstance(value, Tensor) or isinstance(entry, TensorStorageMetadata):
            yield f"{key} is a tensor on one side alone"
        return
    if tuple(entry.size) != tuple(value.shape):
        yield f"{key} has shape {list(entry.size)}, and {list(value.shape)} in the run"
    if entry.properties.dtype != value.dtype:
        yield f"{key} has dtype {entry.properties.dtype}, and {value.dtype} in the run"


def unexpected(known: Iterable[str], saved: SavedState) -> Iterator[str]:
    """Entries of the model that were saved and that no rank has; one rank alone has a table-wise
    table. Collective.

    Args:
        known: entries that this rank loads.
    """
    of_all = {key for keys in saved.group.gather(list(known), saved.what) for key in keys}
    for key in saved.entries:
        if key.startswith("model.") and key not in of_all:
            yield f"{key} is not in the run"


def agree_on(found: list[str], saved: SavedState) -> None:
    """Raise on every rank where one has mismatches, naming those of all."""
    of_ranks = saved.group.gather(found, saved.what)
    of_all = sorted({item for of_rank in of_ranks for item in of_rank})
    if of_all:
        raise ValueError(
            f"{saved.name} is of another model or run: {'; '.join(of_all)}. Nothing was loaded"
        )
