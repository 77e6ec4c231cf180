"""Rows of tables beside the numbers of ids that a source of batches states."""

from torch import nn

from torchembed.core.types import OnBadId
from torchembed.data.loader import BackgroundLoader
from torchembed.data.source import BatchSource
from torchembed.modules.collection import Collection
from torchembed.modules.dense_part.table_modules import configs_of
from torchembed.modules.sharded.sharded_collection import ShardedCollection
from torchembed.training.epochs import Epochs


def check_table_sizes(model: nn.Module, batches: object) -> None:
    """Raise ``ValueError`` where a feature of ``batches`` has more ids than its table has rows.

    Only a :class:`~torchembed.data.source.BatchSource` states how many ids its features have. A
    dynamic table takes any ids, and one that does not raise for bad ids may have fewer rows.
    """
    source = _source_of(batches)
    if source is None or source.raw_ids:
        return
    num_ids = dict(zip(source.keys, source.table_sizes, strict=True))
    for module in model.modules():
        if not isinstance(module, Collection | ShardedCollection):
            continue
        if module._on_bad_id is not OnBadId.RAISE:
            continue
        for config in configs_of(module):
            most = max((num_ids.get(feature, 0), feature) for feature in config.feature_names)
            if config.dynamic is None and most[0] > config.num_embeddings:
                raise ValueError(
                    f"table_sizes of the batches must not exceed the rows of tables, and feature "
                    f"{most[1]} has {most[0]} ids where table {config.name} has "
                    f"{config.num_embeddings} rows; give the table as many, or the source the "
                    "table's"
                )


def _source_of(batches: object) -> BatchSource | None:
    if isinstance(batches, Epochs):
        batches = batches.batches
    if isinstance(batches, BackgroundLoader):
        batches = batches.source
    return batches if isinstance(batches, BatchSource) else None
