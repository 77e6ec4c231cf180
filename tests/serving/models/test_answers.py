"""Loaded models answer as the models that were deployed."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import torchembed
from tests.support.served_lookups import options_over
from tests.zoo.served_models import MODELS, NUM_ROWS, ServedCase
from torchembed.checkpoints.files.tensor_file import open_safetensors
from torchembed.serving.interface import InvalidRequestError
from torchembed.serving.levels import RowFormat
from torchembed.serving.models import DeployError, ModelRepository, deploy
from torchembed.serving.models.dense_program import WEIGHTS_FILE
from torchembed.stores import MemoryStore


def forward(model: nn.Module, arguments: Any) -> dict[str, np.ndarray]:
    """The outputs of a model by name."""
    model.eval()
    with torch.no_grad():
        found = model(*arguments) if type(arguments) is tuple else model(arguments)
    named = found if isinstance(found, dict) else {"output": found}
    return {name: tensor.double().numpy() for name, tensor in named.items()}


def of_dtype(arguments: Any, dtype: torch.dtype) -> Any:
    """``arguments`` with their floating-point tensors in ``dtype``."""

    def converted(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    return tree_map(converted, arguments)


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    torch.manual_seed(1)
    case = MODELS[request.param]()
    folder = tmp_path_factory.mktemp("models")
    deploy(case.model, folder, name="m", version=1, examples=case.examples(4))
    with MemoryStore() as store, ModelRepository(folder, options_over(store)) as repository:
        repository.start()
        yield case, repository.model("m")


@pytest.mark.parametrize("num_samples", [1, 2, 7])
def test_answers_equal_the_models_forward(served: Any, num_samples: int) -> None:
    case, model = served
    examples = case.examples(num_samples)
    answer = model.answer(case.request(examples))
    expected = forward(case.model, examples)
    assert set(answer.outputs) == {*expected, "default_rows"}
    for name, values in expected.items():
        found = answer.outputs[name]
        assert found.dtype == np.float32 and found.shape == values.shape
        # The same numbers, but products may be added up in another order for another form.
        np.testing.assert_allclose(found, values, rtol=0, atol=2e-6 * max(1, abs(values).max()))
    assert answer.version == "1" and answer.num_default_rows == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_dense_parts_of_16_bits_answer_as_models_of_them(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    case = MODELS[name]()

    def deployed() -> Path:
        examples = case.examples(4)
        return deploy(
            case.model, tmp_path, name="m", version=1, examples=examples, dense_dtype=dtype
        )

    if dtype == torch.float16 and name in ("din", "sequence"):
        # They mask with a number that float16 lacks.
        with pytest.raises(DeployError, match=r"computes in torch\.float16, and is not: value"):
            deployed()
        return
    weights = open_safetensors(deployed() / WEIGHTS_FILE).values()
    assert all(weight.dtype in (dtype, torch.int64) for weight in weights)
    examples = case.examples(7)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        found = repository.model("m").answer(case.request(examples)).outputs
    # Float32 is exact beside 16 bits.
    exact = forward(case.model, examples)
    rounded = forward(copy.deepcopy(case.model).to(dtype), of_dtype(examples, dtype))
    for output, values in exact.items():
        assert found[output].dtype == np.float32
        error = abs(rounded[output] - values).max()
        unit = torch.finfo(dtype).eps * abs(values).max()
        np.testing.assert_allclose(found[output], values, rtol=0, atol=2 * error + unit)


def test_only_the_outputs_that_are_asked_for_come(served: Any) -> None:
    case, model = served
    request = case.request(case.examples(3))
    assert set(model.answer(request, ["default_rows"]).outputs) == {"default_rows"}
    with pytest.raises(InvalidRequestError, match=r"outputs must be among \[.*got \['x'\]"):
        model.answer(request, ["x"])


def changed(request: Mapping[str, np.ndarray], name: str, array: Any) -> dict[str, np.ndarray]:
    return {**request, name: array}


def test_requests_that_do_not_fit_are_named(served: Any) -> None:
    case, model = served
    request = case.request(case.examples(3))
    for name, array in request.items():
        without = {n: a for n, a in request.items() if n != name}
        with pytest.raises(InvalidRequestError, match=f"got none of .*{name}"):
            model.answer(without)
        with pytest.raises(InvalidRequestError, match=f"input {name} must be of dtype"):
            model.answer(changed(request, name, array.astype(np.float16)))
        with pytest.raises(InvalidRequestError, match=f"input {name} must have shape"):
            model.answer(changed(request, name, array[..., None]))
    with pytest.raises(InvalidRequestError, match=r"unknown ones \['x'\]"):
        model.answer(changed(request, "x", np.zeros(3)))


def dlrm(tmp_path: Path) -> tuple[ServedCase, Path]:
    case = MODELS["dlrm"]()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    return case, tmp_path


def test_ids_out_of_range_and_other_sizes_are_named(tmp_path: Path) -> None:
    case, folder = dlrm(tmp_path)
    with MemoryStore() as store, ModelRepository(folder, options_over(store)) as repository:
        repository.start()
        model = repository.model("m")
        request = case.request(case.examples(3))
        for bad in (-1, NUM_ROWS):
            ids = np.array([[0], [bad], [1]])
            message = rf"ids of feature f0 must be in \[0, {NUM_ROWS}\), got {bad}"
            with pytest.raises(InvalidRequestError, match=message):
                model.answer(changed(request, "f0", ids))
        with pytest.raises(InvalidRequestError, match=r"one number of samples, got \[2, 3\]"):
            model.answer(changed(request, "f0", request["f0"][:2]))


def test_lengths_must_add_up_to_the_ids(tmp_path: Path) -> None:
    case = MODELS["tasks"]()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        model = repository.model("m")
        request = case.request(case.examples(3))
        request["f0"] = np.arange(4)
        for lengths in ([2, 1, 2], [5, -1, 0]):
            array = np.array(lengths, dtype=np.int32)
            with pytest.raises(InvalidRequestError, match=r"f0\.lengths must not be negative"):
                model.answer(changed(request, "f0.lengths", array))


def test_dynamic_tables_answer_and_count_ids_without_a_row(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dynamic = torchembed.Dynamic(missing="zeros")
            self.items = torchembed.EmbeddingBag(64, 4, mode="sum", dynamic=dynamic)

        def forward(self, ids: Tensor) -> Tensor:
            return self.items(ids)

    model = Model().train()
    known = torch.tensor([[-1, 2**63 - 1], [-(2**63), 0]])
    model(known).sum().backward()
    deploy(model, tmp_path, name="m", version=1, examples=known)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        asked = torch.tensor([[-1, 5], [7, 9], [-(2**63), 2**63 - 1]])
        answer = repository.model("m").answer({"ids": asked.numpy()})
    np.testing.assert_array_equal(answer.outputs["output"], forward(model, asked)["output"])
    assert answer.outputs["default_rows"].tolist() == [1, 2, 0]
    assert answer.num_default_rows == 3


def test_narrow_rows_are_close_and_defaults_are_the_options(tmp_path: Path) -> None:
    case, folder = dlrm(tmp_path)
    examples = case.examples(5)
    expected = forward(case.model, examples)["output"]
    with MemoryStore() as store:
        options = options_over(store, row_format=RowFormat.FP16)
        with ModelRepository(folder, options) as repository:
            repository.start()
            found = repository.model("m").answer(case.request(examples)).outputs["output"]
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    with MemoryStore() as store:
        options = options_over(store, defaults={"x": 1.0})
        with pytest.raises(ValueError, match=r"defaults must be of tables of the model.*\['x'\]"):
            ModelRepository(folder, options).start()


def test_histories_without_any_id_are_answered(tmp_path: Path) -> None:
    case = MODELS["sequence"]()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    empty = torchembed.SparseFeatures(
        keys=("seen", "target"),
        values=torch.tensor([1, 2]),
        offsets=torch.tensor([0, 0, 0, 1, 2]),
        batch_size=2,
    )
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        found = repository.model("m").answer(case.request(empty)).outputs["output"]
    expected = forward(case.model, empty)["output"]
    np.testing.assert_allclose(found, expected, atol=1e-6)
