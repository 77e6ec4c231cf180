"""Causal attention within bags, against a formula of one bag after the other."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.tolerance import assert_as_near, relative_error
from tests.support.values import normal
from torchembed.modules.dense.causal_attention import causal_attention
from torchembed.ops.padded_layout import PaddedLayout

LENGTHS = ([3, 0, 5, 1], [0, 0], [5], [1, 3, 1], [7, 2])
"""None, one, the most, and more than the most rows, of which the last are left out."""
LONGEST = 5


def formula(parts: list[Tensor], offsets: list[int]) -> Tensor:
    """The softmax of each row over itself and those before it, written out; ``[L, H, D]``."""
    query, key, value = parts
    rows = [torch.zeros_like(query[0]) for _ in query]
    for start, end in itertools.pairwise(offsets):
        for row in range(start, min(end, start + LONGEST)):
            scores = torch.einsum("hd,lhd->hl", query[row], key[start : row + 1])
            weights = (scores / math.sqrt(query.shape[2])).softmax(1)
            rows[row] = torch.einsum("hl,lhd->hd", weights, value[start : row + 1])
    return torch.stack(rows)


@pytest.mark.parametrize("spare", [0, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_follows_the_formula(lengths: list[int], spare: int, device: torch.device) -> None:
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    num_rows = sum(lengths) + spare
    layout = PaddedLayout.of(offsets, LONGEST, num_rows)
    if not num_rows:
        return
    given = [normal(num_rows, 2, 6, seed=seed, device=device) for seed in range(3)]
    upstream = normal(num_rows, 2, 6, seed=9, device=device)
    leaves = [part.clone().requires_grad_() for part in given]
    query, key, value = leaves
    actual = causal_attention(query, torch.stack([key, value], 1), layout)
    results = [actual, *torch.autograd.grad(actual, leaves, upstream)]

    def expected(dtype: torch.dtype) -> list[Tensor]:
        exact = [part.to(dtype).requires_grad_() for part in given]
        found = formula(exact, offsets.tolist()) + 0 * sum(part.sum() for part in exact)
        return [found, *torch.autograd.grad(found, exact, upstream.to(dtype))]

    # A weight's gradient is a product over columns less the mean of such, which may cancel.
    terms = [part.abs().max().item() for part in (*given, upstream)]
    slack = relative_error(8) * 6 * terms[3] * terms[2] * max(terms[:2])
    exact, eager = expected(torch.float64), expected(torch.float32)
    for which, result in enumerate(results):
        of_weights = slack if which in (1, 2) else 0.0
        assert_as_near(result, eager[which], exact[which], slack=of_weights)


def test_dropout_keeps_the_mean(device: torch.device) -> None:
    """With all values 1 a row's output is the sum of its weights that stay, doubled."""
    offsets = torch.tensor([0, 4], device=device)
    layout = PaddedLayout.of(offsets, 4, 4)
    ones = torch.ones(4, 1, 2, device=device)
    zeros = torch.zeros_like(ones)
    key_value = torch.stack([zeros, ones], 1)
    torch.manual_seed(0)
    found = torch.stack(
        [causal_attention(zeros, key_value, layout, dropout=0.5)[:, 0, 0] for _ in range(64)]
    )
    shares = found * torch.arange(1, 5, device=device) / 2
    assert torch.equal(shares, shares.round())
    assert set(found[:, 0].tolist()) == {0.0, 2.0}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 50])
def test_is_flash_attention_in_16_bits(head_dim: int, device: torch.device) -> None:
    offsets = torch.tensor([0, 3, 3, 8], device=device)
    layout = PaddedLayout.of(offsets, LONGEST, 8)
    shapes = (8, 2, head_dim), (8, 2, 2, head_dim)
    leaves = [
        normal(*shape, seed=0, dtype=torch.bfloat16, device=device).requires_grad_()
        for shape in shapes
    ]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # which raises where it cannot
        found = causal_attention(*leaves, layout, dropout=0.1)
    found.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
