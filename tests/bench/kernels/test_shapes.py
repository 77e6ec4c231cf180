"""The comparison of shapes: what it takes for right, on small shapes of each kind."""

import dataclasses

import pytest
import torch

from bench.data.workload import ADAM, RULES, SGD, Rule
from bench.kernels.shape import (
    Shape,
    excess,
    expected_rows,
    expected_vectors,
    floor_bytes,
    make_shape_batch,
)
from bench.kernels.shape_tables import DynamicShape, FbgemmShape, ShapeTables, TorchembedShape
from bench.kernels.shapes import DYNAMIC_SHAPES, SHAPES, compare, errors, measure, short_name
from torchembed.core.types import Pooling

CPU = torch.device("cpu")
SMALL = Shape(dim=8, batch_size=6, hotness=3, num_tables=3, num_rows=20)
FORMS = (
    SMALL,
    dataclasses.replace(SMALL, is_jagged=True),
    dataclasses.replace(SMALL, is_jagged=True, is_weighted=True),
    dataclasses.replace(SMALL, is_jagged=True, pooling=Pooling.MEAN),
    dataclasses.replace(SMALL, pooling=None),
    dataclasses.replace(SMALL, pooling=None, is_jagged=True),
    dataclasses.replace(SMALL, dtype=torch.float16),
    dataclasses.replace(SMALL, dtype=torch.bfloat16),
)


def _errors(shape: Shape, kind: type[ShapeTables]) -> tuple[float, float]:
    tables, batch = kind(shape, CPU), make_shape_batch(shape, 0, CPU)
    return errors(shape, tables, tables.prepare(batch), batch)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("form", FORMS, ids=lambda shape: shape.name)
def test_right_vectors_and_rows_are_within_the_limits(form: Shape, rule: Rule) -> None:
    of_vectors, of_rows = _errors(dataclasses.replace(form, rule=rule), TorchembedShape)
    assert of_vectors <= 1
    assert of_rows <= 1


@pytest.mark.parametrize("form", FORMS, ids=lambda shape: shape.name)
def test_dynamic_tables_are_held_to_the_same(form: Shape) -> None:
    of_vectors, of_rows = _errors(form, DynamicShape)
    assert of_vectors <= 1
    assert of_rows <= 1


@pytest.mark.parametrize("form", FORMS, ids=lambda shape: shape.name)
def test_a_row_or_vector_that_is_off_by_a_thousandth_exceeds_them(form: Shape) -> None:
    tables, batch = TorchembedShape(form, CPU), make_shape_batch(form, 0, CPU)
    expected = expected_vectors(form, batch, tables.weights())
    assert excess(expected.value, expected) == 0
    off = expected.value.clone()
    off.view(-1)[off.abs().argmax()] *= 1.001
    assert excess(off, expected) > 1
    assert excess(off.fill_(torch.nan), expected) > 1


def test_a_wrong_step_exceeds_the_limits() -> None:
    double = dataclasses.replace(SGD, lr=2 * SGD.lr)
    tables, batch = TorchembedShape(SMALL, CPU), make_shape_batch(SMALL, 0, CPU)
    tables_of_other_rule = dataclasses.replace(SMALL, rule=double)
    assert errors(tables_of_other_rule, tables, tables.prepare(batch), batch)[1] > 1


@pytest.mark.filterwarnings("ignore")  # of its own, on import
def test_fbgemm_is_called_as_its_users_call_it() -> None:
    pytest.importorskip("fbgemm_gpu")
    for form in FORMS[:4]:
        of_vectors, of_rows = _errors(dataclasses.replace(form, rule=SGD), FbgemmShape)
        assert of_vectors <= 1
        assert of_rows <= 1


def test_what_a_library_lacks_is_said_and_not_measured() -> None:
    shape = dataclasses.replace(SMALL, dtype=torch.float16, rule=ADAM)
    row = measure(shape, FbgemmShape, [make_shape_batch(shape, 0, CPU)])
    assert row["not_printed_because"] == "its Adam takes float32 rows alone"
    assert "in_all_microseconds" not in row


def test_limits_are_those_of_the_dtype_that_the_tables_have() -> None:
    shape = dataclasses.replace(SMALL, dtype=torch.bfloat16, rule=SGD)
    batch = make_shape_batch(shape, 0, CPU)
    tables = [torch.zeros(shape.num_rows, shape.dim, dtype=torch.float16)] * shape.num_tables
    limits = expected_rows(shape, batch._replace(grad=batch.grad * 1e-9), tables).values.limit
    assert limits.min() >= 2**-24  # the distance of float16's smallest numbers


def test_the_shapes_are_different_ones() -> None:
    for shapes in (SHAPES, DYNAMIC_SHAPES):
        assert len({(shape.name, shape.rule.name) for shape in shapes}) == len(shapes)


def test_floors_count_what_must_move() -> None:
    batch = make_shape_batch(SMALL, 0, CPU)
    batch = batch._replace(ids=torch.zeros_like(batch.ids))
    ids, rows, vectors = 3 * 6 * 3 * 8, 3 * 8 * 4, 6 * 3 * 8 * 4
    in_all = ids + rows + 2 * vectors + 2 * (rows + 3 * 4)
    assert floor_bytes(SMALL, [batch]) == (ids + rows + vectors, in_all)


def test_times_are_compared_with_bytes_and_with_the_other_library() -> None:
    ours = {"forward_microseconds": 2.0, "in_all_microseconds": 6.0}
    theirs = {"forward_microseconds": 4.0}
    compare(ours, theirs, {"forward": 4000.0, "in_all": 6000.0}, copy_rate=4e9)
    assert ours["forward_of_fbgemm"] == 0.5
    assert ours["forward_copy_fraction"] == 0.5
    assert ours["in_all_copy_fraction"] == 0.25
    assert "in_all_of_fbgemm" not in ours


def test_kernels_have_short_names() -> None:
    name = "void torchembed::(anonymous namespace)::count_digits<2, int>(int const*, long)"
    assert short_name(name) == "count_digits"
    assert short_name("_linearize_ids_kernel") == "_linearize_ids_kernel"
