"""Exchanges by push, the ranks being buffers of one device.

That ranks agree is in tests/sharding/test_push.py and tests/gpu/test_push.py.
"""

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.tolerance import assert_same_bits
from torchembed.core.copies.rectangles import RectangleCopies, RectangleCopy
from torchembed.core.types import Pooling
from torchembed.ops import push as ops
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.push import reference

HALF = 64


class Ranks:
    """Buffers, flags and states of two ranks, whose epochs are ``epoch``."""

    def __init__(self, device: torch.device, dtype: torch.dtype, epoch: int = 0) -> None:
        self.buffers = [torch.zeros(2, HALF, dtype=dtype, device=device) for _ in range(2)]
        self.flags = [
            torch.tensor([epoch, epoch], dtype=torch.int32, device=device) for _ in range(2)
        ]
        state = torch.tensor([epoch, 0], dtype=torch.int32, device=device)
        self.states = [state, state.clone()]
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._addresses, self._flags = addresses(self.buffers), addresses(self.flags)

    def exchange(self, rank: int) -> ops.Exchange:
        return ops.Exchange(self.buffers, self._addresses, self.states[rank])

    def meet(self, rank: int, limit_seconds: float) -> None:
        mine = self.flags, self._flags, self.states[rank], self.failed
        ops.push_barrier(*mine, rank=rank, limit_seconds=limit_seconds)
        if self.flags[0].is_cuda:
            torch.cuda.synchronize()


def addresses(tensors: list[Tensor]) -> Tensor:
    numbers = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(numbers, dtype=torch.int64, device=tensors[0].device)


@pytest.mark.parametrize("epoch", [0, 1, -(2**31)])
def test_push_and_collect(device: torch.device, epoch: int) -> None:
    ranks = Ranks(device, torch.float32, epoch)
    source = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    copies = RectangleCopies(
        [RectangleCopy(0, 1, 2, 0, 0, 0, 2), RectangleCopy(1, 1, 1, 1, 1, 3, 2)], device
    )
    ops.push(source, copies, ranks.exchange(0))
    halves = [buffer[(epoch + 1) % 2] for buffer in ranks.buffers]
    assert [half[:4].tolist() for half in halves] == [[1, 2, 0, 0], [0, 0, 0, 4]]
    assert sum(buffer.count_nonzero() for buffer in ranks.buffers) == 3
    for state in ranks.states:
        state[0] += 1
    out = torch.zeros(2, 3, device=device)
    to_out = RectangleCopies([RectangleCopy(0, 2, 2, 0, 0, 1, 3)], device)
    ops.collect(ranks.exchange(1), 1, 2, to_out, out)
    assert out.tolist() == [[0, 0, 0], [0, 0, 4]]


def test_sums_of_what_arrived_side_by_side(device: torch.device) -> None:
    """Three terms of two columns, in float32: 256 + 1 + 1 is 256 in bfloat16 if rounded twice."""
    ranks = Ranks(device, torch.bfloat16)
    arrived = torch.tensor([[9, 256, 2, 1, 4, 1, 8], [9, 3, 0.5, -3, 0.25, 5, 1]])
    ranks.buffers[0][0, :14] = arrived.flatten().to(ranks.buffers[0])
    copies = RectangleCopies([RectangleCopy(0, 2, 2, 0, 1, 1, 4)], device)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.zeros(2, 4, dtype=dtype, device=device)
        ops.collect(ranks.exchange(0), 0, 7, copies, out, 3)
        assert out.tolist() == [[0, 258, 14, 0], [0, 5, 1.75, 0]]


def test_scaled_in_its_dtype_and_then_rounded(device: torch.device) -> None:
    ranks = Ranks(device, torch.bfloat16)
    source = torch.linspace(-3, 5, 64, device=device).view(2, 32).to(torch.float16)
    copies = RectangleCopies([RectangleCopy(0, 2, 32, 0, 0, 0, 32)], device)
    ops.push(source, copies, ranks.exchange(0), 1 / 3)
    expected = (source * (1 / 3)).to(torch.bfloat16)
    assert torch.equal(ranks.buffers[0][1].view(2, 32), expected)


def test_meet(device: torch.device) -> None:
    ranks = Ranks(device, torch.float32, 4)
    ranks.flags[0][1] = 5  # the other one has come
    ranks.meet(0, 1.0)
    assert [flags.tolist() for flags in ranks.flags] == [[5, 5], [5, 4]]
    assert ranks.states[0].tolist() == [5, 0]
    assert not ranks.failed


def test_meet_ends_without_a_rank_and_waits_no_more(device: torch.device) -> None:
    ranks = Ranks(device, torch.float32, 4)
    ranks.meet(0, 1e-7)
    assert ranks.states[0].tolist() == [5, 1]
    assert ranks.failed.tolist() == [2]
    ranks.meet(0, 1e9)
    assert ranks.states[0].tolist() == [6, 1]


def test_epochs_may_wrap_around(device: torch.device) -> None:
    ranks = Ranks(device, torch.float32, 2**31 - 1)
    ranks.flags[0][1] = -(2**31)
    ranks.meet(0, 1e-7)
    assert ranks.states[0].tolist() == [-(2**31), 0]


