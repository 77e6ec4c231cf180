"""Configs of a collection's tables; TorchRec's are accepted too."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.features import names_in
from torchembed.core.types import Pooling
from torchembed.tables import (
    MAX_ROWS,
    Disk,
    Dynamic,
    HashedRows,
    HashFactory,
    IndexFactory,
    Initializer,
    InPlaceFunction,
    Missing,
    MissingValue,
    RangeFactory,
    Storage,
    TableSpec,
    Uniform,
    check_at_most,
    check_missing,
    index_bytes_of,
    is_function_of_id,
)


class ConfigLike(Protocol):
    """The fields that torchembed's configs of tables and TorchRec's have in common."""

    @property
    def name(self) -> str: ...

    @property
    def num_embeddings(self) -> int: ...

    @property
    def embedding_dim(self) -> int: ...

    @property
    def feature_names(self) -> Sequence[str]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """The config of one table of an :class:`EmbeddingCollection`. Field names are TorchRec's.

    Raises:
        ValueError, TypeError: for a value that does not fit; names the field and the table.
    """

    name: str
    """The name of the table, without dots, which ``state_dict`` and plans use."""
    num_embeddings: int
    """The number of rows, so that ids are from 0 to ``num_embeddings - 1``; for a dynamic table its
    capacity."""
    embedding_dim: int
    """The number ``D`` of columns of a row."""
    feature_names: tuple[str, ...]
    """The features whose ids are looked up in the table."""
    dtype: torch.dtype = torch.float32
    """The dtype of rows: float32, float16 or bfloat16. Optimizer states are float32."""
    initializer: Initializer = Uniform()
    """The initial values of rows; by default uniform in ``1 / sqrt(num_embeddings)`` around 0."""
    dynamic: Dynamic | None = None
    """Makes each 64-bit integer an id; None for a table with a row for each number."""
    storage: Storage | None = None
    """The place that rows are kept in outside the device, behind a cache on it: ``HostMemory`` or
    ``Disk``; None to keep all rows on the device."""

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
            if not hasattr(getattr(self, field), "__index__"):
                raise TypeError(
                    f"{field} of table {self.name} must be an int, got {getattr(self, field)!r}"
                )
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
        check_storage(f"table {self.name}", self.storage, self.dynamic, self.initializer)
        if self.dynamic is not None:
            check_dynamic(
                f"table {self.name}",
                self.dynamic,
                self.initializer,
                dim=self.embedding_dim,
                dtype=self.dtype,
            )

    def spec(self, seed: int) -> TableSpec:
        """The table, with ``seed`` for its initial rows."""
        return table_spec(
            self.dynamic,
            name=self.name,
            num_rows=self.num_embeddings,
            dim=self.embedding_dim,
            dtype=self.dtype,
            initializer=self.initializer,
            seed=seed,
            storage=self.storage,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """The config of one table of an :class:`EmbeddingBagCollection`. Field names are TorchRec's."""

    pooling: Pooling = Pooling.SUM
    """The pooling of a bag's vectors, also given as ``"sum"`` or ``"mean"``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pooling", _pooling(self.name, self.pooling))


def check_seed(seed: object) -> None:
    """Raise ``TypeError`` unless ``seed`` is an int."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an int, got {seed!r}")


def check_storage(
    name: str, storage: object, dynamic: Dynamic | None, initializer: Initializer
) -> None:
    """Raise unless a table, ``name`` in errors, can have its rows in ``storage``."""
    if storage is not None and not isinstance(storage, Storage):
        raise TypeError(
            f"storage of {name} must be HostMemory(...), Disk(...) or None for the device, got "
            f"{storage!r}"
        )
    if isinstance(storage, Disk) and not is_function_of_id(initializer):
        raise TypeError(
            f"initializer of {name} must be Uniform, Normal or Constant, since rows on disk are "
            f"made when they are used first, got {type(initializer).__name__}"
        )
    if storage is not None and dynamic is not None and dynamic.initial_capacity is not None:
        raise ValueError(
            f"initial_capacity of {name} must be None with a storage, got "
            f"{dynamic.initial_capacity}: its cache is small, and its rows on the host do not grow"
        )


def check_dynamic(
    name: str, dynamic: object, initializer: Initializer, *, dim: int, dtype: torch.dtype
) -> None:
    """Raise unless a table, ``name`` in errors, of ``dim`` columns can be dynamic."""
    if not isinstance(dynamic, Dynamic):
        raise TypeError(f"dynamic of {name} must be a Dynamic or None, got {dynamic!r}")
    if not is_function_of_id(initializer):
        raise TypeError(
            f"initializer of {name} must be Uniform, Normal or Constant, since a dynamic table "
            f"makes rows when their ids come, got {type(initializer).__name__}"
        )
    check_missing(name, dynamic.missing_value, dim, dtype)


