"""``EmbeddingBagCollection`` beside TorchRec's with the same weights, and beside formulas."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.clicks import Clicks, import_torchrec, pooled, random_clicks
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.values import normal
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, Pooling
from torchembed.ops.side_by_side import side_by_side

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Three groups; "item" is looked up in two tables, "goods" by two features.
TABLES = (
    EmbeddingBagConfig(name="users", num_embeddings=13, embedding_dim=8, feature_names=("user",)),
    EmbeddingBagConfig(
        name="genres",
        num_embeddings=9,
        embedding_dim=4,
        feature_names=("genre", "item"),
        pooling=Pooling.MEAN,
        dtype=torch.float16,
    ),
    EmbeddingBagConfig(
        name="goods", num_embeddings=29, embedding_dim=8, feature_names=("item", "history")
    ),
    EmbeddingBagConfig(
        name="tags",
        num_embeddings=5,
        embedding_dim=4,
        feature_names=("tag",),
        pooling=Pooling.MEAN,
    ),
)
# What TorchRec can do with weights.
WEIGHTED_TABLES = tuple(
    dataclasses.replace(table, pooling=Pooling.SUM, dtype=torch.float32) for table in TABLES
)
NAMES = ["user", "genre", "item@genres", "item@goods", "history", "tag"]
# "item" must be an id of both of its tables.
NUM_IDS = {"tag": 5, "item": 9, "unused": 100, "user": 13, "history": 29, "genre": 9}
HOTNESS = {"tag": 1, "item": 3, "unused": 2, "user": 1, "history": 0, "genre": 2}


def torchrec_config(table: EmbeddingBagConfig) -> Any:
    torchrec = import_torchrec()
    types = {torch.float32: torchrec.DataType.FP32, torch.float16: torchrec.DataType.FP16}
    return torchrec.EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=list(table.feature_names),
        pooling=torchrec.PoolingType(table.pooling.name),
        data_type=types[table.dtype],
    )


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name.split(".")[1]: parameter for name, parameter in module.named_parameters()}


@dataclasses.dataclass(frozen=True)
class Result:
    keys: list[str]
    widths: list[int]
    values: Tensor
    weight_grads: dict[str, Tensor]
    """The gradient of each table."""
    flat_weights_grad: Tensor | None


def look_up(module: nn.Module, features: Any, flat_weights: Tensor | None) -> Result:
    """Forward and backward, as users of either library write them."""
    result = module(features)
    values = result.values()
    values.backward(normal(*values.shape, seed=9).to(values.device, values.dtype))
    grads = {name: parameter.grad for name, parameter in weights_of(module).items()}
    flat_grad = None if flat_weights is None else flat_weights.grad
    return Result(result.keys(), result.length_per_key(), values, grads, flat_grad)


def formula(
    clicks: Clicks,
    weights: dict[str, Tensor],
    tables: tuple[EmbeddingBagConfig, ...],
    weighted: bool,
) -> Callable[[torch.dtype], Result]:
    """The exact results, where called with float64."""

    def compute(dtype: torch.dtype) -> Result:
        leaves = {
            name: weight.detach().cpu().to(dtype).requires_grad_()
            for name, weight in weights.items()
        }
        flat_weights = clicks.flat_weights().to(dtype).requires_grad_() if weighted else None
        slots = [
            (leaves[table.name], feature, table.pooling.value)
            for table in tables
            for feature in table.feature_names
        ]
        values = pooled(clicks, slots, flat_weights)
        if values.requires_grad:
            values.backward(normal(*values.shape, seed=9).to(dtype))
        grads = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        grads |= {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        flat_grad = None if flat_weights is None else flat_weights.grad
        return Result(NAMES, [], values.detach(), grads, flat_grad)

    return compute


def check(result: Result, exact: Callable[[torch.dtype], Result]) -> None:
    """Values and all gradients follow the formula."""
    assert_follows(result.values, lambda dtype: exact(dtype).values)
    for name, grad in result.weight_grads.items():
        assert_follows(grad.to_dense(), lambda dtype, name=name: exact(dtype).weight_grads[name])
    if result.flat_weights_grad is not None:
        grad_of = lambda dtype: exact(dtype).flat_weights_grad  # noqa: E731
        assert_follows(result.flat_weights_grad, grad_of)


def batch_of(clicks: Clicks, form: str, device: torch.device, weighted: bool) -> Any:
    """The batch in ``form``, and the leaf of its ids' weights."""
    flat_weights = clicks.flat_weights().to(device).requires_grad_() if weighted else None
    return getattr(clicks, form)(device, flat_weights), flat_weights


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_a_kjt_gives_what_torchrec_gives(weighted: bool, device: torch.device) -> None:
    torchrec = import_torchrec()
    tables = WEIGHTED_TABLES if weighted else TABLES
    theirs = torchrec.EmbeddingBagCollection(
        [torchrec_config(table) for table in tables], is_weighted=weighted
    )
    ours = EmbeddingBagCollection(
        [torchrec_config(table) for table in tables], is_weighted=weighted, device=device
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    clicks = random_clicks(NUM_IDS, 7)

    kjt, flat_weights = batch_of(clicks, "kjt", device, weighted)
    assert isinstance(ours(kjt), torchrec.KeyedTensor)
    result = look_up(ours, kjt, flat_weights)
    cpu = torch.device("cpu")
    expected = look_up(theirs, *batch_of(clicks, "kjt", cpu, weighted))
    assert result.keys == expected.keys == NAMES
    assert result.widths == expected.widths == [8, 4, 4, 8, 8, 4]
    assert result.values.shape == expected.values.shape == (7, 36)

    exact = formula(clicks, weights_of(theirs), tables, weighted)
    # As near to the exact result as TorchRec is.
    check(result, lambda dtype: exact(dtype) if dtype == torch.float64 else expected)


def test_a_kjt_without_samples(device: torch.device) -> None:
    # TorchRec's own collection fails here.
    module = EmbeddingBagCollection(TABLES, device=device)
    result = module(random_clicks(NUM_IDS, 0).kjt(device))
    assert isinstance(result, import_torchrec().KeyedTensor)
    assert (result.keys(), result.values().shape) == (NAMES, (0, 36))


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("form", ["jagged", "fixed"])
def test_sparse_features_give_keyed_tensors(
    form: str, weighted: bool, device: torch.device
) -> None:
    clicks = random_clicks(NUM_IDS, 6, hotness=HOTNESS if form == "fixed" else None)
    module = EmbeddingBagCollection(TABLES, is_weighted=weighted, device=device, seed=3)
    features, flat_weights = batch_of(clicks, form, device, weighted)
    result = look_up(module, features, flat_weights)
    assert (result.keys, result.widths) == (NAMES, [8, 4, 4, 8, 8, 4])
    check(result, formula(clicks, weights_of(module), TABLES, weighted))

    by_name = module(features)
    assert isinstance(by_name, torchembed.KeyedTensor)
    assert_same_bits(by_name["item@goods"], by_name.values()[:, 16:24])
    assert list(by_name.to_dict()) == NAMES


def test_keys_may_come_in_any_order(device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device)
    clicks = random_clicks(NUM_IDS, 5, hotness=HOTNESS)
    in_slot_order = [NAMES[0], "genre", "item", "history", "tag"]
    expected = module(clicks.fixed(device)).values()
    for keys in (in_slot_order, sorted(NUM_IDS), sorted(NUM_IDS, reverse=True)):
        other = clicks.reordered(keys)
        for features in (other.fixed(device), other.jagged(device, dtype=torch.int32)):
            assert_same_bits(module(features).values(), expected)


def test_a_batch_in_slot_order_of_one_group(device: torch.device) -> None:
    tables = [dataclasses.replace(table, pooling=Pooling.SUM) for table in (TABLES[0], TABLES[2])]
    module = EmbeddingBagCollection(tables, device=device)
    clicks = random_clicks({"user": 13, "item": 29, "history": 29}, 5)
    slots = [
        (weights_of(module)[table.name].detach(), feature, "sum")
        for table in tables
        for feature in table.feature_names
    ]
    assert_follows(
        module(clicks.jagged(device)).values(),
        lambda dtype: pooled(clicks, [(w.cpu().to(dtype), f, p) for w, f, p in slots]),
    )


@pytest.mark.parametrize("form", ["jagged", "fixed"])
def test_batches_without_ids_or_samples(form: str, device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device)
    for batch_size in (0, 3):
        empty = Clicks({name: [[]] * batch_size for name in NUM_IDS}, {})
        if batch_size == 0 and form == "fixed":
            features = torchembed.SparseFeatures(
                keys=empty.keys,
                values=torch.zeros(0, dtype=torch.int64, device=device),
                batch_size=0,
                hotness=(2,) * len(empty.keys),
            )
        else:
            features = getattr(empty, form)(device)
        values = module(features).values()
        assert values.tolist() == [[0.0] * 36] * batch_size
        values.sum().backward()
        assert all(p.grad.count_nonzero() == 0 for p in module.parameters())


def test_ids_behind_the_last_offset_belong_to_no_bag(device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES[:1], device=device)
    values = torch.tensor([3, 4, 999, -999], device=device)
    offsets = torch.tensor([0, 1, 2], device=device)
    features = torchembed.SparseFeatures(
        keys=("user",), values=values, batch_size=2, offsets=offsets
    )
    weight = weights_of(module)["users"]
    assert_same_bits(module(features).values(), weight[3:5])


@pytest.mark.parametrize("output_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(dtype: torch.dtype, output_dtype: torch.dtype, device: torch.device) -> None:
    tables = tuple(dataclasses.replace(table, dtype=dtype) for table in TABLES)
    module = EmbeddingBagCollection(tables, device=device, output_dtype=output_dtype)
    clicks = random_clicks(NUM_IDS, 6)
    values = module(clicks.jagged(device)).values()
    assert values.dtype == output_dtype
    exact = formula(clicks, weights_of(module), tables, weighted=False)
    assert_follows(values, lambda dtype: exact(dtype).values)
    values.float().sum().backward()
    assert all(parameter.grad.dtype == dtype for parameter in module.parameters())


def test_sparse_gradients(device: torch.device) -> None:
    clicks = random_clicks(NUM_IDS, 6)
    # First and last rows: a group's gradient is divided between its tables.
    clicks.bags["user"][0], clicks.bags["history"][0] = [0, 12], [28, 0]
    dense = EmbeddingBagCollection(TABLES, device=device)
    sparse = EmbeddingBagCollection(TABLES, device=device, sparse=True)
    expected, result = (look_up(m, clicks.jagged(device), None) for m in (dense, sparse))
    assert all(grad.is_sparse for grad in result.weight_grads.values())
    check(result, formula(clicks, weights_of(dense), TABLES, weighted=False))
    touched = {
        table.name: sorted({i for f in table.feature_names for b in clicks.bags[f] for i in b})
        for table in TABLES
    }
    for name, grad in result.weight_grads.items():
        assert grad.coalesce().indices()[0].tolist() == touched[name]
    assert not any(grad.is_sparse for grad in expected.weight_grads.values())


def test_weights_are_ignored_where_the_collection_is_not_weighted(device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device)
    clicks = random_clicks(NUM_IDS, 5)
    weighted = clicks.jagged(device, clicks.flat_weights().to(device))
    assert_same_bits(module(weighted).values(), module(clicks.jagged(device)).values())


def test_one_group_for_each_dim_dtype_and_pooling(device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device)
    groups = [[table.spec.name for table in g.tables] for g in module._table_set.groups]
    assert groups == [["users", "goods"], ["genres"], ["tags"]]


# Dynamo asks every tensor for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_trains_as_the_eager_one(device: torch.device) -> None:
    # With graph breaks, where the host looks at ids and groups.
    def train(model: nn.Module, module: EmbeddingBagCollection) -> dict[str, Tensor]:
        optimizer = torchembed.optim.SGD(module.parameters(), lr=0.5)
        clicks = random_clicks(NUM_IDS, 5, hotness=HOTNESS)
        for step in range(4):
            weights_of(module)["users"].requires_grad_(step != 1)
            values = model(clicks.fixed(device)).values()
            values.backward(normal(*values.shape, seed=step).to(device))
            optimizer.step()
        return {name: value.detach().clone() for name, value in weights_of(module).items()}

    eager, module = (EmbeddingBagCollection(TABLES, device=device) for _ in range(2))
    expected = train(eager, eager)
    try:
        found = train(torch.compile(module, backend="eager"), module)
    finally:
        torch._dynamo.reset()
    for name, weight in found.items():
        assert_same_bits(weight, expected[name])


def test_what_the_module_says_of_itself(device: torch.device) -> None:
    module = EmbeddingBagCollection(TABLES, device=device)
    assert module.embedding_bag_configs() == list(TABLES)
    assert not module.is_weighted()
    assert EmbeddingBagCollection(TABLES, is_weighted=True).is_weighted()
    assert module.device.type == device.type
    assert EmbeddingBagCollection(TABLES, device="meta").device.type == "meta"


def small_collection(num_reserved: int, *, weighted: bool, groups: int) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=7,
            embedding_dim=4,
            feature_names=(name,),
            dtype=torch.bfloat16 if groups == 2 and name == "b" else torch.float32,
        )
        for name in ("a", "b")
    ]
    collection = EmbeddingBagCollection(configs, is_weighted=weighted)
    collection.reserved_columns = num_reserved
    return collection


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_reserved", [8, 3])
def test_reserved_columns_change_no_vector(
    num_reserved: int, weighted: bool, jagged: bool, groups: int
) -> None:
    values = torch.tensor([1, 6, 0, 0, 3, 3, 5, 2, 4])
    bags: dict[str, Any] = {"hotness": (1, 2)}
    if jagged:
        bags = {"offsets": torch.tensor([0, 2, 2, 3, 3, 8, 9])}
    found = []
    for reserved in (0, num_reserved):
        weights = normal(9, seed=1).requires_grad_() if weighted else None
        features = torchembed.SparseFeatures(
            keys=("a", "b"), values=values, batch_size=3, weights=weights, **bags
        )
        collection = small_collection(reserved, weighted=weighted, groups=groups)
        vectors = collection(features).values()
        joined = side_by_side(normal(3, num_reserved, seed=2), vectors)
        assert vectors.is_contiguous() == (not reserved)
        assert (joined.data_ptr() == vectors._base.data_ptr()) if reserved else True
        (joined * normal(*joined.shape, seed=3)).sum().backward()
        found.append([joined, *(p.grad for p in collection.parameters())])
        if weights is not None:
            found[-1].append(weights.grad)
        # Prepared, and handed to two calls; gradients then go to an optimizer.
        optimizer = torchembed.optim.Adagrad(collection.parameters(), lr=0.5)
        optimizer.zero_grad()
        prepared = collection.look_up(collection.prepare(features))
        with collection.reusing([prepared]):
            twice = [
                side_by_side(normal(3, num_reserved, seed=k), collection(features).values())
                for k in range(2)
            ]
        (torch.stack(twice) * normal(2, *joined.shape, seed=4)).sum().backward()
        optimizer.step()
        found[-1] += [*twice, *(p.detach() for p in collection.parameters())]
    for plain, reserving in zip(*found, strict=True):
        assert_same_bits(plain, reserving)