def test_mean(device: torch.device) -> None:
    parts, means = Ranks(device, torch.float32, 1), Ranks(device, torch.float32)
    parts.buffers[1][1, :4] = torch.tensor([1.0, 2.0, 3.0, 6.0])
    ops.push_mean(parts.exchange(1), means.exchange(1), share=2, num_elements=2, rank=1)
    for buffer in means.buffers:
        assert buffer[1, :4].tolist() == [0, 0, 2, 4]
        assert buffer.count_nonzero() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lookup_pushes_what_it_would_return(device: torch.device, dtype: torch.dtype) -> None:
    ranks = Ranks(device, torch.bfloat16)
    weight, rows, copies = lookup_of_two_features(device, dtype)
    ops.push_pooled_lookup(
        weight, rows, None, [1, 2], None, 2, 4, copies=copies, to=ranks.exchange(0)
    )
    expected = pooled_lookup(
        weight,
        rows,
        hotness=[1, 2],
        batch_size=4,
        num_features=2,
        pooling=Pooling.SUM,
        output_dtype=torch.bfloat16,
    )
    for rank, samples in enumerate((expected[:3], expected[3:])):
        home = ranks.buffers[rank][1, : 10 * len(samples)].view(-1, 2, 5)
        assert torch.equal(home, samples.flip(1))


def lookup_of_two_features(
    device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, RectangleCopies]:
    """A weight ``[20, 5]``, the rows of four samples with one id and two, and where their vectors
    go: rank 0 has three of the samples, rank 1 one; features are the other way round at home."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 5, generator=generator).to(device, dtype)
    rows = torch.randint(-1, 20, (4 * 3,), generator=generator).to(device)
    copies = [
        RectangleCopy(rank, size, 5, start, 0, target, 10)
        for target in (5, 0)
        for rank, size, start in ((1, 1, 3), (0, 3, 0))
    ]
    return weight, rows, RectangleCopies(copies, device)


COPIES = [
    RectangleCopy(0, 3, 4, 1, 2, 8, 8),
    RectangleCopy(1, 2, 6, 0, 0, 32, 10),
    RectangleCopy(1, 0, 2, 0, 0, 60, 1),
    RectangleCopy(0, 1, 2, 4, 6, 2, 2),
]
"""No two of them overlap, not in one tensor either: kernels copy them in any order."""


@pytest.mark.parametrize("scale", [None, 1 / 3])
@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_reference(
    device: torch.device, dtype: torch.dtype, wire: torch.dtype, scale: float | None
) -> None:
    ranks, expected = Ranks(device, wire), Ranks(device, wire)
    source = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    copies = RectangleCopies(COPIES, device)
    ops.push(source.t().contiguous().t(), copies, ranks.exchange(0), scale)
    bounds = copies.numbers, copies.max_rows, copies.max_columns, copies.vector
    reference.push_rectangles_reference(source, *bounds, *expected.exchange(0), scale)
    for buffer, same in zip(ranks.buffers, expected.buffers, strict=True):
        assert_same_bits(buffer, same)
        assert same[1].any()
        assert not same[0].any()
    moved, same = torch.zeros(2, 5, 16, dtype=wire, device=device)
    ops.copy_rectangles(source, copies, moved)
    reference.copy_rectangles_reference(source, *bounds, same)
    assert_same_bits(moved, same)
    state = torch.tensor([1, 0], dtype=torch.int32, device=device)
    out, same = torch.zeros(2, 5, 16, dtype=dtype, device=device)
    ops.collect(expected.exchange(0)._replace(state=state), 0, 8, copies, out, 2)
    reference.collect_rectangles_reference(expected.buffers[0], state, 8, *bounds, 2, same)
    assert_same_bits(out, same)


@pytest.mark.parametrize("num_elements", [0, 5, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_equal_the_reference(
    device: torch.device, dtype: torch.dtype, num_elements: int
) -> None:
    parts = Ranks(device, dtype)
    generator = torch.Generator().manual_seed(2)
    parts.buffers[1].copy_(torch.randn(2, HALF, generator=generator))
    means, expected = Ranks(device, dtype), Ranks(device, dtype)
    mine = {"share": 32, "num_elements": num_elements, "rank": 1}
    ops.push_mean(parts.exchange(1), means.exchange(1), **mine)
    arrived, state = parts.buffers[1], parts.states[1]
    reference.push_mean_reference(arrived, state, *expected.exchange(1), **mine)
    for buffer, same in zip(means.buffers, expected.buffers, strict=True):
        assert_same_bits(buffer, same)
        assert bool(same.any()) is (num_elements > 0)


def test_schemas_say_what_is_written(device: torch.device) -> None:
    """An operation changes what its schema declares, peers' memory among it."""
    if lanes.picked_kernel("push_barrier", device) != "reference":
        pytest.skip("the check copies the ranks' memory, which kernels reach by address")
    ranks = Ranks(device, torch.float32, 1)
    ranks.flags[0][1] = 100  # each call is one exchange
    weight, rows, of_lookup = lookup_of_two_features(device, torch.float32)
    source, copies = torch.ones(5, 8, device=device), RectangleCopies(COPIES, device)
    to, buffer, state = ranks.exchange(0), ranks.buffers[0], ranks.states[0]
    bounds, of_lookup = (
        (m.numbers, m.max_rows, m.max_columns, m.vector) for m in (copies, of_lookup)
    )
    schemas = torch.ops.torchembed
    calls = {
        schemas.push_rectangles: (source, *bounds, *to, 0.5),
        schemas.collect_rectangles: (buffer, state, 8, *bounds, 2, source.clone()),
        schemas.copy_rectangles: (source, *bounds, torch.zeros(5, 16, device=device)),
        schemas.push_mean: (buffer, state, *to, 32, 32, 0),
        schemas.push_barrier: (ranks.flags, ranks._flags, state, ranks.failed, 0, 1.0),
        schemas.push_pooled_lookup: (weight, rows, None, [1, 2], None, 2, 4, *of_lookup, *to),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
