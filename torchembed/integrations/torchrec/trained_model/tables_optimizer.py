"""A fused optimizer over the tables of TorchRec's kernels, for torchembed's pipeline."""

from torchembed.integrations.torchrec.tables.fused_tables import STATE_NAMES, FusedTables
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.optim.fused import FusedOptimizer
from torchembed.tables import table_of


class TablesOptimizer(FusedOptimizer):
    """Steps ``tables`` by the settings and states that they have as a kernel's tables.

    The learning rate is read on the device, where TorchRec's optimizer of the tables sets it.
    """

    def __init__(self, tables: FusedTables) -> None:
        self._tables = tables
        self.kind = tables.hyper_parameters.rule.kind  # type: ignore[misc]
        self.state_names = STATE_NAMES[self.kind]  # type: ignore[misc]
        self._groups = tables.groups
        self._known_iteration: int | None = None
        parameters = [table.parameter for group in self._groups for table in group.tables]
        super().__init__(
            parameters,
            {"lr": tables.hyper_parameters.learning_rate_tensor},
            stochastic_rounding=tables.rounds,
        )

    def _take_over(self, first: int) -> None:
        """Keep the rule and the states that the tables have already."""
        for parameter in self.param_groups[0]["params"]:
            table = table_of(parameter)
            assert table is not None
            table.update_key = self._update_key(table, 0)
        self._groups[0].tables[0].owner.form_groups()
        self._publish_state()

    def _rule(self, group: dict[str, object]) -> UpdateRule:
        return self._tables.hyper_parameters.rule

    def begin(self) -> UpdateRule:
        """Before a step: set the step count from the tables, and return the rule, with which any
        captured step is only valid as long as it is equal."""
        iteration = self._tables.iteration
        if iteration != self._known_iteration:
            for group in self._groups:
                group.step.fill_(iteration)
        return self._tables.hyper_parameters.rule

    def end(self) -> None:
        """After a step: count it in the tables, as their own forward does."""
        if self._tables.counts:
            self._tables.iteration += 1
        self._known_iteration = self._tables.iteration
