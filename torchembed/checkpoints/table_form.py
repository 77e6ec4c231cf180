"""The forms of dynamic tables in checkpoints: what their rows mean, and how they are divided."""

import json
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.tables import Dynamic, EpochLFU, HashFactory, Table


class TableForm(NamedTuple):
    """What must be known of a dynamic table to load it; in a checkpoint a tensor of bytes."""

    key: int
    """64-bit key of its initial rows, from its name and seed."""
    eviction: str
    """The policy that its scores are of."""
    admission: str
    """The policy that chooses new ids, ``None`` where there is none."""
    num_shares: int
    """In how many parts a hash divides its ids."""
    share_rows: int
    """Rows of each part, where ids lie as the hash of a table of as many rows says."""
    num_hashed_rows: int
    """The last of them, which ids without a row of their own share."""

    @classmethod
    def of(cls, table: Table) -> "TableForm | None":
        """The form of a table of the run; None for a static one."""
        factory = table.spec.index
        if not isinstance(factory, HashFactory):
            return None
        dynamic, num_shares = factory.dynamic, table.id_share.num_shares
        rows = table.num_rows, dynamic.num_hashed_rows
        return cls(table.spec.key, *_policies(dynamic), num_shares, *rows)

    def to_tensor(self) -> Tensor:
        """The form as uint8 ``[n]``."""
        return torch.frombuffer(bytearray(json.dumps(self._asdict()).encode()), dtype=torch.uint8)

    @classmethod
    def parse(cls, tensor: Tensor) -> "TableForm":
        """The form of which :meth:`to_tensor` gave ``tensor``."""
        return cls(**json.loads(tensor.numpy().tobytes()))


def _policies(dynamic: Dynamic) -> tuple[str, str]:
    """The names of eviction and admission. Of their numbers those count that scores depend on."""
    eviction = dynamic.eviction
    name = str(eviction) if isinstance(eviction, EpochLFU) else type(eviction).__name__
    return name, "None" if dynamic.admission is None else type(dynamic.admission).__name__


def form_key(name: str) -> str:
    """The entry of a checkpoint that holds the form of the table of a parameter."""
    return f"tables.{name}"
