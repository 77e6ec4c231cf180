"""Linear layers, alone and with a rectifier, whose backward makes one pass after each product."""

from torchembed.ops.linear.function import linear, linear_relu

__all__ = ["linear", "linear_relu"]
