"""MLPerf's DLRM-DCNv2 for the benches: its sizes, its tables, batches of skewed or uniform ids."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.data.workload import EXPONENTS
from torchembed import Dynamic, EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES, Batch
from torchembed.data.skewed_ids import skewed_ids
from torchembed.models import DLRM_DCNv2
from torchembed.sharding.planning.distinct_rows import expected_distinct


class DenseSizes(NamedTuple):
    """Sizes of a DLRM-DCNv2's dense part, in the order of the model's arguments."""

    num_dense: int
    dense_arch: tuple[int, ...]
    over_arch: tuple[int, ...]
    num_cross_layers: int
    low_rank: int


DIM, NUM_DENSE = 128, 13
HOTNESS = MLPERF_HOTNESS
KEYS = tuple(f"cat_{number}" for number in range(len(HOTNESS)))
DENSE_ARCH, OVER_ARCH = (512, 256, DIM), (1024, 1024, 512, 256, 1)
NUM_CROSS_LAYERS, LOW_RANK = 3, 512
DENSE_SIZES = DenseSizes(NUM_DENSE, DENSE_ARCH, OVER_ARCH, NUM_CROSS_LAYERS, LOW_RANK)
WIDTH = DIM * (1 + len(KEYS))
"""Columns of the cross network."""
NUM_DENSE_PARAMETERS = 16.04e6
FLOPS_PER_SAMPLE = 96.2e6
"""FLOPs of the dense part, forward and backward."""


def table_sizes(max_rows: int | None, row_factor: int = 1) -> tuple[int, ...]:
    """Rows of each table, ``row_factor`` times MLPerf's and at most ``max_rows``."""
    return tuple(
        min(row_factor * size, max_rows or row_factor * size) for size in MLPERF_TABLE_SIZES
    )


def table_configs(
    max_rows: int | None,
    dynamic: Dynamic | None = None,
    row_factor: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[EmbeddingBagConfig]:
    """One table for each feature, its rows of ``dtype`` and initial values; ``dynamic`` tables have
    room for as many ids, and ids the same initial values. Rows are those of :func:`table_sizes`."""
    return [
        EmbeddingBagConfig(
            name=key,
            num_embeddings=size,
            embedding_dim=DIM,
            feature_names=(key,),
            dynamic=dynamic,
            dtype=dtype,
        )
        for key, size in zip(KEYS, table_sizes(max_rows, row_factor), strict=True)
    ]


def make_model(
    configs: Sequence[EmbeddingBagConfig],
    sizes: DenseSizes,
    *,
    table_device: torch.device | str,
    device: torch.device,
    seed: int,
    output_dtype: torch.dtype = torch.float32,
) -> DLRM_DCNv2:
    """torchembed's model.

    Args:
        configs: the tables.
        sizes: of the dense part.
        table_device: the meta device for tables that are made when they are sharded.
        device: of the dense part.
        seed: of all initial values.
        output_dtype: of the pooled vectors.
    """
    torch.manual_seed(seed)
    tables = EmbeddingBagCollection(
        configs, device=table_device, seed=seed, output_dtype=output_dtype
    )
    return DLRM_DCNv2(tables, *sizes, dense_device=device)


def dense_parameters(model: nn.Module) -> list[Tensor]:
    """The dense parameters of torchembed's DLRM-DCNv2: bottom MLP, then all ``v``, ``u`` and biases
    of the cross layers, then the top MLP."""
    parameters = dict(model.named_parameters())
    parts = ("dense_arch.", "cross.v.", "cross.u.", "cross.bias.", "over_arch.")
    return [p for part in parts for name, p in parameters.items() if name.startswith(part)]


def distinct_ids(
    ids: str, batch_size: int, max_rows: int | None, row_factor: int = 1
) -> dict[str, float]:
    """Different ids of each feature in a batch of :func:`make_batch`, expected, where tables have
    the rows of :func:`table_sizes`."""
    return {
        key: expected_distinct(size, [(count * batch_size, EXPONENTS[ids])])
        for key, size, count in zip(KEYS, table_sizes(max_rows, row_factor), HOTNESS, strict=True)
    }


def make_batch(ids: str, batch_size: int, max_rows: int | None, number: int) -> Batch:
    """A batch on the host that depends on its number alone; labels follow the first dense feature.

    Args:
        ids: ``"uniform"``, or ``"zipf"`` of exponent 1.05 with the hot ids scattered.
        batch_size: samples.
        max_rows: as for :func:`table_sizes`.
        number: of all numbers, each table has the same hot ids.
    """
    values = [
        skewed_ids(
            size,
            count * batch_size,
            exponent=EXPONENTS[ids],
            seed=table,
            first=number * count * batch_size,
        )
        for table, (size, count) in enumerate(zip(table_sizes(max_rows), HOTNESS, strict=True))
    ]
    generator = torch.Generator().manual_seed(number)
    dense = torch.rand(batch_size, NUM_DENSE, generator=generator)
    labels = (dense[:, 0] > 0.5).float()
    sparse = SparseFeatures(
        keys=KEYS, values=torch.cat(values), batch_size=batch_size, hotness=HOTNESS
    )
    return Batch(dense, sparse, labels)
