"""Lookups of modules while ``torch.compile`` or ``torch.export`` traces them.

The weights are the parameters that the modules hold, so that a program reads what they are when it
runs, and an exported one what its state dict holds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.features import SparseFeatures
from torchembed.core.types import Pooling
from torchembed.modules.lookup.table_lookup import check_recordable, look_up_in, look_up_pooled_in
from torchembed.modules.traced.lookup_of_tables import (
    pooled_lookup_of_tables,
    sequence_lookup_of_tables,
)
from torchembed.modules.traced.stored_rows import read_rows_of_tables
from torchembed.ops.row_gradients import WeightGradient
from torchembed.tables import Disk, MissingVectors, Table


def _is_recorded(tables: Sequence[Table]) -> bool:
    """True if a fused optimizer takes the gradients of a lookup in ``tables``, of one group.

    Raises:
        RuntimeError, TypeError: where it cannot.
    """
    table = tables[0]
    is_trained = torch.is_grad_enabled() and table.parameter.requires_grad
    # An exported program is for inference: it has no optimizer. is_exporting() is always true for
    # Dynamo of torch 2.11.
    is_exported = torch.compiler._is_exporting_flag
    if table.group.rule is None or not is_trained or is_exported:
        return False
    held = [table for table in tables if table.holds_parameter()]
    if not held:
        return False
    check_recordable(tables, table.parameter)
    if len(held) < len(tables):
        raise RuntimeError(
            f"weights of some of the tables {', '.join(t.spec.name for t in tables)} were given "
            "for this call, while an optimizer of torchembed's updates all of them; give all, or "
            "make the optimizer without these"
        )
    return True


def _read_rows(tables: Sequence[Table], rows: Tensor) -> tuple[Tensor, Tensor]:
    """``[L, D]``, a copy of each of ``rows`` of ``tables`` in host memory, and the row ``[L]`` of
    that for each of them; -1 for none."""
    if isinstance(tables[0].spec.storage, Disk):
        tables[0].check_whole("a program of torch.export")
    weights = [table.held_weight() for table in tables]
    read = read_rows_of_tables(weights, rows)
    return read, torch.where(rows < 0, -1, torch.arange(rows.shape[0], device=rows.device))


def _weights_and_anchor(tables: Sequence[Table]) -> tuple[list[Tensor], Tensor | None]:
    """The weights of ``tables``, and where a fused optimizer takes the gradients, their group's
    anchor."""
    weights = [table.held_weight() for table in tables]
    if not _is_recorded(tables):
        return weights, None
    return [weight.detach() for weight in weights], tables[0].group.anchor


def are_looked_up_at_once(tables: Sequence[Table], form: WeightGradient) -> bool:
    """True if one operation looks up several ``tables`` of a group with gradients of ``form``."""
    is_sparse = form is WeightGradient.SPARSE and tables[0].group.rule is None
    return tables[0].held_weight().dtype in FLOAT_DTYPES and not is_sparse


def traced_vectors(
    tables: Sequence[Table],
    rows: Tensor,
    output_dtype: torch.dtype | None,
    form: WeightGradient,
    missing: MissingVectors | None = None,
) -> Tensor:
    """The vector of each of ``rows [L]``, ``[L, D]``.

    Args:
        tables: all those of a group, in its order, or one.
        rows: numbered through all ``tables``, -1 for none.
        output_dtype: of the vectors; the weights' where None.
        form: form of the gradients of the weights where no fused optimizer updates them.
        missing: vectors in place of some of the zeros of rows of -1.
    """
    if missing is not None:
        found = traced_vectors(tables, rows, output_dtype, form)
        return found + look_up_in(
            *missing, tables=tables, sink=None, output_dtype=found.dtype, weight_form=form
        )
    if tables[0].spec.storage is not None:
        read, places = _read_rows(tables, rows)
        return look_up_in(
            read,
            places,
            tables=tables,
            sink=None,
            output_dtype=output_dtype,
            weight_form=WeightGradient.DENSE,
        )
    weights, anchor = _weights_and_anchor(tables)
    if anchor is None and len(tables) == 1:
        return look_up_in(
            weights[0],
            rows,
            tables=tables,
            sink=None,
            output_dtype=output_dtype,
            weight_form=form,
        )
    dtype = weights[0].dtype if output_dtype is None else output_dtype
    return sequence_lookup_of_tables(weights, rows, output_dtype=dtype, anchor=anchor)


def traced_pooled(
    tables: Sequence[Table],
    features: SparseFeatures,
    rows: Tensor,
    num_features: Sequence[int],
    pooling: Pooling,
    output_dtype: torch.dtype | None,
    form: WeightGradient,
    missing: MissingVectors | None = None,
) -> Tensor:
    """The pooled vectors of the bags of ``features``, ``[B, F, D]``.

    Args:
        features: jagged; those of each table one after the other, in the order of ``tables``.
        rows: ``[L]``, of the ids of ``features``; otherwise as for :func:`traced_vectors`.
        num_features: of each table.
        tables, output_dtype, form, missing: as for that function.
    """
    assert features.offsets is not None
    if missing is not None:
        dtype = missing.weight.dtype if output_dtype is None else output_dtype
        summed_in = torch.promote_types(dtype, torch.float32)
        found = traced_pooled(tables, features, rows, num_features, pooling, summed_in, form)
        others = look_up_pooled_in(
            *missing,
            tables=tables,
            offsets=features.offsets,
            hotness=None,
            batch_size=features.batch_size,
            num_features=sum(num_features),
            per_id_weights=features.weights,
            pooling=pooling,
            sink=None,
            output_dtype=summed_in,
            weight_form=form,
        )
        return (found + others).to(dtype)
    if tables[0].spec.storage is not None:
        read, places = _read_rows(tables, rows)
        return look_up_pooled_in(
            read,
            places,
            tables=tables,
            offsets=features.offsets,
            hotness=None,
            batch_size=features.batch_size,
            num_features=sum(num_features),
            per_id_weights=features.weights,
            pooling=pooling,
            sink=None,
            output_dtype=output_dtype,
            weight_form=WeightGradient.DENSE,
        )
    weights, anchor = _weights_and_anchor(tables)
    if anchor is None and len(tables) == 1:
        return look_up_pooled_in(
            weights[0],
            rows,
            tables=tables,
            offsets=features.offsets,
            hotness=None,
            batch_size=features.batch_size,
            num_features=num_features[0],
            per_id_weights=features.weights,
            pooling=pooling,
            sink=None,
            output_dtype=output_dtype,
            weight_form=form,
        )
    return pooled_lookup_of_tables(
        weights,
        rows,
        offsets=features.offsets,
        num_features=num_features,
        batch_size=features.batch_size,
        per_id_weights=features.weights,
        mean=pooling is Pooling.MEAN,
        output_dtype=weights[0].dtype if output_dtype is None else output_dtype,
        anchor=anchor,
    )
