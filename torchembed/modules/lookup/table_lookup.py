"""Lookups in a table group, by kernels or by PyTorch's own operations, whichever can do it."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.stand_ins import in_transform
from torchembed.core.types import Pooling
from torchembed.modules.inside_ddp import active_ddp
from torchembed.modules.lookup.forward_admission import is_trial
from torchembed.ops.eager_lookup import bags_of_positions, eager_sequence_lookup, pool_vectors
from torchembed.ops.pooled_lookup import LookupStore, pooled_lookup
from torchembed.ops.row_gradients import GradientSink, WeightGradient
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.sequence_lookup import sequence_lookup
from torchembed.tables import (
    FetchedRows,
    MissingVectors,
    Table,
    TableGroup,
    TieredGroup,
    group_weight,
)


def _names(tables: Sequence[Table]) -> str:
    return ", ".join(table.spec.name for table in tables)


def _uses_kernels(
    tables: Sequence[Table], weight: Tensor, rows: Tensor, form: WeightGradient, is_recorded: bool
) -> bool:
    """True if kernels look up ``rows`` of ``weight``, False if PyTorch's own operations do.

    Args:
        is_recorded: the gradients go to a fused optimizer.

    Raises:
        RuntimeError: where the tables have no rows yet, a fused optimizer would get gradients that
            ``DistributedDataParallel`` does not average, or that would average rows of other ids.
        TypeError: where kernels cannot look up the rows and a fused optimizer needs them to.
    """
    if weight.is_meta and not rows.is_meta:
        raise RuntimeError(
            f"tables {_names(tables)} are on the meta device and have no rows; call "
            "shard_embeddings, or to_empty(device=...) and then reset_parameters()"
        )
    if tables[0].spec.num_ids is None and torch.is_grad_enabled():
        _check_not_replicated(tables)
    if is_recorded:
        check_recordable(tables, weight)
    # A compiler takes sparse gradients from PyTorch's own operations alone.
    is_seen_through = in_transform() or (torch.compiler.is_compiling() and _is_sparse(form))
    return weight.dtype in FLOAT_DTYPES and (is_recorded or not is_seen_through)


def _check_not_replicated(tables: Sequence[Table]) -> None:
    """Raise ``RuntimeError`` where ``DistributedDataParallel`` would train dynamic ``tables``, in
    which each rank gives rows to the ids of its own batches."""
    table = tables[0]
    is_trained = table.parameter.requires_grad and not table.is_sharded
    if is_trained and not torch.compiler.is_compiling() and active_ddp() is not None:
        raise RuntimeError(
            f"dynamic tables {_names(tables)} must be sharded to be trained on several ranks, got "
            "DistributedDataParallel around whole ones, in which each rank gives rows to ids of "
            "its own, so that it would average rows of different ids; call shard_embeddings before"
        )


def check_recordable(tables: Sequence[Table], weight: Tensor) -> None:
    """Check that a fused optimizer may get the gradients of rows of ``weight``.

    Raises:
        RuntimeError: where ``DistributedDataParallel`` would not average them.
        TypeError: where kernels cannot look up the rows.
    """
    table = tables[0]
    is_averaged = table.is_sharded or table.gradient_reduction is not None
    if not is_averaged and active_ddp() is not None:
        raise RuntimeError(
            f"tables {_names(tables)} have a fused optimizer, whose gradients "
            "DistributedDataParallel does not average, so that the ranks' rows would differ; call "
            "shard_embeddings, with data_parallel for tables that every rank is to hold, or use an "
            "optimizer of torch.optim"
        )
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"tables {_names(tables)} must be float32, float16 or bfloat16 for an optimizer of "
            f"torchembed's, got {weight.dtype}; use one of torch.optim"
        )


class _Source(NamedTuple):
    """The memory that a lookup in a group reads."""

    weight: Tensor
    """``[n, D]``."""
    rows: Tensor
    """``[L]``, of ``weight``; -1 for none."""
    sink: GradientSink | None
    """Receives the gradients, of the rows of the group; None where they go to ``weight``."""


def _source(
    group: TableGroup, rows: Tensor, sink: GradientSink, fetched: FetchedRows | None
) -> _Source:
    """The memory that a lookup of ``rows [L]`` of ``group`` reads."""
    is_tiered = isinstance(group, TieredGroup)
    if not is_tiered or not all(table.holds_parameter() for table in group.tables):
        # What stands in place of a parameter may be made of it, as by a parametrization.
        group.write_back()
        weight, is_recorded = group_weight(group)
        return _Source(weight, rows, sink if is_recorded else None)
    if fetched is not None:
        read, places = group.weight, group.placed_rows(rows)
    else:
        # Nothing brings these rows to the device. They are read one by one from where they are.
        read = group.gathered_rows(rows)
        places = torch.where(rows < 0, -1, torch.arange(rows.numel(), device=rows.device))
        if not is_trial():
            sink = functools.partial(_refuse_gradients, group)
    weight, is_recorded = group_weight(group, read)
    return _Source(weight, places, functools.partial(_of_rows, sink, rows) if is_recorded else None)


def _of_rows(sink: GradientSink, rows: Tensor, _: Tensor, gradients: RowGradients) -> None:
    """Give ``sink`` the gradients as those of ``rows``, whose places the lookup has read."""
    sink(rows, gradients)


def _refuse_gradients(group: TableGroup, *_: object) -> None:
    raise RuntimeError(
        f"tables {_names(group.tables)} in host memory or on disk must be trained by an optimizer "
        "of torchembed.optim, made before forward, and in training mode, got a backward of a "
        "lookup without; call train() of the module, or forward under torch.no_grad() where "
        "nothing is trained"
    )


def look_up(
    group: TableGroup,
    rows: Tensor,
    *,
    sink: GradientSink,
    output_dtype: torch.dtype | None,
    weight_form: WeightGradient,
    missing: MissingVectors | None = None,
    fetched: FetchedRows | None = None,
) -> Tensor:
    """The vector of each of ``rows [L]`` of ``group``, ``[L, D]``; zeros for a row of -1.

    Kernels look up float32, float16 and bfloat16 tables. PyTorch's operations look up float64 ones,
    and all inside a transform of ``torch.func``.

    Args:
        sink: receives the gradients where a fused optimizer updates the group.
        output_dtype: of the vectors; the weight's where None.
        weight_form: form of the gradient of the weight, where no fused optimizer updates it.
        missing: vectors in place of some of the zeros.
        fetched: what was brought to the device, of a group whose rows live elsewhere.
    """
    weight, places, row_sink = _source(group, rows, sink, fetched)
    found = look_up_in(
        weight,
        places,
        tables=group.tables,
        sink=row_sink,
        output_dtype=output_dtype,
        weight_form=weight_form,
    )
    if missing is None:
        return found
    return found + look_up_in(
        *missing,
        tables=group.tables,
        sink=None,
        output_dtype=found.dtype,
        weight_form=weight_form,
    )


def look_up_in(
    weight: Tensor,
    rows: Tensor,
    *,
    tables: Sequence[Table],
    sink: GradientSink | None,
    output_dtype: torch.dtype | None,
    weight_form: WeightGradient,
) -> Tensor:
    """:func:`look_up` in the ``weight [R, D]`` of ``tables``, which gets the gradients where there
    is no ``sink``."""
    if not _uses_kernels(tables, weight, rows, weight_form, sink is not None):
        vectors = eager_sequence_lookup(weight, rows, sparse=_is_sparse(weight_form))
        return vectors if output_dtype is None else vectors.to(output_dtype)
    return sequence_lookup(
        weight,
        rows,
        output_dtype=output_dtype,
        weight_form=weight_form,
        sink=sink,
    )


def look_up_pooled(
    group: TableGroup,
    rows: Tensor,
    *,
    offsets: Tensor | None,
    hotness: Sequence[int] | None,
    batch_size: int,
    num_features: int,
    per_id_weights: Tensor | None,
    pooling: Pooling,
    sink: GradientSink,
    output_dtype: torch.dtype | None,
    weight_form: WeightGradient,
    known_map: tuple[Tensor, Tensor] | None = None,
    store: LookupStore | None = None,
    missing: MissingVectors | None = None,
    fetched: FetchedRows | None = None,
) -> Tensor:
    """The pooled vectors of the bags of ``rows [L]`` of ``group``, ``[B, num_features, D]``.

    By kernels or PyTorch's operations, as :func:`look_up`; the latter add in float32, or in
    float64 for a float64 weight.

    Args:
        offsets, hotness, batch_size, num_features, per_id_weights, known_map, store: as for
            :func:`~torchembed.ops.pooled_lookup.pooled_lookup`; ``store`` is for kernels alone.
        pooling, sink, output_dtype, weight_form, fetched: as for that function and
            :func:`look_up`.
        missing: vectors in place of those of some rows of -1.
    """
    weight, places, row_sink = _source(group, rows, sink, fetched)
    dtype = weight.dtype if output_dtype is None else output_dtype
    pool = functools.partial(
        look_up_pooled_in,
        tables=group.tables,
        offsets=offsets,
        hotness=hotness,
        batch_size=batch_size,
        num_features=num_features,
        per_id_weights=per_id_weights,
        pooling=pooling,
        weight_form=weight_form,
    )
    if missing is None:
        return pool(
            weight, places, sink=row_sink, output_dtype=dtype, known_map=known_map, store=store
        )
    # Both are added before they are rounded, as kernels add rows.
    summed_in = torch.promote_types(dtype, torch.float32)
    found = pool(weight, places, sink=row_sink, output_dtype=summed_in, known_map=known_map)
    pooled = found + pool(*missing, sink=None, output_dtype=summed_in)
    return pooled.to(dtype) if store is None else _stored(pooled, dtype, store)


def _stored(pooled: Tensor, dtype: torch.dtype, store: LookupStore) -> Tensor:
    """Let ``store`` take vectors ``[B, num_features, D]`` that are pooled already.

    Returns:
        As many zeros of ``dtype``, which carry the gradients.
    """
    batch_size, num_features, num_columns = pooled.shape
    places = torch.arange(batch_size * num_features, device=pooled.device)
    return pooled_lookup(
        pooled.view(-1, num_columns),
        places.view(batch_size, num_features).t().flatten(),
        hotness=[1] * num_features,
        batch_size=batch_size,
        num_features=num_features,
        output_dtype=dtype,
        store=store,
    )


def look_up_pooled_in(
    weight: Tensor,
    rows: Tensor,
    *,
    tables: Sequence[Table],
    offsets: Tensor | None,
    hotness: Sequence[int] | None,
    batch_size: int,
    num_features: int,
    per_id_weights: Tensor | None,
    pooling: Pooling,
    sink: GradientSink | None,
    output_dtype: torch.dtype | None,
    weight_form: WeightGradient,
    known_map: tuple[Tensor, Tensor] | None = None,
    store: LookupStore | None = None,
) -> Tensor:
    """:func:`look_up_pooled` in the ``weight [R, D]`` of ``tables``, which gets the gradients where
    there is no ``sink``."""
    if _uses_kernels(tables, weight, rows, weight_form, sink is not None):
        return pooled_lookup(
            weight,
            rows,
            offsets=offsets,
            hotness=hotness,
            batch_size=batch_size,
            num_features=num_features,
            per_id_weights=per_id_weights,
            pooling=pooling,
            output_dtype=output_dtype,
            weight_form=weight_form,
            sink=sink,
            known_map=known_map,
            store=store,
        )
    if store is not None:
        raise TypeError(
            f"weight must be float32, float16 or bfloat16 where vectors are pushed, got "
            f"{weight.dtype}, or a transform of torch.func; shard by collectives"
        )
    vectors = eager_sequence_lookup(weight, rows, sparse=_is_sparse(weight_form))
    # As kernels do, 16-bit rows are added in float32 and rounded once.
    summed_in = torch.promote_types(vectors.dtype, torch.float32)
    vectors = vectors.to(summed_in)
    if per_id_weights is not None:
        vectors = vectors * per_id_weights.to(summed_in).unsqueeze(1)
    num_bags = num_features * batch_size
    bags = bags_of_positions(rows.numel(), offsets, hotness, batch_size, rows.device)
    pooled = pool_vectors(vectors, bags, num_bags, pooling)
    pooled = pooled.view(num_features, batch_size, weight.shape[1]).transpose(0, 1)
    return pooled.to(weight.dtype if output_dtype is None else output_dtype)


def _is_sparse(form: WeightGradient) -> bool:
    return form is WeightGradient.SPARSE
