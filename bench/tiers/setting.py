"""The setting of a measured step of tables that may be elsewhere than on the device."""

import dataclasses

import torch

from bench.step.setting import StepSetting

MODELS = ("dlrm", "tables")
"""``dlrm``: the whole DLRM-DCNv2. ``tables``: its tables alone, whose pooled vectors give the
logits, so that nothing hides what moves rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierSetting(StepSetting):
    """The training that all systems of a comparison do."""

    model: str
    """One of ``MODELS``."""


def make_setting(
    model: str,
    *,
    batch_size: int,
    ids: str,
    optimizer: str,
    max_rows: int,
    device: torch.device,
) -> TierSetting:
    """The setting of ``model``: the whole one in bfloat16, as in :mod:`bench.step.train_step`; its
    tables alone in float32, with a larger learning rate, so that what rows become shows in the
    losses."""
    is_whole = model == "dlrm"
    return TierSetting(
        model=model,
        batch_size=batch_size,
        ids=ids,
        optimizer=optimizer,
        precision="bf16" if is_whole else "fp32",
        wire="bf16" if is_whole else "fp32",
        max_rows=max_rows,
        device=device,
        lr=StepSetting.lr if is_whole else 0.005,
    )
