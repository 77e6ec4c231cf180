"""Our tables behave as FBGEMM's in its place: lookups, updates, states, checks of ids."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

SHAPES = ((7, 8), (5, 4), (6, 8))
FEATURE_TABLES = (0, 0, 1, 2)
STEPS = 4


def ids(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, offsets and weights of four features and five samples."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(FEATURE_TABLES), 5), generator=generator)
    values = [
        torch.randint(0, SHAPES[table][0], (int(row.sum()),), generator=generator)
        for table, row in zip(FEATURE_TABLES, lengths, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    return torch.cat(values), offsets, torch.rand(int(offsets[-1]), generator=generator)


def make_ours(kind: str, pooling: Any, output_dtype: torch.dtype, **rule: Any) -> Any:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

    from torchembed.core.types import OptimizerKind
    from torchembed.integrations.torchrec.tables.fused_tables import FusedTables, UpdateSettings
    from torchembed.ops.rowwise_update import UpdateRule
    from torchembed.tables import Table, TableSpec

    specs = [
        TableSpec(name=str(number), num_rows=rows, dim=dim)
        for number, (rows, dim) in enumerate(SHAPES)
    ]
    settings = UpdateSettings(
        rule=UpdateRule(kind=OptimizerKind[kind], eps=1e-4, **rule),
        learning_rate=0.1,
        stochastic_rounding=True,
        bounds_check=rule.pop("bounds_check", BoundsCheckMode.WARNING),
    )
    made = FusedTables(
        [Table(spec) for spec in specs],
        FEATURE_TABLES,
        pooling,
        SparseType.FP32,
        output_dtype,
        torch.device("cpu"),
        settings,
    )
    fill(made)
    return made


def make_theirs(kind: str, pooling: Any) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in SHAPES],
        feature_table_map=list(FEATURE_TABLES),
        pooling_mode=PoolingMode[pooling.name],
        optimizer=EmbOptimType[f"EXACT_{kind}"],
        learning_rate=0.1,
        eps=1e-4,
        output_dtype=SparseType.FP32,
    )
    fill(made)
    return made


def fill(tables: Any) -> None:
    generator = torch.Generator().manual_seed(99)
    for rows in tables.split_embedding_weights():
        rows.copy_(torch.rand(rows.shape, generator=generator))


def train(tables: Any, *, weighted: bool) -> dict[str, Any]:
    outputs, weight_gradients = [], []
    for step in range(STEPS):
        values, offsets, weights = ids(step)
        weights.requires_grad_(weighted)
        if step == 2:
            tables.set_learning_rate(0.05)
        out = tables(values, offsets, weights if weighted else None)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        outputs.append(out.detach())
        if weighted:
            weight_gradients.append(weights.grad)
    return {
        "outputs": outputs,
        "weights": list(tables.split_embedding_weights()),
        "states": tables.get_optimizer_state(),
        "weight gradients": weight_gradients,
        "learning rate": tables.get_learning_rate(),
    }


def apart(ours: Any, theirs: Any) -> float:
    """The greatest difference in nested results of equal forms."""
    if isinstance(theirs, Tensor):
        assert ours.shape == theirs.shape
        return float((ours - theirs).abs().max()) if ours.numel() else 0.0
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        return max((apart(ours[name], theirs[name]) for name in theirs), default=0.0)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        return max((apart(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
    return abs(ours - theirs)


def against_fbgemm() -> dict[str, float]:
    from torchembed.core.types import Pooling

    return {
        f"{kind}, {pooling.value}, weighted {weighted}": apart(
            train(make_ours(kind, pooling, torch.float32), weighted=weighted),
            train(make_theirs(kind, pooling), weighted=weighted),
        )
        for kind in ("SGD", "ADAGRAD", "ROWWISE_ADAGRAD")
        for pooling in Pooling
        for weighted in (False, True)
        if not (weighted and pooling is Pooling.MEAN)  # see settings.unsupported
    }


def adam() -> float:
    """How far two steps are from FBGEMM's formula, which its CPU code lacks."""
    from torchembed.core.types import Pooling

    tables = make_ours("ADAM", Pooling.SUM, torch.float32)
    expected = [rows.double().clone() for rows in tables.split_embedding_weights()]
    states = [(torch.zeros_like(rows), torch.zeros_like(rows)) for rows in expected]
    values, offsets = torch.tensor([1, 1, 3]), torch.tensor([0, 2, 2, 3, 3])
    rows_of = {0: {1: 2.0}, 1: {3: 1.0}}
    for step in range(1, 4):
        tables(values, offsets).sum().backward()
        for table, touched in rows_of.items():
            for row, gradient in touched.items():
                m, v = (state[row] for state in states[table])
                m.copy_(0.9 * m + 0.1 * gradient)
                v.copy_(0.999 * v + 0.001 * gradient**2)
                root = (v / (1 - 0.999**step)).sqrt() + 1e-4
                expected[table][row] -= 0.1 * m / (1 - 0.9**step) / root
    assert list(tables.get_optimizer_state()[0]) == ["exp_avg", "exp_avg_sq"]
    return max(
        float((a - b).abs().max())
        for a, b in zip(tables.split_embedding_weights(), expected, strict=True)
    )


