"""The disk of each node, for rows that neither devices nor hosts have room for."""

import dataclasses
import os
import shutil
import socket
from collections import Counter
from pathlib import Path

import torch.distributed as dist

DISK_SHARE = 0.5
"""Share of the free bytes of a disk that rows may take. The rest is for lines that compactions
write anew before the old ones go, and for those that checkpoints keep."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeDisk:
    """A folder on each node for rows of tables, and how fast they come from there. Without a path
    none are placed on disk."""

    path: str | os.PathLike[str] | None = None
    """Folder for the databases of the ranks, on a disk of each node; made where there is none in a
    folder that exists."""
    capacity_bytes: int | None = None
    """Bytes of each node's disk that rows may take, of all its ranks together; None:
    ``DISK_SHARE`` of what is free there when a plan is made."""
    bandwidth: float = 1e9
    """Bytes a second of rows that all ranks of a node read at random while they write as many."""
    line_seconds: float = 1e-5
    """Time of a rank's processor to read a row and to write one, whatever the disk."""

    def __post_init__(self) -> None:
        path = self.path
        if path is not None:
            if not isinstance(path, str | os.PathLike) or not os.fspath(path):
                raise ValueError(f"path of a disk must be a folder or None, got {path!r}")
            object.__setattr__(self, "path", os.fspath(path))
        for name, may_be_zero in (
            ("capacity_bytes", True),
            ("bandwidth", False),
            ("line_seconds", True),
        ):
            value = getattr(self, name)
            if value is not None and not (value > 0 or (may_be_zero and value == 0)):
                required = "not be negative" if may_be_zero else "be positive"
                raise ValueError(f"{name} of a disk must {required}, got {value}")
        if path is None and self.capacity_bytes is not None:
            raise ValueError(
                f"path of a disk must be given where capacity_bytes is, got {self.capacity_bytes} "
                "bytes; name the folder that rows may take them of"
            )

    @property
    def is_unknown(self) -> bool:
        """True where the disk has to be asked what rows may take of it."""
        return self.path is not None and self.capacity_bytes is None

    def known(self) -> "NodeDisk":
        """This disk with the capacity that this process finds where none is given.

        Raises:
            FileNotFoundError: if the folder that is to hold ``path`` is missing.
        """
        if not self.is_unknown:
            return self
        return dataclasses.replace(self, capacity_bytes=self.found_bytes())

    def found_bytes(self) -> int:
        """``DISK_SHARE`` of the bytes that the file system of ``path`` has free now.

        Raises:
            FileNotFoundError: if the folder that is to hold ``path`` is missing.
        """
        assert self.path is not None
        path = Path(self.path).absolute()
        folder = path if path.exists() else path.parent
        if not folder.is_dir():
            raise FileNotFoundError(
                f"path of a disk must be a folder, or a new one in a folder that exists, got "
                f"{str(path)!r}; make {str(folder)!r} on each node"
            )
        return int(shutil.disk_usage(folder).free * DISK_SHARE)


def known_on_all(disk: NodeDisk, group: dist.ProcessGroup | None, ranks_per_node: int) -> NodeDisk:
    """``disk``, the same on all ranks, with the capacity that they find where none is given: each
    rank of a host has an equal part of what is found there, and all as much as the least.

    Collective where the capacity is not given.

    Raises:
        OSError: if this rank cannot tell what is free.
        RuntimeError: if another one cannot.
    """
    if not disk.is_unknown:
        return disk
    problem, found = None, -1
    try:
        found = disk.found_bytes()
    except OSError as error:
        problem = error
    all_found = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(all_found, (socket.gethostname(), found), group=group)
    if problem is not None:
        raise problem
    silent = [rank for rank, (_, num_bytes) in enumerate(all_found) if num_bytes < 0]
    if silent:
        raise RuntimeError(
            f"ranks {silent} could not tell what is free at {disk.path}, for the errors that they "
            "raise; give the disk capacity_bytes"
        )
    ranks_of_host = Counter(host for host, _ in all_found)
    of_rank = min(num_bytes // ranks_of_host[host] for host, num_bytes in all_found)
    return dataclasses.replace(disk, capacity_bytes=of_rank * ranks_per_node)
