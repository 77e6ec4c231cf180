"""``rowwise_update`` against formulas for each row, and against ``torch.optim``."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.row_updates import Batch, Training, positions, random_batch
from tests.support.sizes import Sizes
from tests.support.tolerance import Formula, assert_follows, assert_same_bits
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import RowGradients, UpdateRule

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
KINDS = tuple(OptimizerKind)


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_follows_the_formula(
    kind: OptimizerKind,
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes,
) -> None:
    num_ids = sizes.batch_size * 4
    batches = [
        random_batch(
            num_ids, sizes.num_rows, 16, seed, grad_dtype=grad_dtype, scattered=seed % 2 == 0
        )
        for seed in range(3)
    ]
    Training(
        rule=UpdateRule(kind=kind),
        batches=batches,
        num_rows=sizes.num_rows,
        dim=16,
        weight_dtype=weight_dtype,
    ).check(device)


@pytest.mark.parametrize("kind", KINDS)
def test_follows_the_formula_in_every_dim(
    kind: OptimizerKind, device: torch.device, sizes: Sizes
) -> None:
    rule = UpdateRule(
        kind=kind, eps=1e-6, beta1=0.8, beta2=0.95, weight_decay=0.05, max_gradient=1.5
    )
    for dim in sizes.dims:
        batches = [
            random_batch(sizes.batch_size, sizes.num_rows, dim, seed, scattered=True)
            for seed in range(2)
        ]
        Training(
            rule=rule, batches=batches, num_rows=sizes.num_rows, dim=dim, multiplier=0.7
        ).check(device)


EDGE_CASES: dict[str, tuple[int, Batch]] = {
    "no ids": (5, positions()),
    "one id": (5, positions(3)),
    "one row": (1, positions(0, 0)),
    "all ids equal": (5, positions(2, 2, 2, 2)),
    "last row": (7, positions(6, 1, 6)),
    "all missing": (5, positions(-1, -1)),
    "some missing": (5, positions(-1, 4, -1, 0, 4)),
    "no rows": (0, positions(-1)),
    "no columns": (5, positions(3, -1, 3, dim=0)),
    "a hot row": (5, positions(*[2] * 300, 4, *[2] * 3)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", EDGE_CASES)
def test_edge_cases(case: str, kind: OptimizerKind, device: torch.device) -> None:
    num_rows, batch = EDGE_CASES[case]
    Training(
        rule=UpdateRule(kind=kind, weight_decay=0.1),
        batches=[batch, batch],
        num_rows=num_rows,
        dim=batch.gradients.grad.shape[1],
    ).check(device)


def test_spare_ids_without_any_gradient_change_nothing(device: torch.device) -> None:
    rows = torch.full((3,), -1)
    gradients = RowGradients(torch.zeros(0, 4), torch.zeros(3, dtype=torch.int32), torch.ones(3))
    training = Training(
        rule=UpdateRule(kind=OptimizerKind.SGD),
        batches=[Batch(rows, gradients)],
        num_rows=5,
        dim=4,
    )
    assert_same_bits(training.results(device)[0], training.initial(device)[0])


Torch = Callable[[list[Tensor]], torch.optim.Optimizer]
TORCH_OPTIMIZERS: dict[OptimizerKind, tuple[Torch, dict[str, float], tuple[str, ...]]] = {
    OptimizerKind.SGD: (lambda p: torch.optim.SGD(p, lr=0.1), {}, ()),
    OptimizerKind.ADAGRAD: (
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6),
        {"eps": 1e-6},
        ("sum",),
    ),
    OptimizerKind.ADAM: (
        lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.99), eps=1e-6),
        {"eps": 1e-6, "beta1": 0.8, "beta2": 0.99},
        ("exp_avg", "exp_avg_sq"),
    ),
}


@pytest.mark.parametrize("kind", TORCH_OPTIMIZERS)
def test_equals_torch_optimizers_on_coalesced_sparse_gradients(
    kind: OptimizerKind, device: torch.device, sizes: Sizes
) -> None:
    make, options, names = TORCH_OPTIMIZERS[kind]
    num_rows, dim = sizes.num_rows, 16
    training = Training(
        rule=UpdateRule(kind=kind, **options),
        batches=[
            random_batch(sizes.batch_size * 3, num_rows, dim, seed, missing=0.0)
            for seed in range(5)
        ],
        num_rows=num_rows,
        dim=dim,
    )

    def formula_of(name: str | None) -> Formula:
        def formula(dtype: torch.dtype) -> Tensor:
            weight = training.initial(torch.device("cpu"))[0].to(dtype).requires_grad_()
            optimizer = make([weight])
            for batch in training.batches:
                with torch.sparse.check_sparse_tensor_invariants():
                    indices, values = batch.rows.unsqueeze(0), batch.each(dtype)
                    sparse = torch.sparse_coo_tensor(indices, values, weight.shape)
                    weight.grad = sparse.coalesce()
                    optimizer.step()
            return weight if name is None else optimizer.state[weight][name]

        return formula

    for result, name in zip(training.results(device), (None, *names), strict=True):
        assert_follows(result, formula_of(name))


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (OptimizerKind.SGD, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2)),
        (
            OptimizerKind.ADAGRAD,
            lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8, weight_decay=0.2),
        ),
    ],
)
def test_weight_decay_equals_torch_where_every_row_is_touched(
    kind: OptimizerKind, make: Torch, device: torch.device
) -> None:
    num_rows, dim = 6, 5
    batches = [positions(*range(num_rows), *range(num_rows), dim=dim)] * 3
    training = Training(
        rule=UpdateRule(kind=kind, weight_decay=0.2), batches=batches, num_rows=num_rows, dim=dim
    )

    def formula(dtype: torch.dtype) -> Tensor:
        weight = training.initial(torch.device("cpu"))[0].to(dtype).requires_grad_()
        optimizer = make([weight])
        for batch in batches:
            weight.grad = batch.each(dtype).view(2, num_rows, dim).sum(0)
            optimizer.step()
        return weight

    assert_follows(training.results(device)[0], formula)
