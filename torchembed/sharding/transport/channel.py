"""Channels of symmetric memory, by which the GPUs of a node store into each other's buffers.

No rank resets a buffer or a flag, and none uses multicast. :mod:`torchembed.ops.push` explains the
exchange, and why two halves of a buffer are enough.
"""

import os
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.copies.rectangles import RectangleCopy, copies_on
from torchembed.ops.pooled_lookup import LookupInputs
from torchembed.ops.push import (
    Exchange,
    collect,
    push,
    push_barrier,
    push_mean,
    push_pooled_lookup,
)

_ALIGNMENT = 256
"""Bytes that the size of a half is a multiple of."""
_LEAST_BYTES = 1 << 16
"""Smallest size of a half."""
Allocate = Callable[[int, dist.ProcessGroup, torch.device], list[Tensor]]
"""Allocates the memory of all ranks, as :func:`symmetric_memory` does."""


class PushDomain:
    """The GPUs that store into each other's memory, as seen by one of their ranks.

    Args:
        group: their process group, in which symmetric memory is allocated.
        device: this rank's.
        limit_seconds: time that a GPU waits for another one in a barrier. It then goes on with
            what has arrived, and :meth:`check` raises.
        allocate: allocates the memory; :func:`symmetric_memory` by default.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        limit_seconds: float = 600.0,
        allocate: "Allocate | None" = None,
    ) -> None:
        self.group, self.device, self.limit_seconds = group, device, limit_seconds
        self.allocate = symmetric_memory if allocate is None else allocate
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        # In pinned memory, which kernels can write and the host can read without waiting for a GPU.
        self.failed = torch.zeros(
            1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        """1 + the rank that did not come in time, 0 where all did; written by kernels."""
        self._channels: dict[tuple[Hashable, int], Channel] = {}

    def check(self) -> None:
        """Raise where a rank has not come to a barrier in time; the host waits for nothing.

        Raises:
            TimeoutError: names the rank.
        """
        late = self.failed.item()  # int() of an element would be two operations, at each step
        if late:
            raise TimeoutError(
                f"rank {late - 1} of {self.num_ranks} has not come to an exchange of vectors or "
                f"gradients in {self.limit_seconds:g} s; look for one that died or is stuck. "
                "What was computed since is wrong"
            )

    def channel(self, use: Hashable, num_bytes: int) -> "Channel":
        """The channel of this ``use`` for exchanges in which a rank receives at most ``num_bytes``.

        Collective where there is none yet, which waits for the GPU and the other ranks; arguments
        are the same on all ranks. A channel is never freed: a CUDA graph of another rank may store
        into it.
        """
        size = half_bytes(num_bytes)
        channel = self._channels.get((use, size))
        if channel is None:
            channel = self._channels[use, size] = Channel(self, size)
        return channel


def half_bytes(num_bytes: int) -> int:
    """Size of each half of a channel for exchanges of ``num_bytes``: a power of two, so that
    batches of similar sizes share a channel."""
    return max(1 << (num_bytes - 1).bit_length(), _LEAST_BYTES)


class Channel:
    """A buffer of two halves on each rank, between which successive exchanges alternate.

    All ranks take part in every exchange, in the same order on their streams.

    Args:
        half_bytes: a multiple of 256.
    """

    def __init__(self, domain: PushDomain, half_bytes: int) -> None:
        assert half_bytes % _ALIGNMENT == 0
        self._domain, self.half_bytes = domain, half_bytes
        # Buffers and flags are one allocation, since each one takes a rendezvous of all ranks.
        memories = domain.allocate(
            2 * half_bytes + domain.num_ranks * 4, domain.group, domain.device
        )
        self._buffers = [memory[: 2 * half_bytes] for memory in memories]
        self._flags = [memory[2 * half_bytes :].view(torch.int32) for memory in memories]
        self._addresses = _addresses(self._buffers, domain.device)
        self._flag_addresses = _addresses(self._flags, domain.device)
        # The number of the exchange is on the device: a captured graph replays the same kernels for
        # each exchange, and they read from it which half is theirs.
        self._state = torch.zeros(2, dtype=torch.int32, device=domain.device)
        self._exchanges: dict[torch.dtype, Exchange] = {}

    def exchange(self, dtype: torch.dtype) -> Exchange:
        """The channel's buffers, seen as elements of ``dtype``, for operations."""
        if dtype not in self._exchanges:
            buffers = [buffer.view(dtype).view(2, -1) for buffer in self._buffers]
            self._exchanges[dtype] = Exchange(buffers, self._addresses, self._state)
        return self._exchanges[dtype]

    def push(
        self,
        source: Tensor,
        moves: Sequence[RectangleCopy],
        dtype: torch.dtype,
        scale: float | None = None,
    ) -> None:
        """Store ``moves`` of ``source [rows, columns]``, times ``scale``, into the ranks' buffers
        in ``dtype``."""
        self._domain.check()
        push(source, copies_on(source.device, tuple(moves)), self.exchange(dtype), scale)

    def push_lookup(
        self, lookup: LookupInputs, moves: Sequence[RectangleCopy], dtype: torch.dtype
    ) -> None:
        """Pool the sums of ``lookup``, and store ``moves`` of them into the ranks' buffers in
        ``dtype``."""
        self._domain.check()
        on_device = copies_on(self._domain.device, tuple(moves))
        push_pooled_lookup(*lookup, copies=on_device, to=self.exchange(dtype))

    def push_mean(self, means: "Channel", dtype: torch.dtype, share: int, num_mine: int) -> None:
        """Push the mean over ranks of what has arrived to all ranks, at this rank's share.

        Args:
            means: the channel to push through, as large as this one.
            share: elements from each rank.
            num_mine: elements of the share to average.
        """
        assert means.half_bytes == self.half_bytes
        push_mean(
            self.exchange(dtype),
            means.exchange(dtype),
            share=share,
            num_elements=num_mine,
            rank=self._domain.rank,
        )

    def barrier(self) -> None:
        """Let the GPU wait until every rank has pushed, which ends an exchange."""
        domain = self._domain
        push_barrier(
            self._flags,
            self._flag_addresses,
            self._state,
            domain.failed,
            rank=domain.rank,
            limit_seconds=domain.limit_seconds,
        )

    def collect(
        self,
        out: Tensor,
        moves: Sequence[RectangleCopy],
        stride: int,
        dtype: torch.dtype,
        num_terms: int = 1,
    ) -> None:
        """Move what arrived, in rows of ``stride`` elements of ``dtype``, in the exchange that is
        over to ``out``; the sum of ``num_terms`` neighbouring rectangles."""
        on_device = copies_on(out.device, tuple(moves))
        collect(self.exchange(dtype), self._domain.rank, stride, on_device, out, num_terms)


def _addresses(memories: Sequence[Tensor], device: torch.device) -> Tensor:
    """Addresses of ``memories``, int64 ``[W]``."""
    numbers = [memory.data_ptr() for memory in memories]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def symmetric_memory(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """Allocate zeroed memory on each rank, mapped by all: the uint8 ``[num_bytes]`` of each rank.

    Collective; waits for the GPU and for the other ranks.

    Raises:
        RuntimeError: if torch cannot allocate it, or a CUDA graph is being captured.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "symmetric memory cannot be made while a CUDA graph is captured; run a batch of the "
            "same size before"
        )
    # Torch would set up multicast, which is not used here and fails on machines that forbid it.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with torch.cuda.device(device):
        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        memory.zero_()
        # Other ranks may store into it as soon as rendezvous has given them the address: the zeros
        # must be there by then.
        torch.cuda.current_stream().synchronize()
        handle = _SymmetricMemory.rendezvous(memory, group.group_name)
    assert handle is not None
    memories = [
        handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)
    ]
    assert [memory.data_ptr() for memory in memories] == list(handle.buffer_ptrs)
    # This rank's own tensor, in place of the view of it, keeps the memory and the mappings alive.
    memories[handle.rank] = memory
    return memories
