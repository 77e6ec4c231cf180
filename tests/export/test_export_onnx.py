"""Models as ONNX files, answered by onnxruntime as by PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.exported_models import (
    LAST_ROW,
    NUM_ROWS,
    Everything,
    arguments_of,
    arrays_of,
    forward_of,
    numpy_of,
)
from tests.zoo.served_models import MODELS, bags, feature_arrays, fixed
from torchembed import models
from torchembed.core.types import OnBadId
from torchembed.export import DeployError, export_onnx

onnx = pytest.importorskip("onnx", reason="needs torchembed[export]")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs torchembed[export]")
pytest.importorskip("onnxscript", reason="needs torchembed[export]")

Answer = Callable[[dict[str, np.ndarray]], dict[str, Tensor]]
SIZES = (1, 2, 4, 40)


def answers_of(path: Path) -> Answer:
    """Answers of onnxruntime from a file, by name."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it refuses is raised, and need not be logged
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def answer(inputs: dict[str, np.ndarray]) -> dict[str, Tensor]:
        return {
            n: torch.from_numpy(a) for n, a in zip(names, session.run(None, inputs), strict=True)
        }

    return answer


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right.float(), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: Any) -> tuple[Everything, Path, Answer]:
    model = Everything().train()
    path = tmp_path_factory.mktemp("onnx") / "everything.onnx"
    export_onnx(model, arguments_of(arrays_of(4)), path)
    assert model.training and all(p.requires_grad for p in model.parameters())
    return model, path, answers_of(path)


@pytest.mark.parametrize("batch_size", SIZES)
def test_answers_are_those_of_the_model(everything: Any, batch_size: int) -> None:
    model, _, answer = everything
    inputs = arrays_of(batch_size)
    check_close(answer(numpy_of(inputs)), forward_of(model, *arguments_of(inputs)))


def test_no_sample_and_samples_without_any_id_are_answered(everything: Any) -> None:
    model, _, answer = everything
    found = answer(numpy_of(arrays_of(0)))
    assert {n: tuple(t.shape) for n, t in found.items()} == {"click": (0,), "buy": (0, 1)}
    inputs = arrays_of(3)
    for name in ("jagged", "mean", "heavy"):
        inputs[name] = inputs[name][:0]
        inputs[f"{name}.lengths"] = torch.zeros_like(inputs[f"{name}.lengths"])
    inputs["heavy.weights"] = inputs["heavy.weights"][:0]
    check_close(answer(numpy_of(inputs)), forward_of(model, *arguments_of(inputs)))


@pytest.mark.parametrize("bad", [-1, -NUM_ROWS, NUM_ROWS, 2**40])
@pytest.mark.parametrize("feature", ["fixed", "jagged", "mean", "heavy"])
def test_ids_without_a_row_are_refused(everything: Any, feature: str, bad: int) -> None:
    _, _, answer = everything
    inputs = arrays_of(40)
    inputs[feature].view(-1)[3] = bad
    with pytest.raises(Exception, match="indices element out of data bounds"):
        answer(numpy_of(inputs))


@pytest.mark.parametrize("change", [[5, 0, 0, 0], [0, 0, 0, 0], [7, -1, 0, 0], [0, 0, 0, 6]])
def test_lengths_that_do_not_add_up_are_refused(everything: Any, change: list[int]) -> None:
    _, _, answer = everything
    inputs = arrays_of(4)
    inputs["jagged"] = torch.zeros(6 + (sum(change) == 6), dtype=torch.int64)
    inputs["jagged.lengths"] = torch.tensor(change, dtype=torch.int32)
    with pytest.raises(Exception, match=r"out of data bounds|invalid indice found"):
        answer(numpy_of(inputs))


