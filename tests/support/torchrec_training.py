"""A model in TorchRec's own style, trained with TorchRec's sharders or with ours."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    CacheParams,
    KeyValueParams,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.support.tolerance import NUDGE_UNITS
from torchembed.integrations import torchrec as ours
from torchembed.tables import Storage

DIM = 16
NUM_DENSE = 4
BATCH_SIZE = 32
TABLES = {"a": 50, "b": 200, "c": 1000, "d": 30}
FEATURES = {"a": ["user"], "b": ["item"], "c": ["words", "tags"], "d": ["user"]}
"""``user`` looks up two tables, and ``c`` is looked up by two features."""
RESULTS = ["item", "tags", "user@a", "user@d", "words"]
IDS = {"user": 30, "item": 200, "words": 1000, "tags": 1000}


def sharder_of(kind: type, whose: str, **arguments: Any) -> Any:
    if whose == "theirs":
        return kind(**arguments)
    return getattr(ours, kind.__name__)(**arguments)


def placement(name: str, table: int) -> Any:
    """A generator of a table's shards; tables take turns."""
    num_ranks = dist.get_world_size()
    rank = table % num_ranks
    return {
        "table_wise": lambda: table_wise(rank=rank),
        "row_wise": row_wise,
        "column_wise": lambda: column_wise(ranks=[rank, (rank + 1) % num_ranks]),
        "table_column_wise": lambda: _within_host(
            column_wise(ranks=[rank, (rank + 1) % num_ranks])
        ),
        "columns on one rank": lambda: column_wise(ranks=[rank, rank]),
        "data_parallel": data_parallel,
        "grid_shard": lambda: grid_shard(host_indexes=[0]),
        "table_row_wise": lambda: table_row_wise(host_index=table % max(num_ranks // 2, 1)),
    }[name]()


def _within_host(by_column: Any) -> Any:
    """``by_column`` as a planner names it where a table's columns stay within a host."""

    def generate(*arguments: Any) -> Any:
        made = by_column(*arguments)
        made.sharding_type = ShardingType.TABLE_COLUMN_WISE.value
        return made

    return generate


def plan_of(
    module: nn.Module,
    placements: Sequence[str],
    device_type: str,
    tables: Sequence[str] = tuple(TABLES),
) -> ShardingPlan:
    """Tables take the placements in turns."""
    num_ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module,
        {
            name: placement(placements[number % len(placements)], number)
            for number, name in enumerate(tables)
        },
        local_size=2 if "table_row_wise" in placements else num_ranks,
        world_size=num_ranks,
        device_type=device_type,
    )
    return ShardingPlan(plan={"sparse": plan})


def config_kind(kind: type, storage: Storage | None) -> Callable[..., Any]:
    """TorchRec's ``kind`` of configs, or ours of that name with a ``storage``."""
    return (
        kind
        if storage is None
        else functools.partial(getattr(ours, kind.__name__), storage=storage)
    )


class Bags(nn.Module):
    """Pooled vectors and dense features to one logit."""

    def __init__(
        self,
        *,
        is_weighted: bool,
        pooling: PoolingType,
        dims: Mapping[str, int],
        data_type: DataType,
        tables: Sequence[str],
        storages: Mapping[str, Storage],
    ) -> None:
        super().__init__()
        self.sparse = torchrec.EmbeddingBagCollection(
            device=torch.device("meta"),
            is_weighted=is_weighted,
            tables=[
                config_kind(EmbeddingBagConfig, storages.get(name))(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dims.get(name, DIM),
                    feature_names=FEATURES[name],
                    pooling=pooling,
                    data_type=data_type,
                )
                for name, rows in TABLES.items()
                if name in tables
            ],
        )
        self.results = RESULTS if "d" in tables else list(IDS)
        width = sum(dims.get(name, DIM) * len(FEATURES[name]) for name in tables)
        self.over = over_arch(width)

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        vectors = self.sparse(features)
        # By name, since their order depends on the placement.
        columns = [vectors[name] for name in self.results]
        return self.over(torch.cat([dense, *columns], dim=1)).squeeze(1)


class Sequences(nn.Module):
    """The same from a vector for each id, which are then summed."""

    def __init__(self, *, storages: Mapping[str, Storage], **_: Any) -> None:
        super().__init__()
        self.sparse = torchrec.EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                config_kind(EmbeddingConfig, storages.get(name))(
                    name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=FEATURES[name]
                )
                for name, rows in TABLES.items()
            ],
        )
        self.over = over_arch(DIM * sum(map(len, FEATURES.values())))

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        return self.over(summed(dense, self.sparse(features))).squeeze(1)


