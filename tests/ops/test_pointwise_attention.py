"""``pointwise_attention`` against its formula, one history after the other."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import lanes
from tests.support.repeats import assert_repeats
from tests.support.tolerance import NUDGE_UNITS, assert_as_near, assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal
from torchembed.core.trees import map_tensors
from torchembed.ops.pointwise_attention import pointwise_attention

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS, LONGEST, NUM_SPARE, NUM_BUCKETS = (0, 1, 40, 3, 45), 40, 5, 40
"""One history is longer than the longest that counts, and two take several blocks of a kernel."""
NUM_NUDGES = 16
"""Draws of inputs that are off by their rounding, of which the largest effect is allowed."""


class Inputs(NamedTuple):
    """Arguments of ``pointwise_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    offsets: Tensor
    distance_bias: Tensor
    time_bias: Tensor | None = None
    times: Tensor | None = None
    next_times: Tensor | None = None

    def floats(self) -> dict[str, Tensor]:
        """The arguments that get gradients."""
        named = self._asdict()
        return {
            n: named[n] for n in (*self._fields[:3], *self._fields[4:6]) if named[n] is not None
        }


class Results(NamedTuple):
    """The output, and the gradient of each of :meth:`Inputs.floats`."""

    out: Tensor
    grads: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        return {"out": self.out} | self.grads


def inputs(
    lengths: Sequence[int] = LENGTHS,
    *,
    dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype = torch.float32,
    num_heads: int = 2,
    dim: int = 16,
    times: bool = True,
    longest: int = LONGEST,
    device: torch.device,
) -> Inputs:
    num_rows = sum(lengths) + NUM_SPARE
    rows = [normal(num_rows, num_heads, dim, seed=seed) / dim**0.25 for seed in range(3)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    biases = normal(longest, seed=3).to(bias_dtype)
    found = Inputs(*(each.to(dtype) for each in rows), offsets, biases)
    if times:
        seen = (normal(num_rows, seed=4).abs() * 1000).long().cumsum(0)
        found = found._replace(
            time_bias=normal(NUM_BUCKETS, seed=5).to(bias_dtype),
            times=seen,
            # Not all requests follow at once, and some are said to be earlier.
            next_times=seen + (normal(num_rows, seed=6) * 1000).long(),
        )
    return map_tensors(lambda tensor: tensor.to(device), found)


def formula(given: Inputs) -> Tensor:
    """``[L, H, D]`` in the dtype of the rows, whose scores are in that of the biases if wider."""
    query, key, value = given[:3]
    longest, rows = given.distance_bias.shape[0], list(torch.zeros_like(value).unbind())
    for start, end in itertools.pairwise(given.offsets.tolist()):
        length = min(end - start, longest)
        here = slice(start, start + length)
        scores = torch.einsum("nhd,mhd->hnm", query[here], key[here])
        places = torch.arange(length)
        distances = places.unsqueeze(1) - places
        scores = scores + given.distance_bias[distances.clamp_min(0)]
        if given.time_bias is not None:
            assert given.times is not None and given.next_times is not None
            seconds = given.next_times[here].unsqueeze(1) - given.times[here]
            buckets = [
                min(int(math.log(max(abs(s), 1)) / 0.301), NUM_BUCKETS - 1)
                for s in seconds.flatten().tolist()
            ]
            scores = scores + given.time_bias[torch.tensor(buckets, dtype=torch.int64)].view_as(
                distances
            )
        weights = torch.where(distances >= 0, F.silu(scores) / longest, 0.0).to(value.dtype)
        attended = torch.einsum("hnm,mhd->nhd", weights, value[here])
        rows[start : start + length] = attended.unbind()
    return torch.stack(rows)


def results(function: Callable[[Inputs], Tensor], given: Inputs, grad: Tensor) -> Results:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in given.floats().items()}
    out = function(given._replace(**leaves))
    gradients = torch.autograd.grad(out, list(leaves.values()), grad)
    return Results(out, dict(zip(leaves, gradients, strict=True)))


def attention(given: Inputs) -> Tensor:
    return pointwise_attention(*given[:5], **dict(list(given._asdict().items())[5:]))


