"""Memory of every GPU of a node that all of them store into: symmetric memory, and meeting there.

No rank resets anything, and none uses multicast. How an exchange works, and why two halves of a
buffer are enough, is in :mod:`torchembed.triton_kernels.push`.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGNMENT = 256
"""Bytes."""
_LEAST_BYTES = 1 << 16
Move = tuple[int, int, int, int, int, int, int]
"""See :func:`torchembed.triton_kernels.push._move_kernel`."""
Allocate = Callable[[int, Any, torch.device], tuple[Tensor, list[int]]]


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
        memory, addresses = domain.allocate(
            2 * half_bytes + domain.num_ranks * 4, domain.group, domain.device
        )
        self._buffer = memory[: 2 * half_bytes]
        self._own_flags = memory[2 * half_bytes :].view(torch.int32)
        flags = [address + 2 * half_bytes for address in addresses]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=domain.device)
        self._flags = torch.tensor(flags, dtype=torch.int64, device=domain.device)
        self._state = torch.zeros(2, dtype=torch.int32, device=domain.device)

    def exchange(self, dtype: torch.dtype) -> Any:
        """What kernels know of the channel where elements of ``dtype`` travel."""
        from torchembed.triton_kernels.push import Exchange

        half = self.half_bytes // dtype.itemsize
        return Exchange(self._addresses, self._state, half, dtype)

    def push(
        self,
        source: Tensor,
        moves: Sequence[Move],
        dtype: torch.dtype,
        scale: float | None = None,
    ) -> None:
        """Store ``moves`` of ``source [rows, columns]``, times ``scale``, into the ranks' buffers
        in ``dtype``."""
        from torchembed.triton_kernels.push import launch_push, moves_on

        self._domain.check()
        if source.stride(-1) != 1:
            source = source.contiguous()
        launch_push(source, moves_on(source.device, tuple(moves)), self.exchange(dtype), scale)

    def push_lookup(self, lookup: Sequence[Any], moves: Sequence[Move], dtype: torch.dtype) -> None:
        """Store ``moves`` of what a ``lookup``, the arguments of a
        :obj:`~torchembed.ops.pooled_lookup.LookupStore`, pools into the ranks' buffers in
        ``dtype``."""
        from torchembed.triton_kernels.pooled_lookup import launch_pooled_lookup_push
        from torchembed.triton_kernels.push import moves_on

        self._domain.check()
        on_device = moves_on(self._domain.device, tuple(moves))
        launch_pooled_lookup_push(*lookup, moves=on_device, to=self.exchange(dtype))

    def push_mean(self, means: "Channel", dtype: torch.dtype, share: int, num_mine: int) -> None:
        """Of what has arrived here, ``share`` elements from each rank, push the mean over ranks of
        the first ``num_mine`` to all ranks through ``means``, a channel as large, each rank's where
        its share is."""
        from torchembed.triton_kernels.push import launch_mean

        assert means.half_bytes == self.half_bytes
        parts, rank = self._buffer.view(dtype), self._domain.rank
        launch_mean(parts, self.exchange(dtype), means.exchange(dtype), share, num_mine, rank)

    def meet(self) -> None:
        """Wait on the GPU until every rank has pushed: the end of an exchange."""
        from torchembed.triton_kernels.push import launch_meet

        domain = self._domain
        launch_meet(
            self._own_flags,
            self._flags,
            self._state,
            domain.failed,
            domain.rank,
            domain.limit_seconds,
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
        from torchembed.triton_kernels.push import launch_collect, moves_on

        on_device = moves_on(out.device, tuple(moves))
        arrived = self._buffer.view(dtype)
        launch_collect(arrived, stride, on_device, self.exchange(dtype), out, num_terms)


def symmetric_memory(num_bytes: int, group: Any, device: torch.device) -> tuple[Tensor, list[int]]:
    """Zeros, uint8, and where every rank's are in this rank's address space.

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
    addresses = [int(address) for address in handle.buffer_ptrs]
    assert addresses[dist.get_rank(group)] == memory.data_ptr()
    return memory, addresses
