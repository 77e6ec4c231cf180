"""When training stops, for any history of evaluations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchembed.training import EarlyStop


@given(
    aucs=st.lists(st.sampled_from([0.5, 0.53125, 0.5625, 0.625, 0.75, math.nan]), max_size=12),
    patience=st.none() | st.integers(1, 4),
    target=st.none() | st.sampled_from([0.5625, 0.75]),
    min_improvement=st.sampled_from([0.0, 0.03125, 0.0625]),
    saved_at=st.integers(0, 12),
)
def test_it_stops_as_the_whole_list_says(
    aucs: list[float],
    patience: int | None,
    target: float | None,
    min_improvement: float,
    saved_at: int,
) -> None:
    limits = {"patience": patience, "target_auc": target, "min_improvement": min_improvement}
    stop = EarlyStop(**limits)  # type: ignore[arg-type]
    bests: list[int] = []
    for step, auc in enumerate(aucs):
        if step == saved_at:
            state, stop = stop.state_dict(), EarlyStop(**limits)  # type: ignore[arg-type]
            stop.load_state_dict(state)
        is_better = not math.isnan(auc) and (
            not bests or (auc > aucs[bests[-1]] and auc - aucs[bests[-1]] >= min_improvement)
        )
        assert stop.update(step, auc) is is_better
        bests += [step] if is_better else []
        num_worse = step - bests[-1] if bests else step + 1
        is_reached = target is not None and bool(bests) and aucs[bests[-1]] >= target
        is_worn_out = patience is not None and num_worse >= patience
        assert (stop.reason is not None) is (is_reached or is_worn_out)
        assert stop.has_reached_target is is_reached
        assert (stop.best_auc, stop.best_step) == (
            (aucs[bests[-1]], bests[-1]) if bests else (None, 0)
        )


def test_the_reason_is_said() -> None:
    stop = EarlyStop(target_auc=0.80275, patience=2)
    stop.update(100, 0.8)
    assert stop.reason is None
    stop.update(200, 0.79)
    stop.update(300, 0.8)
    assert stop.reason == "AUC no better than at step 100 in 2 evaluations"
    stop.update(400, 0.80275)
    assert stop.reason == "AUC 0.80275 reached 0.80275"


def test_fields_are_checked() -> None:
    with pytest.raises(ValueError, match="patience must be at least 1 or None, got 0"):
        EarlyStop(patience=0)
    with pytest.raises(ValueError, match="min_improvement must not be negative, got -1"):
        EarlyStop(min_improvement=-1.0)
    with pytest.raises(ValueError, match="min_improvement must not be negative, got nan"):
        EarlyStop(min_improvement=math.nan)
    with pytest.raises(ValueError, match="target_auc must be a number or None, got nan"):
        EarlyStop(target_auc=math.nan)
