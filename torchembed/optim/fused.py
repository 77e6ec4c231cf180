"""The base of the fused optimizers: a ``torch.optim.Optimizer`` over embedding tables."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.own_storage import with_own_storage
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import UpdateRule, rowwise_update
from torchembed.optim.divided_columns import update_divided_columns
from torchembed.optim.hyperparameters import (
    ParamGroup,
    ReplayedOptimizer,
    check_hyperparameters,
    rule_numbers,
)
from torchembed.optim.loss_scaling import overflow_flag
from torchembed.optim.table_state import check_own_groups, check_table_state
from torchembed.tables import (
    RecordedGradients,
    Table,
    TableGradient,
    TableGroup,
    join_groups,
    table_of,
    why_refused,
)


class FusedOptimizer(ReplayedOptimizer):
    """Updates exactly the rows that were looked up, fused with the sum of each row's gradients.

    Constructing one takes over the given tables, also from another fused optimizer, whose ``step``
    raises from then on: their lookups' backward records gradients inside the table group
    and :meth:`step` applies and discards them. Several backwards before a step accumulate;
    ``zero_grad`` discards, that of any module around the tables too. Meanwhile ``weight.grad`` is a
    :class:`~torchembed.tables.TableGradient`, which stands for them without their memory, so that
    ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` count and clip them. Copies of the
    module start without an optimizer.

    A rank that holds no table passes no parameters, and may step as the others do.

    ``param_groups`` holds the usual hyperparameters, so learning-rate schedulers work; a tensor
    ``lr`` on the tables' device is read there. ``state_dict`` holds one entry of state for each
    table.

    With ``torch.amp.GradScaler``, ``scaler.step(optimizer)`` unscales inside the update, unless
    ``scaler.unscale_`` came before, and skips it on the device where a gradient is not finite. Pass
    dense parameters' optimizer through the same scaler: torch wants at least one that it can
    inspect itself, and its loss scale follows the gradients of that one; that of
    :class:`torchembed.optim.GradScaler` also follows those of the tables. Ranks that share sharded
    tables skip the same steps, by one small collective in each scaled step: give all tables of the
    model to one optimizer, and step it on every rank that has tables. The norm of
    sharded tables spans the ranks: :func:`torchembed.optim.clip_grad_norm_`.
    """

    kind: ClassVar[OptimizerKind]
    state_names: ClassVar[tuple[str, ...]] = ()

    grad_scale: Tensor | None
    """Loss scale, set by ``GradScaler`` for the time of one step, as ``found_inf`` is."""
    found_inf: Tensor | int
    skip: Tensor | None = None
    """float32 ``[1]``; where it is not zero on the device, :meth:`step` discards the gradients and
    changes nothing. For code that finds out on the device that a batch is bad."""
    overflow: Tensor | None = None
    """float32 ``[]``; 1 where the last scaled step was skipped for a gradient not finite."""

    def __init__(self, params: ParamsT, defaults: ParamGroup, *, stochastic_rounding: bool) -> None:
        check_hyperparameters(defaults)
        self._key: object | None = None
        if not isinstance(params, Tensor):
            # A rank may hold no table, and steps with the others all the same.
            given: list[Any] = list(params)
            params = given or [{"params": []}]
        super().__init__(params, defaults)
        self._key = object()
        """Identity of this optimizer in its tables' update keys."""
        self._step_supports_amp_scaling = True
        self._stochastic_rounding = stochastic_rounding
        self._take_over(first=0)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of further tables, and take them over."""
        super().add_param_group(param_group)
        if self._key is not None:
            try:
                self._take_over(first=len(self.param_groups) - 1)
            except (TypeError, RuntimeError):
                self.param_groups.pop()
                raise

    def _take_over(self, first: int) -> None:
        """Let the tables of the parameter groups from ``first`` on be updated by this optimizer.

        Raises:
            TypeError: if a parameter is no table's weight, or float64; no table is taken over
                then.
            RuntimeError: if a table has gradients that another optimizer should apply; likewise.
        """
        new_groups = list(enumerate(self.param_groups))[first:]
        tables = [(_table(p), index) for index, group in new_groups for p in group["params"]]
        for table, _ in tables:
            if table.parameter.dtype not in FLOAT_DTYPES:
                raise TypeError(
                    f"table {table.spec.name} must be float32, float16 or bfloat16 for "
                    f"{type(self).__name__}, got {table.parameter.dtype}; use one of torch.optim"
                )
            if table.group.pending or table.group.num_awaited:
                raise RuntimeError(
                    f"table {table.spec.name} has gradients that its optimizer has not applied; "
                    "call its step() or zero_grad() before giving the table to another one"
                )
        for table, index in tables:
            table.update_key = self._update_key(table, index)
        for owner in {id(table.owner): table.owner for table, _ in tables}.values():
            owner.form_groups()
        for index, group in new_groups:
            for table_group in join_groups(self._table_groups(index, group)):
                initial = group.get("initial_accumulator_value", 0.0)
                table_group.set_rule(self._rule(group), initial)
        self._publish_state()

    def _update_key(self, table: Table, index: int) -> Hashable:
        """Key of the tables that may share an update: this optimizer and the parameter group.

        A table whose columns several ranks update in step has a key of its own, so that it is alone
        in its table group and these ranks have the same runs.
        """
        return self._key, index, table.spec.name if self._spans_ranks(table) else None

    def _spans_ranks(self, table: Table) -> bool:
        """True where a row's update needs sums over the ranks that hold its other columns."""
        return self.kind is OptimizerKind.ROWWISE_ADAGRAD and table.sum_over_columns is not None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, since it is bound to its tables; "
            "make one for the copied module and give it this one's state_dict()"
        )

    def _table_groups(self, index: int, group: ParamGroup) -> list[TableGroup]:
        """The table groups of parameter group ``index``."""
        found, of_most = {}, (self._key, index, None)
        for table in map(_table, group["params"]):
            key = table.update_key
            # Of many tables each step asks.
            if key != of_most and key != self._update_key(table, index):
                raise RuntimeError(
                    f"table {table.spec.name} was taken over by another optimizer; use that one"
                )
            found[id(table.group)] = table.group
        return list(found.values())

    def _all_table_groups(self) -> list[list[TableGroup]]:
        """The table groups of each parameter group."""
        return [self._table_groups(index, group) for index, group in enumerate(self.param_groups)]

    def _rule(self, group: ParamGroup) -> UpdateRule:
        return UpdateRule(kind=self.kind, max_gradient=group["max_gradient"], **rule_numbers(group))

    def _publish_state(self) -> None:
        """Make ``self.state`` views of each table's part of its group's state."""
        self.state.clear()
        for index, group in enumerate(self.param_groups):
            self._table_groups(index, group)
            for parameter in group["params"]:
                table = _table(parameter)
                entry: dict[str, Tensor] = {"step": table.group.step}
                stored = table.group.stored_states
                states = [table.group.table_rows(state, table) for state in stored]
                table.shown_states = list(map(with_own_storage, states))
                entry.update(zip(self.state_names, table.shown_states, strict=True))
                self.state[parameter] = entry

    def _lr(self, index: int, group: ParamGroup, table_group: TableGroup) -> Tensor:
        """The learning rate as a float32 ``[1]`` on the tables' device; never synchronizes."""
        tensor = self._device_lr(index, table_group.device)
        decay = group.get("lr_decay", 0.0)
        return tensor if decay == 0.0 else tensor / (1 + (table_group.step - 1) * decay)

    def recorded(self) -> list[RecordedGradients]:
        """The gradients that :meth:`step` would apply."""
        groups = (group for found in self._all_table_groups() for group in _updated_groups(found))
        return [entry for table_group in groups for entry in table_group.recorded()]

    def _loss_scaling(
        self, entries: Sequence[RecordedGradients]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The inverse loss scale ``[1]``, unless the scaler has unscaled the gradients before, and
        the flag ``[1]`` that skips the step; None where there is no scaler."""
        if not hasattr(self, "found_inf"):
            return None, None
        tables = list(map(_table, self._parameters()))
        self.overflow = overflow_flag(self.found_inf, self.grad_scale, entries, tables)
        # None where scaler.unscale_ has unscaled what is recorded.
        scale = self.grad_scale
        multiplier = None if scale is None else scale.float().reciprocal().reshape(1)
        return multiplier, self.overflow.reshape(1)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply and discard all gradients recorded since the last step; never synchronizes.

        Raises:
            RuntimeError: if a table belongs to another optimizer by now, where its
                ``weight.grad`` is set, by a backward from before this optimizer took it over, or
                where its gradients are on their way over ranks, within ``DeferredWeightGradients``,
                or where ``fully_shard`` has taken its rows.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        table_groups = self._all_table_groups()
        for found in table_groups:
            _check_not_taken(found)
            for table_group in {*found, *_updated_groups(found)}:
                if table_group.num_awaited:
                    raise RuntimeError(
                        f"gradients of table {table_group.tables[0].spec.name}, which every rank "
                        "holds, are on their way over ranks; call step() after leaving "
                        "DeferredWeightGradients, or step_early() within it and step() after it"
                    )
        self._apply_recorded(table_groups)
        return loss

    @torch.no_grad()
    def step_early(self) -> None:
        """Apply and discard the gradients that are there already. :meth:`step` then applies those
        that are averaged over ranks with the dense gradients."""
        self._apply_recorded(self._all_table_groups())

    def _apply_recorded(self, table_groups: Sequence[Sequence[TableGroup]]) -> None:
        updates = []
        groups = zip(self.param_groups, table_groups, strict=True)
        for index, (group, of_tables) in enumerate(groups):
            for parameter in filter(_has_own_gradient, group["params"]):
                raise RuntimeError(why_refused(_table(parameter)))
            for table_group in _updated_groups(of_tables):
                merged = table_group.merged_pending()
                if merged is not None:
                    updates.append((index, table_group, merged))
        multiplier, skip = self._loss_scaling([entry for *_, entry in updates])
        if self.skip is not None:
            skip = self.skip if skip is None else skip.maximum(self.skip.to(skip.device))
        for index, table_group, entry in updates:
            self._update(index, table_group, entry, multiplier, skip)

    def _update(
        self,
        index: int,
        table_group: TableGroup,
        entry: RecordedGradients,
        multiplier: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        weight, group = table_group.weight, self.param_groups[index]
        multiplier = None if multiplier is None else multiplier.to(weight.device)
        skip = None if skip is None else skip.to(weight.device)
        # Before the wait, since these need no gradients: the count, and where the rows are, of runs
        # that were found before forward.
        table_group.step += 1.0 if skip is None else skip == 0
        runs = entry.known_runs and table_group.placed_runs(entry.known_runs)
        entry.wait()
        if runs is None:
            runs = table_group.placed_runs(entry.runs(table_group.num_rows))
        gradients = entry.gradients
        rounds = self._stochastic_rounding and weight.dtype != torch.float32
        rule, lr = self._rule(group), self._lr(index, group, table_group)
        table = table_group.tables[0]
        if self._spans_ranks(table):
            update_divided_columns(
                table,
                runs,
                gradients,
                rule,
                lr,
                grad_multiplier=multiplier,
                skip=skip,
                stochastic=rounds,
            )
        else:
            rowwise_update(
                weight,
                table_group.states,
                runs,
                gradients,
                rule,
                lr,
                step=table_group.step,
                grad_multiplier=multiplier,
                skip=skip,
                rounding=table_group.rounding_keys if rounds else None,
            )
        table_group.clear_pending()
        table_group.release_forwards()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the recorded gradients; ``weight.grad`` of tables always becomes None.

        Tables that another optimizer has taken over are left to it.
        """
        del set_to_none
        own: list[Tensor] = []
        groups: dict[TableGroup, None] = {}
        for index, group in enumerate(self.param_groups):
            of_most = self._key, index, None
            for parameter in group["params"]:
                table = _table(parameter)
                key = table.update_key
                if key == of_most or key == self._update_key(table, index):
                    groups[table.group] = None
                    own.append(parameter)
                elif _has_own_gradient(parameter):
                    parameter.grad = None
        for table_group in groups:
            table_group.discard()
            if table_group.joined is not None:
                table_group.joined.discard()
        for parameter in own:
            parameter.grad = None

    def _check_whole(self) -> None:
        for parameter in self._parameters():
            _table(parameter).check_whole("a state dict of its optimizer")

    def state_dict(self) -> StateDict:
        """State in torch's form: ``state`` by parameter number, and ``param_groups``.

        Raises:
            TypeError: for tables on disk.
        """
        self._check_whole()
        self._publish_state()
        self._write_back()
        return super().state_dict()

    def check_state_dict(self, state_dict: StateDict) -> None:
        self._check_whole()
        check_own_groups(state_dict["param_groups"])
        super().check_state_dict(state_dict)
        self._publish_state()
        loaded = state_dict["state"]
        for number, parameter in enumerate(self._parameters()):
            name = _table(parameter).spec.name
            check_table_state(name, loaded.get(number, {}), self.state[parameter])

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Copy hyperparameters and every table's state from ``state_dict``, in place.

        Raises:
            ValueError: if parameter groups, state names or shapes do not match, or the state is
                that of an optimizer of torch; nothing is changed then.
            TypeError: for tables on disk; likewise.
        """
        self.check_state_dict(state_dict)
        parameters, loaded = self._parameters(), state_dict["state"]
        self._write_back()
        super().load_state_dict({**state_dict, "state": {}})
        steps = {
            _table(parameter).group: float(loaded[number]["step"])
            for number, parameter in enumerate(parameters)
        }
        for joined in {group.joined for group in steps}:
            if joined is not None:  # what is updated in one pass has done as many steps
                joined.split_by(steps.__getitem__)
        self._publish_state()
        for number, parameter in enumerate(parameters):
            for key, tensor in self.state[parameter].items():
                tensor.copy_(loaded[number][key])
            _table(parameter).group.forget_cached()

    def _write_back(self) -> None:
        """Bring the states of tables up to date whose rows live outside the device."""
        for table_group in itertools.chain.from_iterable(self._all_table_groups()):
            table_group.write_back()


def _updated_groups(of_tables: Sequence[TableGroup]) -> list[TableGroup]:
    """The groups that are updated in one pass each, of table groups."""
    return list(dict.fromkeys(group.joined or group for group in of_tables))


def _check_not_taken(of_tables: Sequence[TableGroup]) -> None:
    """Raise ``RuntimeError`` where ``fully_shard`` has put parameters of its own in place of
    tables' weights since the optimizer was made, which would go without their gradients."""
    for group in of_tables:
        for table in group.tables:
            if table.holds_parameter():
                continue
            from torch.distributed.tensor import DTensor

            held = table.holder and table.holder._parameters.get("weight")
            if isinstance(held, DTensor):
                raise RuntimeError(
                    f"fully_shard has divided table {table.spec.name} over ranks since its "
                    "optimizer was made; call shard_embeddings before, whose tables fully_shard "
                    "passes over, or train the table by an optimizer of torch.optim that is made "
                    "afterwards"
                )


def _has_own_gradient(parameter: Tensor) -> bool:
    """True where ``parameter.grad`` is a gradient, and does not stand for recorded ones."""
    return parameter.grad is not None and not isinstance(parameter.grad, TableGradient)


def _table(parameter: Tensor) -> Table:
    """The table whose weight ``parameter`` is."""
    table = table_of(parameter)
    if table is None:
        raise TypeError(
            "params must be weights of torchembed tables, got an ordinary tensor of shape "
            f"{tuple(parameter.shape)}; give that one to a torch.optim optimizer"
        )
    return table
