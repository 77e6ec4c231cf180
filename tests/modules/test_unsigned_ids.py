"""Ids of uint32 and uint64: the first by their values, the others by their bits."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.dynamic_tables import ids_held
from tests.support.tape import taped_captures
from tests.support.tiny_training import assert_same_state, state_of
from torchembed import Dynamic, SparseFeatures
from torchembed.data import as_batch
from torchembed.training import TrainPipeline

NUM_STEPS = 14
EDGES = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
SIGNED = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), -1]
DTYPES = pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64], ids=str)


def unsigned(ids: Tensor, dtype: torch.dtype) -> Tensor:
    return ids.view(dtype) if dtype is torch.uint64 else ids.to(dtype)


def drawn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """int64 ids, few enough to recur, of which half are outside int32 or are negative."""
    numbers = torch.randint(24, shape, generator=generator)
    return numbers * (2**27 + 5 if dtype is torch.uint32 else -(2**59) + 5)


def one_feature(values: Tensor) -> SparseFeatures:
    return SparseFeatures(keys=("f",), values=values, batch_size=len(values), hotness=(1,))


def test_features_hold_the_bits_of_uint64_in_the_same_memory() -> None:
    given = torch.tensor(SIGNED).view(torch.uint64)
    assert given.tolist() == EDGES
    features = one_feature(given)
    assert features.values.dtype == torch.int64 and features.values.tolist() == SIGNED
    assert features.values.data_ptr() == given.data_ptr()
    strided = one_feature(torch.tensor(SIGNED).repeat_interleave(2).view(torch.uint64)[::2])
    assert strided.values.tolist() == SIGNED


def test_features_hold_the_values_of_uint32() -> None:
    features = one_feature(torch.tensor(EDGES[:4]).to(torch.uint32))
    assert features.values.dtype == torch.int64 and features.values.tolist() == EDGES[:4]


def test_offsets_are_signed() -> None:
    with pytest.raises(TypeError, match=r"^offsets must be int32 or int64, got uint64; call"):
        SparseFeatures(
            keys=("f",),
            values=torch.zeros(0, dtype=torch.int64),
            batch_size=0,
            offsets=torch.zeros(1, dtype=torch.uint64),
        )


@pytest.mark.parametrize(
    "ids",
    [EDGES, np.array(EDGES, dtype=np.uint64), torch.tensor(SIGNED).view(torch.uint64)],
    ids=["numbers", "array", "tensor"],
)
def test_lists_hold_numbers_of_uint64(ids: Any) -> None:
    assert SparseFeatures.from_dict({"f": ids}).values.tolist() == SIGNED


def test_numbers_that_no_dtype_holds_and_weights_are_refused() -> None:
    for numbers in ([2**64], [-(2**63) - 1]):
        with pytest.raises(TypeError, match=r"ids of feature f, sample 0, must be whole numbers"):
            SparseFeatures.from_dict({"f": numbers})
    with pytest.raises(TypeError, match=r"weights of feature f, sample 0, must be numbers"):
        SparseFeatures.from_dict({"f": [1]}, {"f": [2**63]})


def test_a_batch_may_have_features_of_several_dtypes() -> None:
    columns = {
        "wide": torch.tensor(SIGNED[:2]).view(torch.uint64),
        "narrow": np.array([2**32 - 1, 7], dtype=np.uint32),
        "signed": torch.tensor([-3, 4]),
    }
    sparse = as_batch((None, columns, torch.zeros(2))).sparse
    assert isinstance(sparse, SparseFeatures)
    assert sparse.values.tolist() == [0, 1, 2**32 - 1, 7, -3, 4]


@pytest.mark.parametrize("on_bad_id", ["raise", "zero"])
@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([3, 5]).to(torch.uint32),
        torch.tensor([3, 2**32 - 1]).to(torch.uint32),
        torch.tensor([3, 5]).view(torch.uint64),
        torch.tensor([3, -1]).view(torch.uint64),
        torch.tensor([3, -(2**63) + 1]).view(torch.uint64),
    ],
)
def test_static_tables_check_their_range(ids: Tensor, on_bad_id: str) -> None:
    config = torchembed.EmbeddingConfig(
        name="t", num_embeddings=5, embedding_dim=2, feature_names=("f",)
    )
    collection = torchembed.EmbeddingCollection([config], on_bad_id=on_bad_id)
    module = torchembed.Embedding(5, 2, on_bad_id=on_bad_id)
    if on_bad_id == "raise":
        with pytest.raises(IndexError):
            module(ids)
        with pytest.raises(IndexError):
            collection(one_feature(ids))
        return
    for vectors, weight in (
        (module(ids), module.weight),
        (collection(one_feature(ids))["f"].values(), collection.embeddings["t"].weight),
    ):
        assert torch.equal(vectors, torch.stack([weight[3], torch.zeros(2)]))


class Model(nn.Module):
    """Modules and a collection of dynamic tables and of static ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config, bag = torchembed.EmbeddingBagConfig, torchembed.EmbeddingBag
        settings: dict[str, Any] = {"embedding_dim": 4, "num_embeddings": 40}
        self.tables = torchembed.EmbeddingBagCollection(
            [
                config(name="a", feature_names=("a",), dynamic=Dynamic(), **settings),
                config(name="b", feature_names=("b",), **settings),
            ]
        )
        self.means = bag(40, 4, mode="mean", padding_idx=0, seed=0, dynamic=Dynamic())
        self.maxima = bag(40, 4, mode="max", seed=1, dynamic=Dynamic())
        self.jagged = bag(40, 4, mode="sum", seed=2, dynamic=Dynamic(missing="initial"))
        self.static = torchembed.Embedding(40, 4, padding_idx=2, seed=3)
        self.deep = nn.Linear(24, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        vectors = [
            self.tables(batch["sparse"]).values(),
            self.means(batch["ids"]),
            self.maxima(batch["ids"]),
            self.jagged(batch["list"], batch["offsets"]),
            self.static(batch["static"]),
        ]
        return self.deep(torch.cat(vectors, dim=1)).square().mean()


def batches(dtype: torch.dtype, *, is_unsigned: bool, is_jagged: bool) -> Iterator[dict[str, Any]]:
    def given(ids: Tensor) -> Tensor:
        return unsigned(ids, dtype) if is_unsigned else ids

    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        length = 6 + step % 2 * is_jagged
        features = drawn(generator, 8, dtype=dtype), torch.randint(40, (4,), generator=generator)
        yield {
            "sparse": SparseFeatures(
                keys=("a", "b"), values=given(torch.cat(features)), batch_size=4, hotness=(2, 1)
            ),
            "ids": given(drawn(generator, 4, 3, dtype=dtype)),
            "list": given(drawn(generator, length, dtype=dtype)),
            "offsets": torch.tensor([0, 2, 2, 5]),
            "static": given(torch.randint(40, (4,), generator=generator)),
        }


def trained(
    dtype: torch.dtype, capture: bool | None, device: torch.device, **settings: bool
) -> tuple[Model, list[str]]:
    """A trained model, and the forms of its steps; by a plain loop where ``capture`` is
    None."""
    model, forms = Model().to(device), []
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.1)
    if capture is None:
        for batch in batches(dtype, **settings):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    else:
        with contextlib.ExitStack() as stack:
            if capture and device.type == "cpu":
                stack.enter_context(taped_captures())
            pipeline = stack.enter_context(TrainPipeline(model, None, optimizer, capture=capture))
            read = batches(dtype, **settings)
            for _ in range(NUM_STEPS):
                pipeline.progress(read)
            forms = [str(kind.form) for kind in pipeline.kinds]
    assert min(ids_held(model.tables)) < 0 or max(ids_held(model.tables)) > 2**31
    return model, forms


