"""The losses of DLRM-DCNv2's first steps by plain PyTorch, which the systems' own are held against.

Only the rows that the batches touch are made, so whole tables fit wherever they are trained.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.data import dlrm_dcnv2 as workload
from bench.dense.dense_part import DensePart, plain
from bench.step.model_optimizers import half_precision
from bench.step.setting import Precisions, StepSetting
from torchembed.core.random_bits import random_bits, random_uniform
from torchembed.data import Batch
from torchembed.modules import use_float8_products
from torchembed.ops.row_codec import decode_rows, encode_rows
from torchembed.tables.table import TableSpec

LARGEST_ROUNDING = {"bf16": 2**-8, "fp8": 2**-8, "tf32": 2**-10, "fp32": 2**-20}
"""Largest relative rounding of a loss; in float32 that of a sum of some thousand numbers."""

EXACT = Precisions(dense="fp64", wire="fp32", rows="fp32")
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


class Expected(NamedTuple):
    """Expected losses, and their tolerances."""

    losses: list[list[float]]
    """``[steps][ranks]``."""
    tolerance: dict[Precisions, float]


def dense_values(setting: StepSetting) -> list[Tensor]:
    """The initial dense parameters, as :func:`bench.data.dlrm_dcnv2.dense_parameters` lists
    them."""
    model = workload.make_model(
        workload.table_configs(setting.max_rows),
        workload.DENSE_SIZES,
        table_device="meta",
        device=setting.device,
        seed=setting.seed,
    )
    return [parameter.detach().clone() for parameter in workload.dense_parameters(model)]


def expected_losses(
    setting: StepSetting,
    steps: Sequence[Sequence[Batch]],
    precisions: Sequence[Precisions],
) -> Expected:
    """Train on ``steps``, each the batches of all ranks, with the dense part in float64.

    A tolerance is twice the largest error of plain PyTorch's own losses in these precisions, and
    one rounding of a loss.
    """
    device = setting.device
    steps = [[_moved(batch, device) for batch in of_ranks] for of_ranks in steps]
    dense = dense_values(setting)
    true = _losses(setting.with_precisions(EXACT), steps, dense)
    exact = torch.tensor(true, dtype=torch.float64)
    tolerance = {}
    for each in dict.fromkeys(precisions):
        losses = _losses(setting.with_precisions(each), steps, dense)
        found = torch.tensor(losses, dtype=torch.float64)
        rounding = LARGEST_ROUNDING[each.dense] * exact.abs().max()
        tolerance[each] = float(2 * (found - exact).abs().max() + rounding)
    return Expected(true, tolerance)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return batch.to(device)


def _losses(
    setting: StepSetting,
    steps: list[list[Batch]],
    dense: list[Tensor],
) -> list[list[float]]:
    ids = [_ids_by_table([batch.sparse.values for batch in of_ranks]) for of_ranks in steps]
    tables, places = [], []
    for config, *of_steps in zip(workload.table_configs(setting.max_rows), *ids, strict=True):
        rows, inverse = torch.cat(of_steps).unique(return_inverse=True)
        places.append(inverse.split([len(of_step) for of_step in of_steps]))
        tables.append(nn.Parameter(_initial_rows(config.spec(setting.seed), rows)))
    part = dense_part(dense, setting.precision)
    rule = _rule(setting, [*tables, *part.parameters()], len(tables))
    losses = []
    with _matmul_precision(setting.precision):
        for number, of_ranks in enumerate(steps):
            of_step = [of_table[number] for of_table in places]
            if setting.rows == "bf16":
                for table in tables:
                    table.data = _rounded_at_random(table.data)
            losses.append(_step(part, tables, of_step, of_ranks, setting))
            rule()
    return losses


def _rounded_at_random(rows: Tensor) -> Tensor:
    """float32 ``rows`` as bfloat16 holds them, each element up or down by chance, nearer ones
    more often."""
    noise = torch.randint(1 << 16, rows.shape, dtype=torch.int32, device=rows.device)
    return ((rows.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)


def _ids_by_table(of_ranks: list[Tensor]) -> list[Tensor]:
    """For each table the ids of all ranks."""
    size = len(of_ranks[0]) // sum(workload.HOTNESS)
    parts = [values.split([size * count for count in workload.HOTNESS]) for values in of_ranks]
    return [torch.cat(of_table) for of_table in zip(*parts, strict=True)]


def _initial_rows(spec: TableSpec, rows: Tensor) -> Tensor:
    """Rows of a table by their numbers: uniform up to ``1 / sqrt(num_rows)`` either side of 0."""
    table_key = torch.full((1,), spec.key, dtype=torch.int64, device=rows.device)
    columns = torch.arange(spec.dim, device=rows.device)
    bound = spec.num_rows**-0.5
    made = torch.empty(len(rows), spec.dim, device=rows.device)
    for part, values in zip(rows.split(1 << 16), made.split(1 << 16), strict=True):
        keys = random_bits(table_key, part).unsqueeze(1)
        values.copy_(2 * bound * random_uniform(keys, columns) - bound)
    return made


def dense_part(dense: list[Tensor], precision: str) -> DensePart:
    """The dense part by plain PyTorch, with the values of :func:`dense_values`; in float64 for a
    ``precision`` of ``fp64``, and with wide layers in 8 bits for one of ``fp8``."""
    part = plain().to(dense[0].device, torch.float64 if precision == "fp64" else torch.float32)
    with torch.no_grad():
        for parameter, value in zip(part.parameters(), dense, strict=True):
            parameter.copy_(value)
    if precision == "fp8":
        use_float8_products(part)
    return part


def _step(
    part: DensePart,
    tables: list[nn.Parameter],
    places: list[Tensor],
    of_ranks: list[Batch],
    setting: StepSetting,
) -> list[float]:
    """Each rank's loss; leaves the mean of their gradients."""
    losses = []
    for rank, batch in enumerate(of_ranks):
        pooled = torch.cat(
            [
                F.embedding_bag(ids.chunk(len(of_ranks))[rank].view(-1, count), table, mode="sum")
                for table, ids, count in zip(tables, places, workload.HOTNESS, strict=True)
            ],
            dim=1,
        )
        exact = setting.precision == "fp64"
        if setting.wire in WIRES:
            pooled = _RoundedOnWire.apply(pooled, WIRES[setting.wire])
        pooled = pooled.double() if exact else pooled
        assert batch.dense is not None
        dense, labels = (t.double() if exact else t for t in (batch.dense, batch.labels))
        half = half_precision(setting)
        with torch.autocast(pooled.device.type, half, enabled=half is not None):
            loss = part(dense, pooled, labels)
        (loss / len(of_ranks)).backward()
        losses.append(loss.item())
    return losses


class _RoundedOnWire(torch.autograd.Function):
    """Vectors rounded as on the wire, and so their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return _rounded(vectors, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _rounded(grad, ctx.dtype), None


def _rounded(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.float8_e4m3fn:
        return vectors.to(dtype).to(vectors.dtype)
    rows = vectors.reshape(-1, workload.DIM)
    return decode_rows(encode_rows(rows), vectors.dtype).view_as(vectors)


def _rule(
    setting: StepSetting, parameters: list[nn.Parameter], num_tables: int
) -> Callable[[], None]:
    """A step of the setting's optimizer on all parameters, by its formula; clears gradients."""
    states = [torch.zeros_like(parameter) for parameter in parameters]
    is_row_wise = setting.optimizer == "rowwise_adagrad"

    @torch.no_grad()
    def update() -> None:
        for number, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
            step = parameter.grad
            assert step is not None
            if setting.optimizer != "sgd":
                square = step.square()
                if is_row_wise and number < num_tables:
                    square = square.mean(dim=1, keepdim=True)
                state += square
                step = step / (state.sqrt() + setting.eps)
            parameter -= setting.lr * step
            parameter.grad = None

    return update


@contextlib.contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """float32 products as ``precision`` has them."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
