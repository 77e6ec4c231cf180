"""Names of inputs and outputs in ONNX files, which torch's exporter may give to others."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchembed
from torchembed.export import DeployError, export_onnx

pytest.importorskip("onnx", reason="needs torchembed[export]")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs torchembed[export]")
pytest.importorskip("onnxscript", reason="needs torchembed[export]")


class _Named(nn.Module):
    """Its inputs have names that torch's exporter gives to values and to constants."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(10, 4, mode="sum")
        self.last = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, embedding: Tensor, linear: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.last(self.items(embedding)) + linear
        return found, found * self.scale, found.sigmoid()


EXAMPLES = torch.arange(6).view(3, 2), torch.rand(3, 1)


def test_inputs_and_outputs_may_be_named_as_operations(tmp_path: Path) -> None:
    model, names = _Named(), ["add", "mul", "val_0"]
    export_onnx(model, EXAMPLES, tmp_path / "m.onnx", output_names=names)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert {i.name for i in session.get_inputs()} == {"embedding", "linear"}
    inputs = {"embedding": EXAMPLES[0].numpy(), "linear": EXAMPLES[1].numpy()}
    found = session.run(names, inputs)
    with torch.no_grad():
        expected = model(*EXAMPLES)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "scale", "last.weight"])
def test_one_name_of_two_tensors_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=rf"have different names in ONNX, .* \['{name}'\]; ren"):
        export_onnx(_Named(), EXAMPLES, tmp_path / "m.onnx", output_names=["a", "b", name])
    assert list(tmp_path.iterdir()) == []
