"""Vectors and gradients of a sharded model by push and by all-to-all, and a rank that is late."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import torchembed
from tests.support.sharded_cases import Case, made_mesh, make_batch, make_model, vectors_of
from torchembed import MinimumCount
from torchembed.sharding import WirePrecision, WireTransport
from torchembed.sharding.transport.channel import PushDomain

MIXED = {"a": "column_wise", "b": "row_wise", "c": "table_wise", "d": "data_parallel"}
CASES = [
    Case(placements=dict.fromkeys("abcd", "table_wise"), fixed=True, fused=False),
    Case(placements=MIXED, fixed=True, weighted=True, fused=False, reserved=3),
    Case(placements=MIXED, fused=False, dtype=torch.bfloat16),
]
DYNAMIC = Case(
    placements=MIXED,
    fused=False,
    weighted=True,
    dynamic=("a", "b", "c"),
    admission=MinimumCount(2),
    missing="vector",
)
WIRES = [
    WirePrecision(),
    WirePrecision(forward=torch.bfloat16, backward=torch.bfloat16),
    WirePrecision(forward=torch.float16, backward=torch.float16),
]


class MappedMemory:
    """Files of a folder, which every rank maps: a CPU's symmetric memory."""

    def __init__(self, folder: str) -> None:
        self._folder, self._num_maps = Path(folder), 0

    def __call__(self, num_bytes: int, group: Any, _: torch.device) -> list[Tensor]:
        number, rank = self._num_maps, dist.get_rank(group)
        self._num_maps += 1
        names = [str(self._folder / f"{number}-{r}") for r in range(dist.get_world_size(group))]
        Path(names[rank]).write_bytes(bytes(num_bytes))
        dist.barrier(group)
        return [torch.from_file(n, shared=True, size=num_bytes, dtype=torch.uint8) for n in names]


def sharded_model(
    case: Case,
    wire: WirePrecision,
    device_type: str,
    transport: WireTransport,
    memory: MappedMemory | None,
) -> Any:
    """The model of ``case``; with ``memory`` it pushes on the CPU."""
    model: Any = make_model(case, "meta")
    mesh, plan = made_mesh(device_type, 1), case.plan(dist.get_world_size())
    torchembed.shard_embeddings(model, mesh, plan, wire=wire, transport=transport)
    if memory is not None:
        domain = PushDomain(mesh.get_group(), torch.device("cpu"), allocate=memory)
        model.tables._push = model.tables._pooled_push(domain)
    return model


def vectors_and_gradients(
    pairs: list[tuple[Case, WirePrecision]],
    device_type: str,
    transport: WireTransport,
    memory: MappedMemory | None = None,
) -> list[list[np.ndarray]]:
    """On a rank, of each case and wire: vectors of batches of different sizes, each followed by its
    backward but the last two, whose backwards come together; and the gradients of all weights."""
    found = []
    for case, wire in pairs:
        model = sharded_model(case, wire, device_type, transport, memory)
        arrays, losses = [], []
        for step in range(4):
            batch = make_batch(case, dist.get_rank(), step).to(device_type)
            if case.weighted:
                batch.weights.requires_grad_()
            vectors = vectors_of(model.tables(batch))
            arrays.append(vectors.detach().cpu().numpy())
            coefficients = torch.linspace(-1, 1, vectors.numel(), device=vectors.device) ** 3
            losses.append((vectors * coefficients).sum())
            if step < 2:
                losses.pop().backward()
                if case.weighted:
                    arrays.append(batch.weights.grad.cpu().numpy())
        torch.stack(losses).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(arrays + [gradient.float().cpu().numpy() for gradient in gradients])
    return found


def assert_same_arrays(ones: list[list[np.ndarray]], others: list[list[np.ndarray]]) -> None:
    for one, other in zip(ones, others, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype == np.float32
            np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


def late_rank(device_type: str, limit_seconds: float, memory: MappedMemory | None = None) -> str:
    """The words of the first of two ranks where the other one comes to one exchange of two."""
    device = torch.device(device_type, dist.get_rank()) if memory is None else torch.device("cpu")
    domain = PushDomain(dist.group.WORLD, device, allocate=memory)
    channel = domain.channel("a test", 64)
    for _ in range(2 - dist.get_rank()):
        channel.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        # The second time nobody else comes, however long it is waited for.
        domain.limit_seconds = limit_seconds
    try:
        domain.check()
    except TimeoutError as error:
        return str(error)
    return ""


LATE = "rank 1 of 2 has not come to an exchange of vectors or gradients in .* s; look for one that"
