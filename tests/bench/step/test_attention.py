"""The measure of a transformer ranker's attention, at sizes of a CPU."""

import itertools

import pytest
import torch

pytest.importorskip("tyro", reason="the bench needs tyro")
from bench.step.attention import Config, compared, eager_attention, line
from tests.support.tolerance import assert_as_near
from tests.support.values import normal
from torchembed.modules.dense.causal_attention import causal_attention
from torchembed.ops.padded_layout import PaddedLayout


def test_the_written_out_attention_is_the_same() -> None:
    offsets = torch.tensor([0, 3, 3, 8])
    layout = PaddedLayout.of(offsets, 5, 9)
    low = normal(9, 2, 4, seed=0), normal(9, 2, 2, 4, seed=1)
    exact = eager_attention(*(part.double() for part in low), layout)
    # Its softmax is in float32 in any case.
    reference = causal_attention(*(part.double() for part in low), layout)
    assert_as_near(exact.float(), eager_attention(*low, layout), reference)
    assert_as_near(causal_attention(*low, layout), eager_attention(*low, layout), reference)


def test_both_are_measured_and_compared() -> None:
    config = Config(
        lengths=(6,),
        batch_sizes=(4,),
        embedding_dim=8,
        num_heads=2,
        num_items=20,
        num_steps=1,
        device="cpu",
    )
    rows = compared(config, 6, 4)
    assert [row.get("system") for row in rows] == ["torchembed", "eager", None]
    assert all(row["kind"] == "graph" for row in rows[:2])
    ours, eager, summary = rows
    assert summary["speedup"] == eager["step_ms"] / ours["step_ms"]
    assert summary["memory"] is None  # a CPU's is not measured
    assert summary["is_right"]
    assert "torchembed" in line(ours) and "right" in line(summary)


@pytest.mark.parametrize(
    ("speedup", "memory", "words"),
    [(3.0, 0.3, "meets the goals"), (2.9, 0.1, "MISSES"), (4.0, 0.31, "MISSES")],
)
def test_goals(speedup: float, memory: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = itertools.cycle([(1.0, memory * 100), (speedup, 100.0)])

    def measured(*_: object) -> dict[str, object]:
        step_ms, peak_bytes = next(sizes)
        return {"bench": "attention", "step_ms": step_ms, "peak_bytes": peak_bytes}

    monkeypatch.setattr("bench.step.attention.measured", measured)
    config = Config(embedding_dim=4, num_heads=2, num_items=9, device="cpu")
    assert words in line(compared(config, 3, 2)[-1])


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"batch_sizes must be one for each .* got \(8,\)"):
        Config(lengths=(1, 2), batch_sizes=(8,))