@torch.fx.wrap
def summed(dense: Tensor, vectors: Mapping[str, Any]) -> Tensor:
    """``dense`` and beside it the sums of each feature's ``vectors``, for TorchRec in one piece."""
    # Neither waits for a GPU nor adds up in any order there.
    sums = [
        torch.segment_reduce(jagged.values(), "sum", lengths=jagged.lengths(), unsafe=True)
        for _, jagged in sorted(vectors.items())
    ]
    return torch.cat([dense, *sums], dim=1)


class BagsForTraining(Bags):
    """In the form that TorchRec's pipelines train: a batch to its loss and what else there is."""

    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        return _with_loss(super().forward(batch.dense_features, batch.sparse_features), batch)


class SequencesForTraining(Sequences):
    """Likewise."""

    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        return _with_loss(super().forward(batch.dense_features, batch.sparse_features), batch)


def _with_loss(logits: Tensor, batch: Any) -> Any:
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def over_arch(num_sparse: int) -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_DENSE + num_sparse, 16), nn.ReLU(), nn.Linear(16, 1))


def batch(
    step: int,
    device: torch.device,
    *,
    weighted: bool,
    ids_dtype: torch.dtype,
    size: int = BATCH_SIZE,
    is_fixed: bool = False,
) -> tuple[Tensor, Any, Tensor]:
    """Dense features, sparse ones and labels of a step on this rank; bags may be empty, or all of a
    feature have as many ids."""
    generator = torch.Generator().manual_seed(step * 64 + dist.get_rank())
    lengths = torch.randint(0, 5, (len(IDS), size), generator=generator)
    if is_fixed:
        lengths = torch.arange(1, len(IDS) + 1).unsqueeze(1).expand(-1, size)
    counts = lengths.sum(dim=1).tolist()
    values = [
        # Few ids often, so that rows repeat within a batch.
        (torch.rand(count, generator=generator) ** 3 * rows).to(ids_dtype)
        for count, rows in zip(counts, IDS.values(), strict=True)
    ]
    weights = torch.rand(sum(counts), generator=generator) + 0.5 if weighted else None
    features = torchrec.KeyedJaggedTensor(
        keys=list(IDS), values=torch.cat(values), lengths=lengths.flatten().int(), weights=weights
    )
    dense = torch.randn(size, NUM_DENSE, generator=generator)
    labels = (dense.sum(dim=1) + lengths[0] - 2 > 0).float()
    return dense.to(device), features.to(device), labels.to(device)


class Run(NamedTuple):
    model: Any
    optimizer: Any
    device: torch.device
    weighted: bool
    ids_dtype: torch.dtype

    def steps(self, first: int, last: int, after: Callable[[], None] | None = None) -> list[float]:
        """The losses of steps ``[first, last)``."""
        losses = []
        for step in range(first, last):
            dense, features, labels = batch(
                step, self.device, weighted=self.weighted, ids_dtype=self.ids_dtype
            )
            self.optimizer.zero_grad()
            logits = self.model(dense, features)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
            loss.backward()
            self.optimizer.step()
            if after is not None:
                after()
            losses.append(loss.item())
        return losses


