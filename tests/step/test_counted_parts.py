"""``EmbeddingBag(values, offsets)`` of batches whose numbers of ids vary, in captured steps."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchembed
from tests.support.histories import kinds_as_by_hand
from tests.support.ranks import run_on_ranks
from tests.support.tape import taped_captures
from tests.support.tiny_training import assert_same_state, state_of
from torchembed.modules.counted_tensor import CountedTensor
from torchembed.training import TrainPipeline

NUM_ROWS = 20
Batch = dict[str, Any]
Adam = torchembed.optim.Adam


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


class OfBags(nn.Module):
    """A linear model of one bag for each sample."""

    def __init__(self, *, is_weighted: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torchembed.EmbeddingBag(NUM_ROWS, 4, seed=0, **settings)
        self.over = nn.Linear(4, 1)
        self.is_weighted = is_weighted

    def forward(self, batch: Batch) -> Tensor:
        weights = batch["weights"] if self.is_weighted else None
        vectors = self.bag(batch["values"], batch["offsets"], weights)
        return F.binary_cross_entropy_with_logits(self.over(vectors)[:, 0], batch["label"])


def bags(
    count: int,
    *,
    includes_last: bool = False,
    is_weighted: bool = False,
    first_seed: int = 0,
    most: int = 4,
) -> list[Batch]:
    """Eight bags of less than ``most`` ids in each batch, empty ones among them."""
    batches = []
    for seed in range(first_seed, first_seed + count):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(most, (8,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        num_ids = int(offsets[-1])
        batches.append(
            {
                "values": torch.randint(NUM_ROWS, (num_ids,), generator=generator),
                "offsets": offsets if includes_last else offsets[:-1],
                "label": torch.randint(2, (8,), generator=generator).float(),
            }
        )
        if is_weighted:
            batches[-1]["weights"] = torch.rand(num_ids, generator=generator)
    return batches


@pytest.mark.parametrize("includes_last", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "max"},
        {"mode": "sum", "is_weighted": True},
        {"mode": "mean", "padding_idx": 0},
        {"mode": "sum", "padding_idx": 3, "is_weighted": True},
    ],
)
def test_bags_between_offsets_are_captured_with_spare_ids(
    settings: dict[str, Any], includes_last: bool
) -> None:
    def make() -> nn.Module:
        return OfBags(include_last_offset=includes_last, **settings)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = bags(16, includes_last=includes_last, is_weighted="is_weighted" in settings)
        kinds, _ = kinds_as_by_hand(batches, make)
    assert [kind.form for kind in kinds[-6:]] == ["padded"] * 6


def test_no_row_is_updated_for_spare_ids() -> None:
    """Adam moves a row that is updated also where its gradient is zero."""
    plain, model = OfBags(mode="sum"), OfBags(mode="sum")
    batches = bags(14)
    for batch in batches:
        batch["values"] = batch["values"].clamp(min=1)
    batches[0]["values"][:3] = 0
    optimizer = Adam.with_dense(plain.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        plain(batch).backward()
        optimizer.step()
    optimizer = Adam.with_dense(model.parameters(), lr=0.05)
    with TrainPipeline(model, None, optimizer, capture=True) as pipeline:
        iterator = iter(batches)
        kinds = [pipeline.progress(iterator).kind for _ in batches]
    assert kinds[-1].form == "padded"
    assert_same_state(model, state_of(plain))


def test_more_ids_than_ever_are_captured_anew() -> None:
    batches = [*bags(12), *bags(1, first_seed=12, most=120), *bags(12, first_seed=13)]
    assert len(batches[12]["values"]) > 256
    kinds, _ = kinds_as_by_hand(batches, OfBags)
    assert kinds[11].form == "padded"
    assert kinds[12].form == "eager"
    assert kinds[-1].form == "padded"


def test_lengths_that_do_not_vary_are_prepared_ahead() -> None:
    (batch,) = bags(1)
    kinds, _ = kinds_as_by_hand([batch] * 8, OfBags)
    assert kinds[-1].form == "graph"


def test_the_result_has_the_ids_as_they_were_given() -> None:
    model, batches = OfBags(), bags(14)
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    with TrainPipeline(model, None, optimizer, capture=True) as pipeline:
        iterator = iter(batches)
        results = [pipeline.progress(iterator) for _ in batches]
    assert results[-1].kind.form == "padded"
    assert torch.equal(results[-1].batch["values"], batches[-1]["values"])


class Clicks(NamedTuple):
    parts: tuple[Tensor, Tensor]
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Clicks":
        values, lengths = (p.to(device, non_blocking=non_blocking) for p in self.parts)
        return Clicks((values, lengths), self.label.to(device, non_blocking=non_blocking))


class OfLengths(OfBags):
    """Computes the offsets, and has ids of the right dtype and device already."""

    def forward(self, batch: Any) -> Tensor:
        values, lengths = batch.parts
        values = values.long().to(self.over.weight.device)
        vectors = self.bag(values, F.pad(lengths.cumsum(0), (1, -1)))
        return F.binary_cross_entropy_with_logits(self.over(vectors)[:, 0], batch.label)


def test_offsets_may_be_computed() -> None:
    batches = []
    for batch in bags(14, includes_last=True):
        lengths = batch["offsets"].diff()
        batches.append(Clicks((batch["values"], lengths), batch["label"]))
    kinds, _ = kinds_as_by_hand(batches, OfLengths)
    assert kinds[-1].form == "padded"


class OfTables(nn.Module):
    """A bag of each of three tables, as the first DLRM has them: a list of ids, offsets ``[F, B]``;
    two of the tables are alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(
            torchembed.EmbeddingBag(NUM_ROWS + number // 2, 4, mode="sum", seed=number)
            for number in range(3)
        )
        self.over = nn.Linear(12, 1)

    def forward(self, batch: Batch) -> Tensor:
        vectors = [
            bag(ids, offsets)
            for bag, ids, offsets in zip(self.bags, batch["ids"], batch["offsets"], strict=True)
        ]
        logits = self.over(torch.cat(vectors, dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, batch["label"])


def bags_of_tables(
    count: int, dtype: torch.dtype = torch.int64, first_seed: int = 0
) -> list[Batch]:
    batches = []
    for seed in range(first_seed, first_seed + count):
        of_tables = [bags(1, first_seed=3 * seed + number)[0] for number in range(3)]
        batches.append(
            {
                "ids": [batch["values"].to(dtype) for batch in of_tables],
                "offsets": torch.stack([batch["offsets"] for batch in of_tables]).to(dtype),
                "label": of_tables[0]["label"],
            }
        )
    return batches


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_lists_of_ids_of_several_tables_are_captured(dtype: torch.dtype) -> None:
    kinds, _ = kinds_as_by_hand(bags_of_tables(16, dtype), OfTables)
    assert [kind.form for kind in kinds[-4:]] == ["padded"] * 4


class Reads(OfBags):
    """Does something else with the ids or the weights, too."""

    def __init__(self, read: Callable[[Batch], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.read = read

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) * self.read(batch)


READS: dict[str, Callable[[Batch], Any]] = {
    "elements": lambda batch: batch["values"].float().mean(),
    "length": lambda batch: len(batch["values"]),
    "shape": lambda batch: batch["values"].shape[0],
    "numel": lambda batch: batch["values"].numel(),
    "a view": lambda batch: batch["values"][:1].sum(),
    "a new tensor": lambda batch: torch.ones_like(batch["values"], dtype=torch.float32).sum(),
    "weights": lambda batch: batch["weights"].sum() + 1,
}


@pytest.mark.parametrize("what", READS)
def test_ids_that_are_read_elsewhere_are_not_padded(what: str) -> None:
    def make() -> nn.Module:
        return Reads(READS[what], is_weighted=is_weighted, mode="sum")

    # Further batches of two lengths, which recur.
    is_weighted = what == "weights"
    few = [b for b in bags(40, is_weighted=is_weighted) if len(b["values"]) in (12, 13)]
    batches = [*bags(10, is_weighted=is_weighted), *few, *few, *few]
    kinds, _ = kinds_as_by_hand(batches, make)
    assert any("does not ignore padding" in str(kind.why) for kind in kinds)
    assert {kind.form for kind in kinds[:10]} == {"eager"}
    assert kinds[-1].form == "graph"


def test_weights_that_are_computed_are_not_padded() -> None:
    class Computes(OfBags):
        def forward(self, batch: Batch) -> Tensor:
            return super().forward({**batch, "weights": batch["weights"].sigmoid()})

    batches = bags(12, is_weighted=True)
    kinds, _ = kinds_as_by_hand(batches, lambda: Computes(is_weighted=True, mode="sum"))
    assert {kind.form for kind in kinds} == {"eager"}


def test_bad_offsets_raise_as_in_a_plain_loop() -> None:
    model, batches = OfBags(), bags(9)
    batches[6]["offsets"][-1] = len(batches[6]["values"]) + 1
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    # A step before the capture: the host may read what is on the CPU.
    with TrainPipeline(model, None, optimizer, capture=True) as pipeline:
        iterator = iter(batches)
        for _ in range(6):
            pipeline.progress(iterator)
        with pytest.raises(ValueError, match="offsets must"):
            pipeline.progress(iterator)


@pytest.mark.parametrize(
    "use",
    [
        lambda ids: ids + 1,
        lambda ids: ids.size(0),
        torch.nn.Embedding(9, 2),
        torchembed.Embedding(9, 2),
        lambda ids: torch.nn.EmbeddingBag(9, 2)(ids, torch.tensor([0])),
        lambda ids: ids.tolist(),
        lambda ids: ids.numpy(),
        lambda ids: ids.int(),
        len,
        list,
        int,
    ],
)
def test_counted_tensors_may_be_read_by_lookups_alone(use: Callable[[Tensor], object]) -> None:
    ids = CountedTensor.of(torch.tensor([1, 2, 0]), torch.tensor([2]), "ids")
    with pytest.raises(RuntimeError, match="EmbeddingBag alone may take them"):
        use(ids)
    bag = torchembed.EmbeddingBag(9, 2, mode="sum")
    assert torch.equal(bag(ids, torch.tensor([0, 1])), bag(ids.elements[:2], torch.tensor([0, 1])))
    assert ids.long() is ids
    assert (ids.device, ids.dtype, ids.dim()) == (torch.device("cpu"), torch.int64, 1)


def states_on_ranks(
    model: nn.Module, batches: list[Batch], *, capture: bool
) -> tuple[list[float], list[Any], list[str]]:
    """Losses, this rank's part of the state, and the forms of steps."""
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.05)
    with TrainPipeline(model, None, optimizer, capture=capture) as pipeline:
        iterator, losses, forms = iter(batches), [], []
        for _ in batches:
            result = pipeline.progress(iterator)
            losses.append(result.loss.item())
            forms.append(str(result.kind.form))
    held = [t.to_local() if isinstance(t, DTensor) else t for t in model.state_dict().values()]
    return losses, [tensor.tolist() for tensor in held], forms


def sharded(model: nn.Module) -> nn.Module:
    torchembed.shard_embeddings(model, init_device_mesh("cpu", (2,)))
    return model


def trained_on_ranks() -> list[tuple[list[str], bool]]:
    """The forms of steps on batches of other lengths on each rank, and whether they equal eager
    steps: of a module that is whole on each rank, and of sharded ones, also under
    ``DistributedDataParallel``."""
    seed, found = 100 * dist.get_rank(), []
    weighted = {"is_weighted": True, "mode": "sum"}
    weights = bags(20, first_seed=seed, is_weighted=True)
    cases: list[tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], list[Batch]]] = [
        (OfBags, lambda model: model, bags(20, first_seed=seed)),
        (OfBags, sharded, bags(20, first_seed=seed)),
        (lambda: OfBags(**weighted), sharded, weights),
        (OfTables, sharded, bags_of_tables(20, first_seed=seed)),
        (OfBags, lambda model: DistributedDataParallel(sharded(model)), bags(20, first_seed=seed)),
    ]
    for make, put_on_ranks, batches in cases:
        results = []
        for capture in (False, True):
            model = put_on_ranks(make())
            results.append(states_on_ranks(model, batches, capture=capture))
        eager, captured = results
        found.append((captured[2], captured[:2] == eager[:2]))
    return found


def test_ranks_have_spare_ids_alike() -> None:
    for first, second in zip(*run_on_ranks(2, trained_on_ranks), strict=True):
        assert first == second
        forms, is_equal = first
        assert is_equal
        assert forms[-3:] == ["padded"] * 3
