"""The C++ library: its instruction sets, its threads, and what it refuses to protect memory."""

import hashlib
import re
import subprocess

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.native_library import CARRIES_MESSAGES, native, raises_runtime_error
from tests.support.repeats import assert_repeats
from tests.support.source_tree import ROOT, run_python
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed import _native
from torchembed.core.types import OnBadId, OptimizerKind
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.rowwise_update import RoundingKeys, RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs
from torchembed.ops.sequence_lookup import sequence_lookup

pytestmark = [
    pytest.mark.skipif(
        _native.load_error() is not None, reason=f"needs the C++ library: {_native.load_error()}"
    ),
    pytest.mark.skipif(lanes.is_interpreted(), reason="Triton's interpreter has the CPU here"),
]

DIMS = (1, 10, 16, 100, 200)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def skewed_rows(num_ids: int, num_rows: int, seed: int = 0) -> Tensor:
    """Rows, a few of them often, and some -1."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(num_ids, generator=generator, dtype=torch.float64)
    return (uniform**4 * (num_rows + 1)).long() - 1


def every_result(dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Results of each kernel, which between them take all of its vector code."""
    num_rows, num_bags, hotness = 50, 40, 6
    rows = skewed_rows(num_bags * hotness, num_rows, seed=dim)
    weight = normal(num_rows, dim, seed=1, dtype=dtype)
    grad = normal(num_bags, 1, dim, seed=2, dtype=dtype)
    factors = normal(rows.numel(), seed=3)
    keys = RoundingKeys(torch.tensor([0, 20, num_rows]), torch.tensor([7, -8]))
    runs = find_runs(rows, num_rows)
    results = [*runs]
    for out in FLOATS:
        results.append(sequence_lookup(weight, rows, output_dtype=out))
        results.append(
            native.pooled_lookup_forward(
                weight, rows, None, [hotness], factors, 1, num_bags, True, out
            )
        )
    bags = (rows, None, [hotness])
    results += native.pooled_lookup_gradient_map(*bags, factors, 1, num_bags, True)
    results.append(native.pooled_lookup_weights_backward(grad, weight, *bags, True))
    for kind in OptimizerKind:
        rule = UpdateRule(kind=kind, weight_decay=0.01, max_gradient=2.5)
        updated = weight.clone()
        states = tuple(torch.rand(rule.state_shape(num_rows, dim)) for _ in range(rule.num_states))
        rowwise_update(
            updated,
            states,
            runs,
            RowGradients(grad.view(num_bags, dim), torch.arange(rows.numel()) // hotness, factors),
            rule,
            torch.tensor([0.1]),
            step=torch.tensor([3.0]),
            rounding=None if dtype == torch.float32 else keys,
        )
        results += [updated, *states]
    return results


def digest() -> str:
    """A hash of the bits of every kernel's results."""
    torch.manual_seed(0)
    total = hashlib.sha256()
    for dim in DIMS:
        for dtype in FLOATS:
            for result in every_result(dim, dtype):
                total.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digest_elsewhere(instruction_set: str) -> subprocess.CompletedProcess[str]:
    """``digest`` in a process that is to use ``instruction_set``."""
    program = f"from {__name__} import digest; print(digest())"
    return run_python("-c", program, cwd=ROOT, TORCHEMBED_INSTRUCTION_SET=instruction_set)


def test_every_instruction_set_gives_the_same_bits() -> None:
    refused = digest_elsewhere("sse9")
    assert refused.returncode != 0
    names = [native.instruction_set(), "portable"]
    if CARRIES_MESSAGES:
        message = (
            r"TORCHEMBED_INSTRUCTION_SET must be (.*) on this processor, got sse9; unset it to "
            r"take the best"
        )
        found = re.search(message, refused.stderr)
        assert found, refused.stderr
        names = found[1].split(" or ")
        assert names[-1] == "portable"
    assert native.instruction_set() in names
    expected = digest()
    for name in names:
        result = digest_elsewhere(name)
        assert (name, result.stdout.strip()) == (name, expected), result.stderr


def test_schemas_are_those_of_the_operations() -> None:
    for name in (
        "initialize_rows",
        "linearize_ids",
        "find_runs",
        "pooled_lookup_forward",
        "pooled_lookup_gradient_map",
        "pooled_lookup_weights_backward",
        "sequence_lookup_forward",
        "rowwise_update",
    ):
        schema = str(getattr(native, name).default._schema)
        public = str(getattr(torch.ops.torchembed, name).default._schema)
        assert schema == public.replace("torchembed::", "torchembed_native::")


@pytest.mark.parametrize("num_rows", [200, 100_000, 2**31, 2**40])
def test_sorts_large_batches_in_threads(num_rows: int) -> None:
    rows = skewed_rows(200_003, num_rows)
    sorted_rows, order = torch.sort(rows, stable=True)
    runs = find_runs(rows, num_rows)
    assert torch.equal(runs.order, order.int())
    unique = sorted_rows[sorted_rows >= 0].unique_consecutive()
    assert torch.equal(runs.unique_rows[: unique.numel()], unique)
    assert_repeats(lambda: find_runs(rows, num_rows))


def test_linearizes_large_batches_in_threads() -> None:
    values = skewed_rows(150_000, 1000, seed=4)
    values[-1] = 10**12

    def run() -> list[Tensor]:
        rows, first_bad = linearize_ids(
            values,
            torch.tensor([5, 0, 2000]),
            torch.tensor([500, 2000, 900]),
            hotness=[20, 9, 1],
            batch_size=5000,
            on_bad_id=OnBadId.CLAMP,
            rows_dtype=torch.int32,
        )
        return [rows, first_bad]

    rows, _ = run()
    assert rows[-1] == 2899
    assert rows.min() == 0
    assert_repeats(run)


def test_large_outputs_are_those_of_their_parts() -> None:
    """They are written past the caches, by other instructions."""
    dim, hotness, batch_size = 256, 2, 20_000
    weight, rows = normal(300, dim, seed=5), skewed_rows(batch_size * hotness, 300)
    options = {"hotness": [hotness], "batch_size": batch_size}
    whole = pooled_lookup(weight, rows, **options)
    assert whole.nbytes > 16 << 20
    options["batch_size"] = batch_size // 10
    parts = [pooled_lookup(weight, part, **options) for part in rows.chunk(10)]
    assert_same_bits(whole, torch.cat(parts))
    assert_repeats(lambda: [pooled_lookup(weight, rows, hotness=[hotness], batch_size=batch_size)])


def test_a_row_outside_its_weight_is_no_row() -> None:
    weight = torch.ones(4, 20)
    rows = torch.tensor([3, 4, 2**40, -(2**40)])
    looked_up = sequence_lookup(weight, rows)
    assert_same_bits(looked_up, weight * torch.tensor([[1.0], [0.0], [0.0], [0.0]]))
    assert_same_bits(pooled_lookup(weight, rows, hotness=[1], batch_size=4)[:, 0], looked_up)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3, 2, 4], r"offsets must start at 0 and not decrease"),
        ([1, 2, 3, 4], r"offsets must start at 0 and not decrease"),
        ([-1, 0, 3, 4], r"offsets must start at 0 and not decrease"),
        ([0, 1, 2, 5], r"offsets must end at the number of ids, 4, or before, got 5"),
    ],
)
def test_offsets_that_would_read_outside_the_ids(offsets: list[int], message: str) -> None:
    with raises_runtime_error(message):
        pooled_lookup(
            torch.ones(4, 2),
            torch.zeros(4, dtype=torch.int64),
            offsets=torch.tensor(offsets),
            batch_size=3,
        )


def test_rounding_needs_a_key_for_every_row() -> None:
    weight = torch.ones(4, 2, dtype=torch.bfloat16)
    rows = torch.arange(4)
    keys = RoundingKeys(torch.tensor([0, 3]), torch.tensor([1]))
    with raises_runtime_error(r"row_offsets must cover the 4 rows of weight"):
        rowwise_update(
            weight,
            (),
            find_runs(rows, 4),
            RowGradients(torch.ones(4, 2)),
            UpdateRule(kind=OptimizerKind.SGD),
            torch.tensor([0.1]),
            step=torch.tensor([1.0]),
            rounding=keys,
        )
