"""Cases to train sharded models with: placements, optimizers, dtypes and modes of bad ids."""

import dataclasses

import torch

from tests.support.sharded_cases import Case

# Each placement is in one of the two, beside others.
MIXED = {"a": "column_wise", "b": "row_wise", "c": "table_row_wise", "d": "data_parallel"}
MIXED_TOO = {"a": "table_wise", "b": "table_row_wise", "c": "column_wise", "d": "row_wise"}
OPTIMIZERS = ("SGD", "Adagrad", "RowwiseAdagrad", "Adam")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MATRIX = [
    Case(
        placements=(MIXED, MIXED_TOO)[(m + n + pooled) % 2],
        pooled=pooled,
        optimizer=optimizer,
        dtype=dtype,
        fixed=(m if pooled else n) % 2 == 1,
    )
    for m, optimizer in enumerate(OPTIMIZERS)
    for n, dtype in enumerate(DTYPES)
    for pooled in (True, False)
]
"""Each optimizer with each dtype, and any two values of all settings together."""
ALIKE = [
    Case(placements=dict.fromkeys("abcd", placement), pooled=pooled, fixed=fixed)
    for placement in (
        "table_wise",
        "row_wise",
        "data_parallel",
        "column_wise",
        "table_row_wise",
    )
    for pooled, fixed in ((True, False), (True, True), (False, False))
]
OTHERS = [
    *(Case(placements=MIXED, weighted=True, fixed=f, reserved=8 * f) for f in (False, True)),
    *(Case(placements=MIXED, fused=False, optimizer=name) for name in ("SGD", "Adagrad")),
    Case(placements=MIXED, pooled=False, fused=False, optimizer="SGD"),
    *(
        Case(placements=MIXED, on_bad_id=mode, fixed=fixed, pooled=pooled)
        for mode in ("zero", "clamp")
        for fixed, pooled in ((False, True), (True, True), (False, False))
    ),
]
SOME = [
    Case(placements=placements, pooled=pooled, optimizer=optimizer, dtype=dtype)
    for placements in (MIXED, MIXED_TOO)
    for pooled, optimizer, dtype in (
        (True, "RowwiseAdagrad", torch.bfloat16),
        (False, "Adam", torch.float32),
    )
]
ON_SOME_RANKS = [
    Case(placements=MIXED, pooled=pooled, optimizer="RowwiseAdagrad", column_ranks=(1, 2))
    for pooled in (True, False)
]


def on_two_nodes(cases: list[Case]) -> list[Case]:
    return [dataclasses.replace(case, num_nodes=2) for case in cases]
