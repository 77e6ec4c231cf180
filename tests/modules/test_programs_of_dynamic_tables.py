"""Dynamic tables in programs of ``torch.compile`` and ``torch.export``."""

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from torchembed import (
    LFU,
    CountMinSketch,
    Dynamic,
    EmbeddingBagConfig,
    EmbeddingConfig,
    HashedRows,
    MinimumCount,
    SparseFeatures,
)
from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.training import TrainPipeline

KEYS = ("z", "x", "y")
CAPACITY = 24
SIZES = (34, 46)  # samples
IDS = 40
VECTOR = (0.5, -1.25, 3.0, 0.1)
MISSING = (VECTOR, "initial", VECTOR, HashedRows(5), HashedRows(5), "initial")
"""What each model looks ids without a row up as."""


class Collection(nn.Module):
    """Two dynamic tables of one group, a feature of which looks up both, and a static one, under an
    interface of tensors."""

    def __init__(self, dynamic: Dynamic, *, pooled: bool, device: torch.device) -> None:
        super().__init__()
        config = EmbeddingBagConfig if pooled else EmbeddingConfig
        kind = torchembed.EmbeddingBagCollection if pooled else torchembed.EmbeddingCollection
        shape: dict[str, Any] = {"num_embeddings": CAPACITY, "embedding_dim": 4}
        self.tables = kind(
            [
                config(name="a", feature_names=("x", "y"), dynamic=dynamic, **shape),
                config(name="b", feature_names=("x",), dynamic=dynamic, **shape),
                config(name="c", num_embeddings=IDS, embedding_dim=4, feature_names=("z",)),
            ],
            device=device,
        )

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        batch_size = (offsets.shape[0] - 1) // len(KEYS)
        batch = SparseFeatures(keys=KEYS, values=values, offsets=offsets, batch_size=batch_size)
        found = self.tables(batch)
        if isinstance(found, dict):
            return torch.cat([part.values() for part in found.values()])
        return found.values()


def bag(mode: str, padding_idx: int | None = None) -> Callable[[Dynamic, torch.device], nn.Module]:
    return lambda dynamic, device: torchembed.EmbeddingBag(
        CAPACITY, 4, mode=mode, padding_idx=padding_idx, seed=1, device=device, dynamic=dynamic
    )


MODELS: dict[str, Callable[[Dynamic, torch.device], nn.Module]] = {
    "sum": bag("sum"),
    "padded mean": bag("mean", 0),
    "maximum": bag("max"),
    "embedding": lambda dynamic, device: torchembed.Embedding(
        CAPACITY, 4, padding_idx=0, seed=1, device=device, dynamic=dynamic
    ),
    "bags": lambda dynamic, device: Collection(dynamic, pooled=True, device=device),
    "sequences": lambda dynamic, device: Collection(dynamic, pooled=False, device=device),
}


def batch_of(kind: str, size: int, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Ids among all 64-bit numbers, 0 too; in collections those of the first feature are small."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(IDS, (size * 3,), generator=generator)
    hashes = ids * signed64(GOLDEN)
    if kind not in ("bags", "sequences"):
        return (hashes.view(size, 3).to(device),)
    offsets = torch.randint(size * 3, (len(KEYS) * size + 1,), generator=generator).sort().values
    offsets[0] = 0
    is_static = torch.arange(size * 3) < offsets[size]
    return torch.where(is_static, ids, hashes).to(device), offsets.to(device)


def trained(
    kind: str,
    dynamic: Dynamic,
    optimizer: type[torch.optim.Optimizer],
    device: torch.device,
    *,
    compiles: bool,
) -> tuple[list[Tensor], dict[str, Tensor], nn.Module]:
    """Results of the steps of a loop, and after them an evaluation, and the state at the end."""
    module = MODELS[kind](dynamic, device)
    steps = optimizer(module.parameters(), lr=0.1)  # type: ignore[call-arg]
    call, found = compiled_once(module) if compiles else module, []
    for seed, size in enumerate((*SIZES, SIZES[0])):
        steps.zero_grad()
        vectors = call(*batch_of(kind, size, seed, device))
        vectors.square().sum().backward()
        steps.step()
        found.append(vectors.detach().clone())
    call = compiled_once(module.eval()) if compiles else module.eval()
    with torch.no_grad():
        found += [call(*batch_of(kind, size, 9, device)) for size in SIZES]
    return found, {name: tensor.clone() for name, tensor in module.state_dict().items()}, module


@pytest.fixture(autouse=True)
def numbers_of_ids_are_variables() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "dynamic", "optimizer"),
    [
        (
            "sum",
            Dynamic(admission=CountMinSketch(threshold=2, width=999), missing=VECTOR),
            torch.optim.SGD,
        ),
        ("padded mean", Dynamic(missing=HashedRows(5)), torchembed.optim.Adagrad),
        ("maximum", Dynamic(), torchembed.optim.Adagrad),
        (
            "embedding",
            Dynamic(admission=MinimumCount(2), missing="initial"),
            torchembed.optim.Adam,
        ),
        ("bags", Dynamic(eviction=LFU(), missing="initial"), torchembed.optim.Adam),
        ("sequences", Dynamic(ttl_steps=2, sweep_steps=1), torchembed.optim.SGD),
    ],
)
def test_a_compiled_program_trains_and_evicts_as_the_module(
    kind: str, dynamic: Dynamic, optimizer: type[torch.optim.Optimizer], device: torch.device
) -> None:
    expected, state, _ = trained(kind, dynamic, optimizer, device, compiles=False)
    found, of_program, _ = trained(kind, dynamic, optimizer, device, compiles=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)
    assert of_program.keys() == state.keys()
    for name, tensor in state.items():
        assert_same_bits(of_program[name], tensor)


