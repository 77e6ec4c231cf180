"""The log loss of logits, with its sigmoid, in one pass forward and one backward."""

from torchembed.ops.binary_cross_entropy.function import binary_cross_entropy

__all__ = ["binary_cross_entropy"]
