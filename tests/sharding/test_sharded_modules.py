"""Modules of one table each that are sharded train as unsharded ones, by one exchange in captured
steps."""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import extent, made_mesh
from torchembed.modules.sharded.sharded_single_table import ShardedSingleTable
from torchembed.tables import table_of
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline

NUM_MODULES, NUM_SAMPLES, NUM_ROWS, DIM, NUM_STEPS = 7, 4, 11, 4, 8
RANKS = range(2)
PLACEMENTS = {
    f"tables.{number}": placement
    for number, placement in enumerate(
        ["row_wise", "column_wise", "data_parallel", "row_wise", "data_parallel"]
    )
}
Batch = dict[str, Any]


class Model(nn.Module):
    """Modules of one table each, and a loss whose gradients are exact in any order of sums."""

    def __init__(
        self,
        call: Callable[["Model", Batch], Sequence[Tensor]],
        kind: str = "bags",
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        module: Any = torchembed.EmbeddingBag if kind == "bags" else torchembed.Embedding
        self.tables = nn.ModuleList(
            module(NUM_ROWS + number, DIM, seed=number, device=device, **settings)
            for number in range(NUM_MODULES)
        )
        self.call = call
        with torch.no_grad():
            for weight in self.tables.parameters() if device is None else ():
                weight.mul_(64).round_().add_(1).div_(64)

    def forward(self, batch: Batch) -> Tensor:
        loss = torch.zeros(())
        for vectors in self.call(self, batch):
            coefficients = torch.arange(vectors.numel()).view(vectors.shape) * 7 % 5 - 2
            loss = loss + (vectors * coefficients).sum()
        return loss


def ids_of(rank: int, step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randint(NUM_ROWS, shape, generator=generator)


def stacked(rank: int) -> Iterator[Batch]:
    for step in itertools.count():
        yield {"ids": ids_of(rank, step, NUM_MODULES, NUM_SAMPLES, 2)}


def in_lists(rank: int) -> Iterator[Batch]:
    """Bags of 0, 1, 2 and 4 ids, between offsets, and weights."""
    for step in itertools.count():
        ids = [ids_of(rank, step + number, 8) for number in range(NUM_MODULES)]
        starts = [torch.tensor([0, 4, 4 + step % 2, 6]) for _ in range(NUM_MODULES)]
        weights = [ids_of(rank, number, 8).float() for number in range(NUM_MODULES)]
        yield {"ids": ids, "offsets": starts, "weights": weights}


def each(model: Model, batch: Batch) -> list[Tensor]:
    return [module(ids) for module, ids in zip(model.tables, batch["ids"], strict=True)]


def each_between_offsets(model: Model, batch: Batch) -> list[Tensor]:
    lists = zip(model.tables, batch["ids"], batch["offsets"], strict=True)
    return [module(ids, offsets) for module, ids, offsets in lists]


def each_weighted(model: Model, batch: Batch) -> list[Tensor]:
    lists = zip(model.tables, batch["ids"], batch["offsets"], batch["weights"], strict=True)
    return [module(*of_module) for module, *of_module in lists]


def in_several_forms(model: Model, batch: Batch) -> list[Tensor]:
    """Bags of 1 and of 2 ids, modules that are called twice, ids that forward computes; the loss
    depends on some results only, and some are written to."""
    pairs = zip(model.tables, batch["ids"], strict=True)
    found = [m(ids[:, : 1 + n % 2]) for n, (m, ids) in enumerate(pairs)]
    again = [module(ids) for module, ids in zip(model.tables, batch["ids"], strict=True)]
    computed = model.tables[0]((batch["ids"][0] + 1) % NUM_ROWS)
    return [*(v.mul_(2) for v in found), *again[:2], computed]


CASES: list[tuple[Any, Any, str, dict[str, Any]]] = [
    (each, stacked, "bags", {"mode": "sum"}),
    (each, stacked, "bags", {"mode": "sum", "on_bad_id": "clamp", "sparse": True}),
    (each, stacked, "bags", {"mode": "max", "padding_idx": 3}),
    (in_several_forms, stacked, "bags", {"mode": "mean"}),
    (each_between_offsets, in_lists, "bags", {"mode": "mean"}),
    (each_between_offsets, in_lists, "bags", {"mode": "sum", "padding_idx": -1}),
    (each_between_offsets, in_lists, "bags", {"mode": "max"}),
    (each_weighted, in_lists, "bags", {"mode": "sum"}),
    (each, stacked, "vectors", {}),
    (each, in_lists, "vectors", {"padding_idx": 0, "on_bad_id": "zero"}),
]


def plain(model: Model, batches: Iterator[Batch]) -> list[float]:
    optimizer, losses = torchembed.optim.SGD(model.tables.parameters(), lr=0.125), []
    for batch in itertools.islice(batches, NUM_STEPS):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_pipeline(model: Model, batches: Iterator[Batch], *, capture: bool = False) -> list[float]:
    optimizers = [torchembed.optim.SGD(model.tables.parameters(), lr=0.125)]
    with TrainPipeline(model, None, optimizers, device="cpu", capture=capture) as pipeline:
        losses = [pipeline.progress(batches).loss.item() for _ in range(NUM_STEPS)]
        assert pipeline.engine.is_captured == capture
    return losses


def captured(model: Model, batches: Iterator[Batch]) -> list[float]:
    return by_pipeline(model, batches, capture=True)


def held_rows(model: Model) -> dict[str, tuple[Any, Any]]:
    """For each parameter the rows and columns that it holds of its table, and its elements."""
    held = {}
    for name, parameter in model.named_parameters():
        table = table_of(parameter)
        assert table is not None
        held[name] = extent(table), parameter.detach().numpy().copy()
    return held


def trained_on_rank() -> list[list[tuple[list[float], dict[str, tuple[Any, Any]]]]]:
    """For each case and way to train the losses, and what this rank holds after it."""
    found = []
    for call, batches, kind, settings in CASES:
        found.append([])
        for train in (plain, by_pipeline, captured):
            model = Model(call, kind, **settings)
            torchembed.shard_embeddings(model, made_mesh("cpu", 1), PLACEMENTS)
            losses = train(model, batches(dist.get_rank()))
            found[-1].append((losses, held_rows(model)))
    return found


def trained_unsharded(
    call: Any, batches: Any, kind: str, settings: dict[str, Any]
) -> tuple[list[list[float]], dict[str, Any]]:
    """Each rank's losses, and the weights, of training in one process by the mean over ranks."""
    model, losses = Model(call, kind, **settings), []
    optimizer = torchembed.optim.SGD(model.tables.parameters(), lr=0.125)
    of_ranks = zip(*map(batches, RANKS), strict=True)
    for of_step in itertools.islice(of_ranks, NUM_STEPS):
        optimizer.zero_grad()
        of_ranks_now = [model(batch) for batch in of_step]
        (sum(of_ranks_now, torch.zeros(())) / len(of_ranks_now)).backward()
        optimizer.step()
        losses.append([loss.item() for loss in of_ranks_now])
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return [list(of_rank) for of_rank in zip(*losses, strict=True)], weights


def test_sharded_modules_train_as_unsharded_ones() -> None:
    of_ranks, weights = run_on_ranks(len(RANKS), trained_on_rank), {}
    for number, case in enumerate(CASES):
        losses, weights = trained_unsharded(*case)
        for rank, of_rank in enumerate(of_ranks):
            for of_rank_losses, held in of_rank[number]:
                assert of_rank_losses == losses[rank], case
                assert held.keys() < weights.keys()
                for name, (where, elements) in held.items():
                    expected = weights[name][where]
                    np.testing.assert_array_equal(elements, expected, err_msg=f"{case}")
    held_by_one = [set(of_rank[0][0][1]) for of_rank in of_ranks]
    assert held_by_one[0] != held_by_one[1]
    assert held_by_one[0] | held_by_one[1] == set(weights)


class Counted(TorchDispatchMode):
    """Counts collectives and torchembed's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace in ("torchembed", "c10d"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class OfOneCollection(nn.Module):
    """The tables of :class:`Model` in one collection."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torchembed.EmbeddingBagCollection(
            [
                torchembed.EmbeddingBagConfig(
                    name=f"t{number}",
                    num_embeddings=NUM_ROWS + number,
                    embedding_dim=DIM,
                    feature_names=(f"f{number}",),
                )
                for number in range(NUM_MODULES)
            ]
        )

    def forward(self, features: torchembed.SparseFeatures) -> Tensor:
        return self.tables(features).values().sum()


def features_of(batches: Iterator[Batch]) -> Iterator[torchembed.SparseFeatures]:
    keys = tuple(f"f{number}" for number in range(NUM_MODULES))
    for batch in batches:
        yield torchembed.SparseFeatures(
            keys=keys,
            values=batch["ids"].flatten(),
            batch_size=NUM_SAMPLES,
            hotness=(2,) * NUM_MODULES,
        )


def work_of_a_step(model: nn.Module, batches: Iterator[Any], *, capture: bool) -> dict[str, int]:
    """The collectives and torchembed's operations of a step."""
    optimizers = [torchembed.optim.Adagrad(model.parameters(), lr=0.125)]
    with TrainPipeline(model, None, optimizers, device="cpu", capture=capture) as pipeline:
        source = itertools.islice(batches, NUM_STEPS)
        for _ in range(NUM_STEPS - 2):
            pipeline.progress(source)
        with Counted() as counted:
            pipeline.progress(source)
        assert pipeline.engine.is_captured == capture
    return dict(counted.counts)


def work_on_rank() -> list[dict[str, int]]:
    rank, mesh, found = dist.get_rank(), made_mesh("cpu", 1), []
    for model, batches, capture in (
        (Model(each, mode="sum"), stacked(rank), True),
        (Model(each, mode="sum"), stacked(rank), False),
        (OfOneCollection(), features_of(stacked(rank)), True),
    ):
        torchembed.shard_embeddings(model, mesh)
        found.append(work_of_a_step(model, batches, capture=capture))
    return found


def test_a_step_does_the_work_of_one_collection() -> None:
    for of_modules, of_eager, of_collection in run_on_ranks(len(RANKS), work_on_rank):
        assert of_modules == of_collection
        for name in ("pooled_lookup_forward", "rowwise_update", "find_runs", "alltoall_base_"):
            assert of_eager[name] == of_modules[name]
        assert of_modules["pooled_lookup_forward"] == of_modules["rowwise_update"] == 1
        assert of_modules["alltoall_base_"] == 3  # of ids, of vectors and of their gradients


class Derived(torchembed.EmbeddingBag):
    """A class of a user's own."""


class Several(nn.Module):
    """Modules that are sharded, and, where they are real, some that are not."""

    def __init__(self, seed: int | None = None, device: str | None = None) -> None:
        super().__init__()
        given: dict[str, Any] = {"seed": seed, "device": device}
        self.bag = torchembed.EmbeddingBag(9, DIM, mode="sum", padding_idx=6, **given)
        self.again = self.bag
        self.frozen = torchembed.Embedding(8, DIM, _freeze=True, **given)
        self.narrow = torchembed.EmbeddingBag(7, DIM, dtype=torch.float16, **given)
        if device is None:
            self.derived = Derived(5, DIM)
            self.wide = torchembed.Embedding(5, DIM, dtype=torch.float64)
            self.tied, self.out = torchembed.Embedding(5, DIM), nn.Linear(DIM, 5)
            self.out.weight = self.tied.weight


PLAN = {"bag": "row_wise", "frozen": "column_wise", "narrow": "table_wise"}
Held = dict[str, tuple[Any, Any]]


def sharded_rows(model: nn.Module) -> Held:
    """For each sharded module the rows and columns that this rank holds, and its elements."""
    held: Held = {}
    for name, module in model.named_modules():
        if isinstance(module, ShardedSingleTable) and module.weight is not None:
            assert module.local_table is not None
            held[name] = extent(module.local_table), module.weight.detach().clone().numpy()
    return held


def assert_whole(of_ranks: Sequence[Held], expected: dict[str, Any]) -> None:
    for name, of_table in expected.items():
        whole = np.full_like(of_table, np.nan)
        for held in of_ranks:
            if name in held:
                where, elements = held[name]
                whole[where] = elements
        np.testing.assert_array_equal(whole, of_table, err_msg=name)


def made_on_rank() -> tuple[Held, Held, Held]:
    """The rows of modules whose seeds differ from rank to rank, of those that were then loaded, and
    of those that were made on the meta device."""
    rank, mesh = dist.get_rank(), made_mesh("cpu", 1)
    torch.manual_seed(rank)
    model, calls = Several(), []
    model.bag.eval()
    model.bag.register_forward_hook(lambda *_: calls.append("hook"))
    torchembed.shard_embeddings(model, mesh, PLAN)
    of_first, holds_narrow = sharded_rows(model), model.narrow.weight is not None

    modules = dict(model.named_modules())
    assert {n for n, m in modules.items() if isinstance(m, ShardedSingleTable)} == set(PLAN)
    assert model.again is model.bag
    assert model.out.weight is model.tied.weight
    assert (model.bag.training, model.narrow.training) == (False, True)
    ids = torch.tensor([[1]])
    assert [model.bag(ids).dtype, *calls] == [torch.float32, "hook"]
    assert model.narrow(ids).dtype == torch.float16
    assert model.frozen.weight is not None
    assert not model.frozen.weight.requires_grad

    state = model.state_dict()
    assert ("narrow.weight" in state) == holds_narrow
    whole = {f"{n}.weight": m.weight for n, m in Several(0).named_modules() if n in PLAN}
    model.load_state_dict({**state, **whole, "again.weight": whole["bag.weight"]})
    loaded = sharded_rows(model)
    model.load_state_dict(state)

    on_meta = Several(3, "meta")
    torchembed.shard_embeddings(on_meta, mesh, PLAN)
    return of_first, loaded, sharded_rows(on_meta)


def test_rows_are_those_of_the_first_rank_of_what_is_loaded_or_of_the_seed() -> None:
    of_first, loaded, on_meta = zip(*run_on_ranks(len(RANKS), made_on_rank), strict=True)
    torch.manual_seed(0)
    for found, model in ((of_first, Several()), (loaded, Several(0)), (on_meta, Several(3))):
        weights = dict(model.named_parameters())
        expected = {name: weights[f"{name}.weight"].detach().numpy() for name in PLAN}
        assert_whole(found, expected)


def rounded_on_rank() -> Any:
    """The weight of a module of 16-bit rows that every rank holds, after steps that round
    stochastically; each rank has drawn a seed of its own."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(torchembed.EmbeddingBag(9, DIM, mode="sum", dtype=torch.bfloat16))
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), {"0": "data_parallel"})
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.arange(9).view(3, 3)).float().square().sum().backward()
        optimizer.step()
    return next(model.parameters()).detach().float().numpy()


def test_replicas_round_alike_whatever_their_seeds() -> None:
    first, second = run_on_ranks(len(RANKS), rounded_on_rank)
    np.testing.assert_array_equal(first, second)


def saved_on_rank(folder: str) -> None:
    model = Model(each, mode="sum")
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), PLACEMENTS)
    optimizer = torchembed.optim.Adagrad(model.parameters(), lr=0.125)
    model(next(stacked(dist.get_rank()))).backward()
    optimizer.step()
    CheckpointFolder(Path(folder)).save(1, TrainingRun(model=model, optimizers=[optimizer]))


def loaded_on_rank(folder: str) -> list[Held]:
    """The rows that this rank has loaded, under several placements."""
    found = []
    for placement in ("row_wise", "column_wise", "table_wise"):
        model = Model(each, mode="sum", device="meta")
        placements = {f"tables.{number}": placement for number in range(NUM_MODULES)}
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), placements)
        optimizer = torchembed.optim.Adagrad(model.parameters(), lr=0.125)
        CheckpointFolder(Path(folder)).load(TrainingRun(model=model, optimizers=[optimizer]))
        found.append(sharded_rows(model))
    return found


def test_checkpoints_are_loaded_under_every_placement(tmp_path: Path) -> None:
    run_on_ranks(len(RANKS), saved_on_rank, str(tmp_path))
    model = Model(each, mode="sum")
    optimizer = torchembed.optim.Adagrad(model.parameters(), lr=0.125)
    losses = [model(next(stacked(rank))) for rank in RANKS]
    (sum(losses, torch.zeros(())) / len(losses)).backward()
    optimizer.step()
    expected = {
        name: m.weight.detach().numpy()
        for name, m in model.named_modules()
        if isinstance(m, torchembed.EmbeddingBag)
    }
    of_ranks = run_on_ranks(len(RANKS), loaded_on_rank, str(tmp_path))
    for of_placement in zip(*of_ranks, strict=True):
        assert_whole(of_placement, expected)


def refused_on_rank() -> list[str]:
    """The words of this rank about a bad id of one rank, in its forward and ahead of a captured
    step, of an optimizer that is too early, and of a module that would have to be replaced
    itself."""
    rank, messages = dist.get_rank(), []
    mesh = made_mesh("cpu", 1)

    def bad_in_sixth(batches: Iterator[Batch]) -> Iterator[Batch]:
        for step, batch in enumerate(batches):
            if step == 6 and rank == 1:
                batch["ids"][4, 2, 1] = 99
            yield batch

    model = Model(each, mode="sum")
    early = torchembed.optim.SGD(model.parameters(), lr=0.125)
    with pytest.raises(ValueError, match="make optimizers afterwards") as error:
        torchembed.shard_embeddings(model, mesh)
    messages.append(str(error.value))
    del early
    with pytest.raises(ValueError, match="wrap it in a module"):
        torchembed.shard_embeddings(torchembed.EmbeddingBag(9, DIM), mesh)
    model = Model(each, mode="sum")
    torchembed.shard_embeddings(model, mesh)
    batches = bad_in_sixth(stacked(rank))
    optimizers = [torchembed.optim.SGD(model.parameters(), lr=0.125)]
    with TrainPipeline(model, None, optimizers, device="cpu", capture=True) as pipeline:
        for _ in range(6):
            pipeline.progress(batches)
        before = held_rows(model)
        with pytest.raises((IndexError, RuntimeError)) as error:
            pipeline.progress(batches)
        messages.append(str(error.value))
        for name, (_, elements) in held_rows(model).items():
            np.testing.assert_array_equal(elements, before[name][1])
        pipeline.progress(batches)
    return messages


def test_what_is_refused_is_named() -> None:
    of_ranks = run_on_ranks(len(RANKS), refused_on_rank)
    for early, _ in of_ranks:
        assert "would never change the tables tables.0, tables.1" in early
    where = "id out of range: table tables.4, feature input, position 5 of the feature's ids"
    assert of_ranks[1][1].startswith(f"{where}, value 99; ids of this table are in [0, 15)")


def some_untrained(model: Model, batch: Batch) -> list[Tensor]:
    """The loss does not depend on the first two; the next is looked up without gradients."""
    first, second, third, *rest = zip(model.tables, batch["ids"], strict=True)
    for module, ids in (first, second):
        module(ids)
    with torch.no_grad():
        constant = third[0](third[1])
    return [constant, first[0](first[1].flip(0)), *(module(ids) for module, ids in rest)]


def adam(model: Model) -> torch.optim.Optimizer:
    """It changes rows that it touches also where their gradient is zero."""
    return torchembed.optim.Adam(model.tables.parameters(), lr=0.125, weight_decay=0.5)


def single_ids(rank: int) -> Iterator[Batch]:
    return ({"ids": batch["ids"][..., 0]} for batch in stacked(rank))


def train_by_adam(model: Model, batches: Iterator[Batch], *, capture: bool) -> None:
    optimizer, source = adam(model), itertools.islice(batches, NUM_STEPS)
    with TrainPipeline(model, None, [optimizer], device="cpu", capture=capture) as pipeline:
        for _ in range(NUM_STEPS):
            pipeline.progress(source)


def trained_by_adam_on_rank(settings: dict[str, Any]) -> list[Held]:
    found = []
    for capture in (False, True):
        model = Model(some_untrained, "vectors", **settings)
        torchembed.shard_embeddings(model, made_mesh("cpu", 1), PLACEMENTS)
        train_by_adam(model, single_ids(dist.get_rank()), capture=capture)
        found.append(held_rows(model))
    return found


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 3}])
def test_only_what_the_loss_depends_on_is_trained(settings: dict[str, Any]) -> None:
    model = Model(some_untrained, "vectors", **settings)
    optimizer = adam(model)
    of_ranks = zip(*map(single_ids, RANKS), strict=True)
    for of_step in itertools.islice(of_ranks, NUM_STEPS):
        optimizer.zero_grad()
        losses = [model(batch) for batch in of_step]
        (sum(losses, torch.zeros(())) / len(losses)).backward()
        optimizer.step()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for of_rank in run_on_ranks(len(RANKS), trained_by_adam_on_rank, settings):
        for held in of_rank:
            for name, (where, elements) in held.items():
                np.testing.assert_array_equal(elements, weights[name][where], err_msg=name)


def differing_on_rank() -> list[float]:
    """The losses of captured steps in which the ranks call modules in different forms: no exchange
    is joined then."""
    rank = dist.get_rank()

    def of_one_length(model: Model, batch: Batch) -> list[Tensor]:
        pairs = zip(model.tables, batch["ids"], strict=True)
        return [module(ids[:, : 1 + rank]) for module, ids in pairs]

    model = Model(of_one_length, mode="sum")
    torchembed.shard_embeddings(model, made_mesh("cpu", 1), PLACEMENTS)
    return captured(model, stacked(rank))


def test_ranks_whose_calls_differ() -> None:
    def of_several_lengths(model: Model, batch: Batch) -> list[Tensor]:
        pairs = zip(model.tables, batch["ids"], strict=True)
        return [module(ids) for module, ids in pairs]

    def of_rank(rank: int) -> Iterator[Batch]:
        return ({"ids": batch["ids"][..., : 1 + rank]} for batch in stacked(rank))

    losses, _ = trained_unsharded(of_several_lengths, of_rank, "bags", {"mode": "sum"})
    assert run_on_ranks(len(RANKS), differing_on_rank) == losses
