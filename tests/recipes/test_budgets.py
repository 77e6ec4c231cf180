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
"""Bytes of rows and Adagrad's state."""


@pytest.mark.parametrize(("flags", "times"), [([], 4), (["--dynamic"], 2)], ids=str)
def test_losses_are_those_of_tables_on_the_device(
    flags: list[str], times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is so many times what device and host have room for, and is trained in two passes;
    the ids of dynamic tables are all on the device."""
    expected = lines_of_dlrm(tmp_path / "device", *LARGE, *flags)
    capsys.readouterr()
    host = MODEL_BYTES // 10
    budgets = ("--device-bytes", MODEL_BYTES // times - host, "--host-bytes", host)
    on_disk = ("--disk", tmp_path / "rows", "--read-ahead", 100)
    found = lines_of_dlrm(tmp_path / "disk", *LARGE, *flags, *budgets, *on_disk)
    plan = capsys.readouterr().out
    assert len(re.findall(rf"disk {tmp_path}/rows, [0-9,]+ rows in host, ", plan)) >= 3
    without = [{k: v for k, v in line.items() if ".cache" not in k} for line in found]
    assert without == expected
    with pytest.raises(ValueError, match=r"^tables do not fit: .*, all hosts "):
        lines_of_dlrm(tmp_path / "none", *LARGE, *flags, *budgets)


@pytest.mark.parametrize("device_bytes", [10**16, 10**13])
def test_budgets_beyond_the_machine_are_refused(device_bytes: int, tmp_path: Path) -> None:
    """A table has more rows than any machine holds, on the device and in host memory."""
    flags = ["--device-bytes", device_bytes, "--host-bytes", 10**16, "--max-table-rows", 10**12]
    sizes = ("--click-log.table-sizes", 10**12, *ROWS[1:])
    with pytest.raises(ValueError, match=r"^tables do not fit: rank 0 will take .* free memory: "):
        lines_of_dlrm(tmp_path, *flags, *sizes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_bytes": 5}, "host_bytes must be given where another one of device_bytes, "),
        ({"disk": Path("d")}, "device_bytes and host_bytes must be given where another"),
        ({"device_bytes": 0, "host_bytes": 0}, "device_bytes must be positive, got 0"),
        ({"device_bytes": 1, "host_bytes": -1}, "host_bytes must not be negative, got -1"),
        ({"device_bytes": 1, "host_bytes": 1, "cached": 0.5}, "cached must be left out where"),
    ],
)
def test_budgets_that_say_too_little_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        DlrmConfig(**settings)  # pyright: ignore[reportArgumentType]
