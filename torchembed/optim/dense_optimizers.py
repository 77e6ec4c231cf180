"""The optimizers of dense parameters by name. Their formulas are those of :class:`DenseRule`."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchembed.core.types import OptimizerKind
from torchembed.optim.dense import DenseOptimizer


class DenseSGD(DenseOptimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD`` without momentum.

    Args:
        params: dense parameters, or parameter groups of them.
        lr: learning rate, a number or a tensor.
        weight_decay: L2 penalty.
        dtype: type that the parameters are cast to, over float32 masters; None leaves them.
    """

    kind = OptimizerKind.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, dtype=dtype)


class DenseAdagrad(DenseOptimizer):
    """Adagrad, as ``torch.optim.Adagrad``; state ``sum``, float32.

    Args:
        params, weight_decay, dtype: as for :class:`DenseSGD`.
        lr_decay: step t uses ``lr / (1 + (t - 1) * lr_decay)``.
        initial_accumulator_value: initial value of every sum.
        eps: added to the root.
    """

    kind = OptimizerKind.ADAGRAD
    state_names = ("sum",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, defaults, dtype=dtype)


class DenseAdam(DenseOptimizer):
    """Adam, as ``torch.optim.Adam``; states ``exp_avg`` and ``exp_avg_sq``, float32.

    Args:
        params, weight_decay, dtype: as for :class:`DenseSGD`.
        betas: decay of the two averages.
        eps: added to the root.
    """

    kind = OptimizerKind.ADAM
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, dtype=dtype)
