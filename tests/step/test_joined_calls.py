"""Modules of one table each train in captured steps as in the plain loop, by one lookup."""

import collections
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh
from tests.support.tape import taped_captures
from tests.support.tolerance import assert_same_bits
from torchembed.optim import SGD, Adagrad, Adam
from torchembed.training import TrainPipeline

NUM_MODULES, NUM_SAMPLES, NUM_ROWS, DIM, NUM_STEPS = 8, 6, 11, 4, 9
Batch = dict[str, Any]
ONE_LOOKUP = dict.fromkeys(
    ("linearize_ids", "locate_bad_id", "pooled_lookup_forward", "find_runs", "rowwise_update"), 1
)


class Counted(TorchDispatchMode):
    """Counts torchembed's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "torchembed":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    """Modules of one table each, and how they are called."""

    def __init__(
        self,
        call: Callable[["Model", Batch], Sequence[Tensor]],
        kind: str = "bags",
        **settings: Any,
    ) -> None:
        super().__init__()
        module: Any = torchembed.EmbeddingBag if kind == "bags" else torchembed.Embedding
        self.tables = nn.ModuleList(
            module(NUM_ROWS + number, DIM, seed=number, **settings) for number in range(NUM_MODULES)
        )
        self.call, self.num_calls = call, 0
        self.factors = nn.Parameter(torch.linspace(-1, 1, NUM_MODULES * DIM))

    def forward(self, batch: Batch) -> Tensor:
        vectors = self.call(self, batch)
        parts = zip(vectors, itertools.cycle(self.factors.split(DIM)))
        return sum(
            ((v.flatten(0, -2) * part).square().mean() for v, part in parts), torch.zeros(())
        )


def ids_of(step: int, *shape: int) -> Tensor:
    return torch.randint(NUM_ROWS, shape, generator=torch.Generator().manual_seed(step))


def stacked(hotness: int = 3) -> Iterator[Batch]:
    for step in itertools.count():
        yield {"ids": ids_of(step, NUM_MODULES, NUM_SAMPLES, hotness)}


def in_columns() -> Iterator[Batch]:
    for step in itertools.count():
        yield {"ids": ids_of(step, NUM_SAMPLES, NUM_MODULES)}


def in_lists() -> Iterator[Batch]:
    """Bags of several lengths, between offsets as the original DLRM's, and weights."""
    for step in itertools.count():
        ids = [ids_of(step + number, 2 * NUM_SAMPLES) for number in range(NUM_MODULES)]
        starts = [
            torch.tensor([0, 1, 1, 5, 7 + step % 3, 11]) + (number % 2) * torch.arange(6) // 6
            for number in range(NUM_MODULES)
        ]
        weights = [torch.linspace(step, number, 2 * NUM_SAMPLES) for number in range(NUM_MODULES)]
        yield {"ids": ids, "offsets": starts, "weights": weights}


def each(model: Model, batch: Batch) -> list[Tensor]:
    return [module(ids) for module, ids in zip(model.tables, batch["ids"], strict=True)]


def each_column(model: Model, batch: Batch) -> list[Tensor]:
    return [m(batch["ids"][:, n : n + 1]) for n, m in enumerate(model.tables)]


def each_by_keyword(model: Model, batch: Batch) -> list[Tensor]:
    lists = zip(model.tables, batch["ids"], batch["offsets"], strict=True)
    return [module(input=ids, offsets=offsets) for module, ids, offsets in lists]


def each_weighted(model: Model, batch: Batch) -> list[Tensor]:
    lists = zip(model.tables, batch["ids"], batch["offsets"], batch["weights"], strict=True)
    return [module(*of_module) for module, *of_module in lists]


def of_several_lengths(model: Model, batch: Batch) -> list[Tensor]:
    pairs = zip(model.tables, batch["ids"], strict=True)
    return [m(ids[:, : 1 + n % 3]) for n, (m, ids) in enumerate(pairs)]


