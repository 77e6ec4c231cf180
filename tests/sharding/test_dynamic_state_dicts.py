"""State dicts of dynamic tables that several gloo ranks share."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    Case,
    make_batch,
    make_model,
    make_optimizer,
    vectors_of,
)
from torchembed import LFU, CountMinSketch, MinimumCount

MIXED = {"a": "row_wise", "b": "column_wise", "c": "data_parallel", "d": "table_wise"}
CASES = [
    Case(
        placements=MIXED,
        dynamic=("a", "b", "d"),
        eviction=LFU(),
        admission=MinimumCount(2, capacity=50),
    ),
    # One rank holds all columns; and sketches have the shape of tables whose columns are divided.
    *(
        Case(
            placements=MIXED,
            dynamic=("a", "b", "d"),
            admission=CountMinSketch(threshold=2, width=width, depth=64),
            capacity=64,
            column_ranks=column_ranks,
        )
        for width, column_ranks in ((7, (1,)), (8, None))
    ),
]


def sharded(case: Case) -> nn.Module:
    model = make_model(case, "meta")
    torchembed.shard_embeddings(model, case.mesh(), case.plan(dist.get_world_size()))
    return model


def trained(case: Case) -> nn.Module:
    model = sharded(case)
    optimizer = make_optimizer(case, model)
    for step in range(2):
        vectors_of(model.tables(make_batch(case, dist.get_rank(), step))).sum().backward()
        optimizer.step()
    return model


def contents(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of this rank by name; copies."""
    return {
        f"{table.spec.name}.{name}": tensor.clone()
        for table in model.tables.table_set.tables
        for name, tensor in {"weight": table.parameter.data, **table.index_contents()}.items()
    }


def differences(model: nn.Module, expected: dict[str, Tensor]) -> list[str]:
    found = contents(model)
    assert set(found) == set(expected)
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


def save_and_load(folder: str) -> list[dict[str, Any]]:
    results = []
    for number, case in enumerate(CASES):
        model = trained(case)
        expected = contents(model)
        state = model.state_dict()
        divided = {name for name, tensor in state.items() if isinstance(tensor, DTensor)}
        loaded = sharded(case)
        loaded.load_state_dict(state)
        checkpoint.save(state, checkpoint_id=f"{folder}/{number}")
        through_files = sharded(case)
        target = through_files.state_dict()
        checkpoint.load(target, checkpoint_id=f"{folder}/{number}")
        through_files.load_state_dict(target)
        results.append(
            {
                "divided": divided,
                "loaded": differences(loaded, expected),
                "through files": differences(through_files, expected),
                "fresh": differences(sharded(case), expected),
            }
        )
    return results


def rows_of_a(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries of table ``a``, those that this rank holds; copies."""
    return {
        key: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()
        for key, tensor in state.items()
        if ".a." in key
    }


def load_others() -> list[str | None]:
    """Errors of loading for rows of another rank, of a table that is not divided, and of its own;
    None where it says nothing."""
    case = CASES[0]
    model = trained(case)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, rows_of_a(model.state_dict()))
    rank, expected = dist.get_rank(), contents(model)
    own = of_ranks[rank]
    policies = torchembed.Dynamic(eviction=case.eviction, admission=case.admission)
    start = "tables.embedding_bags.a."
    whole = torchembed.EmbeddingBag(*own[f"{start}weight"].shape, mode="sum", dynamic=policies)
    whole(torch.arange(40).repeat(1, 2))
    of_whole = {f"{start}{key}": tensor for key, tensor in whole.state_dict().items()}
    said: list[str | None] = []
    for state in (of_ranks[1 - rank], of_whole, own):
        try:
            model.load_state_dict(state, strict=False)
            said.append(None)
        except RuntimeError as error:
            said.append(str(error))
        assert differences(model, expected) == []
    return said


def test_ids_of_other_ranks_are_refused() -> None:
    for rank, said in enumerate(run_on_ranks(2, load_others)):
        *refusals, of_own = said
        assert of_own is None
        for refusal in refusals:
            assert re.search(
                rf"a\.index\.ids must hold ids where dynamic table a looks for them \(.*, part "
                rf"{rank + 1} of 2\), got \d+ of \d+ rows otherwise: .* number of ranks",
                refusal,
            )


@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device.*:FutureWarning")
def test_state_dicts_hold_what_each_rank_holds(tmp_path: Any) -> None:
    """Ids, their use, and what chooses new ones; in memory and by ``torch.distributed.checkpoint``,
    for as many ranks."""
    of_ranks = run_on_ranks(2, save_and_load, str(tmp_path))
    for results in of_ranks:
        for case, result in zip(CASES, results, strict=True):
            assert result["loaded"] == result["through files"] == [], case
            assert "a.ids" in result["fresh"]
            start = "tables.embedding_bags.a.index."
            names = {name.removeprefix(start) for name in result["divided"] if start in name}
            assert names >= {"ids", "touched"}
            assert not any(".b.index." in name for name in result["divided"]), case
