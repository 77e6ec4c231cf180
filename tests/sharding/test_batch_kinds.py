"""Ranks whose batches differ in kind: equal to the unsharded model, or refused by name on all."""

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import FEATURES, SMALLEST, Case, make_model, vectors_of
from torchembed.core.features import with_offsets
from torchembed.modules.sharded.model_plan import table_specs

PLACEMENTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    # These exchange no ids, so ranks do not agree on kinds: gradients are averaged by table.
    "data_parallel",
    {"a": "column_wise", "b": "row_wise", "c": "table_wise", "d": "data_parallel"},
)
HOTNESS = {
    # Totals are equal where a rank pads other features than the other does.
    "equal totals": ((2, 1, 4, 1), (1, 2, 1, 4)),
    "other totals": ((2, 1, 4, 1), (3, 1, 4, 1)),
    "beside offsets": ((2, 1, 4, 1), None),
}


def batch_of(
    hotness: tuple[int, ...] | None, rank: int, *, weighted: bool = False, num_samples: int = 3
) -> torchembed.SparseFeatures:
    counts = (1, 0, 2, 3) if hotness is None else hotness
    ids = [torch.arange(count * num_samples) * 7 + rank for count in counts]
    limits = [SMALLEST[name] for name in FEATURES]
    values = torch.cat([of % limit for of, limit in zip(ids, limits, strict=True)])
    batch = torchembed.SparseFeatures(
        keys=FEATURES,
        values=values,
        batch_size=num_samples,
        hotness=counts,
        weights=torch.arange(1.0, 1.0 + values.numel()) if weighted else None,
    )
    return batch if hotness is not None else with_offsets(batch)


def cases() -> list[Case]:
    return [
        Case(
            placements=placement
            if isinstance(placement, dict)
            else dict.fromkeys("abcd", placement),
            pooled=pooled,
            weighted=weighted,
        )
        for placement in PLACEMENTS
        for pooled, weighted in ((True, False), (True, True), (False, False))
    ]


def sharded(case: Case) -> torch.nn.Module:
    # Real rows, of which each rank copies its own.
    return torchembed.shard_embeddings(make_model(case), case.mesh(), case.plan(2))


def different_hotness() -> list[str]:
    """The cases in which vectors or the gradients' sums differ from the unsharded model's."""
    rank, wrong = dist.get_rank(), []
    for case in cases():
        model, whole = sharded(case), make_model(case)
        optimizers = [
            torchembed.optim.SGD([{"params": list(m.parameters())}], lr=0.125)
            for m in (model, whole)
        ]
        for name, of_ranks in HOTNESS.items():
            batches = [batch_of(h, r, weighted=case.weighted) for r, h in enumerate(of_ranks)]
            found = vectors_of(model.tables(batches[rank]))
            expected = [vectors_of(whole.tables(batch)) for batch in batches]
            # Rows are added in another order, at most 4 of them of magnitudes up to 1 and their
            # weights.
            largest = 4 * (72 if case.weighted else 1)
            tolerance = 4 * torch.finfo(torch.float32).eps * largest
            if (found - expected[rank]).abs().max() > tolerance:
                wrong.append(f"{name}: {case}")
            found.sum().backward()
            (torch.stack([vectors.sum() for vectors in expected]).sum() / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
    return wrong


def test_ranks_of_different_hotness_get_the_vectors_of_the_unsharded_model() -> None:
    assert run_on_ranks(2, different_hotness) == [[], []]


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> dict[str, str]:
    rank = dist.get_rank()
    case = Case(placements=dict.fromkeys("abcd", "row_wise"), weighted=True)
    weighted = sharded(case)
    bags = sharded(dataclasses.replace(case, weighted=False))
    sequences = sharded(dataclasses.replace(case, weighted=False, pooled=False))
    good = batch_of((2, 1, 4, 1), rank, weighted=True)
    of_half = dataclasses.replace(good, weights=good.weights.half())
    without = dataclasses.replace(good, weights=None)
    keys = ("f0", "f1", "f2", "other") if rank == 1 else FEATURES
    missing = dataclasses.replace(good, keys=keys)
    bad = dataclasses.replace(good, values=good.values - 100 * rank)
    trained = dataclasses.replace(good, weights=good.weights.clone().requires_grad_())
    messages = {
        "dtype": message_of(lambda: weighted.tables(of_half if rank else good)),
        "gradients": message_of(lambda: weighted.tables(trained if rank else good)),
        "no weights": message_of(lambda: weighted.tables(without if rank else good)),
        "bags": message_of(lambda: bags.tables(missing)),
        "sequences": message_of(lambda: sequences.tables(missing)),
        "bad id": message_of(lambda: bags.tables(bad)),
        "collection": message_of(lambda: (bags if rank else sequences).tables(good)),
    }
    # Nothing is left over of what was refused.
    for model in (weighted, bags, sequences):
        assert message_of(lambda model=model: model.tables(good)) == ""
    return messages


def fewer_lookups() -> str:
    """The error on the first rank where the other one ends its loop before it."""
    group = dist.new_group()
    model = make_model(Case(placements={}), "meta")
    mesh = DeviceMesh.from_group(group, "cpu")
    torchembed.shard_embeddings(model, mesh, dict.fromkeys(table_specs(model), "row_wise"))
    batch = batch_of((2, 1, 4, 1), dist.get_rank())
    message = message_of(lambda: model.tables(batch))
    if dist.get_rank() == 1:
        return message
    assert message == ""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2), group)
    return message_of(lambda: model.tables(batch))


def test_a_rank_that_looks_up_less_often_is_missed_by_name_of_the_lookup() -> None:
    first, second = run_on_ranks(2, fewer_lookups)
    assert first.startswith("RuntimeError: could not tell the other ranks about lookup 1 of tables")
    assert "every rank must look up equally often" in first.lower()
    assert second == ""


def test_what_cannot_go_together_is_refused_by_name_on_all_ranks() -> None:
    first, second = run_on_ranks(2, refusals)
    for name in ("dtype", "gradients", "collection"):
        assert first[name] == second[name]
    assert "rank 0 has float32 weights without gradients, rank 1 has float16" in first["dtype"]
    assert "without gradients, rank 1 has float32 weights with gradients" in first["gradients"]
    assert "rank 0 has tables a, b, c, d of ShardedEmbeddingCollection, rank" in first["collection"]
    for name in ("no weights", "bags", "sequences", "bad id"):
        assert first[name] == f"RuntimeError: rank 1 could not look up its batch: {second[name]}"
    assert second["no weights"].startswith("ValueError: features must have weights")
    for name in ("bags", "sequences"):
        assert second[name].startswith("ValueError: features must have the keys ['f3']")
    assert second["bad id"].startswith("IndexError: id out of range: table a")
