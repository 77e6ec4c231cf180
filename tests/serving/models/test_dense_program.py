"""Programs of dense parts run on another device than that which they were exported on."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torchembed.serving.models.dense_program import DenseProgram, load_program, program_bytes


class Making(nn.Module):
    """Makes a tensor, on the device that it had when it was exported."""

    def forward(self, weight: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return values @ weight, torch.arange(values.shape[1], device=values.device)


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_runs_on_another_device(name: str, tmp_path: Path) -> None:
    device = torch.device(name)
    arguments = torch.ones(4, 2), torch.ones(3, 4)
    program = torch.export.export(Making(), arguments)
    program.example_inputs = None
    weight, values = (argument.to(device) for argument in arguments)
    file = tmp_path / "dense.pt2"
    file.write_bytes(program_bytes(program))
    found, made = DenseProgram(load_program(file), device).run([weight], [values])
    assert found.shape == (3, 2) and found.device == made.device == device
    if name == "cpu":
        assert found.tolist() == [[4.0, 4.0]] * 3
