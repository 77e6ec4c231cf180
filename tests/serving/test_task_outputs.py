"""A trained model of two tasks is deployed, and a server answers for each of them by name."""

import http.client
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.served_lookups import options_over
from tests.zoo.served_models import bags, feature_arrays, fixed
from torchembed.data import Batch
from torchembed.models import PLE
from torchembed.optim import Adagrad
from torchembed.serving.models import DeployError, ModelRepository, deploy
from torchembed.serving.protocols import HttpServer
from torchembed.stores import MemoryStore
from torchembed.training import MultiTaskLoss, Task, TaskKind, TrainPipeline

pytest.importorskip("uvicorn")

TASKS = [Task(name="like", kind=TaskKind.BINARY), Task(name="rating", kind=TaskKind.REGRESSION)]


def trained() -> PLE:
    torch.manual_seed(0)
    model = PLE(
        bags(2, 4),
        task_names=[task.name for task in TASKS],
        num_levels=2,
        num_task_experts=1,
        num_shared_experts=1,
        expert_layer_sizes=[8],
        tower_layer_sizes=[4],
        dense_in_features=3,
    )
    batches = [
        Batch(
            torch.randn(8, 3),
            fixed(8, (1, 2)),
            {"like": torch.randint(2, (8,)), "rating": torch.rand(8)},
        )
        for _ in range(4)
    ]
    optimizer = Adagrad.with_dense(model.parameters(), lr=0.1)
    with TrainPipeline(model, MultiTaskLoss(TASKS), optimizer) as pipeline:
        stream = iter(batches)
        for _ in batches:
            pipeline.progress(stream)
    return model


def asked(address: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of model ``feed`` by name."""
    datatypes = {"float32": "FP32", "int64": "INT64"}
    inputs: list[dict[str, Any]] = [
        {
            "name": name,
            "datatype": datatypes[array.dtype.name],
            "shape": list(array.shape),
            "data": array.tolist(),
        }
        for name, array in arrays.items()
    ]
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("POST", "/v2/models/feed/infer", json.dumps({"inputs": inputs}))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return {output["name"]: np.array(output["data"]) for output in answer["outputs"]}


def test_a_server_answers_for_each_task_by_name(tmp_path: Path) -> None:
    model = trained()
    examples = (torch.randn(5, 3), fixed(5, (1, 2)))
    with pytest.raises(DeployError, match=r"output must name outputs, \['like', 'rating'\], got"):
        deploy(
            model, tmp_path, name="feed", version=1, examples=examples, output={"buy": "sigmoid"}
        )
    deploy(model, tmp_path, name="feed", version=1, examples=examples, output={"like": "sigmoid"})
    with torch.no_grad():
        outputs = model.eval()(*examples)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        server = HttpServer(repository)
        server.start()
        try:
            request = {"dense_features": examples[0].numpy(), **feature_arrays(examples[1])}
            found = asked(server.address, request)
        finally:
            server.stop(5)
    assert found.keys() == {"like", "rating", "default_rows"}
    np.testing.assert_allclose(found["like"], outputs["like"].sigmoid().numpy(), atol=2e-6)
    np.testing.assert_allclose(found["rating"], outputs["rating"].numpy(), atol=2e-6)
    assert found["default_rows"].tolist() == [0] * 5
