"""``weight.grad`` of a table whose gradients are recorded: a tensor that stands for them."""

import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torchembed.tables.gradients.pending_gradients import PendingGradients
    from torchembed.tables.table import Table

_aten = torch.ops.aten


def why_refused(table: "Table") -> str:
    """The reason why a gradient of the weight of ``table`` itself cannot be applied beside recorded
    ones, and what to do."""
    name = table.spec.name
    if table.is_sharded:
        return (
            f"weight.grad of table {name} is set, by a use of its weight that is no lookup, such "
            "as a softmax over all rows. The table is sharded: this rank has a part of its rows "
            "alone, so that results would lack the others'. Look up what the loss needs, such as "
            "candidates or sampled negatives, through the collection; or place the table "
            "data_parallel and give it to an optimizer of torch"
        )
    return (
        f"weight.grad of a table is set, that of {name}, by a use of its weight that is no "
        "lookup, such as a softmax over all rows, a penalty on the weight, a parametrization or "
        "pruning, by a lookup of another module that shares it, or by a forward from before this "
        "optimizer took the table over, and would not be applied; give the table to an optimizer "
        "of torch, which trains all of its rows, or have the loss use looked-up rows alone; call "
        "one module in place of two that share a weight; after a forward from before, call "
        "zero_grad() first"
    )


class TableGradient(Tensor):
    """The gradients that backward has recorded for one table, as a tensor ``[R, D]``.

    It holds no elements, so that torch's own functions work beside a fused optimizer: norms count
    the rows that were touched, ``mul_``, ``clamp_`` and ``zero_`` change what is recorded, and
    other functions get a dense copy. Those that would write something else raise. Once the
    optimizer has stepped it is all zeros.
    """

    _table: "weakref.ref[Table]"

    def __new__(cls, table: "Table") -> Self:
        weight = table.parameter
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, weight.shape, dtype=weight.dtype, device=weight.device
        )
        # The parameter holds it, and a strong reference back would outlive the model.
        made._table = weakref.ref(table)
        return made

    def __init__(self, table: "Table") -> None:
        pass

    def __repr__(self, **_: object) -> str:
        return f"TableGradient({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    @property
    def table(self) -> "Table":
        """The table.

        Raises:
            RuntimeError: if its module is gone.
        """
        table = self._table()
        if table is None:
            raise RuntimeError("weight.grad is of a table whose module is gone; clone it before")
        return table

    @property
    def pending(self) -> "PendingGradients":
        """The recorded gradients of the table, among those of others."""
        group = self.table.group
        # Some are recorded together only where a lookup of several modules' tables was one.
        if group.joined is not None and len(group.joined.pending):
            return group.joined.gathered_pending()
        return group.pending

    def as_dense(self) -> Tensor:
        """A dense copy."""
        return self.pending.dense_of(self.table).to(self.dtype)

    def norm_of_rows(self, order: float, *others: Any, **named: Any) -> Tensor:
        """``torch.linalg.vector_norm``, over the rows that were touched."""
        table = self.table
        if table.is_sharded:
            raise RuntimeError(
                f"table {table.spec.name} is sharded, and the norm of its gradient spans the "
                "ranks; clip by TrainPipeline(max_grad_norm=...) or "
                "torchembed.optim.clip_grad_norm_(..., group=...), or give dense parameters alone"
            )
        if table.parameter.is_meta:
            # Torch would bring the norm, or the factor that it clips by, to the device of weight,
            # where both have no value, after it has clipped other parameters.
            raise RuntimeError(
                f"table {table.spec.name} is on disk, and the norm of its gradient is not on the "
                "device of its weight, which is meta; clip by "
                "TrainPipeline(max_grad_norm=...) or torchembed.optim.clip_grad_norm_, or take the "
                "norm of weight.grad.clone()"
            )
        dims, *_ = [*others, named.get("dim")]
        if not order > 0 or dims is not None:
            return torch.linalg.vector_norm(self.as_dense(), order, *others, **named)
        sums = self.pending.sums_of(table)
        return torch.linalg.vector_norm(sums, order).to(named.get("dtype") or self.dtype)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        named = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            return rule(func, *args, **named)
        if func._schema.is_mutable and any(isinstance(a, cls) for a in _written(func, args, named)):
            if func is _aten.add_.Tensor and not isinstance(args[1], numbers.Number):
                raise RuntimeError(why_refused(args[0].table))  # autograd adds up
            raise RuntimeError(
                f"weight.grad of a table with a fused optimizer cannot take {func}; it can be "
                "scaled (mul_, div_), clamped (clamp_), cleared (zero_) and read"
            )
        args, named = pytree.tree_map_only(cls, cls.as_dense, (args, named))
        return func(*args, **named)

    def again(self) -> Self:
        """Another tensor that stands for the same gradients."""
        return type(self)(self.table)


