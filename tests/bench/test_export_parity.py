"""The comparison of exported graphs with their models notices what differs."""

import math

import pytest

from bench.export_parity import SIZES, TOLERANCE, Parity, cases, compare


def test_answers_are_compared_for_each_number_of_samples() -> None:
    for module in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(module, reason="needs torchembed[export]")
    parity = compare(cases()["LogisticRegression", "jagged"])
    assert len(parity.differences) == len(SIZES)
    assert parity.differences[0] == 0.0
    assert parity.largest > 1.0
    assert parity.is_kept


@pytest.mark.parametrize(
    ("difference", "largest", "loops", "is_kept"),
    [
        (TOLERANCE, 0.5, (), True),
        (1.1 * TOLERANCE, 0.5, (), False),
        (1.1 * TOLERANCE, 1.2, (), True),
        (math.nan, 1.0, (), False),
        (0.0, 1.0, ("Loop",), False),
    ],
)
def test_loops_and_differences_are_no_parity(
    difference: float, largest: float, loops: tuple[str, ...], is_kept: bool
) -> None:
    assert Parity((0.0, difference), largest, loops).is_kept is is_kept
