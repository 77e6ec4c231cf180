"""Deployed models in NVIDIA's own server answer as the models that were deployed."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.source_tree import ROOT
from tests.support.triton_server import TritonServer, require_triton
from tests.zoo.served_models import MODELS
from torchembed.serving.models import deploy
from torchembed.serving.triton import DeployedModel, TritonOptions, write_triton_repository
from torchembed.serving.triton.__main__ import main


def test_nvidias_server_answers_as_the_model(tmp_path: Path) -> None:
    require_triton()
    import tritonclient.http
    from tritonclient.utils import np_to_triton_dtype

    models, repository, case = tmp_path / "models", tmp_path / "triton", MODELS["dlrm"]()
    deploy(case.model, models, name="m", version=2, examples=case.examples(4))
    options = TritonOptions(max_batch_size=8, environment=Path(sys.prefix), python_path=(ROOT,))
    (written,) = write_triton_repository(models, repository, options=options)
    assert written == repository / "m"
    with TritonServer(repository, tmp_path / "log", ["m"]) as server:
        client = tritonclient.http.InferenceServerClient(server.http)
        examples = case.examples(3)
        tensors = []
        for key, array in case.request(examples).items():
            datatype = np_to_triton_dtype(array.dtype)
            tensor = tritonclient.http.InferInput(key, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        answer = client.infer("m", tensors)
        client.close()
    expected = forward(case.model, examples)["output"]
    found = answer.as_numpy("output").reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
    assert answer.get_response()["model_version"] == "2"
    assert answer.as_numpy("default_rows").ravel().tolist() == [0, 0, 0]


def forward(model: torch.nn.Module, arguments: Any) -> dict[str, np.ndarray]:
    with torch.no_grad():
        found = model.eval()(*arguments) if type(arguments) is tuple else model(arguments)
    named = found if isinstance(found, dict) else {"output": found}
    return {name: tensor.numpy() for name, tensor in named.items()}


def test_the_command_writes_all_models_with_their_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rocksdict")
    case, models = MODELS["dlrm"](), tmp_path / "models"
    deploy(case.model, models, name="m", version=1, examples=case.examples(4))
    config = tmp_path / "server.yaml"
    config.write_text(f"persistent: {{path: {tmp_path / 'rows'}}}\n")
    common = ["--models", str(models), "--output", str(tmp_path / "out"), "--config", str(config)]
    assert main(common) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'm'}\n"
    assert f'\\"config\\": \\"{config}\\"' in (tmp_path / "out/m/config.pbtxt").read_text()
    assert main([*common, "--names", "x"]) == 2
    message = f"names must be among ['m'], the models of {models}, got ['x']"
    assert message in capsys.readouterr().err
    model = DeployedModel("m", "1", models_folder=str(models), config=str(config))
    examples = case.examples(2)
    found = model.answer(case.request(examples)).outputs["output"]
    np.testing.assert_allclose(found, forward(case.model, examples)["output"], atol=2e-6)
    model.close()
    assert (tmp_path / "rows").is_dir()
