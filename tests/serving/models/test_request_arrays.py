"""Requests of any arrays are answered as the model would, or refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support.served_lookups import options_over
from tests.zoo.served_models import MODELS, NUM_ROWS
from torchembed import SparseFeatures
from torchembed.serving.interface import InvalidRequestError
from torchembed.serving.models import ModelRepository, deploy
from torchembed.stores import MemoryStore

BAGS = st.lists(st.integers(0, NUM_ROWS - 1), max_size=4)
DTYPES = ["int8", "int32", "int64", ">i8", "uint64", "float16", "float32", "float64", "bool"]
NUMBERS = [-(2**63), -1, 0, 1, NUM_ROWS - 1, NUM_ROWS, NUM_ROWS + 1, 2**31, 2**63 - 1]


@pytest.fixture(scope="module", params=["tasks", "weighted", "columns", "din"])
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    torch.manual_seed(2)
    case = MODELS[request.param]()
    folder: Path = tmp_path_factory.mktemp("models")
    deploy(case.model, folder, name="m", version=1, examples=case.examples(4))
    with MemoryStore() as store, ModelRepository(folder, options_over(store)) as repository:
        repository.start()
        yield case, repository.model("m")


@st.composite
def changed_arrays(draw: st.DrawFn, array: np.ndarray) -> np.ndarray:
    """An array that an input might be sent as."""
    kind = draw(st.sampled_from(["as it is", "dtype", "shape", "numbers", "layout"]))
    if kind == "dtype":
        with np.errstate(all="ignore"):
            return array.astype(draw(st.sampled_from(DTYPES)))
    if kind == "shape":
        shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
        return np.zeros(shape, dtype=array.dtype)
    if kind == "numbers" and array.size and array.dtype.kind == "i":
        changed = array.copy()
        limits = np.iinfo(array.dtype)
        number = draw(st.sampled_from([n for n in NUMBERS if limits.min <= n <= limits.max]))
        changed.flat[draw(st.integers(0, array.size - 1))] = number
        return changed
    if kind == "layout" and array.ndim:
        read_only = np.repeat(array, 2, axis=0)[::2]
        read_only.flags.writeable = False
        return read_only
    return array


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_arrays_are_answered_or_refused(served: Any, data: st.DataObject) -> None:
    case, model = served
    torch.manual_seed(3)
    request = case.request(case.examples(3))
    sent = {name: data.draw(changed_arrays(array), name) for name, array in request.items()}
    is_same = all(
        a.dtype == sent[n].dtype and np.array_equal(a, sent[n]) for n, a in request.items()
    )
    try:
        answer = model.answer(sent)
    except InvalidRequestError as error:
        words = (*request, "number of samples", "at least 1")
        is_named = any(word in str(error) for word in words)
        if is_same or not is_named:
            raise
        return
    for form in model.form.outputs:
        found = answer.outputs[form.name]
        assert found.dtype == form.dtype and found.shape[1:] == form.shape[1:]
    sizes = {len(array) for array in answer.outputs.values()}
    assert len(sizes) == 1 and answer.num_default_rows == answer.outputs["default_rows"].sum()
    if is_same:
        whole = model.answer(request)
        for name, found in answer.outputs.items():
            np.testing.assert_array_equal(found, whole.outputs[name])


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: Any) -> Any:
    case, folder = MODELS["tasks"](), tmp_path_factory.mktemp("models")
    deploy(case.model, folder, name="m", version=1, examples=case.examples(4))
    with MemoryStore() as store, ModelRepository(folder, options_over(store)) as repository:
        repository.start()
        yield case, repository.model("m")


@settings(max_examples=60, deadline=None)
@given(samples=st.lists(st.tuples(BAGS, BAGS), min_size=1, max_size=6))
def test_bags_of_any_lengths_are_answered_as_by_the_model(tasks: Any, samples: Any) -> None:
    case, model = tasks
    bags = [bag for feature in zip(*samples, strict=True) for bag in feature]
    lengths = torch.tensor([len(bag) for bag in bags])
    batch = {
        "sparse": SparseFeatures(
            keys=("f0", "f1"),
            values=torch.tensor([n for bag in bags for n in bag], dtype=torch.int64),
            offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            batch_size=len(samples),
        ),
        "user": torch.randn(len(samples), 3),
        "context": torch.randn(len(samples), 2),
    }
    answer = model.answer(case.request(batch))
    case.model.eval()
    with torch.no_grad():
        for name, expected in case.model(batch).items():
            np.testing.assert_allclose(answer.outputs[name], expected, rtol=0, atol=2e-6)
    assert answer.num_default_rows == 0