def twice(model: Model, batch: Batch) -> list[Tensor]:
    """Each module twice with the same ids, and the first one with all; some are written to."""
    first, again = each(model, batch), each(model, batch)
    shared = [model.tables[0](ids) for ids in batch["ids"]]
    return [*(v.mul_(2) for v in first), *again, *shared]


def some_without_gradient(model: Model, batch: Batch) -> list[Tensor]:
    """The loss does not depend on the first two; the next are looked up without gradients."""
    first, *rest = zip(model.tables, batch["ids"], strict=True)
    first[0](first[1])
    with torch.no_grad():
        constant = [module(ids) for module, ids in rest[1:3]]
    rest[0][0](rest[0][1])
    return [*constant, *(module(ids) for module, ids in rest[3:])]


def computed(model: Model, batch: Batch) -> list[Tensor]:
    """Half of the ids are computed in forward; these are looked up there."""
    return [
        module(ids if number % 2 else (ids * 7 + number) % NUM_ROWS)
        for number, (module, ids) in enumerate(zip(model.tables, batch["ids"], strict=True))
    ]


def written_in_place(model: Model, batch: Batch) -> list[Tensor]:
    batch["ids"][3:].add_(1).remainder_(NUM_ROWS)
    return each(model, batch)


def plain(model: Model, kind: Any, batches: Iterator[Batch]) -> list[float]:
    tables = kind(model.tables.parameters(), lr=0.1)
    dense, losses = torch.optim.SGD([model.factors], lr=0.1), []
    for batch in itertools.islice(batches, NUM_STEPS):
        tables.zero_grad()
        dense.zero_grad()
        loss = model(batch)
        loss.backward()
        tables.step()
        dense.step()
        losses.append(loss.item())
    return losses


def by_pipeline(
    model: Model, kind: Any, batches: Iterator[Batch], *, capture: bool
) -> tuple[list[float], Any]:
    """The losses of a pipeline's steps, and the counts of operations of the last one."""
    optimizers = [
        kind(model.tables.parameters(), lr=0.1),
        torch.optim.SGD([model.factors], lr=0.1),
    ]
    # The last batches were prepared before they are counted.
    source = itertools.islice(batches, NUM_STEPS)
    with TrainPipeline(model, None, optimizers, capture=capture) as pipeline:
        losses = [pipeline.progress(source).loss.item() for _ in range(NUM_STEPS - 1)]
        with Counted() as counted:
            losses.append(pipeline.progress(source).loss.item())
        assert pipeline.engine.is_captured == capture
    return losses, counted.counts


def captured(model: Model, kind: Any, batches: Iterator[Batch]) -> tuple[list[float], Any]:
    return by_pipeline(model, kind, batches, capture=True)


def assert_equal(model: Model, expected: Model) -> None:
    found = zip(model.parameters(), expected.parameters(), strict=True)
    for parameter, of_expected in found:
        assert_same_bits(parameter, of_expected)


CASES: list[tuple[Any, Any, str, dict[str, Any]]] = [
    (each, stacked, "bags", {"mode": "sum"}),
    (each, stacked, "bags", {"mode": "mean"}),
    (each, stacked, "bags", {"mode": "sum", "padding_idx": 3}),
    (each_column, in_columns, "bags", {"mode": "sum"}),
    (each_by_keyword, in_lists, "bags", {"mode": "mean"}),
    (each_weighted, in_lists, "bags", {"mode": "sum"}),
    (of_several_lengths, stacked, "bags", {"mode": "mean"}),
    (of_several_lengths, stacked, "bags", {"mode": "mean", "padding_idx": 3}),
    (each_by_keyword, in_lists, "bags", {"mode": "mean", "padding_idx": 3, "on_bad_id": "clamp"}),
    (of_several_lengths, stacked, "bags", {"mode": "max"}),
    (each_by_keyword, in_lists, "bags", {"mode": "max", "padding_idx": 3, "on_bad_id": "zero"}),
    (each, stacked, "vectors", {}),
    (each, in_lists, "vectors", {"padding_idx": 0}),
]


