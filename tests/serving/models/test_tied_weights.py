"""Modules of one weight: a table that is deployed, published and exported once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.served_lookups import options_over
from torchembed.core.types import OnBadId
from torchembed.export import export_onnx
from torchembed.modules.served_names import table_names
from torchembed.serving.models import DeployError, ModelRepository, deploy, read_description
from torchembed.stores import MemoryStore


class Tied(nn.Module):
    def __init__(self, on_bad_id: OnBadId = OnBadId.RAISE) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(10, 4, mode="sum")
        self.again = self.items
        self.history = torchembed.Embedding(10, 4, on_bad_id=on_bad_id)
        self.history.weight = self.items.weight
        with torch.no_grad():
            self.items.weight.copy_(torch.arange(40.0).view(10, 4))  # whose sums are exact

    def forward(self, item: Tensor, history: Tensor) -> Tensor:
        return self.items(item) + 2 * self.again(history) + self.history(history).sum(1)


EXAMPLES = torch.arange(6).view(3, 2), torch.arange(12).view(3, 4) % 10


def test_they_are_one_table(tmp_path: Path) -> None:
    model = Tied().eval()
    with torch.no_grad():
        expected = model(*EXAMPLES).numpy()
    assert table_names(model) == {"items.weight": "items"}
    folder = deploy(model, tmp_path, name="m", version=1, examples=EXAMPLES)
    assert [table.name for table in read_description(folder).tables] == ["items"]
    request = {"item": EXAMPLES[0].numpy(), "history": EXAMPLES[1].numpy()}
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        found = repository.model("m").answer(request).outputs["output"]
    assert np.array_equal(found, expected)


def test_they_are_exported(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="needs torchembed[export]")
    export_onnx(Tied(), EXAMPLES, tmp_path / "m.onnx")  # compares the answers


def test_they_treat_ids_alike(tmp_path: Path) -> None:
    message = r"history treats them otherwise than another module of items\.weight; give both one"
    with pytest.raises(DeployError, match=message):
        deploy(Tied(OnBadId.ZERO), tmp_path, name="m", version=1, examples=EXAMPLES)
