"""Our sharding wherever TorchRec's two sharders are used, without a changed line."""

import functools
from collections.abc import Callable
from typing import Any

from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from torchembed.integrations.torchrec import sharders

_replaced: dict[type, Callable[..., Any]] = {}
"""The sharders whose ``shard`` is not TorchRec's now, and what it was."""


def install() -> None:
    """Let TorchRec's ``EmbeddingBagCollectionSharder`` and ``EmbeddingCollectionSharder`` shard
    over our tables, those that exist already included.

    TorchRec's other default sharders keep their modules whole; the log says so where one is used.
    A second call does nothing.
    """
    if _replaced:
        return
    _replace(EmbeddingBagCollectionSharder, sharders.EmbeddingBagCollectionSharder.shard)
    _replace(EmbeddingCollectionSharder, sharders.EmbeddingCollectionSharder.shard)
    for sharder in sharding_plan.get_default_sharders():
        if type(sharder) not in _replaced:
            _keep_whole(type(sharder))


def uninstall() -> None:
    """Give TorchRec its sharders back. What is sharded stays as it is."""
    for kind, shard in _replaced.items():
        kind.shard = shard  # type: ignore[attr-defined]
    _replaced.clear()


def _replace(kind: Any, ours: Callable[..., Any]) -> None:
    theirs = _replaced[kind] = kind.shard

    @functools.wraps(theirs)
    def shard(self: Any, *args: Any, **named: Any) -> Any:
        return (theirs if sharders.within_torchrec.get() else ours)(self, *args, **named)

    kind.shard = shard


def _keep_whole(kind: Any) -> None:
    theirs = _replaced[kind] = kind.shard

    @functools.wraps(theirs)
    def shard(self: Any, *args: Any, **named: Any) -> Any:
        return sharders.announcing(functools.partial(theirs, self))(*args, **named)

    kind.shard = shard
