"""Hyperparameters of the optimizers of tables and of dense parameters, and learning rates where
captured steps read them."""

import numbers
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

ParamGroup: TypeAlias = dict[str, Any]
"""Parameter group of an optimizer, as torch has it: ``params``, and its hyperparameters by name."""


def check_hyperparameters(defaults: ParamGroup) -> None:
    """Raise ``ValueError`` for ``betas`` outside [0, 1) and for negative numbers, and ``TypeError``
    for what is no number; a tensor is not read, since that would wait for a GPU."""
    for name, value in defaults.items():
        if name == "betas":
            if len(value) != 2 or not all(0.0 <= beta < 1.0 for beta in value):
                raise ValueError(f"betas must be two numbers in [0, 1), got {value}")
        elif not isinstance(value, Tensor):
            if not isinstance(value, numbers.Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not float(value) >= 0.0:
                raise ValueError(f"{name} must not be negative, got {value}")


def rule_numbers(group: ParamGroup) -> dict[str, float]:
    """Hyperparameters of ``group`` that the rules of rows and of dense elements both have."""
    beta1, beta2 = group.get("betas", (0.9, 0.999))
    return {
        "eps": group.get("eps", 0.0),
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
    }


def learning_rate(group: ParamGroup, device: torch.device) -> float | Tensor:
    """``group["lr"]``, as a number where it is a tensor on the CPU and the parameters are not.

    Reading such a tensor here waits for no GPU. A step on a GPU, most of all a captured one, would
    read it when it runs, by which time the host may have set the next step's.
    """
    lr = group["lr"]
    return lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" != device.type else lr


class ReplayedOptimizer(torch.optim.Optimizer):
    """An optimizer whose :meth:`step` a CUDA graph can hold: its learning rates are on the device.

    A float ``lr`` of a parameter group is copied there where it has changed, by a step and by
    :meth:`before_replay`; a tensor ``lr`` on the parameters' device is read where it is.
    """

    def __init__(self, params: ParamsT, defaults: ParamGroup) -> None:
        self._device_lrs: dict[tuple[int, torch.device], tuple[float, Tensor]] = {}
        super().__init__(params, defaults)

    def _parameters(self) -> list[Tensor]:
        """The parameters of all groups, in the order of the numbers in a state dict."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def check_state_dict(self, state_dict: StateDict) -> None:
        """Raise what :meth:`load_state_dict` would raise; changes nothing.

        Raises:
            ValueError: if ``param_groups`` are not as many, of as many parameters, as this
                optimizer's.
        """
        own, loaded = (
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        )
        if own != loaded:
            raise ValueError(
                f"param_groups of the state must be {len(own)}, of {own} parameters, "
                f"got {len(loaded)}, of {loaded}"
            )

    def before_replay(self) -> None:
        """Copy learning rates that were set since to the tensors that CUDA graphs of :meth:`step`
        read; call it before each replay."""
        for index, device in self._device_lrs:
            self._device_lr(index, device)

    def _device_lr(self, index: int, device: torch.device) -> Tensor:
        """The learning rate of parameter group ``index``, float32 of one element on ``device``;
        never synchronizes."""
        lr = learning_rate(self.param_groups[index], device)
        if isinstance(lr, Tensor):
            return lr.to(device, torch.float32, non_blocking=True).reshape(1)
        known, tensor = self._device_lrs.get((index, device), (None, None))
        if tensor is None:
            tensor = torch.empty(1, device=device)
        if known != lr:
            self._device_lrs[index, device] = lr, tensor.fill_(lr)
        return tensor
