"""Checks under ``TORCHEMBED_CHECK_OPERATIONS=1``: contents of tensors that would take a kernel past
the ends of memory. Each case runs in a process that has the variable set."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support import raw_cache_calls, raw_calls, raw_hash_calls
from tests.support.native_library import CARRIES_MESSAGES
from tests.support.source_tree import ROOT, run_python_or_fail
from torchembed import _native

FROM_RUNS = "take the runs from find_runs"


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "linearize_ids": [
        (
            "offsets must not decrease, got 1 after 2 at position 2",
            {"offsets": torch.tensor([0, 2, 1, 3])},
        ),
        ("offsets must start at 0, got 1", {"offsets": torch.tensor([1, 2, 2, 3])}),
        (
            "offsets must lie in [0, 4), got 4 at position 3",
            {"offsets": torch.tensor([0, 1, 2, 4])},
        ),
        (
            "num_rows must lie in [0, 9223372036854775807), got -4 at position 0",
            {"num_rows": torch.tensor([-4])},
        ),
        (
            "first_rows + num_rows must lie in [0, 2147483648), got 2147483650 at position 0",
            {"first_rows": torch.tensor([2**31 - 2]), "rows_dtype": torch.int32},
        ),
    ],
    "pooled_lookup_forward": [
        ("rows must lie in [-1, 4), got 4 at position 1", {"rows": torch.tensor([0, 4, 1])}),
        ("rows must lie in [-1, 4), got -2 at position 2", {"rows": torch.tensor([0, 0, -2])}),
        (
            "offsets must not decrease, got 0 after 3 at position 2",
            {"offsets": torch.tensor([0, 3, 0, 3])},
        ),
    ],
    "pooled_lookup_gradient_map": [
        (
            "offsets must lie in [0, 4), got -1 at position 1",
            {"offsets": torch.tensor([0, -1, 2, 3])},
        ),
    ],
    "pooled_lookup_weights_backward": [
        ("rows must lie in [-1, 4), got 9 at position 0", {"rows": torch.tensor([9, 0, 1])}),
        (
            "offsets must not decrease, got 1 after 3 at position 2",
            {"offsets": torch.tensor([0, 3, 1, 3])},
        ),
    ],
    "sequence_lookup_forward": [
        ("rows must lie in [-1, 4), got 4 at position 0", {"rows": torch.tensor([4, 0, 1])}),
    ],
    "find_runs": [
        ("rows must lie in [-1, 1), got 1 at position 1", {"num_rows": 1}),
    ],
    "rowwise_update": [
        (f"num_runs must lie in [0, 4), got 4 at position 0; {FROM_RUNS}", {"num_runs": int32(4)}),
        (
            f"num_runs must lie in [0, 4), got -1 at position 0; {FROM_RUNS}",
            {"num_runs": int32(-1)},
        ),
        (
            f"starts must lie in [0, 4), got 100000 at position 1; {FROM_RUNS}",
            {"starts": int32(0, 100_000, 3, 3)},
        ),
        (
            f"starts must lie in [0, 4), got -7 at position 0; {FROM_RUNS}",
            {"starts": int32(-7, 1, 3, 3)},
        ),
        (
            f"starts must not decrease, got 1 after 2 at position 1; {FROM_RUNS}",
            {"starts": int32(2, 1, 3, 3)},
        ),
        (
            f"order must lie in [0, 3), got 3 at position 2; {FROM_RUNS}",
            {"order": int32(0, 1, 3)},
        ),
        (
            f"order must lie in [0, 3), got -1 at position 0; {FROM_RUNS}",
            {"order": int32(-1, 1, 2)},
        ),
        (
            f"unique_rows must lie in [0, 4), got 4 at position 1; {FROM_RUNS}",
            {"unique_rows": torch.tensor([0, 4, -1])},
        ),
        (
            f"unique_rows must increase, got 0 after 0 at position 1; {FROM_RUNS}",
            {"unique_rows": torch.tensor([0, 0, -1])},
        ),
        (
            "gradient_rows must lie in [0, 3), got 3 at position 1; they are rows of grad",
            {"gradient_rows": torch.tensor([0, 3, 1])},
        ),
    ],
    "permute_features_forward": [
        (
            "offsets must lie in [0, 4), got 9 at position 1",
            {"offsets": torch.tensor([0, 9, 3])},
        ),
    ],
    "permute_features_backward": [
        ("offsets must not decrease, got 1 after 2", {"offsets": torch.tensor([0, 2, 1])}),
        ("new_offsets must not decrease, got 2 after 3", {"new_offsets": torch.tensor([0, 3, 2])}),
    ],
    "bucketize_rows": [
        ("offsets must start at 0, got 1", {"offsets": torch.tensor([1, 1, 3])}),
        (
            "boundaries[0] must not decrease, got 1 after 4 at position 2",
            {"boundaries": torch.tensor([[0, 4, 1]])},
        ),
    ],
    **raw_cache_calls.CONTENTS,
    **raw_hash_calls.CONTENTS,
}
FITTING = raw_calls.FITTING | raw_cache_calls.FITTING | raw_hash_calls.FITTING


def said_by(operation: Callable[..., Any], name: str) -> Iterator[str]:
    """The error of each case of ``name``, or nothing where there is none."""
    for _, changes in CASES[name]:
        try:
            operation(**(FITTING[name] | changes))
            yield ""
        except (ValueError, IndexError, RuntimeError) as error:
            yield str(error).splitlines()[0]


def print_errors() -> None:
    """For each operation what it says to its cases, and to arguments that fit, as JSON."""
    errors = {}
    for name, fitting in FITTING.items():
        getattr(torch.ops.torchembed, name)(**fitting)
        if name in CASES:
            errors[name] = [*said_by(getattr(torch.ops.torchembed, name), name)]
    if _native.load_error() is None:
        native = torch.ops.torchembed_native.rowwise_update
        native(**FITTING["rowwise_update"])
        errors["native"] = [*said_by(native, "rowwise_update")]
    print(json.dumps(errors))  # noqa: T201


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    """The words of a process of this lane that checks contents."""
    lane = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    if _native.load_error() is not None:
        lane["TORCHEMBED_FORCE_REFERENCE"] = "1"
    program = f"import {__name__} as cases; cases.print_errors()"
    said = run_python_or_fail(
        "-W", "ignore", "-c", program, cwd=ROOT, TORCHEMBED_CHECK_OPERATIONS="1", **lane
    )
    return json.loads(said)


@pytest.mark.parametrize("name", CASES)
def test_contents_are_refused_where_asked(name: str, errors: dict[str, list[str]]) -> None:
    for (message, _), said in zip(CASES[name], errors[name], strict=True):
        assert said.startswith(message), said


@pytest.mark.skipif(_native.load_error() is not None, reason="needs the C++ library")
def test_the_library_refuses_runs_by_itself(errors: dict[str, list[str]]) -> None:
    for (message, _), said in zip(CASES["rowwise_update"], errors["native"], strict=True):
        assert said and (message in said or not CARRIES_MESSAGES), said
