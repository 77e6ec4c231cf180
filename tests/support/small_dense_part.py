"""A dense part of MLPerf's DLRM-DCNv2, for its bench, that takes no time to train."""

import pytest

from bench.data import dlrm_dcnv2
from bench.dense import dense_part

SIZES = dlrm_dcnv2.DenseSizes(
    num_dense=dlrm_dcnv2.NUM_DENSE,
    dense_arch=(16, dlrm_dcnv2.DIM),
    over_arch=(32, 1),
    num_cross_layers=2,
    low_rank=8,
)


def shrink_dense_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of the bench, and the plain one that they are compared with, have ``SIZES``."""
    monkeypatch.setattr(dlrm_dcnv2, "DENSE_SIZES", SIZES)
    for name in ("dense_arch", "over_arch", "num_cross_layers", "low_rank"):
        monkeypatch.setattr(dense_part, name.upper(), getattr(SIZES, name))
