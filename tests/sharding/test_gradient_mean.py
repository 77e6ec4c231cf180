"""The mean of dense gradients over ranks: in buckets, flat or not, deferred or not."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.values import normal
from torchembed.autograd.gradient_slots import joint_spans, slot_of
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.modules import MLP, LowRankCross
from torchembed.optim import DenseSGD
from torchembed.sharding.transport.channel import PushDomain
from torchembed.sharding.transport.gradient_mean import GradientMean
from torchembed.sharding.transport.pushed_mean import PushedMean
from torchembed.sharding.wire import WirePrecision


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
    """Of two backwards together, with nothing that reduces."""
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
    cases: list[dict[str, Any]], device: str, pushes: bool
) -> list[list[np.ndarray]]:
    """On one rank, the gradients of each case after two backwards."""
    found, rank, group, push = [], dist.get_rank(), dist.new_group(), None
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
    num_ranks: int, device: str, deferrals: Sequence[str], backend: str, *, pushes: bool = False
) -> None:
    """Assert that ranks end up with the mean of their gradients, however it is reduced."""
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
        for size in (1, 200, 1 << 20)
    ]
    by_rank = run_on_ranks(num_ranks, reduced_gradients, cases, device, pushes, backend=backend)
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


def test_the_mean_of_all_ranks() -> None:
    assert_means(2, "cpu", ("at once", "at the end"), "gloo")


class Brings(torch.autograd.Function):
    """Has numbers averaged in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: GradientMean, sizes: Sequence[int], found: list[Tensor]
    ) -> Tensor:
        ctx.mean, ctx.sizes, ctx.found = mean, sizes, found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        for size in ctx.sizes:
            numbers = torch.full((size,), 1.0 + dist.get_rank(), dtype=ctx.mean.numbers_dtype)
            ctx.mean.add(numbers, ctx.found.append)
        return grad, None, None, None


FEW_AND_MANY = (3, 2), (600_000, 2)


def means_of_numbers(_: None) -> list[Any]:
    """On one rank: of numbers that come alone, and beside gradients at once and deferred, in each
    way the numbers, the gradients and how many collectives there were."""
    results: list[Any] = []
    for dtype, sizes in itertools.product((None, torch.bfloat16), FEW_AND_MANY):
        layers = MLP(4, [4, 4], bias=False)
        unused = nn.Linear(1, 1, bias=False)
        table = torchembed.EmbeddingBag(3, 1)
        torchembed.optim.SGD(table.parameters(), lr=1.0)
        parameters = [unused.weight, *layers.parameters()]
        for parameter in parameters:
            parameter.data.fill_(1.0)
        group = dist.new_group()
        mean = GradientMean([*parameters, table.weight], group, dtype=dtype, bucket_bytes=64)
        x = torch.ones(1, 4, requires_grad=True)
        for kind in ("alone", "at once", "at the end"):
            found: list[Tensor] = []
            # Only the collectives of a backward whose order of gradients is agreed on count.
            for _ in range(2):
                found.clear()
                for parameter in parameters:
                    parameter.grad = None
                with torch.profiler.profile() as profile, deferral(kind):
                    brought = Brings.apply(x, mean, sizes, found)
                    (brought if kind == "alone" else layers(brought)).sum().backward()
            names = [event.name for event in profile.events()]
            results.append(
                (
                    kind,
                    [(numbers.numel(), *numbers.unique().tolist()) for numbers in found],
                    [None if p.grad is None else p.grad.unique().tolist() for p in parameters],
                    names.count("c10d::allreduce_coalesced_"),
                )
            )
    return results


def test_numbers_travel_with_a_bucket() -> None:
    expected = []
    for sizes in (*FEW_AND_MANY, *FEW_AND_MANY):
        numbers, gradients = [(size, 1.5) for size in sizes], [[0.0], [4.0], [4.0]]
        expected += [
            ("alone", numbers, [None, None, None], 1),
            ("at once", numbers, gradients, 3),
            ("at the end", numbers, gradients, 3),
        ]
    for found in run_on_ranks(2, means_of_numbers, None):
        assert found == expected


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise ArithmeticError("on its way back")


def gradients_after_trouble() -> list[list[float]]:
    """On one rank: after a backward that failed, at once or deferred, and of what was frozen."""
    found, x = [], torch.full((1, 1), 1.0 + dist.get_rank())
    for kind in ("at once", "at the end"):
        first, last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        parameters = [first.weight, last.weight]
        GradientMean(parameters, dist.group.WORLD, bucket_bytes=1)
        for parameter in parameters:
            parameter.data.fill_(1.0)
        with pytest.raises(ArithmeticError, match="on its way back"), deferral(kind):
            last(Fails.apply(first(x))).sum().backward()
        for parameter in parameters:
            parameter.grad = None
        with deferral(kind):
            last(first(x)).sum().backward()
        found.append([p.grad.item() for p in parameters])
    frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)
    GradientMean(frozen.parameters(), dist.group.WORLD)
    assert not frozen.weight.requires_grad
    frozen.requires_grad_(True)(x).sum().backward()
    return [*found, [frozen.weight.grad.item()]]


def test_the_mean_after_a_failed_backward_and_of_what_was_frozen() -> None:
    for found in run_on_ranks(2, gradients_after_trouble, backend="gloo"):
        assert found == [[1.5, 1.5], [1.5, 1.5], [1.5]]


def orders(_: None) -> list[list[int]]:
    """On one rank, before and after a backward in which ranks use parameters in other orders."""
    parameters = [nn.Parameter(torch.ones(())) for _ in range(3)]
    mean, found = GradientMean(parameters, dist.group.WORLD), []
    used = (parameters[1], parameters[0]) if dist.get_rank() == 0 else parameters
    for _ in range(2):
        found.append([mean._places[p] for p in mean._order])
        value = torch.ones(())
        for parameter in used:
            value = value * parameter
        value.backward()
    return found


def test_buckets_follow_the_first_ranks_gradients() -> None:
    for before, after in run_on_ranks(2, orders, None):
        assert before == [2, 1, 0]
        assert after == [0, 1, 2]


def test_a_wire_is_float32_or_bfloat16() -> None:
    with pytest.raises(TypeError, match="dense of the wire must be float32, bfloat16 or None, got"):
        WirePrecision(dense=torch.float16)
