"""The entries of a state dict that say which ids a dynamic table holds."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchembed.core.own_storage import with_own_storage
from torchembed.tables import Table, grow_to


class IndexInStateDict(nn.Module):
    """A module whose state dict has the ids of its table beside the weight, as ``index.ids`` and so
    on; those of a static table are the numbers of its rows, and have no entries."""

    _table: Table

    @property
    def _indexed_table(self) -> Table | None:
        """The table; None where other ranks hold it alone."""
        return self._table

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        table = self._indexed_table
        contents = {} if table is None else table.index_contents()
        for name, tensor in contents.items():
            destination[f"{prefix}index.{name}"] = with_own_storage(tensor)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and self._indexed_table is not None:
            grow_to(self._indexed_table, len(weight))
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        table = self._indexed_table
        if table is not None:
            load_index(table, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs)


def load_index(
    table: Table,
    state_dict: Mapping[str, Any],
    prefix: str,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Copy into ``table`` the entries of a state dict that say which ids it holds; arguments are
    those of torch's hooks."""
    own = table.index_contents()
    keys = {name: f"{prefix}index.{name}" for name in own}
    unexpected_keys[:] = [key for key in unexpected_keys if key not in keys.values()]
    missing = [key for key in keys.values() if key not in state_dict]
    wrong = [
        f"{key} must have shape {tuple(own[name].shape)}, got {tuple(state_dict[key].shape)}"
        for name, key in keys.items()
        if key in state_dict and state_dict[key].shape != own[name].shape
    ]
    # Ids that were floating for a while are others.
    wrong += [
        f"{key} must be {own[name].dtype}, got {state_dict[key].dtype}"
        for name, key in keys.items()
        if key in state_dict and state_dict[key].dtype != own[name].dtype
    ]
    if strict:
        missing_keys += missing
    error_msgs += wrong
    if own and not missing and not wrong:
        table.load_index_contents({name: state_dict[key] for name, key in keys.items()})
