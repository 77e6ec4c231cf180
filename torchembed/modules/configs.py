"""What a collection's tables look like; TorchRec's configs are taken as they are."""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.features import names_in
from torchembed.core.types import Pooling
from torchembed.tables import Initializer, InPlaceFunction, TableSpec, Uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """One table of an :class:`EmbeddingCollection`. Field names are TorchRec's."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    initializer: Initializer = Uniform()

    def __post_init__(self) -> None:
        names = names_in(f"feature_names of table {self.name}", self.feature_names)
        object.__setattr__(self, "feature_names", names)
        if not self.name or "." in self.name:
            raise ValueError(
                f"name of a table must be a word without dots, as parameter names need, "
                f"got {self.name!r}"
            )
        if hasattr(nn.ModuleDict(), self.name):
            raise ValueError(
                f"name of a table must not be {self.name!r}, which is an attribute of the "
                "nn.ModuleDict that holds the weights; choose another"
            )
        for field in ("num_embeddings", "embedding_dim"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} of table {self.name} must be positive, got {getattr(self, field)}"
                )
        if not self.feature_names:
            raise ValueError(f"feature_names of table {self.name} must name at least one feature")
        if len(set(self.feature_names)) != len(self.feature_names):
            raise ValueError(
                f"feature_names of table {self.name} must all be different, "
                f"got {list(self.feature_names)}"
            )
        if self.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"dtype of table {self.name} must be float32, float16 or bfloat16, got {self.dtype}"
            )

    def spec(self, seed: int) -> TableSpec:
        return TableSpec(
            name=self.name,
            num_rows=self.num_embeddings,
            dim=self.embedding_dim,
            dtype=self.dtype,
            initializer=self.initializer,
            seed=seed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """One table of an :class:`EmbeddingBagCollection`. Field names are TorchRec's."""

    pooling: Pooling = Pooling.SUM
    """Or its value, ``"sum"`` or ``"mean"``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pooling", _pooling(self.name, self.pooling))


def _pooling(table: str, pooling: Any) -> Pooling:
    """``pooling`` of ours, or TorchRec's, or by its name."""
    value = str(getattr(pooling, "value", pooling)).lower()
    try:
        return Pooling(value)
    except ValueError:
        raise ValueError(
            f'pooling of table {table} must be "sum" or "mean", got {value!r}'
        ) from None


def _initializer(config: Any) -> Initializer:
    """What a TorchRec config says of initial rows.

    TorchRec writes its uniform default into ``init_fn``; that becomes :class:`Uniform`, whose rows
    do not depend on sharding.
    """
    init_fn = getattr(config, "init_fn", None)
    if (
        isinstance(init_fn, functools.partial)
        and init_fn.func is torch.nn.init.uniform_
        and not init_fn.args
        and init_fn.keywords.keys() == {"a", "b"}
    ):
        return Uniform(low=init_fn.keywords["a"], high=init_fn.keywords["b"])
    if init_fn is not None:
        return InPlaceFunction(init_fn)
    return Uniform(
        low=getattr(config, "weight_init_min", None), high=getattr(config, "weight_init_max", None)
    )


_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


def as_config(config: Any, kind: type[EmbeddingConfig]) -> EmbeddingConfig:
    """``config`` itself, or the same table as TorchRec's config of that name describes.

    Raises:
        TypeError: where ``config`` is no such config.
        ValueError: for a setting that torchembed does not have.
    """
    if isinstance(config, kind):
        return config
    fields = ["name", "num_embeddings", "embedding_dim", "feature_names"]
    if kind is EmbeddingBagConfig:
        fields.append("pooling")
    missing = [field for field in fields if not hasattr(config, field)]
    if missing or isinstance(config, EmbeddingConfig):
        raise TypeError(
            f"tables must hold {kind.__name__} or TorchRec's config of that name, "
            f"got {type(config).__name__}"
        )
    data_type = getattr(config, "data_type", None)
    data_type_name = "FP32" if data_type is None else str(getattr(data_type, "value", data_type))
    if data_type_name not in _DTYPES:
        raise ValueError(
            f"data_type of table {config.name} must be FP32, FP16 or BF16, got {data_type_name}"
        )
    for field, ordinary in (("need_pos", False), ("use_virtual_table", False)):
        if getattr(config, field, ordinary) != ordinary:
            raise ValueError(f"{field} of table {config.name} is not supported; leave it out")
    settings: dict[str, Any] = {"initializer": _initializer(config)}
    if kind is EmbeddingBagConfig:
        settings["pooling"] = _pooling(config.name, config.pooling)
    return kind(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        feature_names=config.feature_names or (config.name,),
        dtype=_DTYPES[data_type_name],
        **settings,
    )
