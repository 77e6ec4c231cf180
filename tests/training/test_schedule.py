"""Learning rates against MLPerf's rule, on fused and ordinary optimizers."""

from typing import Any

import pytest
import torch

from tests.support.tiny_model import TinyModel, make_optimizers
from torchembed.training import LearningRate

RATE = LearningRate(warmup_steps=4, decay_start_step=6, decay_steps=5, end_value=1e-3)
BY_HAND = [
    # step 1 to 3: a line that would reach the rate at step 4
    0.25 * 0.5, 0.5 * 0.5, 0.75 * 0.5,
    # until the decay begins, which is at the full rate
    0.5, 0.5, 0.5,
    # 4/5, 3/5, 2/5 and 1/5 of the rate, squared
    0.5 * 0.64, 0.5 * 0.36, 0.5 * 0.16, 0.5 * 0.04,
    # and the end
    1e-3, 1e-3, 1e-3,
]  # fmt: skip


def rates(optimizers: list[torch.optim.Optimizer], schedulers: list[Any], num: int) -> list[float]:
    seen = []
    for _ in range(num):
        own = {float(optimizer.param_groups[0]["lr"]) for optimizer in optimizers}
        assert len(own) == 1
        seen += own
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    return seen


def test_the_rate_of_each_step_is_mlperfs() -> None:
    optimizers = make_optimizers(TinyModel(), lr=0.5)
    schedulers = [RATE.scheduler(optimizer) for optimizer in optimizers]
    assert rates(optimizers, schedulers, len(BY_HAND)) == pytest.approx(BY_HAND, rel=2**-50)


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(TinyModel().dense.parameters(), lr=rate)
    scheduler = RATE.scheduler(optimizer)
    assert rates([optimizer], [scheduler], len(BY_HAND)) == pytest.approx(BY_HAND, rel=2**-23)
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("num_before", [0, 3, 7, 12])
def test_a_state_dict_goes_on(num_before: int) -> None:
    whole = make_optimizers(TinyModel(), lr=0.5)
    of_whole = [RATE.scheduler(optimizer) for optimizer in whole]
    rates(whole, of_whole, num_before)
    other = make_optimizers(TinyModel(), lr=0.125)
    of_other = [RATE.scheduler(optimizer) for optimizer in other]
    for ours, theirs in zip([*other, *of_other], [*whole, *of_whole], strict=True):
        ours.load_state_dict(theirs.state_dict())
    assert rates(other, of_other, 13) == rates(whole, of_whole, 13)
    assert RATE not in of_whole[0].state_dict().values()


def test_by_default_it_is_constant() -> None:
    assert {LearningRate().at(step, 0.3) for step in (1, 2, 10**9)} == {0.3}
    assert [LearningRate(decay_steps=2, power=0).at(step, 0.5) for step in (1, 2, 3)] == [0.5, 0, 0]
    linear = LearningRate(decay_steps=4, power=1)
    assert [linear.at(step, 1.0) for step in range(1, 7)] == [0.75, 0.5, 0.25, 0, 0, 0]


def test_fields_are_checked() -> None:
    with pytest.raises(ValueError, match="warmup_steps must not be negative, got -1"):
        LearningRate(warmup_steps=-1)
    with pytest.raises(ValueError, match="power must not be negative, got nan"):
        LearningRate(power=float("nan"))
    with pytest.raises(ValueError, match="decay_start_step must be at least warmup_steps = 9, got"):
        LearningRate(warmup_steps=9, decay_start_step=8, decay_steps=1)
