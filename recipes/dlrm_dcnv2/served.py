"""DLRM-DCNv2 as servers answer from it."""

from pathlib import Path

import torch
from torch import nn

from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.dlrm_dcnv2.run import build_model, open_split
from recipes.served_run import ServedRun, click_request, load_weights, newest_step
from torchembed.data import Split


def served(config: DlrmConfig, output: Path) -> ServedRun:
    """The newest model, which gives the probability of a click, asked of validation rows."""
    checkpoints = output / "checkpoint"
    num_steps = newest_step(checkpoints)
    rows = open_split(config, Split.VALIDATION)

    def load_model() -> nn.Module:
        model = build_model(config, rows, torch.device("cpu"))
        return load_weights(model, checkpoints, num_steps)

    dense, sparse, _ = next(iter(rows))
    return ServedRun(
        checkpoints=checkpoints,
        num_steps=num_steps,
        load_model=load_model,
        examples=(dense, sparse),
        request=click_request(dense, sparse),
        output_names=["click"],
    )