def test_the_file_has_neither_loops_nor_paths_of_the_machine(everything: Any) -> None:
    _, path, _ = everything
    graph = onnx.load(path).graph
    kinds = {node.op_type for node in graph.node}
    assert "Gather" in kinds and "ScatterND" in kinds and kinds.isdisjoint({"Loop", "If", "Scan"})
    assert not any(node.metadata_props for node in graph.node)
    assert str(Path(__file__).parents[2]).encode() not in path.read_bytes()
    names = {initializer.name for initializer in graph.initializer}
    assert {"bags.embedding_bags.shared.weight", "buy.weight"} <= names
    assert not path.with_name(f"{path.name}.data").exists()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_int32_ids_other_treatments_of_bad_ids_and_weights_beside_the_file(tmp_path: Path) -> None:
    model = Everything(OnBadId.ZERO)
    path = tmp_path / "m.onnx"
    examples = arguments_of(arrays_of(4, torch.int32))
    export_onnx(model, examples, path, max_file_bytes=100)
    assert path.with_name("m.onnx.data").stat().st_size >= NUM_ROWS * 3 * 4
    graph = onnx.load(path, load_external_data=False).graph
    outside = {i.name: i for i in graph.initializer if i.external_data}
    assert "bags.embedding_bags.shared.weight" in outside
    places = {e.key: e.value for e in outside["bags.embedding_bags.shared.weight"].external_data}
    assert places["location"] == "m.onnx.data"
    answer = answers_of(path)
    inputs = arrays_of(9, torch.int32)
    inputs["fixed"][2, 1], inputs["fixed"][3, 0] = -1, NUM_ROWS
    inputs["mean"][0], inputs["heavy"][-1] = 2**31 - 1, LAST_ROW
    check_close(answer(numpy_of(inputs)), forward_of(model, *arguments_of(inputs)))
    with pytest.raises(FileExistsError, match=r"path must not be there yet, and .*m.onnx is"):
        export_onnx(model, examples, path)


class _Together(nn.Module):
    """Several models over a batch each."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, batches: dict[str, Any]) -> dict[str, Tensor]:
        return {name: part(batches[name]) for name, part in self.parts.items()}


def test_single_tables_columns_offsets_and_sequences(tmp_path: Path) -> None:
    cases = {name: MODELS[name]() for name in ("din", "columns", "sequence")}
    model = _Together({name: case.model for name, case in cases.items()})

    def batches(size: int) -> dict[str, Any]:
        return {name: case.examples(size) for name, case in cases.items()}

    path = tmp_path / "m.onnx"
    export_onnx(model, batches(4), path)
    answer = answers_of(path)
    for size in SIZES:
        given = batches(size)
        inputs: dict[str, np.ndarray] = {}
        for name, case in cases.items():
            # Features of collections have names of their own, all else that of its place.
            prefix = "" if name == "sequence" else f"{name}."
            inputs |= {f"{prefix}{n}": a for n, a in case.request(given[name]).items()}
        check_close(answer(inputs), forward_of(model, given))


def _tasks(model: Callable[..., nn.Module], **sizes: Any) -> nn.Module:
    return model(
        bags(3, 8),
        task_names=("click", "buy"),
        tower_layer_sizes=[4],
        dense_in_features=5,
        **sizes,
    )


class _Library(nn.Module):
    """The models of this library that take dense and sparse features."""

    def __init__(self) -> None:
        super().__init__()
        deep: dict[str, Any] = {"layer_sizes": [8, 4], "dense_in_features": 5}
        normed = deep | {"batch_norm": True, "dropout": 0.3}
        self.parts = nn.ModuleDict(
            {
                "dlrm": models.DLRM(bags(3, 8), 5, [16, 8], [16, 1]),
                "dlrm_dcnv2": models.DLRM_DCNv2(bags(3, 8), 5, [16, 8], [16, 1], 2, 4),
                "dcnv2": models.DCNv2(bags(3, 8), num_cross_layers=2, **normed),
                "dcn": models.DCN(bags(3, 8), num_cross_layers=2, **deep),
                "dnn": models.DNN(bags(3, 8), **normed),
                "deepfm": models.DeepFM(bags(3, 8), bags(3, 1), **normed),
                "wide_and_deep": models.WideAndDeep(bags(3, 8), bags(3, 1), **deep),
                "xdeepfm": models.XDeepFM(bags(3, 8), bags(3, 1), cin_layer_sizes=[4, 4], **deep),
                "autoint": models.AutoInt(
                    bags(3, 8), num_attention_layers=2, attention_dim=8, num_heads=2, **deep
                ),
                "shared_bottom": _tasks(models.SharedBottom, bottom_layer_sizes=[8]),
                "mmoe": _tasks(models.MMoE, num_experts=3, expert_layer_sizes=[8]),
                "ple": _tasks(
                    models.PLE,
                    num_levels=2,
                    num_task_experts=2,
                    num_shared_experts=1,
                    expert_layer_sizes=[8],
                ),
            }
        )

    def forward(self, dense: Tensor, features: torchembed.SparseFeatures) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            result = part(dense, features)
            tasks = result if isinstance(result, dict) else {"logit": result}
            found |= {f"{name}.{task}": tensor for task, tensor in tasks.items()}
        return found


def test_the_models_of_the_library(tmp_path: Path) -> None:
    """Over bags of fixed hotness: jagged ones take many more nodes, alike for all models."""
    model, path = _Library(), tmp_path / "m.onnx"

    def examples(size: int) -> tuple[Tensor, torchembed.SparseFeatures]:
        return torch.randn(size, 5), fixed(size, (2, 1, 3))

    export_onnx(model, examples(4), path)
    answer = answers_of(path)
    for size in SIZES:
        dense, features = examples(size)
        inputs = {"dense": dense.numpy(), **feature_arrays(features)}
        check_close(answer(inputs), forward_of(model, dense, features))


def test_dense_parts_take_vectors(tmp_path: Path) -> None:
    """As servers with tables of their own feed them, of dynamic tables too."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bags(2, 4)
            self.items = torchembed.Embedding(8, 3, dynamic=torchembed.Dynamic(missing="zeros"))
            self.again = torchembed.EmbeddingBag(8, 2, mode="mean")
            self.deep = nn.Linear(8 + 3 + 2, 1)

        def forward(self, ids: Tensor, features: torchembed.SparseFeatures) -> Tensor:
            items = self.items(ids).masked_fill((ids == 0).unsqueeze(2), 0.0).sum(1)
            pooled = self.bags(features).values()
            return self.deep(torch.cat([pooled, items, self.again(ids)], 1))

    model, path = Mixed().eval(), tmp_path / "m.onnx"
    ids, features = torch.randint(8, (5, 3)), fixed(5, (2, 1))
    with pytest.raises(DeployError, match=r"tables \['items'\] must not be dynamic"):
        export_onnx(model, (ids, features), path)
    export_onnx(model, (ids, features), path, with_tables=False, output="sigmoid")
    with torch.no_grad():
        pooled = model.bags(features)
        inputs = {
            "ids": ids,
            "ids.items.vectors": model.items(ids),
            "ids.again.vectors": model.again(ids),
            "f0.vectors": pooled["f0"],
            "f1.vectors": pooled["f1"],
        }
        expected = {"output": model(ids, features).sigmoid()}
    check_close(answers_of(path)(numpy_of(inputs)), expected)


