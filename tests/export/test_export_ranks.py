"""Models that ranks share, and checkpoints, as ONNX files."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.zoo.served_models import MODELS, ServedCase
from torchembed.core import ranks
from torchembed.export import export_onnx, export_pt2, load_pt2
from torchembed.training import CheckpointFolder, TrainingRun


def seeded(seed: int) -> ServedCase:
    torch.manual_seed(seed)
    return MODELS["tasks"]()


def export_checkpoint(folder: str) -> str:
    """Load a checkpoint into a model of other values, whose tables ranks share, and export it."""
    case = seeded(2)
    mesh = init_device_mesh("cpu", (ranks.world_size(),))
    plan = {"bags.embedding_bags.t0": "row_wise", "bags.embedding_bags.t1": "table_wise"}
    model = torchembed.shard_embeddings(case.model, mesh, plan)
    CheckpointFolder(Path(folder) / "checkpoints").load(TrainingRun(model=model))
    torch.manual_seed(ranks.rank())
    path = Path(folder) / "m.onnx"
    export_onnx(model, case.examples(4), path)
    try:
        export_onnx(model, case.examples(4), path)
    except (FileExistsError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_export_a_checkpoint_as_one_file(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs torchembed[export]")
    pytest.importorskip("onnxscript", reason="needs torchembed[export]")
    case = seeded(1)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    checkpoints.save(1, TrainingRun(model=case.model))
    checkpoints.close()
    errors = run_on_ranks(2, export_checkpoint, str(tmp_path))
    assert all("path must not be there yet, and" in error for error in errors), errors
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    examples = case.examples(9)
    found = session.run(["click", "buy"], case.request(examples))
    case.model.eval()
    with torch.no_grad():
        expected = case.model(examples)
    for name, array in zip(("click", "buy"), found, strict=True):
        torch.testing.assert_close(torch.from_numpy(array), expected[name], rtol=0, atol=1e-5)


def compile_checkpoint(folder: str) -> None:
    """As :func:`export_checkpoint`, into a package of AOTInductor."""
    case = seeded(2)
    mesh = init_device_mesh("cpu", (ranks.world_size(),))
    model = torchembed.shard_embeddings(case.model, mesh, {"bags.embedding_bags.t0": "row_wise"})
    CheckpointFolder(Path(folder) / "checkpoints").load(TrainingRun(model=model))
    export_pt2(model, case.examples(4), Path(folder) / "m.pt2")


def test_ranks_compile_a_checkpoint_into_one_package(tmp_path: Path) -> None:
    case = seeded(1)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    checkpoints.save(1, TrainingRun(model=case.model))
    checkpoints.close()
    run_on_ranks(2, compile_checkpoint, str(tmp_path))
    examples = case.examples(9)
    found = load_pt2(tmp_path / "m.pt2")(
        {n: torch.as_tensor(a) for n, a in case.request(examples).items()}
    )
    case.model.eval()
    with torch.no_grad():
        expected = case.model(examples)
    for name in ("click", "buy"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)
