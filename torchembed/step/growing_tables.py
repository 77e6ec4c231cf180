"""Dynamic tables that grow between the steps of a pipeline."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn

from torchembed.modules.table_module import TableModule


class TablesThatGrow:
    """Decides between steps which dynamic tables of a model grow, as a loop by hand does: before
    the same batches.

    A table grows between two admissions. Where the batch of the next step was prepared, and so
    admitted, that is once this step has trained it, and has prepared no other one.

    Args:
        model: on several ranks, the modules of all of them that hold parts of one table.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = (m for m in model.modules() if isinstance(m, TableModule))
        self._modules = [module for module in modules if module.growing_tables() is not None]
        self._due: dict[TableModule, Mapping[int, int]] = {}
        self._due_next: dict[TableModule, Mapping[int, int]] = {}
        self._was_prepared = False
        self._grown: set[TableModule] = set()
        """Those that grew between the last step and the next one."""

    @property
    def are_over(self) -> bool:
        """True once no table will grow any more."""
        return not self._modules

    @property
    def are_due(self) -> bool:
        """True if tables are to grow before the batch of the step is admitted."""
        return bool(self._due)

    @property
    def are_due_next(self) -> bool:
        """True if tables are to grow after the step, before another batch is admitted."""
        return bool(self._due_next)

    def before_step(self, *, is_prepared: bool) -> None:
        """Find out which tables are due. Collective where tables are shared by ranks; never waits
        for the step under way.

        Args:
            is_prepared: True if the batch of the step was admitted already.
        """
        num_batches = 1 + is_prepared - self._was_prepared
        self._was_prepared = is_prepared
        for module in list(self._modules):
            tables = module.growing_tables()
            if tables is None:
                self._modules.remove(module)
                continue
            # Nothing was admitted since they grew, and their growth has noted what they hold.
            num = 0 if module in self._grown else num_batches
            due, due_next = module.growth.due(tables, num), module.growth.due_next
            if is_prepared:
                due, due_next = {}, due
            if due:
                self._due[module] = due
            elif due_next:
                self._due_next[module] = due_next
        self._grown = set()

    def grow(self) -> None:
        """Let the tables grow that are due before the next batch is admitted, with no step under
        way and no graph that reads them. Waits for the device."""
        if self._due:
            due, self._due = self._due, {}
        else:
            due, self._due_next = self._due_next, {}
            self._grown = set(due)
        for module, num_rows in due.items():
            module.grow(num_rows)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context in which forwards let no table grow by themselves."""
        for module in self._modules:
            module.growth.is_held = True
        try:
            yield
        finally:
            for module in self._modules:
                module.growth.is_held = False
