"""Lookups of ids without a row of a dynamic table."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torchembed
from tests.support.tolerance import assert_follows, assert_same_bits
from torchembed import (
    Dynamic,
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    MinimumCount,
    Missing,
    Normal,
    SparseFeatures,
)

DIM = 4
VECTOR = (0.5, -1.25, 3.0, 0.1)
VALUES = {"zeros": "zeros", "initial": Missing.INITIAL, "vector": VECTOR}
HELD, NEW = (3, -5, 2**40), (-(2**63), 11, 2**63 - 1)
IDS = (*HELD, *NEW)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def collection(
    missing: Any, *, pooled: bool = True, dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    """A dynamic table of two features, another one of the same group whose missing ids are zeros,
    and a static one."""
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    of_tables: dict[str, Any] = {"embedding_dim": DIM, "dtype": dtype, "initializer": Normal()}
    pooling = settings.pop("pooling", None)
    if pooling is not None:
        of_tables["pooling"] = pooling
    dynamic, plain = Dynamic(missing=missing, **settings.pop("policies", {})), Dynamic()
    tables = [
        config(name="t", num_embeddings=64, feature_names=("f", "g"), dynamic=dynamic, **of_tables),
        config(name="u", num_embeddings=64, feature_names=("h",), dynamic=plain, **of_tables),
        config(name="s", num_embeddings=64, feature_names=("s",), **of_tables),
    ]
    return (EmbeddingBagCollection if pooled else EmbeddingCollection)(tables, seed=5, **settings)


def batch(*, is_jagged: bool, ids: tuple[int, ...] = IDS) -> SparseFeatures:
    generator = torch.Generator().manual_seed(len(ids))
    lengths = torch.tensor([2, 3, 1, 2]).repeat_interleave(5)
    if is_jagged:
        lengths = torch.randint(4, (20,), generator=generator)
    picks = torch.randint(len(ids), (int(lengths.sum()),), generator=generator)
    is_static = torch.arange(20).repeat_interleave(lengths) >= 15
    shape: dict[str, Any] = {"hotness": (2, 3, 1, 2)}
    if is_jagged:
        shape = {"offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])}
    return SparseFeatures(
        keys=("f", "g", "h", "s"),
        values=torch.where(is_static, picks, torch.tensor(ids)[picks]),
        batch_size=5,
        weights=torch.rand(len(picks), generator=generator) + 0.5,
        **shape,
    )


def row_of(module: Any, table: str, id_: int) -> Tensor | None:
    """The row that a table holds for an id."""
    (found,) = [t for t in module.table_set.tables if t.spec.name == table]
    contents = found.index_contents()
    if not contents:
        return found.parameter.detach()[id_]
    place = ((contents["ids"] == id_) & (contents["digests"] > 0)).nonzero().flatten()
    return None if len(place) == 0 else found.parameter.detach()[int(place)]


def expected_vectors(module: Any, features: SparseFeatures, missing: str) -> list[Tensor]:
    """For each slot the vectors of its ids, ``[n, D]``, found one by one."""
    initial = copy.deepcopy(module).train()
    unseen = SparseFeatures(
        keys=tuple("fghs"),
        values=torch.tensor([*IDS * 3, *range(6)]),
        batch_size=6,
        hotness=(1, 1, 1, 1),
        weights=torch.ones(24),
    )
    initial(unseen)
    dtype = module.table_set.tables[0].spec.dtype
    constants = {
        "zeros": torch.zeros(DIM, dtype=dtype),
        "vector": torch.tensor(VECTOR, dtype=dtype),
    }

    def vector(table: str, id_: int) -> Tensor:
        row = row_of(module, table, id_)
        if row is not None:
            return row
        constant = constants.get("zeros" if table == "u" else missing)
        return row_of(initial, table, id_) if constant is None else constant  # type: ignore[return-value]

    of_slots = features.values.split(features.lengths().sum(1).tolist())
    return [
        torch.stack([vector(table, id_) for id_ in ids.tolist()])
        for table, ids in zip("ttus", of_slots, strict=True)
    ]


def trained(make: Callable[[], Any], optimizer: str = "Adagrad") -> Any:
    """A module that holds the first ids, after two steps."""
    module = make()
    fused = getattr(torchembed.optim, optimizer)(module.parameters(), lr=0.25)
    for _ in range(2):
        result = module(batch(is_jagged=True, ids=HELD))
        parts = result.values() if isinstance(result, dict) else [result]
        sum(part.values().sum() for part in parts).backward()
        fused.step()
    return module.eval()


def bags_of(features: SparseFeatures) -> Iterator[tuple[int, int, slice]]:
    """Slot, sample and the positions of each bag among those of its slot."""
    for slot, lengths in enumerate(features.lengths().tolist()):
        first = 0
        for sample, length in enumerate(lengths):
            yield slot, sample, slice(first, first + length)
            first += length


@pytest.mark.parametrize("is_jagged", [False, True], ids=["fixed", "jagged"])
@pytest.mark.parametrize("missing", VALUES)
@pytest.mark.parametrize(
    "form", ["sum", "mean", "weighted", "float16", "bfloat16", "narrow"], ids=str
)
def test_bags_in_evaluation(form: str, missing: str, is_jagged: bool) -> None:
    """Beside ids that have rows; a mean counts ids without one."""
    dtype = getattr(torch, form) if "float" in form else torch.float32
    settings: dict[str, Any] = {
        "mean": {"pooling": "mean"},
        "weighted": {"is_weighted": True},
        "narrow": {"output_dtype": torch.bfloat16},
    }.get(form, {})
    module = trained(lambda: collection(VALUES[missing], dtype=dtype, **settings))
    features = batch(is_jagged=is_jagged)
    before = copy.deepcopy(module.state_dict())
    found = module(features).values()
    assert found.dtype == settings.get("output_dtype", torch.float32)
    vectors = expected_vectors(module, features, missing)
    weights = features.weights if form == "weighted" else torch.ones(len(features.values))
    of_slots = weights.split(features.lengths().sum(1).tolist())

    def pooled(dtype: torch.dtype) -> Tensor:
        out = torch.zeros(5, 4 * DIM, dtype=dtype)
        for slot, sample, bag in bags_of(features):
            terms = vectors[slot][bag].to(dtype) * of_slots[slot][bag].to(dtype).unsqueeze(1)
            size = max(len(terms), 1) if form == "mean" else 1
            out[sample, slot * DIM : (slot + 1) * DIM] = terms.sum(0) / size
        return out

    assert_follows(found, pooled)
    assert_same_bits(found, module.lookup(features).vectors.values())
    with torch.no_grad():
        assert_same_bits(found, module.train()(features).values())
    for name, tensor in module.state_dict().items():
        assert_same_bits(tensor, before[name])


@pytest.mark.parametrize("is_jagged", [False, True], ids=["fixed", "jagged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("missing", VALUES)
def test_sequences_in_evaluation(missing: str, dtype: torch.dtype, is_jagged: bool) -> None:
    """Vectors are rounded to the dtype of the table, as rows are."""
    module = trained(lambda: collection(VALUES[missing], pooled=False, dtype=dtype))
    features = batch(is_jagged=is_jagged)
    found = module(features)
    for key, expected in zip("fghs", expected_vectors(module, features, missing), strict=True):
        assert_same_bits(found[key].values(), expected.float())
        assert_same_bits(module.lookup(features).vectors[key].values(), expected.float())


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("missing", ["initial", "vector"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "torch's"])
def test_ids_that_are_not_admitted_are_never_trained(
    is_fused: bool, missing: str, pooled: bool
) -> None:
    """With a loss whose gradients do not depend on the vectors, the same rows come of it whatever
    ids without a row are looked up as."""
    states = []
    for value in (VALUES[missing], "zeros"):
        module = collection(value, pooled=pooled, policies={"admission": MinimumCount(3)})
        optimizers = torchembed.optim if is_fused else torch.optim
        optimizer = optimizers.SGD(module.parameters(), lr=0.5)
        for ids in (HELD, HELD, HELD, IDS):
            optimizer.zero_grad()
            result = module(batch(is_jagged=False, ids=ids))
            parts = result.values() if isinstance(result, dict) else [result]
            sum((n + 1) * part.values().sum() for n, part in enumerate(parts)).backward()
            optimizer.step()
        states.append(module.state_dict())
        assert row_of(module, "t", HELD[0]) is not None
    for name, tensor in states[0].items():
        assert_same_bits(tensor, states[1][name])


@pytest.mark.parametrize("missing", ["initial", "vector"])
def test_weights_of_ids_without_a_row_get_their_gradients(missing: str) -> None:
    """As those of ids whose rows hold the same values."""
    module = trained(lambda: collection(VALUES[missing], is_weighted=True))
    features = batch(is_jagged=True)
    assert features.weights is not None
    features.weights.requires_grad_()
    coefficients = torch.linspace(-1, 2, 5 * 4 * DIM).view(5, 4, DIM)
    (module(features).values().view(5, 4, DIM) * coefficients).sum().backward()
    vectors = expected_vectors(module, features, missing)

    def expected(dtype: torch.dtype) -> Tensor:
        return torch.cat(
            [
                vectors[slot][bag].to(dtype) @ coefficients[sample, slot].to(dtype)
                for slot, sample, bag in bags_of(features)
            ]
        )

    assert_follows(features.weights.grad, expected)


@pytest.mark.parametrize("missing", ["initial", "vector"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 11])
def test_embedding_bags(padding_idx: int | None, mode: str, missing: str) -> None:
    """A maximum counts ids without a row; padding is looked up as nothing whatever is missing."""
    dynamic = Dynamic(missing=VALUES[missing])
    bag = EmbeddingBag(32, DIM, mode=mode, padding_idx=padding_idx, seed=2, dynamic=dynamic)
    bag(torch.tensor([HELD]))
    initial = copy.deepcopy(bag)
    initial(torch.tensor([IDS]))
    ids = torch.tensor([[3, 11], [11, 11], [-5, NEW[0]], [NEW[2], NEW[0]]])
    found = bag.eval()(ids)
    assert_same_bits(found, bag(ids.flatten(), torch.arange(0, 8, 2)))
    assert_same_bits(found, bag.lookup(ids).vectors)

    def vector(id_: int) -> Tensor:
        row = row_of(bag, "weight", id_)
        if row is not None:
            return row
        vector = torch.tensor(VECTOR)
        return vector if missing == "vector" else row_of(initial, "weight", id_)  # type: ignore[return-value]

    def pooled(dtype: torch.dtype) -> Tensor:
        bags = []
        for of_bag in ids.tolist():
            terms = [vector(id_).to(dtype) for id_ in of_bag if id_ != padding_idx]
            if not terms:
                bags.append(torch.zeros(DIM, dtype=dtype))
            elif mode == "max":
                bags.append(torch.stack(terms).amax(0))
            else:
                bags.append(getattr(torch.stack(terms), mode)(0))
        return torch.stack(bags)

    assert_follows(found, pooled)


@pytest.mark.parametrize("missing", ["initial", "vector"])
def test_embeddings(missing: str) -> None:
    embedding = Embedding(32, DIM, padding_idx=11, seed=2, dynamic=Dynamic(missing=VALUES[missing]))
    embedding(torch.tensor(HELD))
    initial = copy.deepcopy(embedding)
    expected = initial(torch.tensor(IDS)).detach()
    if missing == "vector":
        expected[3:] = torch.tensor(VECTOR)
        expected[4] = 0
    found = embedding.eval()(torch.tensor([IDS]))
    assert_same_bits(found, expected.unsqueeze(0))
    assert_same_bits(embedding.lookup(torch.tensor(IDS)).vectors, expected)


@pytest.mark.parametrize("missing", ["initial", "vector"])
def test_what_is_kept_outlives_the_call_that_made_it(missing: str) -> None:
    """A fake call, and one in inference mode, before weights of ids are trained."""
    module = trained(lambda: collection(VALUES[missing], is_weighted=True))
    features = batch(is_jagged=False)
    expected = copy.deepcopy(module)(features).values()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (features.values, features.weights)]
        of_fakes = dataclasses.replace(features, values=fakes[0], weights=fakes[1])
        assert module(of_fakes).values().shape == expected.shape
    with torch.inference_mode():
        assert_same_bits(module(features).values(), expected)
    assert features.weights is not None
    features.weights.requires_grad_()
    module(features).values().sum().backward()
    assert features.weights.grad is not None


def test_initial_rows_of_32_bit_ids() -> None:
    embedding = Embedding(32, DIM, seed=2, dynamic=Dynamic(missing="initial")).eval()
    ids = torch.tensor([5, -1, 2**31 - 1])
    assert_same_bits(embedding(ids.int()), embedding(ids))


@pytest.mark.parametrize("missing", ["initial", "vector"])
def test_refused_ids(missing: str) -> None:
    """Three ids of one batch in a table of two rows."""
    wide = Embedding(8, DIM, seed=2, dynamic=Dynamic())
    embedding = Embedding(2, DIM, seed=2, dynamic=Dynamic(missing=VALUES[missing]))
    optimizer = torchembed.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.tensor(HELD)
    expected = wide(ids).detach()
    found = embedding(ids)
    has_row = torch.tensor([row_of(embedding, "weight", id_) is not None for id_ in HELD])
    assert has_row.sum() == 2
    if missing == "vector":
        expected[~has_row] = torch.tensor(VECTOR)
    assert_same_bits(found, expected)
    found.sum().backward()
    optimizer.step()
    assert_same_bits(embedding.eval()(ids)[~has_row], expected[~has_row])
    assert_same_bits(embedding(ids)[has_row], expected[has_row] - 1)


def test_vectors_from_any_floating_tensor_or_sequence() -> None:
    assert Dynamic(missing=torch.tensor(VECTOR, dtype=torch.float64)).missing == VECTOR
    assert Dynamic(missing=[1, 2]).missing == (1.0, 2.0)
    assert Dynamic(missing="initial").missing is Missing.INITIAL
    assert hash(Dynamic(missing=[1, 2])) == hash(Dynamic(missing=(1.0, 2.0)))


@pytest.mark.parametrize(
    ("missing", "error", "message"),
    [
        ("nothing", ValueError, r"a vector or HashedRows\(...\), got 'nothing'"),
        (1.0, TypeError, r"a vector of numbers or HashedRows\(...\), got 1.0"),
        ([True], TypeError, r"HashedRows\(...\), got \[True\]"),
        (torch.tensor([1, 2]), TypeError, "missing must be floating, got torch.int64"),
        (torch.ones(2, 2), ValueError, r"missing must have one dimension, got shape \(2, 2\)"),
        ([0.0, float("nan")], ValueError, "missing must hold finite numbers, got nan at place 1"),
    ],
    ids=str,
)
def test_values_that_are_none(missing: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Dynamic(missing=missing)


def test_vectors_that_fit_no_row() -> None:
    with pytest.raises(
        ValueError, match="missing of table t must be a vector of embedding_dim = 4 numbers, got 2"
    ):
        collection([1.0, 2.0])
    with pytest.raises(ValueError, match=r"missing of this module .* = 3 numbers, got 4"):
        EmbeddingBag(8, 3, dynamic=Dynamic(missing=VECTOR))
    with pytest.raises(ValueError, match=r"finite in torch.float16, got 100000.0"):
        EmbeddingBag(8, 1, dtype=torch.float16, dynamic=Dynamic(missing=[-1e5]))