def check_follows(given: Inputs) -> None:
    grad = normal(*given.query.shape, seed=7, device=given.query.device).to(given.query.dtype)
    found = results(attention, given, grad)
    on_cpu = map_tensors(lambda tensor: tensor.cpu(), given)
    exact_inputs = on_cpu._replace(**{n: t.double() for n, t in on_cpu.floats().items()})
    eager = results(formula, on_cpu, grad.cpu()).named()
    exact = results(formula, exact_inputs, grad.cpu().double()).named()
    # Of a sum of few terms the error of one order of operations says little of another's. So a
    # result is right, too, if it is that of inputs that are one rounding of float32 off: by the
    # largest of several draws of signs, since in one draw the parts of a sum may cancel.
    generator = torch.Generator().manual_seed(8)
    slacks = dict.fromkeys(exact, 0.0)
    for _ in range(NUM_NUDGES):
        nudged_inputs = exact_inputs._replace(
            **{name: nudged(tensor, generator) for name, tensor in exact_inputs.floats().items()}
        )
        off = results(formula, nudged_inputs, nudged(grad.cpu().double(), generator)).named()
        for name, right in exact.items():
            error = (off[name] - right).detach().abs().max().item() / NUDGE_UNITS
            slacks[name] = max(slacks[name], error)
    for name, result in found.named().items():
        assert result.is_contiguous()
        assert_as_near(result, eager[name].detach(), exact[name].detach(), slack=slacks[name])


def nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """``tensor``, each element ``NUDGE_UNITS`` units of rounding larger or smaller."""
    signs = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + NUDGE_UNITS * torch.finfo(torch.float32).eps * signs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("times", [False, True])
def test_follows_its_formula(times: bool, dtype: torch.dtype, device: torch.device) -> None:
    check_follows(inputs(dtype=dtype, times=times, device=device))


@pytest.mark.parametrize("dim", [32, 50, 64])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_any_heads_of_any_columns(num_heads: int, dim: int, device: torch.device) -> None:
    check_follows(inputs([5, 38, 40], num_heads=num_heads, dim=dim, device=device))


@pytest.mark.parametrize("dim", [100, 200, 512])
def test_wide_heads(dim: int, device: torch.device) -> None:
    check_follows(inputs([3, 18], num_heads=1, dim=dim, longest=18, device=device))


@pytest.mark.parametrize("longest", [1, 32, 64, 70])
def test_any_longest_history(longest: int, device: torch.device) -> None:
    check_follows(inputs([longest, 2, longest + 1], longest=longest, device=device))


def test_biases_of_the_type_of_rows(device: torch.device) -> None:
    given = inputs(dtype=torch.bfloat16, bias_dtype=torch.bfloat16, device=device)
    check_follows(given)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("times", [False, True])
def test_no_rows_of_histories(lengths: list[int], times: bool, device: torch.device) -> None:
    given = inputs(lengths, times=times, device=device)
    found = results(attention, given, torch.ones_like(given.query))
    for result in found.named().values():
        assert not result.any()


def test_no_rows_at_all(device: torch.device) -> None:
    given = inputs([], device=device)
    none = {name: getattr(given, name)[:0] for name in ("query", "key", "value")}
    given = given._replace(**none, times=given.times[:0], next_times=given.next_times[:0])
    found = results(attention, given, torch.ones_like(given.query))
    assert found.out.shape == (0, 2, 16)
    assert not found.grads["distance_bias"].any() and not found.grads["time_bias"].any()


def test_rows_that_do_not_count_are_not_read(device: torch.device) -> None:
    given = inputs([0, 1, 45, 3], num_heads=1, device=device)
    starts, ends = given.offsets[:-1], given.offsets[1:]
    places = torch.arange(len(given.query), device=device)
    counts = ((places >= starts[:, None]) & (places < ends.minimum(starts + LONGEST)[:, None])).any(
        0
    )
    spoilt = {
        name: getattr(given, name).masked_fill(~counts[:, None, None], torch.nan)
        for name in ("query", "key", "value")
    }
    grad = normal(*given.query.shape, seed=7, device=device)
    found = results(attention, given._replace(**spoilt), grad)
    expected = results(attention, given, torch.where(counts[:, None, None], grad, 0.0))
    for name, result in found.named().items():
        assert_same_bits(result, expected.named()[name])
    for name in ("query", "key", "value"):
        assert not found.grads[name][~counts].any()
    assert not found.out[~counts].any()


