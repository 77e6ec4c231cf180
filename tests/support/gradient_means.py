"""Dense gradients reduced over ranks, compared with means of gradients computed on their own."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run_on_ranks
from tests.support.values import normal
from torchembed.autograd.gradient_slots import joint_spans, slot_of
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.modules import MLP, LowRankCross
from torchembed.optim import DenseSGD
from torchembed.sharding.transport.channel import PushDomain
from torchembed.sharding.transport.gradient_mean import GradientMean
from torchembed.sharding.transport.process_groups import borrow_groups
from torchembed.sharding.transport.pushed_mean import PushedMean


class Model(nn.Module):
    """Layers of ours and of torch's, and one that not every rank uses."""

    def __init__(self, dtype: torch.dtype, *, shares: bool) -> None:
        """``shares``: two gradients of one weight come from one backward, here and there."""
        super().__init__()
        self.shares = shares
        self.first = MLP(6, [5, 8], dtype=dtype)
        self.between = nn.Linear(8, 8, dtype=dtype)
        self.cross = LowRankCross(8, 2, 3, dtype=dtype)
        self.twice = MLP(8, [8], dtype=dtype)
        self.sometimes = nn.Linear(8, 8, dtype=dtype)
        self.frozen = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.last = MLP(8, [4, 1], activation_on_last=False, dtype=dtype)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        x = self.twice(self.cross(self.frozen(self.between(self.first(x)))))
        penalty = 0.0
        if self.shares:
            x = self.twice(x)
            # One use of a weight is deferred, another is not.
            penalty = self.last[0].weight.square().mean()
        return self.last(self.sometimes(x) if uses_all else x) + penalty


def model(dtype: torch.dtype, kind: str) -> Model:
    made = Model(dtype, shares=kind != "on a stream")  # which adds no gradients up
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / 2)
    return made


def backward(module: nn.Module, rank: int, step: int) -> None:
    parameter = next(module.parameters())
    seed = 10 * step + rank
    x = normal(4 + rank, 6, seed=seed, dtype=parameter.dtype, device=parameter.device)
    module(x, uses_all=rank == 0).float().square().mean().backward()


def local_gradients(rank: int, dtype: torch.dtype, kind: str, device: str) -> list[np.ndarray]:
    """Sums of the gradients of two backwards, with nothing that reduces."""
    module = model(dtype, kind).to(device)
    for step in range(2):
        backward(module, rank, step)
    return [
        (torch.zeros_like(p) if p.grad is None else p.grad).float().cpu().numpy()
        for p in module.parameters()
        if p.requires_grad
    ]


def deferral(kind: str) -> Any:
    if kind in ("alone", "at once"):
        return contextlib.nullcontext()
    return DeferredWeightGradients(torch.cuda.Stream() if kind == "on a stream" else None)


def reduced_gradients(
    cases: list[dict[str, Any]], device: str, pushes: bool, num_nodes: int
) -> list[list[np.ndarray]]:
    """On one rank, the gradients of each case after two backwards."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    found, rank, groups, push = [], dist.get_rank(), borrow_groups(mesh, num_nodes), None
    group = groups.gradients
    if pushes:
        push = PushedMean(PushDomain(group, torch.device(device, rank)), "a test")
    for case in cases:
        module = model(case["dtype"], case["deferral"]).to(device)
        if case["flat"]:
            DenseSGD([p for p in module.parameters() if p.requires_grad])
        mean = GradientMean(
            module.parameters(),
            group,
            dtype=case["wire"],
            push=push,
            nodes=groups.gradient_nodes,
            bucket_bytes=case["bucket_bytes"],
        )
        for step in range(2):
            with deferral(case["deferral"]):
                backward(module, rank, step)
        assert not mean._buckets
        if case["flat"]:
            assert joint_spans(list(module.last.parameters())) is not None
            assert all(slot_of(p).holds(p.grad) for p in module.parameters() if p.requires_grad)
        found.append([p.grad.float().cpu().numpy() for p in module.parameters() if p.requires_grad])
        assert all(p.grad is None for p in module.frozen.parameters())
    return found


def assert_means(
    num_ranks: int,
    device: str,
    deferrals: Sequence[str],
    backend: str,
    *,
    pushes: bool = False,
    num_nodes: int = 1,
    sizes: Sequence[int] = (1, 200, 1 << 20),
) -> None:
    """Assert that ranks end up with the mean of their gradients, however it is reduced.

    ``sizes`` are those of buckets in bytes.
    """
    cases = [
        {"dtype": dtype, "wire": wire, "flat": flat, "deferral": kind, "bucket_bytes": size}
        for dtype, wire in (
            (torch.float32, None),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, None),
            (torch.bfloat16, torch.float32),
        )
        for flat in (False, True)
        for kind in deferrals
        for size in sizes
    ]
    arguments = cases, device, pushes, num_nodes
    by_rank = run_on_ranks(num_ranks, reduced_gradients, *arguments, backend=backend)
    for number, case in enumerate(cases):
        first, *others = (results[number] for results in by_rank)
        kind = case["deferral"]
        locals_ = [local_gradients(r, case["dtype"], kind, device) for r in range(num_ranks)]
        wires = {case["dtype"], case["wire"] or case["dtype"]}
        # Each of two backwards rounds gradients, the partial sums of ranks and their mean.
        steps = 2 * (num_ranks + (2 if torch.bfloat16 in wires else 0))
        eps = torch.finfo(torch.bfloat16 if torch.bfloat16 in wires else torch.float32).eps
        for which, (found, *parts) in enumerate(zip(first, *locals_, strict=True)):
            for other in others:
                np.testing.assert_array_equal(found, other[which])
            expected = sum(parts) / num_ranks
            largest = max(np.abs(part).max() for part in (*parts, expected))
            assert np.abs(found - expected).max() <= steps * eps * largest, case