@pytest.mark.parametrize(
    ("kind", "strict", "missing"),
    [
        ("bags", True, "initial"),
        *((kind, False, missing) for kind, missing in zip(MODELS, MISSING, strict=True)),
    ],
    ids=str,
)
def test_an_exported_program_finds_the_ids_that_the_module_held(
    kind: str, strict: bool, missing: Any, device: torch.device
) -> None:
    """Also in a module in training mode: a program admits nothing."""
    dynamic = Dynamic(missing=missing)
    _, _, module = trained(kind, dynamic, torchembed.optim.SGD, device, compiles=False)
    batch, dim = batch_of(kind, SIZES[0], 20, device), torch.export.Dim.DYNAMIC
    shapes = tuple({0: dim} for _ in batch)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    loaded_anew = MODELS[kind](dynamic, device)  # nothing was looked up in it yet
    loaded_anew.load_state_dict(module.state_dict())
    program = torch.export.export(loaded_anew.train(), batch, dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    loaded = torch.export.load(io.BytesIO(file.getvalue()))
    module.eval()
    for seed, size in enumerate(SIZES):
        batch = batch_of(kind, size, seed + 20, device)
        assert_same_bits(loaded.module()(*batch), module(*batch))
    for name, tensor in loaded_anew.state_dict().items():
        assert_same_bits(tensor, before[name])
    # Rows of other ids must not be looked up by those that the program holds.
    with pytest.raises(RuntimeError, match=r"Unexpected key.*index\.ids"):
        loaded.module().load_state_dict(module.state_dict())


def test_programs_follow_tables_that_freeze_and_load(device: torch.device) -> None:
    module, other = (bag("sum")(Dynamic(), device) for _ in range(2))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    ids = torch.arange(4, device=device).view(2, 2)
    compiled(ids).sum().backward()
    optimizer.step()
    other(ids + 2)
    module.load_state_dict(other.state_dict())
    weight = next(module.parameters())
    weight.requires_grad_(False)
    assert_same_bits(compiled(ids + 4), other.eval()(ids + 4))
    weight.requires_grad_(True)
    assert compiled(ids + 40)[1].any()


class Loss(nn.Module):
    """The sum of the squares of a module's vectors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: tuple[Any, ...]) -> Tensor:
        vectors = self.module(*batch)
        return (vectors if isinstance(vectors, Tensor) else vectors.values()).square().sum()


def by_pipeline(kind: str, device: torch.device, *, compiles: bool) -> dict[str, Tensor]:
    """The state of a module, compiled in a model that is not, after the steps of a pipeline."""
    module = MODELS[kind](Dynamic(eviction=LFU()), device)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    batches: list[tuple[Any, ...]] = [batch_of("sum", 4, seed, device) for seed in range(5)]
    if isinstance(module, Collection):
        module = module.tables
        batches = [
            (SparseFeatures(keys=KEYS, values=ids[:, 0] % IDS, batch_size=1, hotness=(2, 1, 1)),)
            for (ids,) in batches
        ]
    if compiles:
        module.compile(backend="eager")
    with (
        TrainPipeline(Loss(module), None, [optimizer], device=device, capture=True) as pipeline,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # no graph can hold the program
        iterator = iter(batches)
        for _ in batches:
            pipeline.progress(iterator)
    return module.state_dict()


def test_a_pipeline_admits_once_what_a_program_looks_up(device: torch.device) -> None:
    """It gives ids of collections their rows ahead, which a program would do once more."""
    expected, found = (by_pipeline("sum", device, compiles=compiles) for compiles in (False, True))
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor)
    with pytest.raises(RuntimeError, match=r"must not be looked up in a program of torch\.compile"):
        by_pipeline("bags", device, compiles=True)