def checks_of_ids() -> dict[str, Any]:
    """The vectors that FBGEMM's modes give for an id of table 0, which has 7 rows."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

    from torchembed.core.types import Pooling

    found: dict[str, Any] = {}
    offsets = torch.tensor([0, 1, 1, 1, 1])
    for mode in (BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE, BoundsCheckMode.FATAL):
        tables = make_ours("SGD", Pooling.SUM, torch.float32)
        tables.bounds_check = mode
        first = tables.split_embedding_weights()[0][0]
        try:
            looked_up = tables(torch.tensor([7]), offsets)
            found[mode.name] = bool(torch.equal(looked_up[0, :8], first))
        except RuntimeError as error:
            found[mode.name] = str(error)
    return found


def hyperparameters() -> list[str]:
    from torchembed.core.types import Pooling

    tables = make_ours("ADAM", Pooling.SUM, torch.float16)
    assert tables(*ids(0)[:2]).dtype == torch.float16
    tables.update_hyper_parameters({"lr": 0.5, "eps": 0.25, "beta1": 0.5})
    assert tables.get_learning_rate() == 0.5
    assert dataclasses.asdict(tables.hyper_parameters.rule)["eps"] == 0.25
    tables.set_optimizer_step(10)
    tables(*ids(0)[:2]).sum().backward()
    assert [float(group.step) for group in tables.groups] == [11.0, 11.0]
    try:
        tables.update_hyper_parameters({"momentum": 1.0})
    except NotImplementedError as error:
        return [str(error)]
    return []


def everything_on_the_cpu() -> tuple[Any, ...]:
    return against_fbgemm(), adam(), checks_of_ids(), hyperparameters()


@pytest.fixture(scope="module")
def found(cpu_answers: list[dict[str, Any]]) -> tuple[Any, ...]:
    return cpu_answers[0]["tables"]


def test_lookups_updates_and_states_are_fbgemms(found: tuple[Any, ...]) -> None:
    # Vectors and gradients are below 8, and a row's gradients are summed in another order.
    rounding = 8 * torch.finfo(torch.float32).eps
    for name, difference in found[0].items():
        assert difference <= 2 * rounding, (name, difference)


def test_adams_formula_is_fbgemms(found: tuple[Any, ...]) -> None:
    assert found[1] <= 8 * torch.finfo(torch.float32).eps
    assert math.isfinite(found[1])


def test_fbgemms_checks_of_ids(found: tuple[Any, ...]) -> None:
    modes = found[2]
    assert modes["WARNING"] is True and modes["IGNORE"] is True
    assert "Expected idx < num_rows" in modes["FATAL"]


def test_hyperparameters_can_be_set(found: tuple[Any, ...]) -> None:
    assert found[3] == ["params_dict may hold lr, eps, beta1, beta2 and weight_decay, got momentum"]