def test_slices_of_a_matrix_and_other_strides(device: torch.device) -> None:
    given = inputs([35, 2], dim=10, device=device)
    grad = normal(*given.query.shape, seed=7, device=device)
    expected = results(attention, given, grad).named()
    num_rows = len(given.query)
    side_by_side = torch.cat([rows.flatten(1) for rows in given[:3]], dim=1)

    def of_slices(given: Inputs) -> Tensor:
        rows = (part.unflatten(1, (2, 10)) for part in side_by_side.chunk(3, dim=1))
        return attention(given._replace(**dict(zip(given._fields, rows, strict=False))))

    assert_same_bits(of_slices(given), expected["out"])
    heads_last = {
        name: getattr(given, name).permute(2, 1, 0).contiguous().permute(2, 1, 0)
        for name in ("query", "key", "value")
    }
    spread = normal(num_rows, 2, 20, seed=8, device=device)[..., ::2]
    spread.copy_(grad)
    strided = given._replace(**heads_last)
    for name, result in results(attention, strided, spread).named().items():
        assert_same_bits(result, expected[name])
    alike = given.query[:1].expand(num_rows, -1, -1)
    assert_same_bits(
        attention(given._replace(query=alike)),
        attention(given._replace(query=alike.contiguous())),
    )


def test_offsets_of_int32(device: torch.device) -> None:
    given = inputs([3, 0, 5], device=device)
    grad = normal(*given.query.shape, seed=7, device=device)
    expected = results(attention, given, grad).named()
    found = results(attention, given._replace(offsets=given.offsets.int()), grad).named()
    for name, result in found.items():
        assert_same_bits(result, expected[name])


def one_row(device: torch.device) -> Inputs:
    numbers = (torch.full((1, 1, 1), number, device=device) for number in (2.0, 3.0, 5.0))
    return Inputs(
        *numbers, torch.tensor([0, 1], device=device), torch.tensor([-6.0], device=device)
    )


def test_worked_example_of_one_row(device: torch.device) -> None:
    found = results(attention, one_row(device), torch.full((1, 1, 1), 4.0, device=device))
    numbers = {name: result.item() for name, result in found.named().items()}
    assert numbers == {"out": 0, "query": 30, "key": 20, "value": 0, "distance_bias": 10}


def test_worked_example_of_two_rows(device: torch.device) -> None:
    rows = torch.tensor([[2.0, 100.0], [3.0, 1.0], [5.0, -2.0]], device=device)
    given = Inputs(
        *rows.view(3, 2, 1, 1).unbind(),
        torch.tensor([0, 2], device=device),
        torch.zeros(2, device=device),
    )
    assert attention(given)[1].item() == 650


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0, 0), (1, 0), (-1, 0), (2, 2), (50, 12), (-50, 12), (10**6, 45), (2**62, 79)],
)
def test_buckets_of_times(seconds: int, bucket: int, device: torch.device) -> None:
    given = one_row(device)._replace(
        time_bias=torch.zeros(80, device=device),
        times=torch.tensor([-seconds], device=device),
        next_times=torch.zeros(1, dtype=torch.int64, device=device),
    )
    found = results(attention, given, torch.full((1, 1, 1), 4.0, device=device))
    expected = torch.zeros(80)
    expected[bucket] = 10
    assert found.grads["time_bias"].tolist() == expected.tolist()


def test_repeats_its_bits(device: torch.device, fastest_algorithms: None) -> None:
    given = inputs([35, 2], dtype=torch.bfloat16, device=device)
    grad = normal(*given.query.shape, seed=7, device=device).bfloat16()
    assert_repeats(lambda: results(attention, given, grad).named().values())


@pytest.mark.parametrize("times", [False, True])
def test_opcheck(times: bool, device: torch.device) -> None:
    given = inputs([2, 5], dtype=torch.bfloat16, times=times, longest=4, device=device)
    ops = torch.ops.torchembed
    torch.library.opcheck(ops.pointwise_attention_forward.default, tuple(given))
    torch.library.opcheck(ops.pointwise_attention_backward.default, (given.value, *given))


def test_compiles_whole_for_any_batch(device: torch.device) -> None:
    compiled = compiled_once(attention)
    for lengths in ([2, 5, 1], [4, 4, 0, 7]):
        given = inputs(lengths, device=device)
        grad = normal(*given.query.shape, seed=7, device=device)
        expected = results(attention, given, grad).named()
        for name, result in results(compiled, given, grad).named().items():
            assert_same_bits(result, expected[name])


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    given = inputs([3], device=device)
    query = given.query.requires_grad_()
    (grad,) = torch.autograd.grad(attention(given).square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="torchembed's pointwise attention has no second deriv"):
        grad.sum().backward()


