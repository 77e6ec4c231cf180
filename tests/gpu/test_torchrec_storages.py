"""Tables that TorchRec's plans put into host memory and on disk train on a GPU as those on it, bit
for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.gpu


def compared(kernel: str, folder: str) -> dict[str, Any]:
    """On a rank: how steps by hand and in pipelines differ from those of tables on the device, and
    the counts."""
    from torchrec.distributed.types import KeyValueParams

    from tests.support.torchrec_tiers import differences, loaded, through_pipelines, trained

    case: dict[str, Any] = {"device": torch.device("cuda", 0)}
    params = KeyValueParams(ssd_storage_directory=folder) if kernel == "key_value" else None
    elsewhere = {"load_factor": 0.9, "kernel": kernel, "key_value": params}
    expected, _ = trained(**case)
    results, counts = trained(**case, **elsewhere)
    return {
        "by hand": (differences(results, expected), counts),
        **through_pipelines(case, **elsewhere),
        "loaded": loaded(case, **elsewhere),
    }


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching", "key_value"])
def test_steps_equal_those_of_tables_on_the_gpu(kernel: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    pytest.importorskip("rocksdict")
    (found,) = run_on_ranks(
        1, compared, kernel, str(tmp_path / "rows"), backend="cpu:gloo,cuda:nccl"
    )
    for differing in found.pop("loaded").values():
        assert differing == []
    for differing, counts, *lines in found.values():
        assert differing == []
        assert lines in ([], [[]])
        assert counts["on disk"] == (counts["tiered"] if kernel == "key_value" else 0)
        assert 0 < counts["slots"] < counts["rows"]
