"""The state of a table in the state dict of its optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def check_table_state(name: str, loaded: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` unless the state ``loaded`` for the table ``name`` has the names and
    shapes of its ``own``."""
    if set(loaded) != set(own):
        raise ValueError(f"state of table {name} must hold {sorted(own)}, got {sorted(loaded)}")
    for key, tensor in own.items():
        if tuple(loaded[key].shape) != tuple(tensor.shape):
            raise ValueError(
                f"state {key} of table {name} must have shape {tuple(tensor.shape)}, "
                f"got {tuple(loaded[key].shape)}"
            )


def check_own_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless the loaded parameter ``groups`` are of an optimizer of tables,
    all of which have ``max_gradient``, and those of torch none."""
    if any("max_gradient" not in group for group in groups):
        raise ValueError(
            "param_groups of the state must be of an optimizer of torchembed's tables, with "
            "max_gradient; the state of an optimizer of torch cannot be loaded: begin without it, "
            "or go on with torch's optimizer"
        )
