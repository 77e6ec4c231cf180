"""What the bench of quality calls as good as fp32."""

import pytest

pytest.importorskip("tyro", reason="the bench needs tyro")
from bench.quality import compare


def rows(fp32: list[float], bf16: list[float]) -> list[dict[str, object]]:
    return [
        {"precision": name, "auc": auc}
        for name, aucs in (("fp32", fp32), ("bf16", bf16))
        for auc in aucs
    ]


@pytest.mark.parametrize(
    ("fp32", "bf16", "limit", "passes"),
    [
        # All seeds alike: half a thousandth is allowed, either way.
        ([0.75] * 3, [0.7496] * 3, 5e-4, True),
        ([0.75] * 3, [0.7506] * 3, 5e-4, False),
        ([0.75] * 3, [0.7494] * 3, 5e-4, False),
        # Deviation 0.001, of three seeds: n - 1 in its denominator.
        ([0.749, 0.750, 0.751], [0.7481] * 3, 2e-3, True),
        ([0.749, 0.750, 0.751], [0.7479] * 3, 2e-3, False),
        # Means are compared, not single seeds.
        ([0.75] * 3, [0.70, 0.80], 5e-4, True),
    ],
)
def test_compare(fp32: list[float], bf16: list[float], limit: float, passes: bool) -> None:
    found = compare(rows(fp32, bf16), bayes_auc=0.8)
    assert found["limit"] == pytest.approx(limit)
    assert found["passes"] is passes
    assert found["bayes_auc"] == 0.8
