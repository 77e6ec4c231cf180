"""Modules of one dynamic table each that gloo ranks share train as unsharded ones."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import extent, made_mesh
from torchembed import Dynamic, Embedding, EmbeddingBag
from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.training import TrainPipeline

NUM_STEPS, NUM_SAMPLES, NUM_IDS, DIM = 11, 4, 23, 4
PADDING = -2
"""An id as any other in tables without it."""
VECTOR = (0.5, -1.25, 3.0, 0.1)
UNSEEN = torch.tensor([[2**50, PADDING], [2**50 + 1, 2**50 + 2], [PADDING, PADDING]])
PLACEMENTS = ("row_wise", "row_wise", "column_wise", "table_wise", "row_wise", "row_wise")
Batch = dict[str, Any]


class Model(nn.Module):
    """Every pooling, ids in rows and between offsets, with and without padding, and a static table;
    a loss whose gradients are exact in any order of sums."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        settings: dict[str, Any] = {"dynamic": Dynamic(missing="initial"), "device": device}
        vector: dict[str, Any] = {"dynamic": Dynamic(missing=VECTOR), "device": device}
        self.tables = nn.ModuleList(
            [
                EmbeddingBag(128, DIM, mode="sum", padding_idx=PADDING, seed=0, **settings),
                EmbeddingBag(128, DIM, mode="mean", padding_idx=PADDING, seed=1, **settings),
                EmbeddingBag(128, DIM, mode="max", padding_idx=PADDING, seed=2, **vector),
                Embedding(128, DIM, padding_idx=PADDING, seed=3, **vector),
                EmbeddingBag(NUM_IDS, DIM, mode="sum", padding_idx=2, seed=4, device=device),
                EmbeddingBag(128, DIM, mode="sum", seed=5, **settings),
            ]
        )

    def forward(self, batch: Batch) -> Tensor:
        tables, ids, offsets = self.tables, batch["ids"], batch["offsets"]
        found = [tables[number](ids[number]) for number in range(4)]
        found.append(tables[4](batch["static"]))
        found += [tables[number](batch["list"], offsets) for number in (0, 1, 5)]
        loss = torch.zeros(())
        for vectors in found:
            coefficients = torch.arange(vectors.numel()).view(vectors.shape) * 7 % 5 - 2
            loss = loss + (vectors * coefficients).sum()
        return loss


def batches_of(rank: int) -> Iterator[Batch]:
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(2 * step + rank)

        def ids(*shape: int, generator: torch.Generator = generator) -> Tensor:
            numbers = torch.randint(-4, NUM_IDS - 4, shape, generator=generator)
            return torch.where(numbers > 0, numbers * signed64(GOLDEN), numbers)

        static = torch.randint(NUM_IDS, (NUM_SAMPLES, 2), generator=generator)
        # The first bag and, at some steps, the third are empty.
        offsets = torch.tensor([0, 0, 4, 4 + step % 2])
        yield {
            "ids": [ids(NUM_SAMPLES, 2) for _ in range(4)],
            "static": static,
            "list": ids(5 + (step + rank) % 3),
            "offsets": offsets,
        }


def some_unsigned(batch: Batch) -> Batch:
    """``batch`` with the same ids, those of some modules uint64 and those of the static one
    uint32."""
    first, second, *others = batch["ids"]
    ids = [first.view(torch.uint64), second.view(torch.uint64), *others]
    static, in_bags = batch["static"].to(torch.uint32), batch["list"].view(torch.uint64)
    return {**batch, "ids": ids, "static": static, "list": in_bags}


def of_unseen(model: Model) -> Any:
    """The vectors in evaluation of ids without a row; two numbers have one sum in any order."""
    model.eval()
    return [model.tables[number](UNSEEN).detach().numpy() for number in range(4)]


def sgd(model: nn.Module) -> Any:
    return torchembed.optim.SGD(list(model.parameters()), lr=0.125)


