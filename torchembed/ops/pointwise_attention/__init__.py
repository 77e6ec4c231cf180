"""Pointwise causal attention over packed histories, with biases of distances and times."""

from torchembed.ops.pointwise_attention.function import pointwise_attention

__all__ = ["pointwise_attention"]
