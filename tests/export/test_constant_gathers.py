"""Gathers by constant indices become splits in exported graphs, with the same elements."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.exported_models import forward_of
from torchembed.export import export_onnx
from torchembed.export.constant_gathers import _part_sizes
from torchembed.modules import DotInteraction

onnx = pytest.importorskip("onnx", reason="needs torchembed[export]")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs torchembed[export]")
pytest.importorskip("onnxscript", reason="needs torchembed[export]")


def test_the_worked_example() -> None:
    assert _part_sizes(np.array([1, 2, 5]), 6) == [1, 2, 2, 1, 0]
    assert _part_sizes(np.array([0, 1]), 4) == [0, 2, 2]
    for unfit in ([], [1, 1], [2, 1], [-1, 0], [3, 4]):
        assert _part_sizes(np.array(unfit, dtype=np.int64), 4) is None


class _Gathers(nn.Module):
    """A dot interaction, and columns in an order of their own, which cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.Embedding(11, 4)
        self.interaction = DotInteraction()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        vectors = self.items(ids)
        pairs = self.interaction(vectors[:, 0], vectors)
        columns = vectors.flatten(1).index_select(1, torch.tensor([5, 0, 1, 2]))
        return {"pairs": pairs * 2, "columns": columns * 2}


def test_runs_are_split_and_give_the_same(tmp_path: Path) -> None:
    model, path = _Gathers(), tmp_path / "m.onnx"
    export_onnx(model, torch.randint(11, (4, 6)), path)
    nodes = onnx.load(path).graph.node
    kinds = [node.op_type for node in nodes]
    # Of the table, and of the columns.
    assert kinds.count("Split") == 1
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for size in (0, 1, 7):
        ids = torch.randint(11, (size, 6))
        names = [output.name for output in session.get_outputs()]
        found = dict(zip(names, session.run(names, {"ids": ids.numpy()}), strict=True))
        for name, right in forward_of(model, ids).items():
            np.testing.assert_allclose(found[name], right, atol=1e-6)