def held(model: Model) -> list[tuple[Any, dict[int, Any]]]:
    """Of each table the columns that are held here, and the elements of each id's row."""
    found = []
    for module in model.tables:
        (table,) = module.table_set.tables or (None,)
        if table is None:
            found.append((slice(0, 0), {}))
            continue
        rows, columns = extent(table)
        contents = table.index_contents()
        places = range(table.num_rows)
        ids = places if contents == {} else contents["ids"].tolist()
        if contents:
            places = contents["digests"].nonzero().flatten().tolist()
        weight, first = table.parameter.detach().numpy(), 0 if contents else rows.start
        found.append((columns, {ids[place] + first: weight[place].copy() for place in places}))
    return found


def plain(model: Model, of_ranks: Sequence[Iterator[Batch]]) -> None:
    optimizer = sgd(model)
    for batches in zip(*of_ranks, strict=True):
        optimizer.zero_grad()
        (torch.stack([model(batch) for batch in batches]).sum() / len(batches)).backward()
        optimizer.step()


def trained_on_rank() -> list[Any]:
    """On a rank: what a plain loop trains, and eager and captured steps; and what a state dict
    brings back."""
    results, rank = [], dist.get_rank()
    placements = {f"tables.{n}": placement for n, placement in enumerate(PLACEMENTS)}
    for capture in (None, False, True):
        model = Model("meta")
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), placements)
        if capture is None:
            plain(model, [map(some_unsigned, batches_of(rank))])
        else:
            with TrainPipeline(
                model, None, [sgd(model)], device="cpu", capture=capture
            ) as pipeline:
                batches = map(some_unsigned, batches_of(rank))
                for _ in range(NUM_STEPS):
                    pipeline.progress(batches)
                kinds = [str(kind.form) for kind in pipeline.kinds]
                assert ("padded" in kinds) is capture, [str(k) for k in pipeline.kinds]
        sizes = [
            {name: of.size for name, of in module.statistics().items()} for module in model.tables
        ]
        results.append((held(model), sizes))
    batch, other = next(batches_of(rank)), Model("meta")
    torchembed.shard_embeddings(other, made_mesh("cpu", 1), placements)
    other.load_state_dict(model.state_dict())
    before = held(model)
    assert torch.equal(model.eval()(batch), other.eval()(batch))
    assert str(held(model)) == str(before)
    results.append(of_unseen(model))
    # By name on all ranks alike, also where one rank holds the table.
    model.tables[3].evict(max_rows=0)
    statistics = model.tables[3].statistics()["weight"]
    assert statistics.evicted_target > 0
    assert statistics.inserted == statistics.size + statistics.evicted
    return results


def test_sharded_dynamic_modules_train_as_unsharded_ones() -> None:
    """By a loop, eager and captured steps: rows by id, bit for bit, whether ids
    are signed; padding has none."""
    expected = Model()
    plain(expected, [batches_of(0), batches_of(1)])
    whole = held(expected)
    of_ranks = run_on_ranks(2, trained_on_rank)
    vectors = of_unseen(expected)
    assert all(found.any() for found in vectors)
    for *_, found in of_ranks:
        for ours, theirs in zip(found, vectors, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for way, number in itertools.product(range(3), range(len(PLACEMENTS))):
        _, rows = whole[number]
        is_padded = number < 4
        assert (PADDING in rows) is (number == 5)
        assert is_padded or len(rows) > NUM_IDS // 2
        columns_of_ids: dict[int, list[int]] = {}
        for ranks_results in of_ranks:
            found, sizes = ranks_results[way]
            columns, of_ids = found[number]
            for id_, row in of_ids.items():
                np.testing.assert_array_equal(row, rows[id_][columns], err_msg=f"{way} {number}")
                columns_of_ids.setdefault(id_, []).extend(range(columns.start, columns.stop))
            assert sizes[number] == ({} if number == 4 else {"weight": len(rows)})
        assert sorted(columns_of_ids) == sorted(rows)
        assert all(sorted(columns) == list(range(DIM)) for columns in columns_of_ids.values())
