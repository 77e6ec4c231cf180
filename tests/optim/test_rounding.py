"""16-bit tables: stochastic rounding keeps, in the mean, what rounding to nearest would lose."""

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.tolerance import assert_same_bits
from torchembed.optim import SGD

NUM_ROWS, DIM, NUM_STEPS = 64, 32, 20
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Above 1."""


def trained(
    dtype: torch.dtype,
    part: float,
    device: torch.device,
    *,
    num_steps: int = NUM_STEPS,
    seed: int = 0,
    stochastic_rounding: bool = True,
) -> Tensor:
    """A table of ones after steps that add ``part`` of an ulp each."""
    weight = torch.ones(NUM_ROWS, DIM, dtype=dtype, device=device)
    module = torchembed.Embedding.from_pretrained(weight, freeze=False, seed=seed)
    optimizer = SGD([module.weight], lr=part * ULP[dtype], stochastic_rounding=stochastic_rounding)
    ids = torch.arange(NUM_ROWS, device=device)
    for _ in range(num_steps):
        module(ids).backward(torch.full((NUM_ROWS, DIM), -1.0, dtype=dtype, device=device))
        optimizer.step()
    return module.weight.detach()


@pytest.mark.parametrize("part", [0.125, 0.4375])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_moves_though_each_step_is_below_half_an_ulp(
    dtype: torch.dtype, part: float, device: torch.device
) -> None:
    moved = (trained(dtype, part, device).double() - 1.0) / ULP[dtype]
    assert torch.equal(moved, moved.round())
    # Each step moves an element by one ulp with probability part: binomial, of deviation
    # sqrt(steps * part * (1 - part)); of the mean over the elements, that over sqrt(elements).
    deviation = (NUM_STEPS * part * (1 - part)) ** 0.5
    assert abs(moved.mean() - NUM_STEPS * part) < 5 * deviation / moved.numel() ** 0.5
    # The variance is estimated to about sqrt(2 / elements) of itself.
    assert abs(moved.var() / deviation**2 - 1) < 6 * (2 / moved.numel()) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_nearest_stays(dtype: torch.dtype, device: torch.device) -> None:
    weight = trained(dtype, 0.4375, device, stochastic_rounding=False)
    assert_same_bits(weight, torch.ones(NUM_ROWS, DIM, dtype=dtype))


def test_exact_results_are_not_rounded(device: torch.device) -> None:
    weight = trained(torch.bfloat16, 1.0, device, num_steps=3)
    assert_same_bits(weight, torch.full((NUM_ROWS, DIM), 1 + 3 * 2.0**-7, dtype=torch.bfloat16))


def test_rounding_differs_by_seed_step_row_and_column_and_repeats(device: torch.device) -> None:
    # How often two independent draws agree at probability 1/2, and five deviations of that.
    spread = 5 * 0.5 / (NUM_ROWS * DIM) ** 0.5

    def agree(first: Tensor, second: Tensor) -> bool:
        return abs((first == second).float().mean().item() - 0.5) > spread

    once = trained(torch.bfloat16, 0.5, device, num_steps=1)
    assert_same_bits(trained(torch.bfloat16, 0.5, device, num_steps=1), once)
    assert not agree(once, trained(torch.bfloat16, 0.5, device, num_steps=1, seed=1))
    assert not agree(once[1:], once[:-1])
    assert not agree(once[:, 1:], once[:, :-1])
    twice = trained(torch.bfloat16, 0.5, device, num_steps=2)
    assert not agree(twice - once, once - 1)


def test_every_16_bit_optimizer_rounds_stochastically(device: torch.device) -> None:
    for kind in (torchembed.optim.Adagrad, torchembed.optim.RowwiseAdagrad, torchembed.optim.Adam):
        weights = []
        for stochastic in (True, False):
            ones = torch.ones(NUM_ROWS, DIM, dtype=torch.bfloat16, device=device)
            module = torchembed.Embedding.from_pretrained(ones, freeze=False, seed=0)
            optimizer = kind([module.weight], lr=0.25 * 2.0**-8, stochastic_rounding=stochastic)
            ids = torch.arange(NUM_ROWS, device=device)
            module(ids).sum().backward()
            optimizer.step()
            weights.append(module.weight.detach())
        # The first step of each of them is lr; below 1 an ulp is 2**-8.
        moved = (weights[0] != 1).double().mean().item()
        spread = 5 * (0.25 * 0.75 / weights[0].numel()) ** 0.5
        assert abs(moved - 0.25) < spread
        assert_same_bits(weights[1], torch.ones(NUM_ROWS, DIM, dtype=torch.bfloat16))