def make_run(
    whose: str,
    device: torch.device,
    placements: Sequence[str],
    optimizer: type[torch.optim.Optimizer],
    settings: Mapping[str, Any],
    *,
    weighted: bool = False,
    pooling: PoolingType = PoolingType.SUM,
    dims: Mapping[str, int] | None = None,
    fused_params: Mapping[str, Any] | None = None,
    codecs: Any = None,
    env: ShardingEnv | None = None,
    is_sequence: bool = False,
    for_pipeline: bool = False,
    init_data_parallel: bool = True,
    nudged: bool = False,
    dense_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    data_type: DataType = DataType.FP32,
    ids_dtype: torch.dtype = torch.int64,
    tables: Sequence[str] = tuple(TABLES),
    kernels: Mapping[str, str] | None = None,
    cache: CacheParams | None = None,
    key_value: KeyValueParams | None = None,
    storages: Mapping[str, Storage] | None = None,
) -> Run:
    """A model that begins alike whosever sharders it has.

    Args:
        kernels: compute kernels of tables, by name; the plan's own for others.
        cache, key_value: of the tables in ``kernels``.
        storages: of tables whose configs have one, by name.
    """
    torch.manual_seed(7)
    kind = Sequences if is_sequence else Bags
    if for_pipeline:
        kind = SequencesForTraining if is_sequence else BagsForTraining
    model = kind(
        is_weighted=weighted,
        pooling=pooling,
        dims=dims or {},
        data_type=data_type,
        tables=tables,
        storages=storages or {},
    )
    model.over.to(device)
    _apply_optimizer_in_backward(optimizer, model.sparse.parameters(), dict(settings))
    sharder = sharder_of(
        EmbeddingCollectionSharder if is_sequence else EmbeddingBagCollectionSharder,
        whose,
        fused_params=dict(fused_params or {}),
        qcomm_codecs_registry=codecs,
    )
    plan = plan_of(model.sparse, placements, device.type, tables)
    for name, kernel in (kernels or {}).items():
        plan.plan["sparse"][name].compute_kernel = kernel  # type: ignore[index]
        plan.plan["sparse"][name].cache_params = cache  # type: ignore[index]
        plan.plan["sparse"][name].key_value_params = key_value  # type: ignore[index]
    sharded = DistributedModelParallel(
        model,
        env=env,
        device=device,
        plan=plan,
        sharders=[sharder],
        init_data_parallel=init_data_parallel,
    )
    if for_pipeline:
        _begin_alike(sharded)
    if nudged:
        nudge(sharded)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    make_dense = dense_optimizer or functools.partial(torch.optim.SGD, lr=0.05)
    of_dense = KeyedOptimizerWrapper(dense, make_dense)
    both = CombinedOptimizer([sharded.fused_optimizer, of_dense])
    return Run(sharded, both, device, weighted, ids_dtype)


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Move every parameter by ``NUDGE_UNITS`` float32 eps of itself, up or down, and alike where
    ranks hold the same."""
    by = NUDGE_UNITS * torch.finfo(torch.float32).eps
    for number, (_, value) in enumerate(sorted(model.state_dict().items())):
        sharded = hasattr(value, "local_shards")
        for part in [shard.tensor for shard in value.local_shards()] if sharded else [value]:
            generator = torch.Generator().manual_seed(number)
            ups = torch.rand(part.shape, generator=generator) < 0.5
            part.mul_(torch.where(ups, 1 + by, 1 - by))


@torch.no_grad()
def _begin_alike(model: nn.Module) -> None:
    """Give tables the same rows wherever they are."""
    generator = torch.Generator().manual_seed(5)
    for name, value in sorted(model.state_dict().items()):
        if not name.startswith("sparse."):
            continue
        rows = (torch.rand(value.size(), generator=generator) - 0.5) * 0.2
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                place = zip(shard.metadata.shard_offsets, shard.tensor.shape, strict=True)
                shard.tensor.copy_(rows[tuple(slice(o, o + n) for o, n in place)])
        else:
            value.copy_(rows)


def whole(value: Any) -> Tensor:
    """A sharded tensor's elements on every rank, float64; its own where it is not sharded."""
    if hasattr(value, "to_local"):
        local = value.to_local()
        total = torch.zeros(value.size(), dtype=torch.float64)
        for part, offsets in zip(local.local_shards(), local.local_offsets(), strict=True):
            _place(total, part, offsets)
    elif hasattr(value, "local_shards"):
        total = torch.zeros(value.size(), dtype=torch.float64)
        for shard in value.local_shards():
            _place(total, shard.tensor, shard.metadata.shard_offsets)
    else:
        return value.detach().cpu().double()
    dist.all_reduce(total)
    return total


def _place(total: Tensor, part: Tensor, offsets: Sequence[int]) -> None:
    where = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
    total[where] = part.detach().cpu().double()


def weights_of(run: Run) -> Tensor:
    """All elements of all parameters."""
    state = run.model.state_dict()
    return torch.cat([whole(state[name]).flatten() for name in sorted(state)])
