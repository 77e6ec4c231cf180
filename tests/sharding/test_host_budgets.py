"""The memory of devices and hosts that tables in host memory take, as shard_embeddings checks."""

import dataclasses

import pytest
import torch

from tests.support.planning import make_stored_use
from torchembed import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    SparseFeatures,
    optim,
)
from torchembed.modules import table_uses
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding import (
    TableUse,
    make_plan,
)
from torchembed.sharding.planning.memory_budget import MemoryBudget, check_hosts, memory_budget
from torchembed.tables import HostMemory
from torchembed.tables.tiers import TieredGroup

LINE = 16 * 4 * 2
"""Bytes of a row of 16 columns with Adagrad's state."""


def budget_of(
    use: TableUse, rank: int = 0, *, is_on_host: bool = False, free: int = 10**6
) -> MemoryBudget:
    plan = make_plan({"t": use.spec}, 2, {"t": "row_wise"})
    budget = memory_budget(
        plan,
        {"t": use},
        rank,
        report=None,
        rule=UpdateRule(kind=optim.Adagrad.kind),
        dense_bytes=0,
        free_bytes=10**9,
        host_free_bytes=free,
        is_on_host=is_on_host,
    )
    return dataclasses.replace(budget, host="h")


def test_budgets_tell_devices_and_hosts_apart() -> None:
    budget = budget_of(make_stored_use(1000, "f", storage=HostMemory(cache_bytes=100 * LINE + 7)))
    assert budget.row_bytes == budget.state_bytes == 100 * LINE / 2
    assert budget.index_bytes == 500 * 8 + 100 * 18
    assert budget.host_bytes == 500 * LINE
    assert str(budget).endswith("; and 62.5 KiB of its host")
    budget = budget_of(make_stored_use(1000, "f", storage=HostMemory(cache_rows=10**6)))
    assert budget.row_bytes == 500 * LINE / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_that_a_table_takes(dtype: torch.dtype) -> None:
    """Budgets count what real tables take, but for what each group has once: a row that is none,
    counters, and the ends of keys."""
    storage = HostMemory(cache_rows=300)
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=5000,
        embedding_dim=16,
        feature_names=("f",),
        dtype=dtype,
        storage=storage,
    )
    module = EmbeddingBagCollection([config])
    optimizer = optim.Adagrad(module.parameters(), lr=0.1)
    module(SparseFeatures.from_dict({"f": [list(range(200))]})).values().sum().backward()
    optimizer.step()
    (group,) = module.table_set.groups
    assert isinstance(group, TieredGroup)
    found = [group.weight, *group.states, *group.cache, group._row_places._place_of_row]
    if group._slot_keys is not None:
        found += vars(group._slot_keys).values()
    use = table_uses(torch.nn.ModuleDict({"bags": module}))["bags.embedding_bags.t"]
    budget = memory_budget(
        make_plan({"t": use.spec}, 1),
        {"t": use},
        0,
        report=None,
        rule=UpdateRule(kind=optim.Adagrad.kind),
        dense_bytes=0,
        free_bytes=10**9,
    )
    assert (group._slot_keys is not None) == (dtype is torch.bfloat16)
    taken = sum(tensor.nbytes for tensor in found)
    assert 0 <= taken - budget.needed_bytes <= 512
    held = [group.stored_weight, *group.stored_states]
    assert budget.host_bytes == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("is_on_host", [False, True])
def test_ranks_of_a_host_need_its_memory_together(is_on_host: bool) -> None:
    use = make_stored_use(1000, "f", storage=HostMemory(cache_rows=100))
    needed = 2 * 500 * LINE
    if is_on_host:
        needed += 2 * (100 * (LINE + 18) + 500 * 8)
    for free in (needed, needed - 1):
        budgets = [budget_of(use, rank, is_on_host=is_on_host, free=free) for rank in (0, 1)]
        if free == needed:
            check_hosts(budgets)
            continue
        with pytest.raises(
            ValueError,
            match=r"^tables do not fit: ranks 0-1 will take .* KiB of the .* KiB free memory of "
            r"their host\. Use more nodes, a 16-bit dtype",
        ):
            check_hosts(budgets)
        check_hosts([budgets[0], dataclasses.replace(budgets[1], host="other")])
        unknown = [dataclasses.replace(budget, host_free_bytes=None) for budget in budgets]
        check_hosts(unknown)