def _written(func: Any, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """The arguments that ``func`` writes, those in lists too."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else named.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return found


def _again(func: object, gradient: TableGradient) -> TableGradient:
    return gradient.again()


def _norm(
    func: object, gradient: TableGradient, order: float = 2, *others: Any, **named: Any
) -> Tensor:
    return gradient.norm_of_rows(order, *others, **named)


def _foreach_norm(
    func: object, gradients: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return [torch.linalg.vector_norm(gradient, order, dtype=dtype) for gradient in gradients]


def _multiply(func: Any, gradient: Tensor, factor: Tensor | float) -> Tensor:
    if not isinstance(gradient, TableGradient) or (
        isinstance(factor, Tensor) and (factor.dim() > 0 or isinstance(factor, TableGradient))
    ):
        raise RuntimeError(
            "weight.grad of a table with a fused optimizer can be multiplied by one number alone"
        )
    weight = gradient.table.group.weight
    as_tensor = torch.as_tensor(factor, dtype=torch.float32, device=weight.device)
    gradient.pending.scale(as_tensor, gradient.table)
    return gradient


def _elementwise(func: Any, gradient: TableGradient, *bounds: Any, **named: Any) -> TableGradient:
    """A function whose value at 0 is 0, applied to each row's summed gradient."""
    given = dict(zip(("min", "max"), bounds, strict=False)) | named
    low, high = given.get("min"), given.get("max")
    if "clamp" in str(func) and (
        (isinstance(low, int | float) and low > 0) or (isinstance(high, int | float) and high < 0)
    ):
        raise RuntimeError(
            "weight.grad of a table with a fused optimizer can be clamped to bounds around 0 "
            f"alone, got {bounds}; rows that were not looked up have no gradient"
        )
    gradient.pending.change_sums(gradient.table, lambda sums: func(sums, *bounds, **named))
    return gradient


def _divide(func: Any, gradient: Tensor, divisor: Tensor | float) -> Tensor:
    if not isinstance(gradient, TableGradient) or (
        isinstance(divisor, Tensor) and (divisor.dim() > 0 or isinstance(divisor, TableGradient))
    ):
        raise RuntimeError(
            "weight.grad of a table with a fused optimizer can be divided by one number alone"
        )
    gradient.pending.change_sums(gradient.table, lambda sums: func(sums, divisor))
    return gradient


def _zero(func: object, gradient: TableGradient) -> TableGradient:
    gradient.pending.clear_table(gradient.table)
    return gradient


def _each(rule: Callable[..., object], func: Any) -> Callable[..., None]:
    """A rule of a function of lists: ``func`` or its ``rule`` for each tensor."""

    def apply(_: object, tensors: Sequence[Tensor], *others: Any) -> None:
        for number, tensor in enumerate(tensors):
            of_tensor = [
                other[number] if isinstance(other, list | tuple) else other for other in others
            ]
            if isinstance(tensor, TableGradient):
                rule(func, tensor, *of_tensor)
            else:
                func(tensor, *of_tensor)

    return apply


def _unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, factor: Tensor) -> None:
    """The loss scale is taken away. The optimizer's step finds what is not finite, on all ranks."""
    others = [g for g in gradients if not isinstance(g, TableGradient)]
    if others:
        func(others, found_inf, factor)
    for gradient in gradients:
        if isinstance(gradient, TableGradient):
            _multiply(func, gradient, factor.reshape(()))


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _again,
    _aten.alias.default: _again,
    _aten.linalg_vector_norm.default: _norm,
    _aten.norm.Scalar: _norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.mul_.Tensor: _multiply,
    _aten.mul_.Scalar: _multiply,
    _aten.div_.Tensor: _divide,
    _aten.div_.Scalar: _divide,
    _aten.clamp_.default: _elementwise,
    _aten.nan_to_num_.default: _elementwise,
    _aten.zero_.default: _zero,
    _aten._foreach_mul_.Tensor: _each(_multiply, _aten.mul_.Tensor),
    _aten._foreach_mul_.Scalar: _each(_multiply, _aten.mul_.Scalar),
    _aten._foreach_zero_.default: _each(_zero, _aten.zero_.default),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
