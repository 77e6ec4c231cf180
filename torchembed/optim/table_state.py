"""The state of a table in the state dict of its optimizer."""

from collections.abc import Mapping

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
