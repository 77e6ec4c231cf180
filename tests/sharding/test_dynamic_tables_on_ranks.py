"""Dynamic tables that several gloo ranks share."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import NUM_STEPS as NUM_CASE_STEPS
from tests.support.sharded_cases import (
    USERS,
    Case,
    assert_equal_ids,
    assert_equal_rows,
    assert_equal_training,
    exact_loss,
    held_ids,
    held_rows,
    make_batch,
    make_model,
    make_optimizer,
    train_sharded,
    train_unsharded,
    vectors_of,
    whole_rows,
)
from tests.support.steps_on_ranks import (
    BAD_STEP,
    NO_RANK,
    NUM_STEPS,
    WithLoss,
    static_batch,
    trained_plainly,
)
from torchembed import LFU, LRU, CallerScores, Dynamic, HashedRows, MinimumCount
from torchembed.sharding.planning.partition import HashPartition
from torchembed.training import TrainPipeline

ROW_WISE = dict.fromkeys("abcd", "row_wise")
MIXED = {"a": "row_wise", "b": "column_wise", "c": "data_parallel", "d": "table_wise"}
CASES = [
    Case(placements=ROW_WISE, dynamic=("a", "b", "d")),
    Case(placements=MIXED, dynamic=("a", "b", "d"), optimizer="RowwiseAdagrad"),
    Case(placements=MIXED, dynamic=("a", "b", "d"), optimizer="Adam", fixed=True),
    Case(placements=MIXED, dynamic=("a", "b"), weighted=True),
    Case(placements=ROW_WISE, dynamic=("b", "d"), weighted=True, fixed=True),
    Case(placements=ROW_WISE, dynamic=tuple("abcd"), optimizer="Adam", fixed=True),
    Case(placements=MIXED, dynamic=("a", "b", "d"), dtype=torch.bfloat16),
    Case(placements=dict.fromkeys("abcd", "table_wise"), dynamic=("d",), fixed=True),
    Case(placements=MIXED, dynamic=("a", "d"), pooled=False),
    Case(placements=ROW_WISE, dynamic=("a", "b", "d"), pooled=False, fixed=True, optimizer="SGD"),
    # No id has a row of its own: ranks of columns share the same rows, and where ranks divide the
    # ids, each has as many, of which no two ids here share one.
    Case(
        placements=MIXED | {"a": "column_wise"},
        dynamic=("a", "b", "d"),
        admission=MinimumCount(2**31 - 1),
        missing=HashedRows(3),
    ),
    Case(
        placements=ROW_WISE,
        dynamic=("a", "b", "d"),
        fixed=True,
        admission=MinimumCount(2**31 - 1),
        missing=HashedRows(1 << 16),
    ),
    *(
        Case(placements=MIXED, dynamic=("a", "b", "d"), **other)
        for other in (
            {"missing": "vector", "fixed": True},
            {"missing": "initial", "pooled": False},
            {"missing": "vector", "pooled": False, "fixed": True, "dtype": torch.bfloat16},
            {"missing": "initial", "weighted": True, "admission": MinimumCount(10**6)},
        )
    ),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_equals_unsharded_while_nothing_is_evicted(num_ranks: int) -> None:
    """Ids, rows and states, bit for bit: pooled and sequences, jagged and fixed, weighted and
    means, beside static tables."""
    results = run_on_ranks(num_ranks, train_sharded, CASES)
    for number, case in enumerate(CASES):
        of_ranks = [rank_results[number] for rank_results in results]
        assert_equal_training(case, of_ranks, train_unsharded(case, num_ranks))
    # Which rank holds an id does not depend on the table, nor on what else is trained.
    partition = HashPartition(ranks=tuple(range(num_ranks)))
    for rank, rank_results in enumerate(results):
        _, of_ids = rank_results[0]["ids"]["a"]
        assert set(partition.places_of(torch.tensor(list(of_ids))).tolist()) == {rank}


FULL = [
    Case(placements=MIXED, dynamic=("b", "d"), capacity=8, eviction=eviction, fixed=fixed)
    for eviction in (LRU(), LFU())
    for fixed in (False, True)
]


def ids_of_table(batch: torchembed.SparseFeatures, name: str) -> list[int]:
    """The ids of a jagged batch that table ``name`` looks up."""
    assert batch.offsets is not None
    ends, found = batch.offsets.tolist(), []
    for feature in USERS[name]:
        first = batch.keys.index(feature) * batch.batch_size
        found += batch.values[ends[first] : ends[first + batch.batch_size]].tolist()
    return found


COUNTED = Case(placements=MIXED, dynamic=("a", "b", "d"), admission=MinimumCount(2, capacity=5000))


def test_ids_are_admitted_by_their_occurrences_on_all_ranks() -> None:
    counts = {name: collections.Counter[int]() for name in COUNTED.dynamic}
    for step, rank in itertools.product(range(NUM_CASE_STEPS), range(2)):
        for name in COUNTED.dynamic:
            counts[name].update(ids_of_table(make_batch(COUNTED, rank, step), name))
    results = run_on_ranks(2, train_sharded, [COUNTED])
    for name, of_table in counts.items():
        held = [set(of_rank["ids"].get(name, (None, {}))[1]) for (of_rank,) in results]
        assert set.union(*held) == {id_ for id_, count in of_table.items() if count >= 2}
    assert min(counts["b"].values()) < 2 <= max(counts["b"].values())


def test_all_ranks_of_columns_hold_the_same_ids_in_the_same_rows() -> None:
    """Also where ids were evicted, since insertion is a function of the batches alone."""
    first, second = run_on_ranks(2, train_sharded, FULL)
    for of_first, of_second in zip(first, second, strict=True):
        (columns, ids), (others, same_ids) = of_first["ids"]["b"], of_second["ids"]["b"]
        assert columns != others
        assert len(ids) == 8
        assert {i: row for i, (row, *_) in ids.items()} == {
            i: row for i, (row, *_) in same_ids.items()
        }


def sharded(case: Case) -> nn.Module:
    model = make_model(case, "meta")
    torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
    return model


def batch_of(case: Case, rank: int, step: int, bad_rank: int) -> torchembed.SparseFeatures:
    """A batch of as many samples on every step; on the bad step one rank has an id outside a static
    table. Another one, which comes in no other batch, is of a dynamic table."""
    batch = static_batch(case, rank, step, NO_RANK)
    if (rank, step) == (bad_rank, BAD_STEP):
        assert batch.lengths()[0].any(), "the first id is of the first feature, of table c too"
        batch.values[0] = 2**20
        assert batch.lengths()[3].any(), "the last id is of the last feature, of table d"
        batch.values[-1] = 2**40
    return batch


def train_in_pipelines(runs: list[tuple[Case, int, bool | None]]) -> list[dict[str, Any]]:
    """On a rank: its rows and ids after training, and the steps that raised for a bad id; without
    a pipeline where its ``capture`` is None."""
    rank, results = dist.get_rank(), []
    for case, bad_rank, capture in runs:
        model = sharded(case)
        batches = iter([batch_of(case, rank, step, bad_rank) for step in range(NUM_STEPS)])
        optimizer, num_errors = make_optimizer(case, model), 0
        with_loss = WithLoss(model)
        with contextlib.ExitStack() as stack:
            if capture is None:
                train = functools.partial(train_by_hand, with_loss, optimizer, batches)
            else:
                pipeline = stack.enter_context(
                    TrainPipeline(with_loss, None, [optimizer], device="cpu", capture=capture)
                )
                train = functools.partial(pipeline.progress, batches)
            for _ in range(NUM_STEPS):
                try:
                    train()
                except (IndexError, RuntimeError):
                    num_errors += 1
        results.append({"rows": held_rows(model), "ids": held_ids(model), "num_errors": num_errors})
    return results


def train_by_hand(
    model: nn.Module, optimizer: Any, batches: Iterator[torchembed.SparseFeatures]
) -> None:
    optimizer.zero_grad()
    model(next(batches)).backward()
    optimizer.step()


def test_pipelines_train_as_plain_loops_and_insert_nothing_of_bad_batches() -> None:
    """The steps that a GPU would capture, and eager ones, and a loop by hand on a CPU; where one
    rank's batch has a bad id of a static table, no rank inserts ids of that batch."""
    cases = [
        Case(placements=ROW_WISE, dynamic=("a", "b", "d"), optimizer="Adam", missing="initial"),
        Case(placements=MIXED, dynamic=("a", "b", "d"), fixed=True),
        Case(placements=MIXED, dynamic=("a", "b", "d"), pooled=False, missing="vector"),
        Case(placements=dict.fromkeys("abcd", "table_wise"), dynamic=("d",), fixed=True),
    ]
    runs: list[tuple[Case, int, bool | None]] = [
        (case, bad_rank, capture)
        for case in cases
        for bad_rank in (NO_RANK, 1)
        for capture in (True, False)
    ]
    runs.append((cases[0], 1, None))
    results = run_on_ranks(2, train_in_pipelines, runs)
    for number, (case, bad_rank, _) in enumerate(runs):
        of_ranks = [rank_results[number] for rank_results in results]
        plain = trained_plainly(case, 2, bad_rank, batch_of=batch_of)
        assert_equal_ids([of["ids"] for of in of_ranks], held_ids(plain), str(case))
        assert_equal_rows([of["rows"] for of in of_ranks], whole_rows(plain), str(case))
        assert [of["num_errors"] for of in of_ranks] == [int(bad_rank == 1)] * 2


