"""``EmbeddingCollection`` beside TorchRec's with the same weights, and beside plain indexing."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchembed
from tests.support.clicks import Clicks, import_torchrec, random_clicks
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.values import normal
from torchembed import EmbeddingCollection, EmbeddingConfig

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Two groups; "item" is looked up in two tables, "goods" by two features.
TABLES = (
    EmbeddingConfig(name="users", num_embeddings=13, embedding_dim=8, feature_names=("user",)),
    EmbeddingConfig(
        name="genres",
        num_embeddings=9,
        embedding_dim=8,
        feature_names=("genre", "item"),
        dtype=torch.float16,
    ),
    EmbeddingConfig(
        name="goods", num_embeddings=29, embedding_dim=8, feature_names=("item", "history")
    ),
)
SLOTS = {
    "user": ("users", "user"),
    "genre": ("genres", "genre"),
    "item@genres": ("genres", "item"),
    "item@goods": ("goods", "item"),
    "history": ("goods", "history"),
}
NUM_IDS = {"item": 9, "unused": 100, "user": 13, "history": 29, "genre": 9}
HOTNESS = {"item": 3, "unused": 2, "user": 1, "history": 0, "genre": 2}


def torchrec_config(table: EmbeddingConfig) -> Any:
    torchrec = import_torchrec()
    types = {torch.float32: torchrec.DataType.FP32, torch.float16: torchrec.DataType.FP16}
    return torchrec.EmbeddingConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=list(table.feature_names),
        data_type=types[table.dtype],
    )


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name.split(".")[1]: parameter for name, parameter in module.named_parameters()}


def gradient(number: int, values: Tensor) -> Tensor:
    return normal(*values.shape, seed=number).to(values.device, values.dtype)


def train(found: dict[str, Any]) -> None:
    torch.autograd.backward(
        [jagged.values() for jagged in found.values()],
        [gradient(number, jagged.values()) for number, jagged in enumerate(found.values())],
    )


def check(clicks: Clicks, module: nn.Module, found: dict[str, Any]) -> None:
    """Vectors, offsets and gradients are those of plain indexing."""
    weights = weights_of(module)
    assert list(found) == list(SLOTS)
    for name, (table, feature) in SLOTS.items():
        flat = [i for bag in clicks.bags[feature] for i in bag]
        expected = weights[table].detach()[flat].float()
        assert_same_bits(found[name].values(), expected)
        lengths = [len(bag) for bag in clicks.bags[feature]]
        assert found[name].lengths().tolist() == lengths
        assert found[name].offsets().tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]

    train(found)

    def exact(dtype: torch.dtype, table: str) -> Tensor:
        total = torch.zeros(weights[table].shape, dtype=dtype)
        for number, (name, (slot_table, feature)) in enumerate(SLOTS.items()):
            if slot_table == table:
                flat = torch.tensor([i for bag in clicks.bags[feature] for i in bag]).long()
                total.index_add_(0, flat, gradient(number, found[name].values()).cpu().to(dtype))
        return total

    for table, weight in weights.items():
        assert weight.grad is not None and weight.grad.dtype == weight.dtype
        assert_follows(weight.grad.to_dense(), lambda dtype, table=table: exact(dtype, table))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("form", ["jagged", "fixed"])
def test_sparse_features_give_jagged_tensors(form: str, sparse: bool, device: torch.device) -> None:
    clicks = random_clicks(NUM_IDS, 6, hotness=HOTNESS if form == "fixed" else None)
    module = EmbeddingCollection(TABLES, device=device, sparse=sparse)
    found = module(getattr(clicks, form)(device))
    assert all(isinstance(jagged, torchembed.JaggedTensor) for jagged in found.values())
    check(clicks, module, found)
    assert all(parameter.grad.is_sparse == sparse for parameter in module.parameters())


def test_a_kjt_gives_what_torchrec_gives(device: torch.device) -> None:
    torchrec = import_torchrec()
    configs = [torchrec_config(table) for table in TABLES]
    theirs = torchrec.EmbeddingCollection(configs)
    ours = EmbeddingCollection(configs, device=device)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    clicks = random_clicks(NUM_IDS, 7)
    expected = theirs(clicks.kjt(torch.device("cpu")))
    found = ours(clicks.kjt(device))
    assert list(found) == list(expected)
    for name, jagged in found.items():
        assert isinstance(jagged, torchrec.JaggedTensor)
        assert_same_bits(jagged.values(), expected[name].values())
        assert jagged.lengths().tolist() == expected[name].lengths().tolist()
    check(clicks, ours, found)


def test_keys_may_come_in_any_order(device: torch.device) -> None:
    module = EmbeddingCollection(TABLES, device=device)
    clicks = random_clicks(NUM_IDS, 5, hotness=HOTNESS)
    for keys in (sorted(NUM_IDS), ["user", "genre", "item", "history"]):
        other = clicks.reordered(keys)
        for features in (other.fixed(device), other.jagged(device, dtype=torch.int32)):
            check(clicks, module, module(features))
            module.zero_grad()


def test_tables_may_differ_in_dim(device: torch.device) -> None:
    tables = [
        dataclasses.replace(table, embedding_dim=dim)
        for table, dim in zip(TABLES, (3, 8, 5), strict=True)
    ]
    module = EmbeddingCollection(tables, device=device)
    clicks = random_clicks(NUM_IDS, 5)
    check(clicks, module, module(clicks.jagged(device)))


def test_batches_without_ids_or_samples(device: torch.device) -> None:
    module = EmbeddingCollection(TABLES, device=device)
    for batch_size in (0, 3):
        empty = Clicks({name: [[]] * batch_size for name in NUM_IDS}, {})
        check(empty, module, module(empty.jagged(device)))
        assert all(p.grad.count_nonzero() == 0 for p in module.parameters())
        module.zero_grad()


@pytest.mark.parametrize("output_dtype", FLOATS)
def test_output_dtypes(output_dtype: torch.dtype, device: torch.device) -> None:
    module = EmbeddingCollection(TABLES, device=device, output_dtype=output_dtype)
    clicks = random_clicks(NUM_IDS, 5)
    found = module(clicks.jagged(device))
    for name, (table, feature) in SLOTS.items():
        flat = [i for bag in clicks.bags[feature] for i in bag]
        expected = weights_of(module)[table].detach()[flat].to(output_dtype)
        assert_same_bits(found[name].values(), expected)


def test_what_the_module_says_of_itself() -> None:
    module = EmbeddingCollection(TABLES)
    assert module.embedding_configs() == list(TABLES)
    groups = [[table.spec.name for table in group.tables] for group in module._table_set.groups]
    assert groups == [["users", "goods"], ["genres"]]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"features must have the keys \['history', 'item'\]"):
        EmbeddingCollection(TABLES[2:])(random_clicks({"user": 13}, 2).jagged(torch.device("cpu")))
    with pytest.raises(ValueError, match=r"tables must have different names, got \['users'\]"):
        EmbeddingCollection([TABLES[0], TABLES[0]])
    with pytest.raises(TypeError, match="tables must hold EmbeddingConfig or TorchRec's config"):
        EmbeddingCollection([{"name": "users"}])


class _Arithmetic(TorchDispatchMode):
    """Counts calls that compute with integers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("fixed", [True, False])
def test_offsets_of_many_features_take_no_more_calls(fixed: bool) -> None:
    counts = set()
    for num_features in (2, 8):
        keys = tuple(f"f{n}" for n in range(num_features))
        config = EmbeddingConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=keys)
        collection = EmbeddingCollection([config])
        offsets = torch.arange(0, 6 * num_features + 1, 2)
        features = torchembed.SparseFeatures(
            keys=keys,
            values=torch.zeros(6 * num_features, dtype=torch.int64),
            batch_size=3,
            hotness=(2,) * num_features if fixed else None,
            offsets=None if fixed else offsets,
        )
        with _Arithmetic() as calls:
            found = collection(features)
        counts.add(calls.count)
        assert all(found[key].offsets().tolist() == [0, 2, 4, 6] for key in keys)
    assert len(counts) == 1
