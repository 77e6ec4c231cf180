"""Optimizers, placements and variants to train TorchRec's models with, and what is logged."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = "sgd", "adagrad", "rowwise_adagrad", "adam"
SETTINGS = {
    SGD: {"lr": 0.1},
    ADAGRAD: {"lr": 0.02, "eps": 1e-6},
    ROWWISE_ADAGRAD: {"lr": 0.02, "eps": 1e-6},
    ADAM: {"lr": 0.01, "eps": 1e-4},
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    classes: dict[str, Any] = {
        SGD: torch.optim.SGD,
        ADAGRAD: torch.optim.Adagrad,
        ROWWISE_ADAGRAD: RowWiseAdagrad,
        ADAM: torch.optim.Adam,
    }
    return classes[name]


def optimize_in_backward(
    module: torch.nn.Module, optimizer: type[torch.optim.Optimizer], lr: float
) -> None:
    """Give the parameters of ``module`` an optimizer of that class in backward, as TorchRec has
    it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own
        from torch.distributed.optim import (
            _apply_optimizer_in_backward,  # type: ignore[attr-defined]
        )
    _apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": lr})


MIXED: dict[str, Any] = {
    "optimizer": ROWWISE_ADAGRAD,
    "placements": ["table_wise", "row_wise", "column_wise", "data_parallel"],
}


def variants(device: torch.device) -> dict[str, dict[str, Any]]:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )
    from torchrec.modules.embedding_configs import DataType, PoolingType

    half = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    # On the CPU TorchRec's own data-parallel sequences fail.
    of_sequences = [*MIXED["placements"][: 4 if device.type == "cuda" else 3]]
    found: dict[str, dict[str, Any]] = {
        "sequences": {"is_sequence": True, "placements": of_sequences},
        "sequences, half wire": {
            "is_sequence": True,
            "placements": of_sequences,
            "optimizer": SGD,
            "codecs": get_qcomm_codecs_registry(half, device=device),
        },
        "scheduler": {"with_scheduler": True},
        "weighted": {"weighted": True},
        "mean": {"pooling": PoolingType.MEAN},
        "widths": {"dims": {"a": 8, "c": 24}, "placements": ["table_wise", "row_wise"]},
        "narrow ids": {"ids_dtype": torch.int32},
        "columns on one rank": {"placements": ["columns on one rank"]},
        "together": {"placements": ["row_wise", "table_wise", "column_wise"]},
        "each feature once": {
            "placements": ["table_wise", "row_wise", "table_wise"],
            "tables": ["a", "b", "c"],
            "with_scheduler": True,
        },
        "each feature once, half wire": {
            "placements": ["table_wise", "row_wise", "table_wise"],
            "tables": ["a", "b", "c"],
            "codecs": get_qcomm_codecs_registry(half, device=device),
        },
        "columns and tables": {
            "placements": ["table_wise", "row_wise", "columns on one rank"],
            "tables": ["a", "b", "c"],
            "dims": {"c": 32},
        },
        "columns within a host": {"placements": ["table_column_wise", "row_wise"]},
        "half rows": {
            "data_type": DataType.FP16,
            "fused_params": {"stochastic_rounding": False},
            "placements": ["table_wise", "row_wise"],
        },
        "wire": {"codecs": get_qcomm_codecs_registry(half, device=device)},
        # Not row-wise, where TorchRec's own run fails in gloo.
        "half vectors": {
            "fused_params": {"output_dtype": DataType.FP16},
            "placements": ["table_wise"],
        },
    }
    if device.type == "cuda":  # FBGEMM forgets it on the CPU
        found["decay"] = {
            "settings": {"weight_decay": 0.1},
            "fused_params": {"weight_decay_mode": WeightDecayMode.L2},
        }
    return found


@contextmanager
def log_lines() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchembed.integrations.torchrec")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