def evaluate_and_reload() -> dict[str, Any]:
    """On a rank: what evaluation changes, and what a state dict brings back."""
    case = CASES[1]
    model, rank = sharded(case), dist.get_rank()
    optimizer = make_optimizer(case, model)
    batch = make_batch(case, rank, 0)
    vectors_of(model.tables(batch)).sum().backward()
    optimizer.step()
    trained = held_ids(model)
    unseen = dataclasses.replace(batch, values=batch.values % 3 + 7)
    vectors = vectors_of(model.eval().tables(unseen))
    with torch.no_grad():
        model.train().tables(unseen)
    evaluated = held_ids(model)
    other = sharded(case)
    other.load_state_dict(model.state_dict())
    same = vectors_of(other.eval().tables(batch))
    kept = vectors_of(model.eval().tables(batch))
    whole = make_model(case).state_dict()
    with pytest.raises(ValueError, match="weight of dynamic table a must be a DTensor") as raised:
        other.load_state_dict(whole)
    return {
        "trained": str(trained),
        "evaluated": str(evaluated),
        "vectors": vectors.detach().view(-1, 37).numpy(),
        "reloaded": torch.equal(same, kept),
        "error": str(raised.value),
        "by name": scored_and_erased(),
    }


SCORED = Case(placements=MIXED, dynamic=("a", "b", "d"), eviction=CallerScores(initial_score=2))


