"""Models as packages of AOTInductor. Compiling one takes long, so all tests share it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.exported_models import NUM_ROWS, Everything, arguments_of, arrays_of, forward_of
from torchembed.export import Pt2Model, export_pt2, load_pt2


@pytest.fixture(scope="module")
def package(tmp_path_factory: Any) -> tuple[Everything, Path]:
    model, path = Everything(), tmp_path_factory.mktemp("pt2") / "m.pt2"
    export_pt2(model, arguments_of(arrays_of(4)), path)
    assert [file.name for file in path.parent.iterdir()] == ["m.pt2"]
    return model, path


@pytest.fixture
def loaded(package: tuple[Everything, Path]) -> tuple[Everything, Pt2Model]:
    model, path = package
    return model, load_pt2(path)


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, rtol=0, atol=1e-5)


def test_any_number_of_samples_and_ids_is_answered(loaded: Any) -> None:
    model, answer = loaded
    for batch_size in (1, 2, 4, 40):
        inputs = arrays_of(batch_size)
        backwards = dict(reversed(inputs.items()))
        check_close(answer(backwards), forward_of(model, *arguments_of(inputs)))
    found = answer(arrays_of(0))
    assert {n: tuple(t.shape) for n, t in found.items()} == {"click": (0,), "buy": (0, 1)}
    for num_ids in (0, 1):
        inputs = arrays_of(3)
        for name in ("jagged", "mean", "heavy"):
            inputs[name] = torch.full((num_ids,), NUM_ROWS - 1)
            inputs[f"{name}.lengths"] = torch.tensor([0, num_ids, 0], dtype=torch.int32)
        inputs["heavy.weights"] = torch.rand(num_ids)
        check_close(answer(inputs), forward_of(model, *arguments_of(inputs)))


def test_each_weight_alone_can_be_replaced(loaded: Any) -> None:
    model, answer = loaded
    inputs = arrays_of(40)
    before = answer(inputs)
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    assert set(answer.weight_names) == set(weights)
    assert any(tensor.numel() == 1 for tensor in weights.values())
    other = Everything()
    for name, weight in weights.items():
        changed = (weight + 0.25).to(weight.dtype)
        answer.load_weights({name: changed})
        other.load_state_dict(weights | {name: changed})
        found = answer(inputs)
        assert any(not torch.allclose(found[n], before[n], rtol=0, atol=1e-3) for n in before)
        check_close(found, forward_of(other, *arguments_of(inputs)))
        answer.load_weights({name: weight})
    check_close(answer(inputs), before)


def test_ids_without_a_row_and_lengths_that_do_not_add_up_are_refused(loaded: Any) -> None:
    _, answer = loaded
    for feature in ("fixed", "jagged", "mean", "heavy"):
        for bad in (-1, -NUM_ROWS, NUM_ROWS, 2**40):
            inputs = arrays_of(40)
            inputs[feature].view(-1)[3] = bad
            with pytest.raises(RuntimeError, match="index out of bounds"):
                answer(inputs)
    for lengths in ([5, 0, 0], [0, 0, 0], [7, -1, 0], [0, 0, 7]):
        inputs = arrays_of(3)
        inputs["jagged"] = torch.zeros(6, dtype=torch.int64)
        inputs["jagged.lengths"] = torch.tensor(lengths, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="index out of bounds"):
            answer(inputs)


def test_what_does_not_fit_is_named(loaded: Any, tmp_path: Path) -> None:
    model, answer = loaded
    inputs = arrays_of(3)
    with pytest.raises(ValueError, match=r"inputs must be \['dense', 'fixed'.*got \['dense'\]"):
        answer({"dense": inputs["dense"]})
    with pytest.raises(ValueError, match=r"input fixed must be torch.int64 \[B, 2\] on cpu, got"):
        answer(inputs | {"fixed": inputs["fixed"].int()})
    with pytest.raises(ValueError, match=r"input dense must be torch.float32 \[B, 2\] on cpu"):
        answer(inputs | {"dense": torch.zeros(3, 5)})
    with pytest.raises(ValueError, match="inputs dense and fixed must have as many rows"):
        answer(inputs | {"fixed": torch.zeros(2, 2, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"weights must be of the model, .*got \['x'\]"):
        answer.load_weights({"x": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"weight click.bias must be torch.float32 \[1\], got"):
        answer.load_weights({"click.bias": torch.zeros(2)})
    examples = arguments_of(arrays_of(4))
    with pytest.raises(ValueError, match=r"path must end with \.pt2, got .*m\.onnx"):
        export_pt2(model, examples, tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError, match=r"path must be a package of export_pt2, and .*no"):
        load_pt2(tmp_path / "m.pt2")
    (tmp_path / "m.pt2").write_bytes(b"x")
    with pytest.raises(FileExistsError, match="path must not be there yet"):
        export_pt2(model, examples, tmp_path / "m.pt2")
    with pytest.raises(ValueError, match="path must be a package of export_pt2, for this machine"):
        load_pt2(tmp_path / "m.pt2")
