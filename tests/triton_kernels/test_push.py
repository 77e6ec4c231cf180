"""The example in the docstring of each kernel that pushes, its ranks being buffers of one device.

That ranks agree is in tests/sharding/test_push.py and tests/gpu/test_push.py.
"""

import pytest
import torch
from torch import Tensor

from torchembed.triton_kernels import pooled_lookup, push

HALF = 64


class Ranks:
    """Buffers, flags and states of two ranks, whose epochs are ``epoch``."""

    def __init__(self, device: torch.device, dtype: torch.dtype, epoch: int = 0) -> None:
        self.buffers = [torch.zeros(2 * HALF, dtype=dtype, device=device) for _ in range(2)]
        self.flags = [
            torch.tensor([epoch, epoch], dtype=torch.int32, device=device) for _ in range(2)
        ]
        state = torch.tensor([epoch, 0], dtype=torch.int32, device=device)
        self.states = [state, state.clone()]
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._addresses, self._flags = addresses(self.buffers), addresses(self.flags)

    def exchange(self, rank: int) -> push.Exchange:
        return push.Exchange(self._addresses, self.states[rank], HALF, self.buffers[0].dtype)

    def meet(self, rank: int, limit_seconds: float) -> None:
        mine = self.flags[rank], self._flags, self.states[rank]
        push.launch_meet(*mine, self.failed, rank, limit_seconds)
        if self.flags[0].is_cuda:
            torch.cuda.synchronize()


def addresses(tensors: list[Tensor]) -> Tensor:
    numbers = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(numbers, dtype=torch.int64, device=tensors[0].device)


@pytest.mark.parametrize("epoch", [0, 1, -(2**31)])
def test_push_and_collect(device: torch.device, epoch: int) -> None:
    ranks = Ranks(device, torch.float32, epoch)
    source = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    moves = push.Moves([(0, 1, 2, 0, 0, 0, 2), (1, 1, 1, 1, 1, 3, 2)], device)
    push.launch_push(source, moves, ranks.exchange(0))
    half = slice((epoch + 1) % 2 * HALF, (epoch + 1) % 2 * HALF + 4)
    assert [buffer[half].tolist() for buffer in ranks.buffers] == [[1, 2, 0, 0], [0, 0, 0, 4]]
    assert sum(buffer.count_nonzero() for buffer in ranks.buffers) == 3
    for state in ranks.states:
        state[0] += 1
    out = torch.zeros(2, 3, device=device)
    to_out = push.Moves([(0, 2, 2, 0, 0, 1, 3)], device)
    push.launch_collect(ranks.buffers[1], 2, to_out, ranks.exchange(1), out)
    assert out.tolist() == [[0, 0, 0], [0, 0, 4]]


def test_sums_of_what_arrived_side_by_side(device: torch.device) -> None:
    """Three terms of two columns, in float32: 256 + 1 + 1 is 256 in bfloat16 if rounded twice."""
    ranks = Ranks(device, torch.bfloat16)
    arrived = torch.tensor([[9, 256, 2, 1, 4, 1, 8], [9, 3, 0.5, -3, 0.25, 5, 1]])
    ranks.buffers[0][:14] = arrived.flatten().to(ranks.buffers[0])
    moves = push.Moves([(0, 2, 2, 0, 1, 1, 4)], device)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.zeros(2, 4, dtype=dtype, device=device)
        push.launch_collect(ranks.buffers[0], 7, moves, ranks.exchange(0), out, 3)
        assert out.tolist() == [[0, 258, 14, 0], [0, 5, 1.75, 0]]


def test_scaled_in_its_dtype_and_then_rounded(device: torch.device) -> None:
    ranks = Ranks(device, torch.bfloat16)
    source = torch.linspace(-3, 5, 64, device=device).view(2, 32).to(torch.float16)
    moves = push.Moves([(0, 2, 32, 0, 0, 0, 32)], device)
    push.launch_push(source, moves, ranks.exchange(0), 1 / 3)
    expected = (source * (1 / 3)).to(torch.bfloat16)
    assert torch.equal(ranks.buffers[0][HALF : HALF + 64].view(2, 32), expected)


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
    parts.buffers[1][HALF : HALF + 4] = torch.tensor([1.0, 2.0, 3.0, 6.0])
    push.launch_mean(parts.buffers[1], parts.exchange(1), means.exchange(1), 2, 2, 1)
    for buffer in means.buffers:
        assert buffer[HALF : HALF + 4].tolist() == [0, 0, 2, 4]
        assert buffer.count_nonzero() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lookup_pushes_what_it_would_return(device: torch.device, dtype: torch.dtype) -> None:
    ranks = Ranks(device, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 5, generator=generator).to(device, dtype)
    rows = torch.randint(-1, 20, (4 * 3,), generator=generator).to(device)
    bags = None, [1, 2], None, 2, 4
    # Rank 0 has three of the samples, rank 1 one; features are the other way round at home.
    moves = push.Moves(
        [
            (rank, size, 5, start, 0, target, 10)
            for target in (5, 0)
            for rank, size, start in ((1, 1, 3), (0, 3, 0))
        ],
        device,
    )
    pooled_lookup.launch_pooled_lookup_push(weight, rows, *bags, moves, ranks.exchange(0))
    expected = pooled_lookup.launch_pooled_lookup_forward(
        weight, rows, *bags, False, torch.bfloat16
    )
    for rank, samples in enumerate((expected[:3], expected[3:])):
        home = ranks.buffers[rank][HALF : HALF + 10 * len(samples)].view(-1, 2, 5)
        assert torch.equal(home, samples.flip(1))
