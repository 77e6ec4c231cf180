"""The agreement of ranks on the kind of their batches, before any id travels."""

import functools
import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchembed.core.collective_errors import described, failure_elsewhere
from torchembed.core.features import SparseFeatures
from torchembed.sharding.transport.collectives import gather_numbers


class BatchKind(NamedTuple):
    """The properties of a batch that decide how its ids travel, and so which sizes every rank
    expects from the others."""

    tables: str
    """The tables that are looked up, in words."""
    hotness: tuple[int, ...] | None
    """Of each feature; None where lengths vary."""
    weights: str
    """The dtype of weights, and whether they have gradients."""

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
    """What the ranks know of each other's batches."""

    batch_sizes: list[int]
    """Samples of each rank."""
    have_same_hotness: bool
    """Whether all have the same, or none has fixed hotness."""


def agree_on_batch(
    kind: BatchKind | Exception, batch_size: int, group: Any, *, number: int
) -> AgreedBatch:
    """Tell the other ranks the kind of this rank's batch, or the error that was found in it.

    One collective through the CPU of five integers a rank, unless within
    :func:`~torchembed.sharding.transport.collectives.known_sizes`; a second one before errors.

    Args:
        kind: of this rank's batch; the error where it cannot be looked up.
        number: of the lookup, counted on this rank; for errors.

    Raises:
        Exception: ``kind`` itself, where it is one.
        RuntimeError: where another rank has an error, which is named with the rank; where ranks do
            not come.
        ValueError: where ranks look up different tables, or differ in weights.
    """
    has_failed = isinstance(kind, Exception)
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
    return tuple(
        int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], signed=True) for of in kind
    )


def _refuse(kind: BatchKind | Exception, group: Any) -> None:
    """Raise for batches that do not go together, on all ranks."""
    kinds: list[Any] = [None] * dist.get_world_size(group)
    mine = described(kind) if isinstance(kind, Exception) else kind
    dist.all_gather_object(kinds, mine, group=group)
    if isinstance(kind, Exception):
        raise kind
    failures = {rank: text for rank, text in enumerate(kinds) if isinstance(text, str)}
    if failures:
        raise failure_elsewhere(failures, "look up its batch")
    for rank, other in enumerate(kinds):
        for first, its in ((kinds[0].tables, other.tables), (kinds[0].weights, other.weights)):
            if first != its:
                raise ValueError(
                    "all ranks must look up the same tables at once, with the same kind of "
                    f"weights: rank 0 has {first}, rank {rank} has {its}; call the collections in "
                    "one order, and give every batch such weights, also an empty one"
                )
