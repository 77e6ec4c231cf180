"""The fused optimizers by name. Their formulas are those of :class:`UpdateRule`."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchembed.core.types import OptimizerKind
from torchembed.optim.dense import DenseOptimizer
from torchembed.optim.dense_optimizers import DenseAdagrad, DenseAdam, DenseSGD
from torchembed.optim.fused import FusedOptimizer
from torchembed.optim.joint import JointOptimizer, split_parameters

_ONLY_OF_TABLES = ("max_gradient", "stochastic_rounding")


class _WithDense(FusedOptimizer):
    """Optimizer of tables whose rule exists for dense parameters, too."""

    dense_counterpart: ClassVar[type[DenseOptimizer]]

    @classmethod
    def with_dense(cls, params: ParamsT, **hyperparameters: Any) -> JointOptimizer:
        """One optimizer of tables and dense parameters: ``Adagrad.with_dense(model.parameters(),
        lr=0.01)`` steps tables by this class, and the rest by ``DenseAdagrad`` and the like.

        Args:
            params: parameters of both kinds, or parameter groups of them.
            hyperparameters: arguments of this class; the dense rule takes those that it has.

        Raises:
            ValueError: where there is no parameter.
        """
        of_tables, of_dense = split_parameters(params, _ONLY_OF_TABLES)
        if not of_tables and not of_dense:
            raise ValueError("params must hold at least one parameter, got none")
        rest = {n: value for n, value in hyperparameters.items() if n not in _ONLY_OF_TABLES}
        parts: list[torch.optim.Optimizer] = []
        if of_tables:
            parts.append(cls(of_tables, **hyperparameters))  # type: ignore[call-arg]
        if of_dense:
            parts.append(cls.dense_counterpart(of_dense, **rest))  # type: ignore[call-arg]
        return JointOptimizer(parts)


class SGD(_WithDense):
    """Stochastic gradient descent on the touched rows; without decay equal to ``torch.optim.SGD``.

    Args:
        params: table weights, or parameter groups of them.
        lr: learning rate, a number or a tensor.
        weight_decay: L2 penalty, applied to the rows that a step touches.
        max_gradient: each element of a row's summed gradient is clamped to this; 0 for no clamping.
        stochastic_rounding: for 16-bit tables; False rounds to nearest.
    """

    kind = OptimizerKind.SGD
    dense_counterpart = DenseSGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        max_gradient: float = 0.0,
        stochastic_rounding: bool = True,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "max_gradient": max_gradient}
        super().__init__(params, defaults, stochastic_rounding=stochastic_rounding)


class Adagrad(_WithDense):
    """Adagrad with one sum an element, as ``torch.optim.Adagrad``; state ``sum``, float32.

    Args:
        params, weight_decay, max_gradient, stochastic_rounding: as for :class:`SGD`.
        lr_decay: step t uses ``lr / (1 + (t - 1) * lr_decay)``.
        initial_accumulator_value: initial value of every sum.
        eps: added to the root.
    """

    kind = OptimizerKind.ADAGRAD
    dense_counterpart = DenseAdagrad
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
        max_gradient: float = 0.0,
        stochastic_rounding: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "max_gradient": max_gradient,
        }
        super().__init__(params, defaults, stochastic_rounding=stochastic_rounding)


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum a row, the mean of its squared gradients; state ``sum [rows]``.

    Arguments as for :class:`Adagrad`. The mean is over all columns of the row, also where they are
    on several ranks: these then take part in each :meth:`step`, each with the table, and the
    sums are the same on all of them.
    """

    kind = OptimizerKind.ROWWISE_ADAGRAD


class Adam(_WithDense):
    """Adam on the touched rows, as ``torch.optim.SparseAdam``; states ``exp_avg, exp_avg_sq``.

    Args:
        params, weight_decay, max_gradient, stochastic_rounding: as for :class:`SGD`. The decay is
            added to the gradient, as in ``torch.optim.Adam``.
        betas: decay of the two averages.
        eps: added to the root.
    """

    kind = OptimizerKind.ADAM
    dense_counterpart = DenseAdam
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_gradient: float = 0.0,
        stochastic_rounding: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_gradient": max_gradient,
        }
        super().__init__(params, defaults, stochastic_rounding=stochastic_rounding)
