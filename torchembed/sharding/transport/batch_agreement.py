"""The agreement of ranks on the kind of their batches, before any id is sent."""

import functools
import hashlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchembed.core.features import SparseFeatures
from torchembed.core.ranks.collective_errors import described, failure_elsewhere
from torchembed.sharding.transport.collectives import gather_numbers


class BatchKind(NamedTuple):
    """The properties of a batch that decide how its ids are exchanged, and so the sizes that every
    rank expects from the others."""

    tables: str
    """Names of the tables that are looked up, for errors."""
    hotness: tuple[int, ...] | None
    """Hotness of each feature; None where lengths vary."""
    weights: str
    """The dtype of weights and if they have gradients, in words."""

    @classmethod
    def of(cls, features: SparseFeatures, tables: str) -> "BatchKind":
        """The kind of ``features``, which are looked up in ``tables``."""
        weights = "no weights"
        if features.weights is not None:
            trains = features.weights.requires_grad and torch.is_grad_enabled()
            kind = str(features.weights.dtype).removeprefix("torch.")
            weights = f"{kind} weights with{'' if trains else 'out'} gradients"
        return cls(tables, features.hotness, weights)


class AgreedBatch(NamedTuple):
    """Facts about the batches of all ranks."""

    batch_sizes: list[int]
    """Samples of each rank."""
    have_same_hotness: bool
    """True if all have the same fixed hotness, or none has a fixed one."""


def agree_on_batch(
    kind: BatchKind | Exception, batch_size: int, group: dist.ProcessGroup | None, *, number: int
) -> AgreedBatch:
    """Tell the other ranks the kind of this rank's batch, or the error that was found in it.

    One all-gather of five integers through the CPU, or none within
    :func:`~torchembed.sharding.transport.collectives.replayed_sizes`; a second one for the texts of
    errors.

    Args:
        kind: the kind of this rank's batch, or the error for which it cannot be looked up.
        number: the number of lookups on this rank so far, for errors.

    Raises:
        Exception: ``kind`` itself, where it is one.
        RuntimeError: if another rank has an error, which is named with the rank; where ranks do
            not come.
        ValueError: if ranks look up different tables, or differ in weights.
    """
    # A rank with an error takes part too: had it raised already, the others would wait for it.
    has_failed = isinstance(kind, Exception)
    # Digests instead of texts: the message has a fixed size, and one collective is enough.
    digests = (0, 0, 0) if has_failed else _digests(kind)
    try:
        of_ranks = gather_numbers((batch_size, int(has_failed), *digests), group)
    except RuntimeError as error:
        what = described(kind) if isinstance(kind, Exception) else kind.tables
        raise RuntimeError(
            f"could not tell the other ranks about lookup {number} of {what}: {error}. Every rank "
            "must look up equally often, with an empty batch where it has none left; look for one "
            "that failed or ended before"
        ) from error
    batch_sizes, failures, tables, hotness, weights = (
        list(column) for column in zip(*of_ranks, strict=True)
    )
    if any(failures) or len(set(tables)) > 1 or len(set(weights)) > 1:
        _refuse(kind, group)
    return AgreedBatch(batch_sizes, have_same_hotness=len(set(hotness)) == 1)


@functools.lru_cache(maxsize=1024)
def _digests(kind: BatchKind) -> tuple[int, ...]:
    """A 64-bit digest of each property, the same in every process."""
    # Python's own hash of a string differs from process to process.
    return tuple(
        int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], signed=True) for of in kind
    )


def _refuse(kind: BatchKind | Exception, group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks for batches that cannot be looked up in one exchange. Collective."""
    # Every rank has seen the same failures and digests and so comes here, or none does.
    mine = described(kind) if isinstance(kind, Exception) else kind
    of_ranks: list[BatchKind | str] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, mine, group=group)
    # The rank that failed raises its own error, with its traceback; the others get its text.
    if isinstance(kind, Exception):
        raise kind
    failures = {rank: text for rank, text in enumerate(of_ranks) if isinstance(text, str)}
    if failures:
        raise failure_elsewhere(failures, "look up its batch")
    kinds = [its for its in of_ranks if isinstance(its, BatchKind)]
    for rank, other in enumerate(kinds):
        for first, its in ((kinds[0].tables, other.tables), (kinds[0].weights, other.weights)):
            if first != its:
                raise ValueError(
                    "all ranks must look up the same tables at once, with the same kind of "
                    f"weights: rank 0 has {first}, rank {rank} has {its}; call the collections in "
                    "one order, and give every batch such weights, also an empty one"
                )
