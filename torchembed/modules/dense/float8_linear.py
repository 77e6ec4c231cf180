"""``Float8Linear``: a linear layer whose products are in 8 bits."""

from torch import Tensor, nn

from torchembed.modules.dense.mlp import MLP
from torchembed.ops.linear.float8 import UNIT, float8_linear

LEAST_WIDTH = 512
"""Default of ``least_width`` of :func:`use_float8_products`."""


class Float8Linear(nn.Linear):
    """:class:`torch.nn.Linear` by :func:`~torchembed.ops.linear.float8.float8_linear`.

    Parameters, their names and their dtype stay; both widths are multiples of 16.
    """

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(x, self.weight, self.bias)


def use_float8_products(model: nn.Module, *, least_width: int = LEAST_WIDTH) -> list[str]:
    """Compute the wide linear layers of ``model`` by products in 8 bits from now on.

    Each :class:`torch.nn.Linear`, also of an :class:`~torchembed.modules.dense.mlp.MLP`, whose two
    widths are at least ``least_width`` and multiples of 16, becomes a :class:`Float8Linear` with
    the same parameters. Layers of derived classes stay as they are, and so do cross layers. Call
    it before the optimizers and pipelines are made, with ``torch.autocast`` in bfloat16: weights,
    optimizer states and gradients of weights are as they were.

    Args:
        model: changed in place.
        least_width: of the layers to change; in narrow ones products save less than rounding costs.

    Returns:
        The names of the layers in ``model``.

    Raises:
        ValueError: where no layer is that wide.
    """
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and type(layer) in (nn.Linear, MLP.layer_type)
        and min(layer.in_features, layer.out_features) >= least_width
        and layer.in_features % UNIT == 0
        and layer.out_features % UNIT == 0
    }
    if not found:
        raise ValueError(
            f"model must have a linear layer of at least {least_width} columns and rows, multiples "
            f"of {UNIT}, got none; lower least_width"
        )
    for layer in found.values():
        # Parameters, hooks and other modules' references to the layer stay.
        layer.__class__ = Float8Linear
    return list(found)
