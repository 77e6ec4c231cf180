"""Replaces TorchRec's two sharders of collections, and its pipeline, within a process, without a
changed line."""

import functools
from typing import Any, TypeGuard

from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder

from torchembed.integrations.torchrec.pipeline.replaced_pipeline import (
    replace_pipeline,
    restore_pipeline,
)
from torchembed.integrations.torchrec.sharded import sharders

_replaced: dict[type, sharders.Shard] = {}
"""TorchRec's own ``shard`` of each sharder class in which it is replaced now."""


def install(*, pipeline: bool = True) -> None:
    """Make TorchRec's ``EmbeddingBagCollectionSharder`` and ``EmbeddingCollectionSharder`` shard
    over torchembed's tables, existing instances included, and torchembed's ``TrainPipeline`` what
    ``TrainPipelineSparseDist(...)`` gives, by whatever name it was imported.

    TorchRec's other default sharders shard their modules, with the collections in them, as before,
    and its other pipelines and what is derived from any of them train as before; the log says so
    where one is used. A second call replaces nothing again, and sets ``pipeline``.

    Args:
        pipeline: False leaves TorchRec's pipeline.
    """
    if pipeline:
        replace_pipeline()
    else:
        restore_pipeline()
    if _replaced:
        return
    _replace(EmbeddingBagCollectionSharder, sharders.EmbeddingBagCollectionSharder.shard)
    _replace(EmbeddingCollectionSharder, sharders.EmbeddingCollectionSharder.shard)
    for sharder in sharding_plan.get_default_sharders():
        if type(sharder) not in _replaced:
            _warn_of_use(type(sharder))


def uninstall() -> None:
    """Restore TorchRec's sharders and pipeline. Modules that are sharded already and pipelines that
    were made stay as they are."""
    restore_pipeline()
    for kind, shard in _replaced.items():
        kind.shard = shard  # type: ignore[attr-defined]
    _replaced.clear()


def shards_here(sharder: ModuleSharder[nn.Module]) -> TypeGuard[BaseEmbeddingSharder[nn.Module]]:
    """True if ``sharder`` shards over torchembed's tables, also if it is TorchRec's own while ours
    are installed."""
    ours = sharders.EmbeddingBagCollectionSharder, sharders.EmbeddingCollectionSharder
    kind = type(sharder)
    return isinstance(sharder, ours) or any(kind.shard is known.shard for known in _replaced)


def _replace(kind: type[ModuleSharder], ours: sharders.Shard) -> None:
    """Make ``kind`` shard by ``ours``, but for collections within a module of TorchRec's."""
    theirs = _replaced[kind] = kind.shard

    @functools.wraps(theirs)
    def shard(self: ModuleSharder, *args: Any, **named: Any) -> nn.Module:
        return (theirs if sharders.within_torchrec.get() else ours)(self, *args, **named)

    kind.shard = shard  # type: ignore[method-assign]


def _warn_of_use(kind: type[ModuleSharder]) -> None:
    """Make ``kind`` log that it is used."""
    theirs = _replaced[kind] = kind.shard

    @functools.wraps(theirs)
    def shard(self: ModuleSharder, *args: Any, **named: Any) -> nn.Module:
        return sharders.with_fallback_warning(functools.partial(theirs, self))(*args, **named)

    kind.shard = shard  # type: ignore[method-assign]
