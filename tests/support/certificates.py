"""Certificates of a test's own, by openssl."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    """Files of a certificate that signs itself."""

    file: Path
    key: Path


def certificate(folder: Path, name: str, made_out_to: str) -> Certificate:
    """A certificate made out to ``made_out_to``, as ``IP:127.0.0.1``; skips the test where there is
    no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: apt-get install openssl")
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName={made_out_to}"),
            *("-keyout", str(made.key), "-out", str(made.file)),
        ],
        check=True,
        capture_output=True,
    )
    return made
