"""The doctor says what is installed, what fits, which kernels run, and whether that is usable."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT, run_python
from torchembed import doctor

FITTING = dict.fromkeys(doctor.DISTRIBUTIONS) | {
    "torch": "2.13.0+cpu",
    "numpy": "2.3.5",
    "triton": "3.7.1",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
}


def test_fitting_versions_give_no_advice() -> None:
    assert doctor.misfits(FITTING) == []


def test_nothing_beside_torch_is_required() -> None:
    assert doctor.misfits(dict.fromkeys(doctor.DISTRIBUTIONS) | {"torch": "2.11.0"}) == []


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        (
            {"torch": "2.10.1"},
            r"torch is 2\.10\.1, and torchembed needs 2\.11\.0 or later; upgrade",
        ),
        ({"torch": None}, r"torch is not installed; run pip install torch"),
        (
            {"torchrec": "1.6.1"},
            r"torchrec is 1\.6\.1, .* 1\.8; run pip install --no-deps torchrec==1\.8\.0",
        ),
        ({"fbgemm-gpu": "1.9.0"}, r"fbgemm-gpu is 1\.9\.0, and torch 2\.13 goes with 1\.8"),
        ({"triton": "3.6.0"}, r"triton is 3\.6\.0, and torch 2\.13 goes with 3\.7"),
        ({"numpy": "2.4.0"}, r"numpy is 2\.4\.0, and Triton's interpreter needs one below 2\.4"),
    ],
)
def test_misfit_is_named_with_advice(changed: dict[str, str | None], advice: str) -> None:
    (sentence,) = doctor.misfits(FITTING | changed)
    assert re.match(advice, sentence)


def test_triton_is_asked_for_where_torch_is_built_for_gpus() -> None:
    without = FITTING | {"triton": None}
    assert doctor.misfits(without) == []
    (sentence,) = doctor.misfits(without, for_gpus=True)
    assert re.match(r"triton is not installed, .*; run pip install triton==3\.7\.1$", sentence)
    assert doctor.misfits(FITTING, for_gpus=True) == []


def test_without_triton_any_numpy_fits() -> None:
    assert doctor.misfits(FITTING | {"triton": None, "numpy": "2.4.0"}) == []


def test_torch_outside_the_table_is_said_to_be() -> None:
    assert doctor.misfits(FITTING | {"torch": "2.12.1"}) == []
    assert "not in the table" in doctor.describe_pairing("2.12.1")


def test_report_is_printed_and_usable() -> None:
    run = run_python("-m", "torchembed.doctor", cwd=ROOT, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    assert re.search(r"^  torch +\d+\.\d+", run.stdout, re.MULTILINE)
    assert re.search(r"^  GPU +\S", run.stdout, re.MULTILINE)
    assert re.search(r"^  pooled_lookup_forward +CPU +\w+ +\w", run.stdout, re.MULTILINE)
    assert re.search(r"^  rowwise_update +CUDA +\w+ +\w", run.stdout, re.MULTILINE)
    assert run.stdout.endswith("torchembed is usable here.\n")


def test_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--verbose"])
    assert "unrecognized arguments: --verbose" in capsys.readouterr().err


def test_report_gives_the_reason_for_a_forced_reference() -> None:
    run = run_python(
        "-m", "torchembed.doctor", cwd=ROOT, OMP_NUM_THREADS="1", TORCHEMBED_FORCE_REFERENCE="1"
    )
    assert run.returncode == 0, run.stderr
    assert "not used: TORCHEMBED_FORCE_REFERENCE is set" in run.stdout
    assert re.search(r"find_runs +CPU +reference +TORCHEMBED_FORCE_REFERENCE is set", run.stdout)


def test_a_reader_that_has_ended_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "torchembed.doctor"]
        ended = subprocess.run(
            command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")
