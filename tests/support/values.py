"""Numbers to test with, and the same numbers laid out in another way."""

import torch
from torch import Tensor


def normal(
    *shape: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def whole(
    *shape: int,
    seed: int,
    largest: int = 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Whole numbers from ``-largest`` to ``largest``, the same on every device: sums and products
    of a few of them round in no order, so that whoever computes them gets the same bits."""
    return normal(*shape, seed=seed).round().clamp(-largest, largest).to(device, dtype)


def not_contiguous(tensor: Tensor) -> Tensor:
    """The same values with gaps of another value between them."""
    wide = torch.stack([tensor, torch.full_like(tensor, 3)], dim=-1)
    view = wide[..., 0]
    assert tensor.numel() < 2 or not view.is_contiguous()
    return view
