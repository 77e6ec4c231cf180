"""The fused optimizers by name. Their formulas are those of :class:`UpdateRule`."""

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchembed.core import ranks
from torchembed.core.types import OptimizerKind
from torchembed.optim.dense import DenseOptimizer
from torchembed.optim.dense_optimizers import DenseAdagrad, DenseAdam, DenseSGD
from torchembed.optim.fused import FusedOptimizer
from torchembed.optim.hyperparameters import ReplayedOptimizer
from torchembed.optim.joint import JointOptimizer, split_parameters

_ONLY_OF_TABLES = ("max_gradient", "stochastic_rounding")


class _WithDense(FusedOptimizer):
    """Optimizer of tables whose rule exists for dense parameters, too."""

    dense_counterpart: ClassVar[type[DenseOptimizer]]

    @classmethod
    def with_dense(cls, params: ParamsT, **hyperparameters: Any) -> JointOptimizer:
        """Make one optimizer of tables and dense parameters.

        ``Adagrad.with_dense(model.parameters(), lr=0.01)`` updates tables by :class:`Adagrad` and
        all other parameters by :class:`DenseAdagrad`; likewise for the other rules. Of several
        ranks, one that holds no table has an optimizer of tables without parameters, so that all
        have optimizers of the same kinds.

        Args:
            params: parameters of both kinds, or parameter groups of them.
            hyperparameters: arguments of this class; the dense optimizer gets those that it has.

        Raises:
            ValueError: if there is no parameter, and one rank alone.
            TypeError: for a module in place of its parameters.
        """
        of_tables, of_dense = split_parameters(params, _ONLY_OF_TABLES)
        is_alone = ranks.world_size() == 1
        if is_alone and not of_tables and not of_dense:
            raise ValueError("params must hold at least one parameter, got none")
        rest = {n: value for n, value in hyperparameters.items() if n not in _ONLY_OF_TABLES}
        parts: list[ReplayedOptimizer] = []
        if of_tables or not is_alone:
            parts.append(cls(of_tables, **hyperparameters))  # type: ignore[call-arg]
        if of_dense:
            parts.append(cls.dense_counterpart(of_dense, **rest))  # type: ignore[call-arg]
        return JointOptimizer(parts)


class SGD(_WithDense):
    """Stochastic gradient descent on the rows that a step looked up, updated in place.

    For a row ``w`` with the sum ``g`` of its gradients: ``w -= lr * g``. Without weight decay that
    equals ``torch.optim.SGD`` without momentum. All arithmetic is in float32. Rows that were not
    looked up stay as they are.

    Args:
        params: weights of tables ``[R, D]``, or parameter groups of them.
        lr: learning rate, a number or a tensor ``[]``; on the tables' device a tensor is read
            there, so that captured steps follow its changes.
        weight_decay: L2 penalty: ``g += weight_decay * w``, for the rows that a step updates.
        max_gradient: clamps each element of ``g`` to ``[-max_gradient, max_gradient]``, before the
            decay; 0 for no clamping.
        stochastic_rounding: rounds 16-bit rows up or down at random, without bias; False rounds to
            the nearest number.

    Raises:
        TypeError: for a parameter that is not the weight of a table.
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
    """Adagrad on the rows that a step looked up, as ``torch.optim.Adagrad``; updates in place.

    For a row ``w`` with the sum ``g`` of its gradients: ``s += g * g``, then
    ``w -= lr * g / (sqrt(s) + eps)`` (J. Duchi, E. Hazan and Y. Singer, "Adaptive Subgradient
    Methods for Online Learning and Stochastic Optimization", 2011). The state ``sum`` holds ``s``,
    float32 ``[R, D]``.

    Args:
        params, lr, weight_decay, max_gradient, stochastic_rounding: as for :class:`SGD`.
        lr_decay: step t, counted from 1, uses ``lr / (1 + (t - 1) * lr_decay)``.
        initial_accumulator_value: initial value of each element of ``s``.
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
    """Adagrad with one accumulator for each row, in much less memory than :class:`Adagrad`.

    For a row ``w`` with the sum ``g`` of its gradients: ``s += mean(g * g)``, then
    ``w -= lr * g / (sqrt(s) + eps)``, as FBGEMM's row-wise Adagrad (D. Mudigere et al.,
    "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
    Models", ISCA 2022). The state ``sum`` holds ``s``, float32 ``[R]``.

    The mean is over all columns of a row. If these are divided over ranks, every such rank must
    take part in each :meth:`step`, and all get the same sums. Arguments are those of
    :class:`Adagrad`.
    """

    kind = OptimizerKind.ROWWISE_ADAGRAD


class Adam(_WithDense):
    """Adam on the rows that a step looked up, as ``torch.optim.SparseAdam``; updates in place.

    For a row ``w`` with the sum ``g`` of its gradients, at step t:
    ``m += (1 - beta1) * (g - m)``, ``v += (1 - beta2) * (g * g - v)``, then
    ``w -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)`` (D. Kingma and J. Ba,
    "Adam: A Method for Stochastic Optimization", 2015). The states ``exp_avg`` and ``exp_avg_sq``
    hold ``m`` and ``v``, float32 ``[R, D]``; those of rows that were not looked up do not decay.
    ``t`` counts the updates of the table, not those of a row.

    Args:
        params, lr, weight_decay, max_gradient, stochastic_rounding: as for :class:`SGD`. The decay
            is added to the gradient, as in ``torch.optim.Adam``, and not decoupled as in AdamW.
        betas: ``(beta1, beta2)``.
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
