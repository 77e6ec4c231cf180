"""Tables and dense parameters under one optimizer."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchembed.tables import table_of


class JointOptimizer(torch.optim.Optimizer):
    """The optimizers of a model's tables and of its dense parameters as one.

    Made by ``with_dense`` of :class:`~torchembed.optim.Adagrad` and the others of tables.
    ``param_groups`` are those of both, tables' first, so that learning-rate schedulers work, and so
    is ``state_dict``, in the form of any torch optimizer's. ``torchembed.optim.GradScaler``,
    ``TrainPipeline`` and ``TrainingRun`` take this one; torch's own ``GradScaler`` each of
    ``optimizers``, one by one.

    Attributes:
        optimizers: of tables, and of dense parameters; each where there are any.
    """

    grad_scale: Tensor | None
    """Given by a ``GradScaler`` for the time of one step, as ``found_inf`` is."""
    found_inf: Tensor | int

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.optimizers = list(optimizers)
        # Whoever steps the parts one by one: torch's schedulers ask whether this one was stepped.
        note = functools.partial(_note_step, weakref.ref(self))
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(note)
        self._share_groups()
        # Torch's scaler then leaves scaled gradients to step, which refuses them.
        self._step_supports_amp_scaling = True

    def _share_groups(self) -> None:
        """Show the parts' groups themselves, which they replace when they load a state."""
        self.param_groups = [g for optimizer in self.optimizers for g in optimizer.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: its parts take tables or dense parameters."""
        if hasattr(self, "optimizers"):
            raise TypeError(
                "add_param_group is of the parts: call it of one of optimizer.optimizers before "
                "they are joined"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step both; never synchronizes.

        Raises:
            RuntimeError: under torch's own ``GradScaler``, and as the parts' ``step``.
        """
        if hasattr(self, "found_inf"):
            # The scaler takes its attributes back only where step succeeds.
            del self.grad_scale, self.found_inf
            raise RuntimeError(
                "torch.amp.GradScaler cannot step tables and dense parameters together; use "
                "torchembed.optim.GradScaler, or step each of optimizer.optimizers"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of both."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As any torch optimizer's: ``state`` by parameter number, and ``param_groups``."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, part in zip(self._first_numbers(), self.optimizers, strict=True):
            packed = part.state_dict()
            state |= {number + first: entry for number, entry in packed["state"].items()}
            groups += [
                {**group, "params": [number + first for number in group["params"]]}
                for group in packed["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy hyperparameters and state from ``state_dict``, in place.

        Raises:
            ValueError: where parameter groups, state names or shapes do not match; where only the
                dense part's do not, the tables' is loaded then.
        """
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"param_groups of the state must be {len(self.param_groups)}, "
                f"got {len(state_dict['param_groups'])}"
            )
        groups = iter(state_dict["param_groups"])
        for first, part in zip(self._first_numbers(), self.optimizers, strict=True):
            own = [next(groups) for _ in part.param_groups]
            numbers = {number for group in own for number in group["params"]}
            of_part = {
                "state": {
                    number - first: entry
                    for number, entry in state_dict["state"].items()
                    if number in numbers
                },
                "param_groups": [
                    {**group, "params": [number - first for number in group["params"]]}
                    for group in own
                ],
            }
            part.load_state_dict(of_part)
        self._share_groups()

    def _first_numbers(self) -> list[int]:
        """The number of each part's first parameter."""
        firsts, first = [], 0
        for part in self.optimizers:
            firsts.append(first)
            first += sum(len(group["params"]) for group in part.param_groups)
        return firsts


def _note_step(joint: "weakref.ref[JointOptimizer]", *_: object) -> None:
    """After a step of a part, as torch's schedulers note a step of the whole."""
    if (optimizer := joint()) is not None:
        optimizer._opt_called = True  # type: ignore[attr-defined]


def separate(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """``optimizers`` with the parts of each :class:`JointOptimizer` in its place."""
    return [
        part
        for optimizer in optimizers
        for part in (optimizer.optimizers if isinstance(optimizer, JointOptimizer) else [optimizer])
    ]


def split_parameters(
    params: Iterable[Any], only_of_tables: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Parameter groups of the tables, and of the dense parameters, among ``params``.

    Args:
        params: tensors, or parameter groups of them.
        only_of_tables: hyperparameters that dense groups go without.
    """
    given = list(params)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    of_tables, of_dense = [], []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        tables = [parameter for parameter in members if table_of(parameter) is not None]
        dense = [parameter for parameter in members if table_of(parameter) is None]
        if tables:
            of_tables.append({**group, "params": tables})
        if dense:
            kept = {name: value for name, value in group.items() if name not in only_of_tables}
            of_dense.append({**kept, "params": dense})
    return of_tables, of_dense
