"""The entries of a state dict that say which ids a dynamic table holds."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchembed.core.own_storage import with_own_storage
from torchembed.tables import Table, grow_to, wrong_digests


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
        table = self._indexed_table
        if table is not None:
            table.group.write_back()
        super()._save_to_state_dict(destination, prefix, keep_vars)
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
        table = self._indexed_table
        if table is not None:
            table.group.write_back()
        checked: CheckedIndex | None = None
        weight = state_dict.get(f"{prefix}weight")
        if table is not None and table.spec.num_ids is None:
            if weight is not None:
                grow_to(table, len(weight))
            checked = check_index(table, state_dict, prefix)
            if weight is not None and not checked.may_load:
                # What torch copies into the weight leaves the rows as they are.
                state_dict = {**state_dict, f"{prefix}weight": self.held_weight().detach()}
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        if table is not None:
            table.group.forget_cached()
        if table is not None and checked is not None:
            load_index(table, checked, strict, missing_keys, unexpected_keys, error_msgs)

    def held_weight(self) -> Tensor:
        """The value of ``weight`` now."""
        raise NotImplementedError


class CheckedIndex(NamedTuple):
    """The entries of a state dict that say which ids a table holds, checked before any change."""

    contents: dict[str, Tensor]
    """As :meth:`~torchembed.tables.Table.load_index_contents` takes them, where they may be loaded.
    """
    keys: dict[str, str]
    """The key of each entry that the table has."""
    missing: list[str]
    """Those of them that the state dict lacks."""
    unexpected: list[str]
    """Keys of entries that the table does not have."""
    errors: list[str]
    """Says what is wrong, where something is."""
    may_load: bool
    """True where rows and ids may both be loaded; neither is otherwise."""


def check_index(table: Table, state_dict: Mapping[str, Any], prefix: str) -> CheckedIndex:
    """Check the entries of a dynamic ``table`` in a state dict, under the keys that begin with
    ``prefix``; changes nothing. Waits for the device of the ids."""
    own, start, weight = (
        table.index_contents(),
        f"{prefix}index.",
        state_dict.get(f"{prefix}weight"),
    )
    given = {key: state_dict[key] for key in state_dict if key.startswith(start)}
    keys = {name: f"{start}{name}" for name in own}
    missing = [key for key in keys.values() if key not in given]
    unexpected = [key for key in given if key not in keys.values()]
    errors = []
    if unexpected or (missing and (given or weight is not None)):
        lacks = f"lacks {missing}" if missing else f"has {unexpected}, too"
        errors.append(
            f"dynamic table {table.spec.name} must be loaded with {list(own)} under {start[:-1]}, "
            "as its eviction and admission say, since rows are nothing without their ids; the "
            f"state dict {lacks}. Nothing of the table was loaded: load a state dict of a table "
            "with the same policies"
        )
    for name, key in keys.items():
        if key not in given:
            continue
        if given[key].shape != own[name].shape:
            shapes = tuple(own[name].shape), tuple(given[key].shape)
            errors.append(f"{key} must have shape {shapes[0]}, got {shapes[1]}")
        # Ids that were floating for a while are others.
        if given[key].dtype != own[name].dtype:
            errors.append(f"{key} must be {own[name].dtype}, got {given[key].dtype}")
    contents = {name: given[key] for name, key in keys.items() if key in given}
    if not errors:
        errors += [
            f"{keys[name]} must be those of the ids beside them, got others: the state dict is "
            f"damaged. Nothing of table {table.spec.name} was loaded; load another one"
            for name in wrong_digests(contents)
        ]
    # Torch reports a weight of another shape.
    fits = weight is None or tuple(weight.shape) == (table.num_rows, table.num_columns)
    may_load = fits and not (missing or errors)
    return CheckedIndex(contents, keys, missing, unexpected, errors, may_load)


def load_index(
    table: Table,
    checked: CheckedIndex,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Copy into ``table`` the entries of a state dict that say which ids it holds, where they may
    be loaded, and report on them; the last arguments are those of torch's hooks."""
    known = {*checked.keys.values(), *checked.unexpected}
    unexpected_keys[:] = [key for key in unexpected_keys if key not in known]
    if strict:
        missing_keys += checked.missing
        unexpected_keys += checked.unexpected
    error_msgs += checked.errors
    if checked.may_load:
        table.load_index_contents(checked.contents)