@pytest.mark.parametrize("is_jagged", [False, True], ids=["fixed", "jagged"])
@DTYPES
def test_training_is_that_of_the_same_int64_ids(dtype: torch.dtype, is_jagged: bool) -> None:
    """By a loop, in eager steps and in captured ones, as many of which are captured."""
    check_training(dtype, (None, False, True), torch.device("cpu"), is_jagged=is_jagged)


@pytest.mark.gpu
@pytest.mark.parametrize("is_jagged", [False, True], ids=["fixed", "jagged"])
@DTYPES
def test_training_in_graphs_is_that_of_the_same_int64_ids(
    dtype: torch.dtype, is_jagged: bool, device: torch.device
) -> None:
    check_training(dtype, (False, True), device, is_jagged=is_jagged)


def check_training(
    dtype: torch.dtype, captures: Sequence[bool | None], device: torch.device, *, is_jagged: bool
) -> None:
    """Ids of ``dtype`` train the same bits as int64 ones, in steps of the same kinds."""
    form = "padded" if is_jagged else "graph"
    for capture in captures:
        signed = trained(dtype, capture, device, is_unsigned=False, is_jagged=is_jagged)
        found = trained(dtype, capture, device, is_unsigned=True, is_jagged=is_jagged)
        assert_same_state(found[0], state_of(signed[0]))
        assert found[1] == signed[1]
        assert (form in found[1]) is (capture is True)


@DTYPES
def test_lookups_and_programs_take_them(dtype: torch.dtype) -> None:
    model = Model()
    ids = drawn(torch.Generator().manual_seed(0), 4, 3, dtype=dtype)
    for module in (model.means, model.maxima):
        vectors = module(ids).detach()
        assert vectors.any()
        module.eval()
        assert torch.equal(module.lookup(unsigned(ids, dtype)).vectors, vectors)
        program = torch.compile(module, backend="eager", fullgraph=True)
        assert torch.equal(program(unsigned(ids, dtype)), vectors)
