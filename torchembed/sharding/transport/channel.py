"""Memory of every GPU of a node that all of them store into: symmetric memory, and meeting there.

No rank resets anything, and none uses multicast. How an exchange works, and why two halves of a
buffer are enough, is in :mod:`torchembed.ops.push`.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.ops.push import (
    Exchange,
    Move,
    collect,
    moves_on,
    push,
    push_barrier,
    push_mean,
    push_pooled_lookup,
)

_ALIGNMENT = 256
"""Bytes."""
_LEAST_BYTES = 1 << 16
Allocate = Callable[[int, Any, torch.device], list[Tensor]]


class PushDomain:
    """The GPUs that store into each other's memory, as one of their ranks sees them.

    Args:
        group: their process group, in which symmetric memory is made.
        device: this rank's.
        limit_seconds: how long the GPU waits for another one. It then goes on with what there is,
            and :meth:`check` raises.
        allocate: makes what all of them store into; see :func:`symmetric_memory`.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        limit_seconds: float = 600.0,
        allocate: "Allocate | None" = None,
    ) -> None:
        self.group, self.device, self.limit_seconds = group, device, limit_seconds
        self.allocate = symmetric_memory if allocate is None else allocate
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.failed = torch.zeros(
            1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        """1 + a rank that did not come in time; kernels write it."""
        self._channels: dict[tuple[Any, int], Channel] = {}

    def check(self) -> None:
        """Raise where a rank has not come in time; waits for nothing.

        Raises:
            TimeoutError: names the rank.
        """
        late = int(self.failed[0])
        if late:
            raise TimeoutError(
                f"rank {late - 1} of {self.num_ranks} has not come to an exchange of vectors or "
                f"gradients in {self.limit_seconds:g} s; look for one that died or is stuck. "
                "What was computed since is wrong"
            )

    def channel(self, use: Any, num_bytes: int) -> "Channel":
        """A channel of this ``use``, hashable, for exchanges in which ranks receive ``num_bytes``
        at most.

        Collective where there was none of that use and size, which then waits for the GPU and for
        the others; the arguments are the same on all ranks. It is never freed: a CUDA graph of
        another rank may store there.
        """
        size = half_bytes(num_bytes)
        channel = self._channels.get((use, size))
        if channel is None:
            channel = self._channels[use, size] = Channel(self, size)
        return channel


def half_bytes(num_bytes: int) -> int:
    """Of a half of the channel in which ``num_bytes`` arrive: a power of two, so that batches of
    other sizes need no other one."""
    return max(1 << (num_bytes - 1).bit_length(), _LEAST_BYTES)


class Channel:
    """A buffer of two halves on each rank, for exchanges one after the other.

    Every rank takes part in each of them, in one order of streams.

    Args:
        half_bytes: a multiple of 256.
    """

    def __init__(self, domain: PushDomain, half_bytes: int) -> None:
        assert half_bytes % _ALIGNMENT == 0
        self._domain, self.half_bytes = domain, half_bytes
        memories = domain.allocate(
            2 * half_bytes + domain.num_ranks * 4, domain.group, domain.device
        )
        self._buffers = [memory[: 2 * half_bytes] for memory in memories]
        self._flags = [memory[2 * half_bytes :].view(torch.int32) for memory in memories]
        self._addresses = _addresses(self._buffers, domain.device)
        self._flag_addresses = _addresses(self._flags, domain.device)
        self._state = torch.zeros(2, dtype=torch.int32, device=domain.device)
        self._exchanges: dict[torch.dtype, Exchange] = {}

    def exchange(self, dtype: torch.dtype) -> Exchange:
        """What operations know of the channel where elements of ``dtype`` travel."""
        if dtype not in self._exchanges:
            buffers = [buffer.view(dtype).view(2, -1) for buffer in self._buffers]
            self._exchanges[dtype] = Exchange(buffers, self._addresses, self._state)
        return self._exchanges[dtype]

    def push(
        self,
        source: Tensor,
        moves: Sequence[Move],
        dtype: torch.dtype,
        scale: float | None = None,
    ) -> None:
        """Store ``moves`` of ``source [rows, columns]``, times ``scale``, into the ranks' buffers
        in ``dtype``."""
        self._domain.check()
        push(source, moves_on(source.device, tuple(moves)), self.exchange(dtype), scale)

    def push_lookup(self, lookup: Sequence[Any], moves: Sequence[Move], dtype: torch.dtype) -> None:
        """Store ``moves`` of what a ``lookup``, the arguments of a
        :obj:`~torchembed.ops.pooled_lookup.LookupStore`, pools into the ranks' buffers in
        ``dtype``."""
        self._domain.check()
        on_device = moves_on(self._domain.device, tuple(moves))
        push_pooled_lookup(*lookup, moves=on_device, to=self.exchange(dtype))

    def push_mean(self, means: "Channel", dtype: torch.dtype, share: int, num_mine: int) -> None:
        """Of what has arrived here, ``share`` elements from each rank, push the mean over ranks of
        the first ``num_mine`` to all ranks through ``means``, a channel as large, each rank's where
        its share is."""
        assert means.half_bytes == self.half_bytes
        push_mean(
            self.exchange(dtype),
            means.exchange(dtype),
            share=share,
            num_elements=num_mine,
            rank=self._domain.rank,
        )

    def meet(self) -> None:
        """Wait on the GPU until every rank has pushed: the end of an exchange."""
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
        moves: Sequence[Move],
        stride: int,
        dtype: torch.dtype,
        num_terms: int = 1,
    ) -> None:
        """Move what arrived, in rows of ``stride`` elements of ``dtype``, in the exchange that is
        over to ``out``; the sum of ``num_terms`` rectangles that are side by side."""
        on_device = moves_on(out.device, tuple(moves))
        collect(self.exchange(dtype), self._domain.rank, stride, on_device, out, num_terms)


def _addresses(memories: Sequence[Tensor], device: torch.device) -> Tensor:
    """Where they begin, int64 ``[W]``."""
    numbers = [memory.data_ptr() for memory in memories]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def symmetric_memory(num_bytes: int, group: Any, device: torch.device) -> list[Tensor]:
    """Zeros, uint8 ``[num_bytes]`` of each rank, in this rank's address space.

    Collective; waits for the GPU and for the other ranks.

    Raises:
        RuntimeError: where torch cannot make it, or a CUDA graph is being captured.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "symmetric memory cannot be made while a CUDA graph is captured; run a batch of the "
            "same size before"
        )
    # Torch would prepare for multicast, which nothing here uses.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with torch.cuda.device(device):
        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        memory.zero_()
        # The others store into it as soon as they know where it is.
        torch.cuda.current_stream().synchronize()
        handle = _SymmetricMemory.rendezvous(memory, group.group_name)
    assert handle is not None
    memories = [
        handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)
    ]
    assert [memory.data_ptr() for memory in memories] == list(handle.buffer_ptrs)
    # The rank's own keeps the memory, and its peers' pointers, alive.
    memories[handle.rank] = memory
    return memories
