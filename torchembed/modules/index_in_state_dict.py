"""The entries of a state dict that say which ids a dynamic table holds."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.own_storage import with_own_storage
from torchembed.core.stand_ins import is_stand_in
from torchembed.tables import (
    HashFactory,
    Table,
    can_grow_to,
    count_misplaced_rows,
    grow_to,
    policy_named,
    score_numbers,
    wrong_digests,
)

_OF_ROWS = frozenset({"ids", "digests", "touched", "scores"})
"""The entries with an element for each row of the table."""


class IndexInStateDict(nn.Module):
    """A module whose state dict has the ids of its table beside the weight, as ``index.ids`` and so
    on; those of a static table are the numbers of its rows, and have no entries."""

    _table: Table

    @property
    def _indexed_table(self) -> Table | None:
        """The table; None where other ranks hold it alone."""
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles take the rows as they are now, wherever these are."""
        table = self._indexed_table
        if table is not None and hasattr(table, "group"):
            table.check_whole("a copy of its module")
            table.write_back()
        return super().__getstate__()  # type: ignore[misc]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        table = self._indexed_table
        if table is not None:
            table.check_whole("a state dict")
            table.write_back()
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
            if f"{prefix}weight" in state_dict:
                table.check_whole("a state dict")
            table.write_back()
        checked: CheckedIndex | None = None
        weight = state_dict.get(f"{prefix}weight")
        if table is not None and table.spec.num_ids is None:
            checked = check_index(table, state_dict, prefix)
            if weight is not None and checked.may_load:
                grow_to(table, len(weight))
            elif weight is not None and checked.fits:
                # What torch copies into the weight leaves the rows as they are.
                state_dict = {**state_dict, f"{prefix}weight": self.held_weight().detach()}
        elif table is not None and any(key.startswith(f"{prefix}index.") for key in state_dict):
            error_msgs.append(
                f"static table {table.spec.name}, whose ids are the numbers of its rows, must be "
                f"loaded without entries under {prefix}index, got those of a dynamic table, whose "
                "rows are in another order. Nothing of the table was loaded: load a checkpoint, or "
                "rows by id"
            )
            if weight is not None:
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
            table.forget_cached()
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
    fits: bool
    """False for a weight of a shape that the table's cannot have, which torch reports."""

    @property
    def may_load(self) -> bool:
        """True where rows and ids may both be loaded; neither is otherwise."""
        return self.fits and not (self.missing or self.errors)


def check_index(table: Table, state_dict: Mapping[str, Any], prefix: str) -> CheckedIndex:
    """Check the entries of a dynamic ``table`` in a state dict, under the keys that begin with
    ``prefix``; changes nothing. Waits for the device of the ids."""
    own, start = table.index_contents(), f"{prefix}index."
    weight, num_rows = state_dict.get(f"{prefix}weight"), table.num_rows
    if weight is not None and can_grow_to(table, len(weight)):
        num_rows = len(weight)
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
        shape = torch.Size([num_rows]) if name in _OF_ROWS else own[name].shape
        if given[key].shape != shape:
            errors.append(f"{key} must have shape {tuple(shape)}, got {tuple(given[key].shape)}")
        # Ids that were floating for a while are others.
        if given[key].dtype != own[name].dtype:
            errors.append(f"{key} must be {own[name].dtype}, got {given[key].dtype}")
    contents = {name: given[key] for name, key in keys.items() if key in given}
    if not errors:
        errors += _other_policy(table, contents, f"{start}policy")
    if not errors:
        errors += [
            f"{keys[name]} must be those of the ids beside them, got others: the state dict is "
            f"damaged. Nothing of table {table.spec.name} was loaded; load another one"
            for name in wrong_digests(contents)
        ]
    fits = weight is None or tuple(weight.shape) == (num_rows, table.num_columns)
    if fits and not (missing or errors):
        errors += _wrong_places(table, contents, num_rows, keys["ids"])
    return CheckedIndex(contents, keys, missing, unexpected, errors, fits)


def _other_policy(table: Table, contents: Mapping[str, Tensor], key: str) -> list[str]:
    """The error of scores that are of another policy than the table's."""
    factory, given = table.spec.index, contents.get("policy")
    assert isinstance(factory, HashFactory)
    if given is None or given.is_meta or is_stand_in(given):
        return []
    own, numbers = score_numbers(factory.dynamic.eviction), given.tolist()
    if numbers == own:
        return []
    error = (
        f"{key} must be that of dynamic table {table.spec.name}, {policy_named(own)}, whose scores "
        f"those of {policy_named(numbers)} are not. Nothing of the table was loaded: load a state "
        "dict of a table with the same eviction, or rows by id without their scores "
        "(torchembed.checkpoints.model_rows and load_rows)"
    )
    return [error]


def _wrong_places(
    table: Table, contents: Mapping[str, Tensor], num_rows: int, key: str
) -> list[str]:
    """The errors of ids that do not lie where ``table`` looks for them, with ``num_rows``."""
    from torchembed.sharding.transport.global_rows import (
        are_here,  # a process alone imports it here
    )

    factory = table.spec.index
    if not isinstance(factory, HashFactory):
        return []
    shape = factory.shape_with(num_rows, table.max_rows)
    assert shape is not None
    num_wrong = count_misplaced_rows(contents, shape, partial(are_here, table))
    if not num_wrong:
        return []
    place, num_shares = table.id_share
    division = (
        f"{shape.num_blocks} blocks of {shape.num_buckets} buckets of {shape.num_slots} rows, "
        f"{shape.num_spare} shared rows, part {place + 1} of {num_shares}"
    )
    error = (
        f"{key} must hold ids where dynamic table {table.spec.name} looks for them ({division}), "
        f"got {num_wrong} of {num_rows} rows otherwise: the state dict is of a table whose rows "
        "are divided otherwise, by another initial_capacity, HashedRows or number of ranks. "
        "Nothing of the table was loaded: load a checkpoint, or rows by id "
        "(torchembed.checkpoints.model_rows and load_rows), which fit any division"
    )
    return [error]


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