class _Items(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.items, self.function = torchembed.Embedding(10, 4), function

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids).sum(1)
        return self.function(x)


def _branches(x: Tensor) -> Tensor:
    return x if x.shape[0] > 3 else x + 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (torch.special.bessel_j0, "operations that ONNX has, and .*bessel_j0"),
        (lambda x: x.double().cosh(), r"operators that onnxruntime [\d.]+ has on the CPU, and one"),
        (lambda x: x.reshape(4, 2, 2), "torch.export takes with any number of samples, and is not"),
        (_branches, "torch.export takes with any number of samples, and is not"),
        (lambda x: x * float(x.sum() > 0), "torch.export takes with any number of samples"),
    ],
)
def test_what_cannot_be_exported_names_the_line(
    function: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    line = r", at .*test_export_onnx\.py, line \d+: .*"
    with pytest.raises(DeployError, match=f"{message}.*{line}"):
        export_onnx(_Items(function), torch.ones(4, 2, dtype=torch.int64), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_wrong_answers_are_noticed(tmp_path: Path) -> None:
    model = _Items(lambda x: nn.functional.dropout(x, training=True))
    with pytest.raises(DeployError, match=r"output output of the 4 examples differs by"):
        export_onnx(model, torch.ones(4, 2, dtype=torch.int64), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    case = MODELS["dlrm"]()
    with pytest.raises(ValueError, match="max_file_bytes must be positive, got 0"):
        export_onnx(case.model, case.examples(4), tmp_path / "m.onnx", max_file_bytes=0)
    with pytest.raises(DeployError, match="examples must hold at least 2 samples"):
        export_onnx(case.model, case.examples(1), tmp_path / "m.onnx")
    with pytest.raises(DeployError, match="output_names must be as many"):
        export_onnx(case.model, case.examples(4), tmp_path / "m.onnx", output_names=["a", "b"])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = MODELS["dlrm"]()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs onnx, .*run pip install 'torchembed\[export\]'"):
        export_onnx(case.model, case.examples(4), tmp_path / "m.onnx")
