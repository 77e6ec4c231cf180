"""The base of the modules that hold embedding tables."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from torchembed.core.types import OnBadId
from torchembed.tables import Table, TableSet


class TableWeight(nn.Module):
    """Holds the parameter ``weight`` of one table, so that it has its place in ``state_dict``."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.register_parameter("weight", table.parameter)

    def forward(self) -> Tensor:
        return self.weight


def _restore_after_load(module: "TableModule", incompatible_keys: Any) -> None:
    module._restore_groups()


class TableModule(nn.Module):
    """A module whose tables' parameters are views of their groups' flat weights.

    Whatever replaces or moves parameters (``to``, ``load_state_dict``, ``copy.deepcopy``,
    unpickling) is followed by :meth:`_restore_groups`, which copies them into flat weights again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_restore_after_load)

    def _hold(
        self, tables: Iterable[Table], lookup_keys: Sequence[Hashable], device: Any
    ) -> TableSet:
        self._table_set = TableSet(tables, lookup_keys, device)
        return self._table_set

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        """Each table and the module whose ``weight`` is its parameter."""
        raise NotImplementedError

    def _restore_groups(self) -> None:
        for table, holder in self._holders():
            table.parameter = holder.weight  # type: ignore[assignment]
        self._table_set.form_groups()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TableModule":
        super()._apply(fn, recurse)
        self._restore_groups()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._restore_groups()

    def reset_parameters(self) -> None:
        """Give every row its initial value again, in place."""
        self._table_set.fill_initial_rows()


def as_on_bad_id(on_bad_id: OnBadId | str) -> OnBadId:
    """The enum for ``"raise"``, ``"clamp"`` or ``"zero"``."""
    if isinstance(on_bad_id, OnBadId):
        return on_bad_id
    try:
        return OnBadId[on_bad_id.upper()]
    except KeyError:
        raise ValueError(
            f'on_bad_id must be "raise", "clamp" or "zero", got {on_bad_id!r}'
        ) from None
