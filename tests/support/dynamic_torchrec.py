"""TorchRec collections with dynamic tables, and the same with static ones, for tests on ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed import Dynamic
from torchembed.core.random_bits import name_key
from torchembed.tables import Uniform

DIM = 8
NUM_IDS = 60
CAPACITIES = {"a": 300, "b": 200, "c": 150}
FEATURES = {"a": ("user", "item"), "b": ("item",), "c": ("shop",)}
"""``item`` looks up two tables, and ``a`` is looked up by two features; ``c`` is static."""
KEYS = ("user", "item", "shop")

POOL = torch.cat(
    [
        torch.tensor([0, -1, 2**63 - 1, -(2**63)]),
        torch.randint(
            -(2**63), 2**63 - 1, (NUM_IDS - 4,), generator=torch.Generator().manual_seed(3)
        ),
    ]
)
"""Every id that comes; a static table has the row of the k-th under k."""


def initial_rows(name: str, capacity: int, dim: int) -> Tensor:
    rows = torch.empty(NUM_IDS, dim)
    Uniform().fill(rows, name_key(0, name), POOL, 0, capacity)
    return rows


def batch(step: int, *, is_dynamic: bool, is_weighted: bool, is_fixed: bool) -> Any:
    """Ids of a step on this rank: of ``POOL``, or their numbers. At most two are in a bag, so that
    sums over ranks do not depend on where rows are."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(step * 8 + dist.get_rank())
    lengths = torch.randint(0, 3, (len(KEYS), 6), generator=generator)
    if is_fixed:
        lengths = torch.full_like(lengths, 2)
    total = int(lengths.sum())
    numbers = torch.randint(0, NUM_IDS, (total,), generator=generator)
    of_static = int(lengths[:2].sum())
    values = torch.cat([POOL[numbers[:of_static]], numbers[of_static:]]) if is_dynamic else numbers
    weights = torch.rand(total, generator=generator) if is_weighted else None
    return KeyedJaggedTensor(list(KEYS), values, weights, lengths.flatten().int())


class Model(nn.Module):
    """A collection, and the loss and the output that TorchRec's pipelines want."""

    def __init__(self, sparse: nn.Module, *, is_sequence: bool) -> None:
        super().__init__()
        self.sparse, self._is_sequence = sparse, is_sequence
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features: Any) -> tuple[Tensor, tuple[Tensor]]:
        found = self.sparse(features)
        vectors = [found[name] for name in ("user", "item@a", "item@b", "shop")]
        if self._is_sequence:
            vectors = [jagged.values().sum(dim=0, keepdim=True) for jagged in vectors]
        output = torch.cat(vectors, dim=1) * self.scale
        return output.square().mean(), (output.detach(),)


class Case(NamedTuple):
    placements: Sequence[str]
    """Those of the tables a, b and c."""
    is_sequence: bool = False
    is_weighted: bool = False
    is_fixed: bool = False
    dynamic: Dynamic = Dynamic()
    other: Dynamic | None = None
    """Policies of table b; None for those of a."""
    optimizer: str = "rowwise_adagrad"
    capacities: Mapping[str, int] = CAPACITIES
    output_dtensor: bool = False
    dims: Mapping[str, int] = {}
    """Columns of tables that have not ``DIM``."""


def make(case: Case, *, is_dynamic: bool) -> Any:
    """A model by hand over torchembed's sharders; of static tables, with the rows of the ids."""
    import torchrec
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    from tests.support.torchrec_cases import SETTINGS, optimizer_class
    from tests.support.torchrec_training import plan_of
    from torchembed.integrations import torchrec as ours

    kind: Any = ours.EmbeddingConfig if case.is_sequence else ours.EmbeddingBagConfig
    policies = {"a": case.dynamic, "b": case.other or case.dynamic}
    configs = [
        kind(
            name=name,
            num_embeddings=capacity,
            embedding_dim=case.dims.get(name, DIM),
            feature_names=list(FEATURES[name]),
            dynamic=policies.get(name) if is_dynamic else None,
        )
        for name, capacity in case.capacities.items()
    ]
    meta = torch.device("meta")
    sparse: Any = (
        torchrec.EmbeddingCollection(configs, device=meta)
        if case.is_sequence
        else torchrec.EmbeddingBagCollection(configs, case.is_weighted, device=meta)
    )
    settings = dict(SETTINGS[case.optimizer])
    _apply_optimizer_in_backward(optimizer_class(case.optimizer), sparse.parameters(), settings)
    plan = plan_of(sparse, case.placements, "cpu", tuple(CAPACITIES))
    ranks = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    model = DistributedModelParallel(
        Model(sparse, is_sequence=case.is_sequence),
        env=ShardingEnv(*ranks, output_dtensor=case.output_dtensor),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan=plan.plan),
        sharders=ours.get_default_sharders(),
    )
    begin_alike(model, case, ["c"] if is_dynamic else list(CAPACITIES))
    return model


@torch.no_grad()
def begin_alike(model: Any, case: Case, tables: Sequence[str]) -> None:
    """Give rows of static tables the initial values of the ids that they stand for."""
    for name, weight in model.state_dict().items():
        *_, table, kind = ("", *name.split("."))
        if kind != "weight" or table not in tables:
            continue
        dim = case.dims.get(table, DIM)
        rows = torch.zeros(CAPACITIES[table], dim)
        rows[:NUM_IDS] = initial_rows(table, CAPACITIES[table], dim)
        parts = [(weight, (0, 0))]
        if hasattr(weight, "to_local"):
            local: Any = weight.to_local()
            parts = list(zip(local.local_shards(), local.local_offsets(), strict=True))
        elif hasattr(weight, "local_shards"):
            parts = [
                (shard.tensor, shard.metadata.shard_offsets) for shard in weight.local_shards()
            ]
        for part, (row, column) in parts:
            height, width = part.shape
            part.copy_(rows[row : row + height, column : column + width])


def trained(model: Any, batches: Iterable[Any]) -> list[Tensor]:
    """Outputs of steps by hand, and at last of the evaluation of the last batch."""
    outputs, features = [], None
    for features in batches:
        loss, (output,) = model(features)
        loss.backward()
        outputs.append(output)
    model.eval()
    outputs.append(model(features)[1][0])
    model.train()
    return outputs


def in_pipeline(model: Any, batches: Sequence[Any]) -> list[Tensor]:
    """Outputs of the pipeline's steps."""
    from torchembed.integrations.torchrec import TrainPipeline

    optimizer = torch.optim.SGD([model.module.scale], lr=0.0)
    with TrainPipeline(model, optimizer, torch.device("cpu")) as pipeline:
        reader = iter(batches)
        assert pipeline._steps is not None
        return [pipeline.progress(reader)[0].clone() for _ in batches]


def num_ids_held(model: Any) -> Mapping[str, int]:
    """On all ranks together, by table; of columns those of each."""
    found = torch.zeros(2, dtype=torch.int64)
    held = model.module.sparse.dynamic_tables
    for number, name in enumerate("ab"):
        for table in held.get(name, []):
            found[number] += int((table.index_contents()["digests"] > 0).sum())
    dist.all_reduce(found)
    return dict(zip("ab", found.tolist(), strict=True))
