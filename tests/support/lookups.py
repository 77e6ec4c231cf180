"""Pooled lookups beside the same lookups by the oracle."""

from typing import Any

import torch
from torch import Tensor

from tests.support import oracle
from tests.support.bags import Bags, random_fixed, random_jagged
from tests.support.sizes import Sizes
from tests.support.tolerance import Formula, assert_follows
from tests.support.values import normal
from torchembed.core.types import Pooling
from torchembed.ops.pooled_lookup import pooled_lookup


def random_bags(sizes: Sizes, fixed: bool, seed: int = 0) -> Bags:
    """Bags of several features, some of them empty."""
    if fixed:
        return random_fixed((2, 0, 1, 3), sizes.batch_size, sizes.num_rows, seed=seed)
    return random_jagged(
        3, sizes.batch_size, sizes.num_rows, max_length=sizes.max_length, seed=seed
    )


class Lookup:
    """One case: its inputs on the device, the formula on the CPU, outputs and gradients of both."""

    def __init__(
        self,
        bags: Bags,
        device: torch.device,
        *,
        dim: int = 16,
        weight_dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype | None = None,
        pooling: Pooling = Pooling.SUM,
        weighted: bool = False,
        per_id_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.bags, self.pooling, self.output_dtype = bags, pooling, output_dtype
        self.rows = bags.rows.to(device)
        self.weight = normal(bags.num_rows, dim, seed=1, dtype=weight_dtype, device=device)
        self.per_id_weights = None
        if weighted:
            num_ids = bags.rows.numel()
            self.per_id_weights = normal(num_ids, seed=2, dtype=per_id_dtype, device=device)
        shape = (bags.batch_size, bags.num_features, dim)
        self.grad = normal(*shape, seed=3, dtype=output_dtype or weight_dtype, device=device)

    def leaves(self) -> list[Tensor]:
        tensors = [self.weight, self.per_id_weights]
        return [t.clone().requires_grad_() for t in tensors if t is not None]

    def run(self, leaves: list[Tensor], **changes: Any) -> Tensor:
        arguments: dict[str, Any] = {
            **self.bags.grouping(),
            "pooling": self.pooling,
            "output_dtype": self.output_dtype,
            "per_id_weights": leaves[1] if len(leaves) > 1 else None,
        }
        if "offsets" in arguments:
            arguments["offsets"] = arguments["offsets"].to(self.rows.device)
        arguments |= changes
        return pooled_lookup(leaves[0], arguments.pop("rows", self.rows), **arguments)

    def forward(self, **changes: Any) -> Tensor:
        return self.run([leaf.detach() for leaf in self.leaves()], **changes)

    def gradients(self, **changes: Any) -> tuple[Tensor, ...]:
        leaves = self.leaves()
        return torch.autograd.grad(self.run(leaves, **changes), leaves, self.grad)

    def _formula_leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [leaf.detach().cpu().to(dtype).requires_grad_() for leaf in self.leaves()]

    def _formula(self, leaves: list[Tensor]) -> Tensor:
        per_id_weights = leaves[1] if len(leaves) > 1 else None
        mean = self.pooling is Pooling.MEAN
        return oracle.pooled_lookup(leaves[0], self.bags, per_id_weights=per_id_weights, mean=mean)

    def forward_formula(self, dtype: torch.dtype) -> Tensor:
        return self._formula(self._formula_leaves(dtype))

    def gradient_formula(self, leaf: int) -> Formula:
        def formula(dtype: torch.dtype) -> Tensor:
            leaves = self._formula_leaves(dtype)
            grad = self.grad.cpu().to(dtype)
            output = self._formula(leaves)
            return torch.autograd.grad(output, leaves, grad, materialize_grads=True)[leaf]

        return formula

    def check(self) -> None:
        """Forward and every gradient follow the formula, in the dtypes promised."""
        output = self.forward()
        assert output.dtype == (self.output_dtype or self.weight.dtype)
        assert_follows(output, self.forward_formula)
        for leaf, gradient in enumerate(self.gradients()):
            assert gradient.dtype == self.leaves()[leaf].dtype
            assert_follows(gradient, self.gradient_formula(leaf))