def scored_and_erased() -> dict[str, dict[int, int]]:
    """On a rank, of each table: its ids and their scores. All ranks make the same calls for tables
    that one of them holds, or of which each holds some rows or columns."""
    model = sharded(SCORED)
    optimizer = make_optimizer(SCORED, model)
    for step in range(2):
        exact_loss(vectors_of(model.tables(make_batch(SCORED, dist.get_rank(), step)))).backward()
        optimizer.step()
        for name in SCORED.dynamic if step == 0 else ():
            ids = torch.tensor(ids_of_table(make_batch(SCORED, 0, 0), name))
            model.tables.assign_scores(ids, torch.full_like(ids, 9), table=name)
        model.tables.set_score(5, table="d")
    for name in SCORED.dynamic:
        ids = torch.tensor(ids_of_table(make_batch(SCORED, 1, 0), name))
        model.tables.erase(ids, table=name)
    found: dict[str, dict[int, int]] = {}
    for table in model.tables.table_set.tables:
        contents = table.index_contents()
        if contents:
            rows = contents["digests"].nonzero().flatten()
            ids, scores = contents["ids"][rows].tolist(), contents["scores"][rows].tolist()
            found[table.spec.name] = dict(zip(ids, scores, strict=True))
    return found


def test_evaluation_inserts_nothing_and_state_dicts_hold_ids() -> None:
    """And ids are scored and erased by name, wherever they are held."""
    results = run_on_ranks(2, evaluate_and_reload)
    for result in results:
        assert result["evaluated"] == result["trained"]
        # The columns of a twice, b, c and d: ids without a row give zeros, static ones do not.
        is_static = [24 <= column < 29 for column in range(37)]
        assert not result["vectors"][:, np.logical_not(is_static)].any()
        assert result["vectors"][:, is_static].any()
        assert result["reloaded"]
    of_ranks = [result["by name"] for result in results]
    for name in SCORED.dynamic:
        used = {
            (rank, step): set(ids_of_table(make_batch(SCORED, rank, step), name))
            for rank, step in itertools.product(range(2), range(2))
        }
        now = used[0, 1] | used[1, 1]
        expected = dict.fromkeys(used[0, 0] | now, 2) | dict.fromkeys(used[0, 0], 9)
        if name == "d":
            expected |= dict.fromkeys(now, 5)
        # Rows that the last batch used are not erased.
        for id_ in used[1, 0] - now:
            expected.pop(id_, None)
        held = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        assert len(held) == (1 if name == "d" else 2)
        assert functools.reduce(operator.or_, held) == expected
    assert of_ranks[0]["b"] == of_ranks[1]["b"], "each rank holds columns of all ids"


class Derived(torchembed.EmbeddingBag):
    """A bag that is not sharded."""


def refuse_on_a_rank() -> list[str]:
    """The errors of what cannot be sharded."""
    errors = []
    mesh = CASES[0].mesh()
    used = make_model(CASES[0])
    used.tables(make_batch(CASES[0], 0, 0))
    single = nn.ModuleDict({"bag": Derived(8, 4, dynamic=Dynamic())})
    replicated = {"tables.embedding_bags.a": "data_parallel"}
    for model, plan in ((used, None), (single, None), (make_model(CASES[0]), replicated)):
        with pytest.raises(ValueError, match=r"dynamic") as raised:
            torchembed.shard_embeddings(model, mesh, plan)
        errors.append(str(raised.value))
    return errors


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    of_ranks = run_on_ranks(2, refuse_on_a_rank)
    assert of_ranks[0] == of_ranks[1]
    used, single, replicated = of_ranks[0]
    assert used.startswith("dynamic table a of module 'tables' must hold no ids before")
    assert single.startswith("the table of module 'bag' must not be dynamic where ranks share it")
    assert replicated == (
        "placement of dynamic table tables.embedding_bags.a must not be data_parallel, since each "
        "rank would insert the ids of its own batches; use table_wise, column_wise or row_wise"
    )
