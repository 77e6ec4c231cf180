"""The forms of dynamic tables in checkpoints: what their rows mean, and how they are divided."""

import json
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.tables import Dynamic, EpochLFU, HashFactory, Table


class TableForm(NamedTuple):
    """The form of a dynamic table, by which a checkpoint is loaded; in it a tensor of bytes."""

    key: int
    """64-bit key of its initial rows, from its name and seed."""
    eviction: str
    """The policy that its scores are of."""
    admission: str
    """The policy that chooses new ids, ``None`` where there is none."""
    num_shares: int
    """In how many parts a hash divides its ids."""
    share_rows: int
    """Rows of each part, where ids lie as the hash of a table of as many rows and blocks says."""
    num_blocks: int | None
    """The blocks of each part's slots; None where it cannot have as many rows."""
    num_hashed_rows: int
    """The last of them, which ids without a row of their own share."""

    @classmethod
    def of(cls, table: Table, num_rows: int | None = None) -> "TableForm | None":
        """The form of a table of the run, with as many rows as it has, or once it has grown to
        ``num_rows``; None for a static one."""
        factory = table.spec.index
        if not isinstance(factory, HashFactory):
            return None
        dynamic, num_shares = factory.dynamic, table.id_share.num_shares
        rows = table.num_rows if num_rows is None else num_rows
        shape = factory.shape_with(rows, table.max_rows)
        return cls(
            key=table.spec.key,
            eviction=_eviction(dynamic),
            admission=_admission(dynamic),
            num_shares=num_shares,
            share_rows=rows,
            num_blocks=None if shape is None else shape.num_blocks,
            num_hashed_rows=dynamic.num_hashed_rows,
        )

    def to_tensor(self) -> Tensor:
        """The form as uint8 ``[n]``."""
        return torch.frombuffer(bytearray(json.dumps(self._asdict()).encode()), dtype=torch.uint8)

    @classmethod
    def parse(cls, tensor: Tensor) -> "TableForm":
        """The form of which :meth:`to_tensor` gave ``tensor``."""
        return cls(**json.loads(tensor.numpy().tobytes()))


def _eviction(dynamic: Dynamic) -> str:
    """The policy's name, with the numbers that scores depend on."""
    eviction = dynamic.eviction
    return str(eviction) if isinstance(eviction, EpochLFU) else type(eviction).__name__


def _admission(dynamic: Dynamic) -> str:
    return "None" if dynamic.admission is None else type(dynamic.admission).__name__


def form_key(name: str) -> str:
    """The entry of a checkpoint that holds the form of the table of a parameter."""
    return f"tables.{name}"
