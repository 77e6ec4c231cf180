"""Tables and dense parameters under one optimizer."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from torchembed.optim.hyperparameters import ParamGroup, ReplayedOptimizer
from torchembed.tables import table_of


class JointOptimizer(torch.optim.Optimizer):
    """The optimizers of a model's tables and of its dense parameters as one.

    Made by ``with_dense`` of :class:`~torchembed.optim.Adagrad` and the others for tables.
    ``param_groups`` are those of both, tables' first, so that learning-rate schedulers work, and
    ``state_dict`` holds both in torch's form. ``torchembed.optim.GradScaler``, ``TrainPipeline``
    and ``TrainingRun`` take this optimizer; torch's own ``GradScaler`` takes each of
    ``optimizers``.

    Attributes:
        optimizers: the optimizer of the tables and that of the dense parameters, where there are
            any; of several ranks, one without tables has an optimizer of tables, too.
    """

    grad_scale: Tensor | None
    """Given by a ``GradScaler`` for the time of one step, as ``found_inf`` is."""
    found_inf: Tensor | int

    def __init__(self, optimizers: Sequence[ReplayedOptimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        # Schedulers look for names in them. Set last, since groups are given what they lack.
        self.defaults = {n: value for o in optimizers for n, value in o.defaults.items()}
        self.optimizers = list(optimizers)
        # Whoever steps the parts one by one: torch's schedulers ask whether this one was stepped.
        note = functools.partial(_note_step, weakref.ref(self))
        # Whoever loads the parts one by one, as a checkpoint does, gives them groups of their own,
        # and schedulers would change the former ones.
        share = functools.partial(_share_groups_again, weakref.ref(self))
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(note)
            optimizer.register_load_state_dict_post_hook(share)
        self._share_groups()
        # With this flag torch's scaler does not unscale but calls step, which refuses it.
        self._step_supports_amp_scaling = True

    def _share_groups(self) -> None:
        """Make ``param_groups`` the parts' own groups, which loading a state replaces."""
        self.param_groups = [g for optimizer in self.optimizers for g in optimizer.param_groups]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an optimizer made by with_dense cannot be copied or pickled, since it is bound to its "
            "tables and parameters; make one for the copied module and give it this one's "
            "state_dict()"
        )

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Refused once the optimizer is made: its parts take tables or dense parameters."""
        if hasattr(self, "optimizers"):
            raise TypeError(
                "add_param_group is of the parts: call it of one of optimizer.optimizers before "
                "they are joined"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both optimizers; never synchronizes.

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
        """Discard the gradients of both optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> StateDict:
        """State in torch's form: ``state`` by parameter number, and ``param_groups``."""
        state: dict[int, StateDict] = {}
        groups: list[ParamGroup] = []
        for first, part in zip(self._first_numbers(), self.optimizers, strict=True):
            packed = part.state_dict()
            state |= {number + first: entry for number, entry in packed["state"].items()}
            groups += [
                {**group, "params": [number + first for number in group["params"]]}
                for group in packed["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Copy hyperparameters and state from ``state_dict``, in place.

        Raises:
            ValueError: if parameter groups, state names or shapes of a part do not match; nothing
                is changed then.
            TypeError: for tables on disk; likewise.
        """
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"param_groups of the state must be {len(self.param_groups)}, "
                f"got {len(state_dict['param_groups'])}"
            )
        groups = iter(state_dict["param_groups"])
        of_parts: list[StateDict] = []
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
            part.check_state_dict(of_part)
            of_parts.append(of_part)
        for part, of_part in zip(self.optimizers, of_parts, strict=True):
            part.load_state_dict(of_part)

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


def _share_groups_again(joint: "weakref.ref[JointOptimizer]", *_: object) -> None:
    """After a load of a part, whose groups are others since."""
    if (optimizer := joint()) is not None:
        optimizer._share_groups()


def separate(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """``optimizers`` with the parts of each :class:`JointOptimizer` in its place."""
    return [
        part
        for optimizer in optimizers
        for part in (optimizer.optimizers if isinstance(optimizer, JointOptimizer) else [optimizer])
    ]


class SplitParameters(NamedTuple):
    """Parameter groups of tables, and of dense parameters; each may be empty."""

    tables: list[ParamGroup]
    dense: list[ParamGroup]


def split_parameters(params: ParamsT, only_of_tables: Sequence[str] = ()) -> SplitParameters:
    """Parameter groups of the tables, and of the dense parameters, among ``params``.

    Tables are the weights of torchembed's modules, sharded ones too, so call it after
    ``shard_embeddings``.

    Args:
        params: tensors, with or without names as ``named_parameters()`` gives them, or parameter
            groups of them; a group with both kinds becomes two.
        only_of_tables: hyperparameters that dense groups go without.

    Raises:
        TypeError: for a module in place of its parameters.
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params must be parameters or groups of them, got {type(params).__name__}; "
            "pass model.parameters(), or call torchembed.split_parameters(model)"
        )
    given: list[Any] = list(params)
    has_groups = bool(given) and isinstance(given[0], Mapping)
    groups: list[ParamGroup] = given if has_groups else [{"params": given}]
    of_tables: list[ParamGroup] = []
    of_dense: list[ParamGroup] = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        tables = [member for member in members if table_of(_parameter_of(member)) is not None]
        dense = [member for member in members if table_of(_parameter_of(member)) is None]
        if tables:
            of_tables.append({**group, "params": tables})
        if dense:
            kept = {name: value for name, value in group.items() if name not in only_of_tables}
            of_dense.append({**kept, "params": dense})
    return SplitParameters(of_tables, of_dense)


def _parameter_of(member: Tensor | tuple[str, Tensor]) -> Tensor:
    """The parameter of a member of a group, which may come with its name."""
    return member[1] if isinstance(member, tuple) else member
