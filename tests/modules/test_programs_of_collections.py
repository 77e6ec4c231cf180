"""Collections in programs of ``torch.compile`` and ``torch.export``."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal
from torchembed import EmbeddingBagConfig, EmbeddingConfig, SparseFeatures

KEYS = ("z", "x", "y")
TABLES = (("a", 11, 4, ("x", "y")), ("b", 7, 8, ("x",)), ("c", 9, 4, ("z",)))
SIZES = (74, 86)  # samples


class Model(nn.Module):
    """A collection under an interface of tensors."""

    def __init__(
        self, device: torch.device, *, pooled: bool, jagged: bool, on_bad_id: str = "raise"
    ) -> None:
        super().__init__()
        config = EmbeddingBagConfig if pooled else EmbeddingConfig
        tables = [
            config(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
            for name, rows, dim, features in TABLES
        ]
        kind = torchembed.EmbeddingBagCollection if pooled else torchembed.EmbeddingCollection
        self.tables = kind(tables, device=device, on_bad_id=on_bad_id)
        self.jagged = jagged

    def forward(self, values: Tensor, bags: Tensor) -> list[Tensor]:
        """
        Args:
            bags: offsets where bags are jagged; otherwise anything with a row for each sample.
        """
        if self.jagged:
            batch_size = (bags.shape[0] - 1) // len(KEYS)
            batch = SparseFeatures(keys=KEYS, values=values, offsets=bags, batch_size=batch_size)
        else:
            batch_size = bags.shape[0]
            hotness = (1, 2, values.shape[0] // batch_size - 3)
            batch = SparseFeatures(keys=KEYS, values=values, hotness=hotness, batch_size=batch_size)
        found = self.tables(batch)
        return (
            [part.values() for part in found.values()]
            if isinstance(found, dict)
            else [found.values()]
        )


def batch_of(num_samples: int, device: torch.device, *, jagged: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    num_ids = (5 + num_samples % 3) * num_samples
    values = torch.randint(7, (num_ids,), generator=generator)
    if not jagged:
        return values.to(device), torch.zeros(num_samples, 1, device=device)
    shape = (len(KEYS) * num_samples + 1,)
    offsets = torch.randint(num_ids + 1, shape, generator=generator).sort().values
    offsets[0] = 0
    return values.to(device), offsets.to(device)


def gradients(found: list[Tensor]) -> list[Tensor]:
    return [normal(*part.shape, seed=n, device=part.device) for n, part in enumerate(found)]


@pytest.fixture(autouse=True)
def numbers_of_ids_are_variables() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("pooled", "jagged", "on_bad_id"),
    [
        (True, True, "raise"),
        (True, False, "clamp"),
        (False, False, "raise"),
        (False, True, "zero"),
    ],
)
def test_a_compiled_collection_is_the_eager_one(
    pooled: bool, jagged: bool, on_bad_id: str, device: torch.device
) -> None:
    model = Model(device, pooled=pooled, jagged=jagged, on_bad_id=on_bad_id)
    compiled, weights = compiled_once(model), list(model.parameters())
    for num_samples in SIZES:
        batch = batch_of(num_samples, device, jagged=jagged)
        if on_bad_id != "raise":
            batch[0][::5] = 100
        results = compiled(*batch), model(*batch)
        for found, expected in zip(*results, strict=True):
            assert_same_bits(found, expected)
        grads = [torch.autograd.grad(r, weights, gradients(r)) for r in results]
        for found, expected in zip(*grads, strict=True):
            assert_same_bits(found, expected)


@pytest.mark.parametrize(("pooled", "jagged"), [(True, True), (False, False)])
def test_a_fused_optimizer_trains_a_compiled_collection(
    pooled: bool, jagged: bool, device: torch.device
) -> None:
    trained = []
    for compiles in (False, True):
        model = Model(device, pooled=pooled, jagged=jagged)
        optimizer = torchembed.optim.Adam(model.parameters(), lr=0.1)
        call = compiled_once(model) if compiles else model
        for num_samples in (*SIZES, SIZES[0]):
            found = call(*batch_of(num_samples, device, jagged=jagged))
            torch.autograd.backward(found, gradients(found))
            optimizer.step()
        trained.append([weight.detach() for weight in model.parameters()])
    for found, expected in zip(*trained, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("pooled", "jagged", "on_bad_id", "strict"),
    [
        (True, True, "raise", False),
        (True, False, "clamp", True),
        (False, True, "raise", True),
        (False, False, "zero", False),
    ],
)
def test_an_exported_collection_takes_other_sizes_and_weights(
    pooled: bool, jagged: bool, on_bad_id: str, strict: bool, device: torch.device
) -> None:
    model = Model(device, pooled=pooled, jagged=jagged, on_bad_id=on_bad_id)
    shapes = ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC})
    batch, file = batch_of(SIZES[0], device, jagged=jagged), io.BytesIO()
    torch.export.save(torch.export.export(model, batch, dynamic_shapes=shapes, strict=strict), file)
    program = torch.export.load(io.BytesIO(file.getvalue()))
    assert set(program.state_dict) == set(model.state_dict()) and not program.constants
    other, loaded = copy.deepcopy(model), program.module()
    with torch.no_grad():
        for weight in other.parameters():
            weight.normal_()
    loaded.load_state_dict(other.state_dict())
    for num_samples in SIZES:
        batch = batch_of(num_samples, device, jagged=jagged)
        for found, expected in zip(loaded(*batch), other(*batch), strict=True):
            assert_same_bits(found, expected)
    batch[0][3] = 100
    if on_bad_id != "raise":
        for found, expected in zip(loaded(*batch), other(*batch), strict=True):
            assert_same_bits(found, expected)
    elif device.type == "cpu":
        with pytest.raises(IndexError, match="value 100; ids of this table"):
            loaded(*batch)


def test_a_compiled_collection_takes_torchrecs_batches() -> None:
    jagged_tensor = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="needs TorchRec")
    device = torch.device("cpu")
    collection = Model(device, pooled=True, jagged=True).tables
    compiled = compiled_once(collection)
    for num_samples in SIZES:
        values, offsets = batch_of(num_samples, device, jagged=True)
        # Dynamo compiles again for a view of another part of its memory.
        values, lengths = values[: int(offsets[-1])].clone(), offsets.diff()
        batch = jagged_tensor.KeyedJaggedTensor.from_lengths_sync(
            keys=list(KEYS), values=values, lengths=lengths
        )
        found, expected = compiled(batch), collection(batch)
        assert type(found) is type(expected)
        assert_same_bits(found.values(), expected.values())
