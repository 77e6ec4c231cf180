"""The table modules of a model, and what their tables need to be served."""

from typing import Any, NamedTuple

from torchembed.core.types import OnBadId
from torchembed.modules.collection import Collection
from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.forms import BadIds
from torchembed.modules.served_names import ServedTables, weights_of
from torchembed.modules.sharded.sharded_collection import ShardedCollection
from torchembed.tables import Dynamic, HashedRows, Missing

_BAD_IDS = {
    OnBadId.RAISE: BadIds.RAISE,
    OnBadId.CLAMP: BadIds.CLAMP,
    OnBadId.ZERO: BadIds.ZERO,
}


class TableSource(NamedTuple):
    """A table of a model."""

    name: str
    weight_name: str
    """In the model's ``state_dict``."""
    dim: int
    num_ids: int | None
    """Ids are in ``[0, num_ids)``; None for any."""
    bad_ids: BadIds
    missing: object
    """The value that ids without a row are looked up as."""

    def default(self, given: float | None) -> float:
        """All elements of the vector of an id without a row.

        Args:
            given: what the caller wants; None for what the model has.

        Raises:
            DeployError: where the model has no such number.
        """
        if given is not None:
            return float(given)
        if self.missing is Missing.ZEROS:
            return 0.0
        if isinstance(self.missing, tuple) and len(set(self.missing)) == 1:
            return float(self.missing[0])
        raise DeployError(
            f"ids without a row of table {self.name} must be looked up as one number in all "
            f"columns, and the model looks them up as {self.missing!r}; give "
            f"defaults={{{self.name!r}: 0.0}}"
        )


def is_collection(module: ServedTables) -> bool:
    """True for modules of several tables, which take sparse features."""
    return isinstance(module, Collection | ShardedCollection)


def is_pooled(module: ServedTables) -> bool:
    """True for modules that give a vector for each bag."""
    if isinstance(module, Collection | ShardedCollection):
        return module.is_pooled
    return hasattr(module, "mode")


def is_embedding_bag(module: ServedTables) -> bool:
    """True for the modules that stand for ``torch.nn.EmbeddingBag``."""
    return not is_collection(module) and is_pooled(module)


def configs_of(module: ServedTables) -> list[Any]:
    """The configs of a collection's tables, in order."""
    name = "embedding_bag_configs" if is_pooled(module) else "embedding_configs"
    return getattr(module, name)()


def table_sources(path: str, module: ServedTables) -> list[TableSource]:
    """The tables of the module at ``path``, in order."""
    weights = weights_of(path, module)
    if isinstance(module, Collection | ShardedCollection):
        return [
            TableSource(
                name=config.name,
                weight_name=weights[config.name],
                dim=config.embedding_dim,
                num_ids=None if config.dynamic is not None else config.num_embeddings,
                bad_ids=_BAD_IDS[module._on_bad_id],
                missing=_missing(config.dynamic),
            )
            for config in configs_of(module)
        ]
    ((name, weight_name),) = weights.items()
    dynamic = module.dynamic
    return [
        TableSource(
            name=name,
            weight_name=weight_name,
            dim=module.embedding_dim,
            num_ids=None if dynamic is not None else module.num_embeddings,
            bad_ids=_BAD_IDS[module._on_bad_id],
            missing=_missing(dynamic),
        )
    ]


def _missing(dynamic: Dynamic | None) -> object:
    if dynamic is not None and isinstance(dynamic.missing, HashedRows):
        return dynamic.missing
    return Missing.ZEROS if dynamic is None else dynamic.missing_value
