"""The base of the optimizers of dense parameters: one update over a flat buffer."""

from collections.abc import Callable, Collection
from typing import ClassVar, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from torchembed.core import checks
from torchembed.core.own_storage import with_own_storage
from torchembed.core.types import OptimizerKind
from torchembed.ops.dense_update import DenseRule, dense_update
from torchembed.optim.flat_parameters import FlatParameters, flatten_parameters
from torchembed.optim.hyperparameters import (
    ParamGroup,
    ReplayedOptimizer,
    check_hyperparameters,
    rule_numbers,
)


class DenseOptimizer(ReplayedOptimizer):
    """Updates all parameters of a group in one pass over a flat buffer, with float32 masters.

    Constructing one lays the parameters of each group out in one buffer, of which their ``data``
    become views; gradients that torchembed's modules compute are written into another, and others
    are copied there by :meth:`step`. Parameters that share a storage with others, as those of
    recurrent layers on a GPU do, stay there, and each step copies them to the buffer and back.
    Parameters of 16 bits are rounded copies of float32 masters, which are part of the state; one
    kernel updates the master and rounds it. Make the optimizer after moving or casting the module,
    and one at a time for a parameter.

    Other writes to a parameter, such as those of ``load_state_dict``, are noticed by the next step;
    a write to ``parameter.data`` of 16 bits is not noticed, and is lost.
    Parameters without a gradient are left alone; the step count is the group's. Gradients keep
    their memory until the backward after the next ``zero_grad``, and those that
    ``torch.autograd.grad`` returns may share it until the next step: clone gradients that should
    last.

    :meth:`step` never synchronizes and can be captured in a CUDA graph; call :meth:`before_replay`
    before each replay.
    ``torch.amp.GradScaler`` works, and ``scaler.unscale_`` but for float16 gradients, which it
    refuses. State dicts of Adagrad and Adam are those of ``torch.optim``, with a ``master`` for
    each 16-bit parameter.

    Args:
        dtype: type that the parameters are cast to, float16 or bfloat16; None leaves them as they
            are. Masters begin with the values before the cast.
    """

    kind: ClassVar[OptimizerKind]
    state_names: ClassVar[tuple[str, ...]] = ()

    grad_scale: Tensor | None
    """Loss scale, set by ``GradScaler`` for the time of one step, as ``found_inf`` is."""
    found_inf: Tensor | int
    skip: Tensor | None = None
    """float32 ``[1]``; where it is not zero on the device, :meth:`step` changes nothing. For code
    that finds out on the device that a batch is bad."""

    def __init__(self, params: ParamsT, defaults: ParamGroup, *, dtype: torch.dtype | None) -> None:
        if dtype is not None and dtype not in checks.FLOAT_DTYPES:
            raise TypeError(
                f"dtype must be float32, float16 or bfloat16, got {checks.dtype_name(dtype)}"
            )
        check_hyperparameters(defaults)
        self._dtype = dtype
        self._buffers: list[list[_Buffer]] = []
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of further parameters, and lay them out in flat buffers."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            flats = flatten_parameters(group["params"], self._dtype)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        initial = group.get("initial_accumulator_value", 0.0)
        self._buffers.append([_Buffer(flat, self.state_names, initial) for flat in flats])
        self._publish_state()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, since it is bound to its "
            "parameters; make one for the copied module and give it this one's state_dict()"
        )

    def before_replay(self) -> None:
        """Copy learning rates and values of parameters that were set since to the tensors that
        CUDA graphs of :meth:`step` read; call it before each replay. Graphs read a tensor ``lr`` on
        the parameters' device themselves."""
        for index, buffers in enumerate(self._buffers):
            for buffer in buffers:
                buffer.flat.take_changed_values()
                self._device_lr(index, buffer.step.device)

    def flat_parameters(self) -> list[FlatParameters]:
        """The flat buffers: one for each parameter group, device and dtype."""
        return [buffer.flat for buffers in self._buffers for buffer in buffers]

    def _publish_state(self) -> None:
        """Make ``self.state`` views of each parameter's part of the flat state."""
        self.state.clear()
        for buffers in self._buffers:
            for buffer in buffers:
                for parameter, entry in zip(buffer.flat.parameters, buffer.entries(), strict=True):
                    self.state[parameter] = entry

    def _rule(self, group: ParamGroup) -> DenseRule:
        return DenseRule(kind=self.kind, **rule_numbers(group))

    def _loss_scaling(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The inverse loss scale, under a scaler that has not unscaled yet, and the flag that skips
        the step; None where there is none."""
        of_caller = None if self.skip is None else self.skip.to(device)
        if not hasattr(self, "found_inf"):
            return None, of_caller
        skip = torch.zeros(1, device=device) + self.found_inf
        if of_caller is not None:
            skip = skip.maximum(of_caller)
        # None where the scaler has unscaled the gradients before.
        scale = self.grad_scale
        return None if scale is None else scale.to(device).float().reciprocal(), skip

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; never synchronizes.

        Raises:
            RuntimeError: if a parameter was moved, cast or replaced since the optimizer was
                made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_some(None)
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.updated.clear()
        return loss

    @property
    def may_step_early(self) -> bool:
        """False where a hook before steps has to see all gradients first."""
        return not self._optimizer_step_pre_hooks

    @torch.no_grad()
    def step_early(self, parameters: Collection[Tensor]) -> None:
        """Update some parameters whose gradients are final before :meth:`step`, which then updates
        the others only: both are one step, unless ``zero_grad`` is called between them."""
        self._update_some(parameters)

    def _update_some(self, parameters: Collection[Tensor] | None) -> None:
        for index, buffers in enumerate(self._buffers):
            group = self.param_groups[index]
            rule, decay = self._rule(group), group.get("lr_decay", 0.0)
            for buffer in buffers:
                multiplier, skip = self._loss_scaling(buffer.flat.values.device)
                lr = self._device_lr(index, buffer.step.device)
                buffer.update(rule, lr, decay, multiplier, skip, parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of all parameters, as any torch optimizer does."""
        super().zero_grad(set_to_none)
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.updated.clear()

    def state_dict(self) -> StateDict:
        """State in torch's form; its masters hold what other code has written to parameters."""
        for flat in self.flat_parameters():
            flat.take_changed_values()
        packed = super().state_dict()
        # Torch's optimizers count the steps of each parameter in a tensor of its own.
        state = {
            number: {**entry, "step": entry["step"].clone()}
            for number, entry in packed["state"].items()
        }
        return {**packed, "state": state}

    def check_state_dict(self, state_dict: StateDict) -> None:
        for group in state_dict["param_groups"]:
            for name in ("amsgrad", "decoupled_weight_decay", "maximize"):
                if group.get(name):
                    raise ValueError(
                        f"{name} of the loaded param_groups must be False, got {group[name]}; "
                        f"{type(self).__name__} has no such rule"
                    )
        super().check_state_dict(state_dict)
        loaded = state_dict["state"]
        for number, parameter in enumerate(self._parameters()):
            entry, own = loaded.get(number, {}), self.state[parameter]
            if set(entry) | {"master"} != set(own) | {"master"}:
                raise ValueError(
                    f"state of parameter {number} must hold {sorted(own)}, got {sorted(entry)}"
                )
            for key, tensor in own.items():
                # Some of torch's versions count steps in a tensor of one dimension.
                if key in entry and entry[key].squeeze().shape != tensor.squeeze().shape:
                    raise ValueError(
                        f"state {key} of parameter {number} must have shape "
                        f"{tuple(tensor.shape)}, got {tuple(entry[key].shape)}"
                    )

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Copy hyperparameters and state from ``state_dict``, in place.

        16-bit parameters become their masters, rounded; where ``state_dict`` has no ``master``, as
        one of ``torch.optim`` has none, masters become the parameters.

        Raises:
            ValueError: if parameter groups, state names or shapes do not match, or the state is
                of another rule, as AdamW's; nothing is changed then.
        """
        self.check_state_dict(state_dict)
        parameters, loaded = self._parameters(), state_dict["state"]
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})
        for group, rate in zip(self.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):  # filled in place: a CUDA graph may have captured it
                group["lr"] = rate.fill_(float(group["lr"]))
        self._publish_state()
        for number, parameter in enumerate(parameters):
            entry, own = loaded[number], self.state[parameter]
            for key, tensor in own.items():
                tensor.copy_(entry.get(key, parameter).reshape(tensor.shape))
            if "master" in own:
                parameter.copy_(own["master"])
        for flat in self.flat_parameters():
            flat.values_are_current()


class _Buffer:
    """Flat parameters, and their optimizer state in the same layout."""

    def __init__(
        self, flat: FlatParameters, state_names: tuple[str, ...], initial_state: float
    ) -> None:
        self.flat = flat
        self.state_names = state_names
        self.states = tuple(torch.full_like(flat.master, initial_state) for _ in state_names)
        self.step = torch.zeros((), device=flat.values.device)
        """Updates done, float32 ``[]``."""
        self.updated: set[Tensor] = set()
        """Parameters that :meth:`DenseOptimizer.step_early` has updated in the current step."""

    def entries(self) -> list[dict[str, Tensor]]:
        """The state of each parameter, by name."""
        named = dict(zip(self.state_names, self.states, strict=True))
        if self.flat.rounded is not None:
            named["master"] = self.flat.master
        views = {
            name: [with_own_storage(view) for view in self.flat.views(state)]
            for name, state in named.items()
        }
        return [
            {"step": self.step, **{name: parts[number] for name, parts in views.items()}}
            for number in range(len(self.flat.parameters))
        ]

    def update(
        self,
        rule: DenseRule,
        lr: Tensor,
        lr_decay: float,
        multiplier: Tensor | None,
        skip: Tensor | None,
        parameters: Collection[Tensor] | None,
    ) -> None:
        """Step ``parameters``, or those not updated early where None, by ``rule`` with the learning
        rate ``lr [1]``, decayed by the number of steps."""
        flat = self.flat
        among = set(flat.parameters if parameters is None else parameters) - self.updated
        chosen = [p for p in flat.parameters if p in among and p.grad is not None]
        if not chosen:
            return
        flat.take_changed_values()
        flat.gather_values(chosen)
        parts = flat.gather_gradients(chosen)
        if not self.updated:
            self.step += 1.0 if skip is None else skip[0] == 0
        self.updated.update(chosen)
        if lr_decay != 0.0:
            lr = (lr.double() / (1 + (self.step.double() - 1) * lr_decay)).float()
        dense_update(
            flat.master,
            self.states,
            flat.gradients,
            rule,
            lr,
            rounded=flat.rounded,
            step=self.step,
            grad_multiplier=multiplier,
            skip=skip,
            parts=parts,
        )
        flat.values_were_updated(chosen)