@pytest.mark.parametrize(("call", "batches", "kind", "settings"), CASES)
@pytest.mark.parametrize(("optimizer", "capture"), [(Adagrad, True), (Adam, True), (Adam, False)])
def test_steps_look_all_up_at_once(
    call: Any, batches: Any, kind: str, settings: dict[str, Any], optimizer: Any, capture: bool
) -> None:
    model = Model(call, kind, **settings)
    expected = copy.deepcopy(model)
    losses, counts = by_pipeline(model, optimizer, batches(), capture=capture)
    assert losses == plain(expected, optimizer, batches())
    assert_equal(model, expected)
    lookups = {"sequence_lookup_forward", "pooled_lookup_forward"}
    assert sum(counts[name] for name in lookups) == 1
    assert counts["find_runs"] == counts["rowwise_update"] == counts["linearize_ids"] == 1


def test_as_many_operations_as_one_collection() -> None:
    assert captured(Model(each, mode="sum"), Adagrad, stacked())[1] == ONE_LOOKUP


@pytest.mark.parametrize(
    "call", [twice, some_without_gradient, computed, written_in_place], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("capture", [True, False])
def test_other_habits_equal_the_plain_loop(call: Any, capture: bool) -> None:
    model = Model(call, mode="sum")
    expected = copy.deepcopy(model)
    losses, _ = by_pipeline(model, Adam, stacked(), capture=capture)
    assert losses == plain(expected, Adam, stacked())
    assert_equal(model, expected)


# Offsets are checked on a CPU, which reads them.
@pytest.mark.parametrize(
    ("call", "batches", "kind", "settings"),
    [case for case in CASES if case[0] not in (each_by_keyword, each_weighted)],
)
def test_a_replayed_tape_equals_the_plain_loop(
    call: Any, batches: Any, kind: str, settings: dict[str, Any]
) -> None:
    """Nothing of the host's is asked in a captured step."""
    model = Model(call, kind, **settings)
    expected = copy.deepcopy(model)
    optimizers = [
        Adagrad(model.tables.parameters(), lr=0.1),
        torchembed.optim.DenseAdagrad([model.factors], lr=0.1),
    ]
    with taped_captures(), TrainPipeline(model, None, optimizers, capture=True) as pipeline:
        source = itertools.islice(batches(), NUM_STEPS)
        losses = [pipeline.progress(source).loss.item() for _ in range(NUM_STEPS)]
        assert pipeline.engine.is_captured
    others = [
        Adagrad(expected.tables.parameters(), lr=0.1),
        torchembed.optim.DenseAdagrad([expected.factors], lr=0.1),
    ]
    for loss, batch in zip(losses, batches(), strict=False):
        for optimizer in others:
            optimizer.zero_grad()
        found = expected(batch)
        found.backward()
        for optimizer in others:
            optimizer.step()
        assert loss == found.item()
    assert_equal(model, expected)


def test_a_bad_id_is_named_and_changes_nothing() -> None:
    model = Model(each, mode="sum")
    optimizers = [SGD(model.tables.parameters(), lr=0.1), torch.optim.SGD([model.factors], lr=0.1)]
    batches = list(itertools.islice(stacked(), NUM_STEPS))
    batches[6]["ids"][4, 2, 1] = 99
    source = iter(batches)
    with TrainPipeline(model, None, optimizers, capture=True) as pipeline:
        for _ in range(6):
            pipeline.progress(source)
        before = copy.deepcopy(model.state_dict())
        message = (
            r"id out of range: table weight, feature input, position 7 .*, value 99; .*\[0, 15\)"
        )
        with pytest.raises(IndexError, match=message):
            pipeline.progress(source)
        for name, tensor in model.state_dict().items():
            assert_same_bits(tensor, before[name])
        pipeline.progress(source)


def in_turns(model: Model, batch: Batch) -> list[Tensor]:
    """Other modules in every step, and fewer in some; for a while the first ones are frozen."""
    model.num_calls += 1
    for table in model.tables[:3]:
        table.requires_grad_(not 3 <= model.num_calls < 6)
    return each(model, batch)[model.num_calls % 3 :]


def in_two_layouts() -> Iterator[Batch]:
    for step in itertools.count():
        ids = ids_of(step, NUM_MODULES, NUM_SAMPLES + step // 2 % 2, 3)
        # The last part lies in memory that holds other elements, too.
        yield {"ids": ids if step < 6 else torch.cat([ids, ids])[:NUM_MODULES]}


@pytest.mark.parametrize("call", [each, in_turns], ids=lambda c: c.__name__)
def test_eager_steps_follow_other_batches_and_calls(call: Any) -> None:
    model = Model(call, mode="sum")
    expected = copy.deepcopy(model)
    losses, _ = by_pipeline(model, SGD, in_two_layouts(), capture=False)
    assert losses == plain(expected, SGD, in_two_layouts())
    assert_equal(model, expected)


def test_a_bad_id_of_an_eager_step_changes_nothing() -> None:
    model = Model(each, mode="sum")
    optimizers = [SGD(model.tables.parameters(), lr=0.1), torch.optim.SGD([model.factors], lr=0.1)]
    batches = list(itertools.islice(stacked(), NUM_STEPS))
    batches[4]["ids"][4, 2, 1] = 99
    source = iter(batches)
    with TrainPipeline(model, None, optimizers, capture=False) as pipeline:
        for _ in range(4):
            pipeline.progress(source)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(IndexError, match=r"position 7 .*, value 99; .*\[0, 15\)"):
            pipeline.progress(source)
        for name, tensor in model.state_dict().items():
            assert_same_bits(tensor, before[name])
        pipeline.progress(source)


def test_gradients_are_clipped_by_their_norm() -> None:
    found = []
    for capture in (True, False):
        model = Model(each, mode="sum")
        optimizers = [
            SGD(model.tables.parameters(), lr=0.1),
            torch.optim.SGD([model.factors], lr=0.1),
        ]
        source = itertools.islice(stacked(), NUM_STEPS)
        with TrainPipeline(
            model, None, optimizers, capture=capture, max_grad_norm=0.125
        ) as pipeline:
            losses = [pipeline.progress(source).loss.item() for _ in range(NUM_STEPS)]
        found.append((losses, model))
    (losses, model), (of_plain, expected) = found
    assert losses == of_plain
    assert_equal(model, expected)


def trained_on_rank() -> list[tuple[list[float], list[Any]]]:
    """The losses of this rank and its weights, by the plain loop and by pipelines' steps."""
    rank, found = dist.get_rank(), []

    def batches() -> Iterator[Batch]:
        return ({"ids": (b["ids"] * 3 + rank) % NUM_ROWS} for b in stacked())

    for capture in (None, False, True):
        model = Model(each, mode="sum")
        placements = {f"tables.{number}": "data_parallel" for number in range(NUM_MODULES)}
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), placements)
        if capture is None:
            losses = plain(model, Adagrad, batches())
        else:
            losses, counts = by_pipeline(model, Adagrad, batches(), capture=capture)
            # The gradients of this rank's rows are summed, and their mean over ranks is applied.
            assert counts == {**ONE_LOOKUP, "find_runs": 2, "rowwise_update": 2}
        found.append((losses, [p.detach().numpy().copy() for p in model.parameters()]))
    return found


def test_modules_that_every_rank_holds_train_as_in_the_plain_loop() -> None:
    of_ranks = run_on_ranks(2, trained_on_rank)
    for by_hand, *by_pipelines in of_ranks:
        for losses, weights in by_pipelines:
            assert losses == by_hand[0]
            for found, expected in zip(weights, by_hand[1], strict=True):
                np.testing.assert_array_equal(found, expected)
    weights = zip(of_ranks[0][0][1], of_ranks[1][0][1], strict=True)
    for of_first, of_second in weights:
        np.testing.assert_array_equal(of_first, of_second)