def check_not_dynamic(name: str, dynamic: Dynamic | None) -> None:
    """Raise ``TypeError`` where a table, ``name`` in errors, that is to become one of torch's is
    dynamic."""
    if dynamic is not None:
        raise TypeError(
            f"{name} must not be dynamic to become a module of torch, whose ids are the numbers of "
            "rows; look its ids up by lookup()"
        )


def table_spec(
    dynamic: Dynamic | None,
    *,
    name: str,
    num_rows: int,
    dim: int,
    dtype: torch.dtype,
    initializer: Initializer,
    seed: int,
    storage: Storage | None = None,
    zero_row: int | None = None,
) -> TableSpec:
    """A table of ``num_rows``; a dynamic one of that capacity, with the initial values of a table
    that has as many rows."""
    index: IndexFactory = RangeFactory()
    missing: MissingValue = Missing.ZEROS
    if dynamic is not None:
        if isinstance(initializer, Uniform):
            low, high = initializer.bounds(num_rows)
            initializer = Uniform(low=low, high=high)
        missing = dynamic.missing_value
        check_at_most(f"num_embeddings of dynamic table {name}", num_rows, MAX_ROWS)
        row_bytes = dim * dtype.itemsize + index_bytes_of(dynamic)
        if dynamic.max_bytes is not None and dynamic.max_bytes < row_bytes:
            raise ValueError(
                f"max_bytes of table {name} must have room for a row, of {row_bytes} bytes without "
                f"optimizer state, got {dynamic.max_bytes}"
            )
        if not isinstance(dynamic.missing, HashedRows):
            # Tables that differ in it are looked up together all the same.
            dynamic = dataclasses.replace(dynamic, missing=Missing.ZEROS)
        if dynamic.max_rows is not None and dynamic.max_rows > num_rows:
            raise ValueError(
                f"max_rows of table {name} must be at most its capacity, "
                f"num_embeddings={num_rows}, got {dynamic.max_rows}"
            )
        index = HashFactory(dynamic)
        num_rows = index.rows_for(num_rows)
    return TableSpec(
        name=name,
        num_rows=num_rows,
        dim=dim,
        dtype=dtype,
        initializer=initializer,
        seed=seed,
        index=index,
        missing=missing,
        storage=storage,
        zero_row=zero_row,
    )


def _pooling(table: str, pooling: object) -> Pooling:
    """The enum for ``pooling``: ours, TorchRec's, or its value."""
    value = str(getattr(pooling, "value", pooling)).lower()
    try:
        return Pooling(value)
    except ValueError:
        raise ValueError(
            f'pooling of table {table} must be "sum" or "mean", got {value!r}'
        ) from None


def initializer_of(config: object) -> Initializer:
    """The initializer of the rows of a TorchRec config."""
    given = getattr(config, "initializer", None)
    if given is not None:
        return given
    init_fn = getattr(config, "init_fn", None)
    # TorchRec writes its uniform default into init_fn. It becomes Uniform, whose rows do not depend
    # on sharding, as those of an arbitrary function do.
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


def dtype_of(config: ConfigLike) -> torch.dtype:
    """The dtype of the rows of a TorchRec config.

    Raises:
        ValueError: for one that torchembed does not have.
    """
    data_type = getattr(config, "data_type", None)
    name = "FP32" if data_type is None else str(getattr(data_type, "value", data_type))
    if name not in _DTYPES:
        raise ValueError(f"data_type of table {config.name} must be FP32, FP16 or BF16, got {name}")
    return _DTYPES[name]


def as_config(config: ConfigLike, kind: type[EmbeddingConfig]) -> EmbeddingConfig:
    """``config`` as torchembed's ``kind``, converted where it is TorchRec's config of that name.

    Raises:
        TypeError: where ``config`` is not such a config.
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
    dtype = dtype_of(config)
    for field, ordinary in (("need_pos", False), ("use_virtual_table", False)):
        if getattr(config, field, ordinary) != ordinary:
            raise ValueError(f"{field} of table {config.name} is not supported; leave it out")
    # TorchRec's default is the name of the table.
    names = config.feature_names or (config.name,)
    pooling: dict[str, Any] = {}
    if kind is EmbeddingBagConfig:
        pooling["pooling"] = _pooling(config.name, getattr(config, "pooling", None))
    return kind(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        feature_names=names_in(f"feature_names of table {config.name}", names),
        dtype=dtype,
        initializer=initializer_of(config),
        dynamic=getattr(config, "dynamic", None),
        storage=getattr(config, "storage", None),
        **pooling,
    )
