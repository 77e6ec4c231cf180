"""The mean of dense gradients over ranks: in buckets, flat or not, deferred or not."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support.gradient_means import assert_means, deferral
from tests.support.ranks import run_on_ranks
from torchembed.modules import MLP
from torchembed.sharding.transport.gradient_mean import GradientMean
from torchembed.sharding.wire import WirePrecision


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


def clamped_gradients() -> list[float]:
    """On one rank: gradients that hooks clamp, one registered before the mean's and one after."""
    found = []
    for is_before in (True, False):
        weight = nn.Parameter(torch.ones(()))

        def clamp(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.clamp_(max=2.0)

        means = [] if is_before else [GradientMean([weight], dist.group.WORLD)]
        weight.register_post_accumulate_grad_hook(clamp)
        means += [GradientMean([weight], dist.group.WORLD)] if is_before else []
        means[0].come_last()
        (weight * (1.0 + 3 * dist.get_rank())).backward()
        assert weight.grad is not None
        found.append(weight.grad.item())
    return found


def test_what_hooks_of_others_leave_is_averaged() -> None:
    assert run_on_ranks(2, clamped_gradients) == [[1.5, 1.5]] * 2


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
