"""Runs whose tables are where memory of stated sizes has room for them."""

import re
from pathlib import Path

import pytest

from recipes.dlrm_dcnv2.config import DlrmConfig
from tests.support.small_recipes import lines_of_dlrm

ROWS = (20_000, 20_000, 4000, 1000, 100, 50, 20, 10, 20_000, 200)
LARGE = [
    *("--max-table-rows", 20_000, "--embedding-dim", 16, "--dense-arch", 16, "--epochs", 2),
    *("--click-log.table-sizes", *ROWS),
]
MODEL_BYTES = sum(ROWS) * 16 * 4 * 2
"""Of rows and Adagrad's state."""


@pytest.mark.parametrize("flags", [[], ["--dynamic"]], ids=str)
def test_losses_are_those_of_tables_on_the_device(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model larger than what the device has room for, in two passes."""
    expected = lines_of_dlrm(tmp_path / "device", *LARGE, *flags)
    capsys.readouterr()
    device = ("--device-bytes", MODEL_BYTES // (2 if flags else 4))
    budgets = (*device, "--host-bytes", 2 * MODEL_BYTES)
    found = lines_of_dlrm(tmp_path / "host", *LARGE, *flags, *budgets)
    assert len(re.findall(r"host, [0-9,]+ rows cached", capsys.readouterr().out)) >= 3
    without = [{k: v for k, v in line.items() if ".cache" not in k} for line in found]
    assert without == expected
    with pytest.raises(ValueError, match=r"^tables do not fit: in the best plan found "):
        lines_of_dlrm(tmp_path / "none", *LARGE, *flags, *device, "--host-bytes", 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_bytes": 5}, "device_bytes and host_bytes must be given together, got 5 and None"),
        ({"device_bytes": 0, "host_bytes": 0}, "device_bytes must be positive, got 0"),
        ({"device_bytes": 1, "host_bytes": -1}, "host_bytes must not be negative, got -1"),
        ({"device_bytes": 1, "host_bytes": 1, "cached": 0.5}, "cached must be left out where"),
    ],
)
def test_budgets_that_say_too_little_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        DlrmConfig(**settings)  # pyright: ignore[reportArgumentType]
