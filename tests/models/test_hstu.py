"""``HSTU`` against the same network written out, one history after the other."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchembed
from tests.support.packed_histories import packed_histories
from tests.support.tolerance import assert_as_near
from tests.support.values import normal
from torchembed.models import HSTU, Histories

NUM_ITEMS, DIM, LONGEST, BUCKETS = 11, 6, 5, 30


def model_of(device: torch.device, *, num_heads: int = 2) -> HSTU:
    torch.manual_seed(0)
    model = HSTU(
        torchembed.Embedding(NUM_ITEMS, DIM, device=device, seed=0),
        embedding_dim=DIM,
        max_length=LONGEST,
        num_heads=num_heads,
        dropout=0.0,
        num_time_buckets=BUCKETS,
        dense_device=device,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "projections" in name:  # so that they weigh
                parameter.normal_()
    return model


def formula(values: dict[str, Tensor], histories: Histories) -> Tensor:
    """``[L, D]`` by the values of the model's parameters."""
    rows = [torch.zeros_like(values["positions"][0]) for _ in histories.items]
    for start, end in itertools.pairwise(histories.offsets.tolist()):
        end = min(end, start + LONGEST)
        x = values["items.weight"][histories.items[start:end]] * math.sqrt(DIM)
        x = x + values["positions"][: end - start]
        for block in ("blocks.0", "blocks.1"):
            normed = F.layer_norm(x, (DIM,), eps=1e-6)
            projected = F.silu(normed @ values[f"{block}.projections.weight"].T)
            u, v, q, k = projected.chunk(4, dim=1)
            attended = []
            for n in range(end - start):
                of_heads = []
                for columns in (slice(0, DIM // 2), slice(DIM // 2, DIM)):
                    total = 0 * v[n, columns]
                    for m in range(n + 1):
                        score = q[n, columns] @ k[m, columns]
                        score = score + values[f"{block}.distance_bias"][n - m]
                        if histories.times is not None and histories.next_times is not None:
                            then, now = histories.times[start + m], histories.next_times[start + n]
                            seconds = max(abs(int(now - then)), 1)
                            bucket = min(int(math.log(seconds) / 0.301), BUCKETS - 1)
                            score = score + values[f"{block}.time_bias"][bucket]
                        total = total + F.silu(score) / LONGEST * v[m, columns]
                    of_heads.append(total)
                attended.append(torch.cat(of_heads))
            if attended:
                gated = u * F.layer_norm(torch.stack(attended), (DIM,), eps=1e-6)
                x = x + gated @ values[f"{block}.out.weight"].T + values[f"{block}.out.bias"]
        rows[start:end] = x.unbind()
    return torch.stack(rows)


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [7, 1]], ids=str)
def test_follows_the_formula(lengths: list[int], times: bool, device: torch.device) -> None:
    model = model_of(device)
    histories = packed_histories(lengths, num_items=NUM_ITEMS, spare=2, times=times).mapped(
        lambda tensor: tensor.to(device)
    )
    upstream = normal(len(histories.items), DIM, seed=5, device=device)
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if times or not name.endswith("time_bias")
    }

    def expected(dtype: torch.dtype, nudge: float = 0.0) -> list[Tensor]:
        leaves = {
            name: (p.detach().to(dtype) * (1 + nudge * normal(*p.shape, seed=1).sign().to(p)))
            .to(dtype)
            .requires_grad_()
            for name, p in parameters.items()
        }
        found = formula(leaves, histories)
        return [found, *torch.autograd.grad(found, list(leaves.values()), upstream.to(dtype))]

    encoded = model(histories)
    actual = [encoded, *torch.autograd.grad(encoded, list(parameters.values()), upstream)]
    exact, eager = expected(torch.float64), expected(torch.float32)
    # Norms of small sums make much of roundings: as much as of those of the parameters.
    nudged = expected(torch.float64, nudge=torch.finfo(torch.float32).eps)
    for result, low, high, moved in zip(actual, eager, exact, nudged, strict=True):
        assert_as_near(result, low, high, slack=(moved - high).abs().max().item())


def test_a_later_item_changes_no_earlier_output(device: torch.device) -> None:
    model = model_of(device)
    histories = packed_histories([4, 5], num_items=NUM_ITEMS).mapped(lambda t: t.to(device))
    before = model(histories)
    for place in (2, 8):
        items = histories.items.clone()
        items[place] = (items[place] + 1) % NUM_ITEMS
        after = model(histories._replace(items=items))
        is_after = torch.zeros(9, dtype=torch.bool, device=device)
        is_after[place : 4 if place < 4 else 9] = True
        assert torch.equal(after[~is_after], before[~is_after])
        assert (after[is_after] != before[is_after]).any(1).all()


def test_heads_divide_the_dim(device: torch.device) -> None:
    for num_heads in (4, 0):
        message = rf"^num_heads must divide embedding_dim 6, got {num_heads}$"
        with pytest.raises(ValueError, match=message):
            model_of(device, num_heads=num_heads)
