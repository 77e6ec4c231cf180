"""The base of the fused optimizers: a ``torch.optim.Optimizer`` over embedding tables."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs
from torchembed.tables import Table, TableGroup, table_of


class FusedOptimizer(torch.optim.Optimizer):
    """Updates exactly the rows that were looked up, fused with the sum of each row's gradients.

    Constructing one takes over the given tables: from then on their lookups' backward records
    gradients inside the table group (``weight.grad`` stays None) and :meth:`step` applies and
    discards them. Several backwards before a step accumulate; ``zero_grad`` discards.

    ``param_groups`` holds the usual hyperparameters, so learning-rate schedulers work; a tensor
    ``lr`` stays on its device. ``state_dict`` holds one entry of state for each table.

    With ``torch.amp.GradScaler``, ``scaler.step(optimizer)`` unscales inside the update and skips
    it on the device where a gradient is not finite; ``scaler.unscale_`` is for other optimizers
    (``step`` raises after it). Pass dense parameters' optimizer through the same scaler: torch wants
    at least one that it can inspect itself. ``torch.nn.utils.clip_grad_norm_`` does not see tables;
    use :func:`torchembed.optim.clip_grad_norm_`.
    """

    kind: ClassVar[OptimizerKind]
    state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, stochastic_rounding: bool
    ) -> None:
        for name, value in defaults.items():
            if name == "betas":
                valid = all(0.0 <= beta < 1.0 for beta in value)
            else:
                valid = isinstance(value, Tensor) or value >= 0.0
            if not valid:
                raise ValueError(f"{name} is out of range: {value}")
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True
        self._stochastic_rounding = stochastic_rounding
        self._lr_tensors: dict[tuple[int, torch.device], tuple[float, Tensor]] = {}
        tables = [self._table(p) for group in self.param_groups for p in group["params"]]
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._table(parameter).update_key = (id(self), index)
        for owner in {id(table.owner): table.owner for table in tables}.values():
            owner.form_groups()
        for group in self.param_groups:
            for table_group in self._table_groups(group):
                initial = group.get("initial_accumulator_value", 0.0)
                table_group.set_rule(self._rule(group), initial)
        self._publish_state()

    @staticmethod
    def _table(parameter: Tensor) -> Table:
        table = table_of(parameter)
        if table is None:
            raise TypeError(
                "params must be weights of torchembed tables, got an ordinary tensor of shape "
                f"{tuple(parameter.shape)}; give that one to a torch.optim optimizer"
            )
        return table

    def _table_groups(self, group: dict[str, Any]) -> list[TableGroup]:
        found = {id(table.group): table.group for table in map(self._table, group["params"])}
        return list(found.values())

    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        beta1, beta2 = group.get("betas", (0.9, 0.999))
        return UpdateRule(
            kind=self.kind,
            eps=group.get("eps", 0.0),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            max_gradient=group["max_gradient"],
        )

    def _publish_state(self) -> None:
        """Show each table's part of its group's state in ``self.state``."""
        self.state.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                table = self._table(parameter)
                entry: dict[str, Any] = {"step": table.group.step}
                for name, state in zip(self.state_names, table.group.states, strict=True):
                    entry[name] = table.group.table_rows(state, table)
                self.state[parameter] = entry

    def _lr(self, index: int, group: dict[str, Any], table_group: TableGroup) -> Tensor:
        """The learning rate as a float32 ``[1]`` on the tables' device; never synchronizes."""
        device = table_group.weight.device
        lr = group["lr"]
        if isinstance(lr, Tensor):
            tensor = lr.to(device, torch.float32, non_blocking=True).reshape(1)
        else:
            known, tensor = self._lr_tensors.get((index, device), (None, None))
            if tensor is None:
                tensor = torch.empty(1, device=device)
            if known != lr:
                tensor.fill_(lr)
                self._lr_tensors[index, device] = (lr, tensor)
        decay = group.get("lr_decay", 0.0)
        return tensor if decay == 0.0 else tensor / (1 + (table_group.step - 1) * decay)

    def _amp(self, device: torch.device) -> tuple[Tensor | None, Any]:
        """The inverse loss scale and the flag that ``GradScaler.step`` hands over."""
        if not hasattr(self, "found_inf"):
            return None, None
        if self.grad_scale is None:
            raise RuntimeError(
                "scaler.unscale_(optimizer) was called for a fused optimizer, which unscales in its "
                "own step; call it for the dense optimizer only"
            )
        found_inf = self.found_inf if isinstance(self.found_inf, Tensor) else None
        inverse = self.grad_scale.to(device, torch.float32).reshape(1).reciprocal()
        return inverse, found_inf

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply and discard all gradients recorded since the last step; never synchronizes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for table_group in self._table_groups(group):
                self._update(index, group, table_group)
        return loss

    def _update(self, index: int, group: dict[str, Any], table_group: TableGroup) -> None:
        entry = table_group.merged_pending()
        if entry is None:
            return
        rows, gradients = entry
        multiplier, found_inf = self._amp(table_group.weight.device)
        skip = None
        if multiplier is not None:
            skip = 1.0 - torch.isfinite(gradients.grad).all().float().reshape(1)
            if found_inf is not None:
                skip = skip.maximum(found_inf.to(skip.device).reshape(1))
        if table_group.grad_multiplier is not None:
            clip = table_group.grad_multiplier
            multiplier = clip if multiplier is None else multiplier * clip
        table_group.step += 1.0 if skip is None else (skip == 0).float()
        rounds = self._stochastic_rounding and table_group.weight.dtype != torch.float32
        rowwise_update(
            table_group.weight,
            table_group.states,
            find_runs(rows, table_group.num_rows),
            gradients,
            self._rule(group),
            self._lr(index, group, table_group),
            step=table_group.step,
            grad_multiplier=multiplier,
            skip=skip,
            rounding=table_group.rounding_keys if rounds else None,
        )
        table_group.pending.clear()
        table_group.grad_multiplier = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the recorded gradients."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for table_group in self._table_groups(group):
                table_group.pending.clear()
                table_group.grad_multiplier = None

    def state_dict(self) -> dict[str, Any]:
        """As any torch optimizer's: ``state`` by parameter number, and ``param_groups``."""
        self._publish_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy hyperparameters and every table's state from ``state_dict``, in place.

        Raises:
            ValueError: where parameter groups, state names or shapes do not match; nothing is
                changed then.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._publish_state()
        wanted = {name for entry in self.state.values() for name in entry}
        loaded = state_dict["state"]
        for number, parameter in enumerate(parameters):
            entry, name = loaded.get(number, {}), self._table(parameter).spec.name
            if set(entry) != wanted:
                raise ValueError(
                    f"state of table {name} must hold {sorted(wanted)}, got {sorted(entry)}"
                )
            for key, tensor in self.state[parameter].items():
                if tuple(entry[key].shape) != tuple(tensor.shape):
                    raise ValueError(
                        f"state {key} of table {name} must have shape {tuple(tensor.shape)}, "
                        f"got {tuple(entry[key].shape)}"
                    )
        super().load_state_dict({**state_dict, "state": {}})
        self._publish_state()
        for number, parameter in enumerate(parameters):
            for key, tensor in self.state[parameter].items():
                tensor.copy_(loaded[number][key])
