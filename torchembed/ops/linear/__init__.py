"""Linear layers, alone and with a rectifier, whose backward makes one pass after each product, or
none."""

from torchembed.ops.linear.function import linear, linear_relu, linear_relu_stack

__all__ = ["linear", "linear_relu", "linear_relu_stack"]
