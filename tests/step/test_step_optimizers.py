"""Which optimizers' steps a CUDA graph repeats, learning rates included."""

import pytest
import torch
from torch import Tensor, nn

import torchembed
from torchembed.optim.hyperparameters import learning_rate
from torchembed.step.step_optimizers import follows_replays, step_unless


@pytest.mark.parametrize(
    ("lr", "capturable", "follows"),
    [
        (torch.tensor(0.1, device="meta"), True, True),
        (torch.tensor(0.1, device="meta"), False, False),
        (torch.tensor(0.1), True, False),
        (0.1, True, False),
    ],
)
def test_a_replay_follows_a_learning_rate_on_the_parameters_device(
    lr: float | Tensor, capturable: bool, follows: bool
) -> None:
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.Adam([parameter], capturable=capturable)
    optimizer.param_groups[0]["lr"] = lr
    assert follows_replays(optimizer) is follows


def test_a_replay_of_our_optimizers_follows_any() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert follows_replays(torchembed.optim.DenseSGD([parameter], lr=0.1))


def test_a_learning_rate_on_the_cpu_is_a_number_to_another_device() -> None:
    on_cpu, on_meta = torch.tensor(0.5), torch.tensor(0.5, device="meta")
    meta = torch.device("meta")
    assert learning_rate({"lr": on_cpu}, torch.device("cpu")) is on_cpu
    assert learning_rate({"lr": on_meta}, meta) is on_meta
    assert learning_rate({"lr": 0.25}, meta) == 0.25
    as_number = learning_rate({"lr": on_cpu}, meta)
    assert type(as_number) is float
    assert as_number == 0.5


def test_a_step_that_fails_skips_no_later_one() -> None:
    table = torchembed.Embedding(3, 2)
    optimizer = torchembed.optim.SGD(table.parameters(), lr=0.1)
    table.weight.grad = torch.zeros_like(table.weight)
    with pytest.raises(RuntimeError, match=r"weight\.grad of a table is set"):
        step_unless(optimizer, torch.ones(1))
    assert optimizer.skip is None