ERRORS: list[tuple[type[Exception], str, Callable[[Inputs], dict[str, Any]]]] = [
    (TypeError, r"query must be float32 or .*, got int64", lambda x: {"query": x.query.long()}),
    (ValueError, r"query must have 3 dimension", lambda x: {"query": x.query.flatten(1)}),
    (
        ValueError,
        r"query must have at most 512 columns of a head, got 513; divide them among more heads",
        lambda x: {"query": x.query[..., :1].expand(-1, -1, 513)},
    ),
    (TypeError, r"key must be float32, got float16; cast", lambda x: {"key": x.key.half()}),
    (
        ValueError,
        r"value must have shape \(94, 2, 16\) \(that of query\), got \(93, 2, 16\)",
        lambda x: {"value": x.value[1:]},
    ),
    (ValueError, r"key must be on .* as query is, got meta", lambda x: {"key": x.key.to("meta")}),
    (TypeError, r"offsets must be int32 or int64, got f", lambda x: {"offsets": x.offsets.float()}),
    (
        ValueError,
        r"offsets must hold one number more .*, got none",
        lambda x: {"offsets": x.offsets[:0]},
    ),
    (ValueError, r"offsets must be contiguous", lambda x: {"offsets": x.offsets[::2]}),
    (
        TypeError,
        r"distance_bias must be float32 or .*, got float64",
        lambda x: {"distance_bias": x.distance_bias.double()},
    ),
    (
        ValueError,
        r"distance_bias must hold at least one bias, got none",
        lambda x: {"distance_bias": x.distance_bias[:0]},
    ),
    (ValueError, r"time_bias must have 1 dim", lambda x: {"time_bias": x.time_bias[None]}),
    (
        ValueError,
        r"times must be given together, or none of them, got times and next_times None",
        lambda x: {"times": None, "next_times": None},
    ),
    (ValueError, r"together, .*, got time_bias None", lambda x: {"time_bias": None}),
    (TypeError, r"times must be int64, got int32; call .long", lambda x: {"times": x.times.int()}),
    (
        ValueError,
        r"next_times must have shape \(94,\) \(one for each row of query\), got \(2,\)",
        lambda x: {"next_times": x.next_times[:2]},
    ),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_bad_arguments_are_named(number: int, device: torch.device) -> None:
    error, message, changes = ERRORS[number]
    given = inputs(device=device)
    with pytest.raises(error, match=message):
        attention(given._replace(**changes(given)))


def test_operations_refuse_gradients_and_rows_that_do_not_fit(device: torch.device) -> None:
    given = inputs(device=device)
    backward = torch.ops.torchembed.pointwise_attention_backward
    for grad, error, message in (
        (given.query[1:], ValueError, "grad must have shape (94, 2, 16) (that of query)"),
        (given.query.half(), TypeError, "grad must be float32 as query is, got float16"),
        (given.query.mT.contiguous().mT, ValueError, "grad must be contiguous"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            backward(grad, *given)
    overlapping = given._replace(key=given.key[:1].expand_as(given.key))
    with pytest.raises(ValueError, match="key must have contiguous rows that do not overlap"):
        torch.ops.torchembed.pointwise_attention_forward(*overlapping)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_lane_runs_its_kernels(direction: str, device: torch.device) -> None:
    lane = lanes.required_lane()
    if lane is None:
        pytest.skip("TORCHEMBED_LANE requires no lane, so any kernel will do")
    picked = lanes.picked_kernel(f"pointwise_attention_{direction}", device)
    assert picked == ("reference" if lane == "native" else lane)


@pytest.mark.gpu
def test_a_captured_step_replays_on_other_histories(device: torch.device) -> None:
    if lanes.picked_kernel("pointwise_attention_forward", device) != "triton":
        pytest.skip("the reference may synchronize")
    batches = [
        inputs(lengths, dtype=torch.bfloat16, device=device)
        for lengths in (LENGTHS, (45, 0, 40, 1, 3), (20, 20, 20, 20, 9))
    ]
    grad = normal(*batches[0].query.shape, seed=7, device=device).bfloat16()
    buffers = map_tensors(torch.clone, batches[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(attention, buffers, grad)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(attention, buffers, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(attention, buffers, grad).named()
    for batch in batches:
        for buffer, tensor in zip(buffers, batch, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        for name, expected in results(attention, batch, grad).named().items():
            assert_same_bits(captured[name], expected)
