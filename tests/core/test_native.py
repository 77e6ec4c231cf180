"""The C++ library: loaded once, and where it is not, said once and done without."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.source_tree import run_python_or_fail
from torchembed import _native


@pytest.fixture
def unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHEMBED_FORCE_REFERENCE", raising=False)


def place_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package seem to be imported from ``folder``, alone on Python's path."""
    monkeypatch.setattr(_native, "PACKAGE", folder)
    monkeypatch.setattr(_native, "LIBRARY", folder / "_C.abi3.so")
    monkeypatch.setattr(sys, "path", [str(folder.parent)])


def load() -> str | None:
    """``load_error`` past its cache."""
    return _native.load_error.__wrapped__()


def test_forcing_the_reference_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHEMBED_FORCE_REFERENCE", "1")
    assert load() == "TORCHEMBED_FORCE_REFERENCE is set"


def test_a_missing_library_is_said_with_what_to_do(
    unforced: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place_package(tmp_path / "torchembed", monkeypatch)
    message = (
        r"^torchembed runs its slower reference operations on the CPU: the C\+\+ library "
        r"_C\.abi3\.so is not built; install torchembed again where there is a C\+\+ compiler, "
        r"then `python -m torchembed\.doctor`$"
    )
    with pytest.warns(UserWarning, match=message):
        assert load() == "the C++ library _C.abi3.so is not built"


def test_a_checkout_without_a_library_is_said_to_be_one(
    unforced: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place_package(tmp_path / "torchembed", monkeypatch)
    (tmp_path / "setup.py").touch()
    message = (
        rf"imported from the checkout at {re.escape(str(tmp_path))}; run `make native "
        r"PYTHON=python3` in it, or `pip install \.` in it and Python in another folder, then"
    )
    with pytest.warns(UserWarning, match=message):
        load()


def test_a_checkout_that_hides_an_installed_library_is_said_to(
    unforced: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    for folder in (checkout, site):
        (folder / "torchembed").mkdir(parents=True)
    place_package(checkout / "torchembed", monkeypatch)
    (checkout / "setup.py").touch()
    (site / "torchembed" / "_C.abi3.so").touch()
    monkeypatch.setattr(sys, "path", [str(checkout), str(site)])
    message = (
        rf"imported from the checkout at {re.escape(str(checkout))}, and not from "
        rf"{re.escape(str(site / 'torchembed'))}, where one is installed with its library; run "
        r"Python in another folder, or `make native PYTHON=python3` in the checkout"
    )
    with pytest.warns(UserWarning, match=message):
        load()


def test_a_library_that_does_not_load_is_said_with_why(
    unforced: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "_C.abi3.so"
    library.write_bytes(b"not a library")
    monkeypatch.setattr(_native, "LIBRARY", library)
    with pytest.warns(UserWarning, match=r"reference operations on the CPU: .* does not load"):
        reason = load()
    assert reason is not None and reason.startswith("the C++ library _C.abi3.so does not load: ")


def test_kernels_are_there_exactly_where_the_library_is() -> None:
    kernel = _native.native_op("find_runs")
    if _native.load_error() is None:
        assert kernel is torch.ops.torchembed_native.find_runs.default
    else:
        assert kernel == _native.load_error()


@pytest.mark.skipif(_native.load_error() is not None, reason="needs the C++ library")
def test_a_library_that_was_built_from_other_sources_is_said() -> None:
    with pytest.raises(ImportError, match=r"has no kernel of_tomorrow, .* build it again with"):
        _native.native_op("of_tomorrow")


def test_a_program_without_the_library_warns_once_and_works(tmp_path: Path) -> None:
    without_library = shutil.ignore_patterns("*.so", "__pycache__")
    package = Path(_native.__file__).parent
    shutil.copytree(package, tmp_path / "torchembed", ignore=without_library)
    program = """
import warnings
import torch

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torchembed

    bag = torchembed.EmbeddingBag(5, 4, mode="sum")
    bag(torch.tensor([[1, 2], [3, 4]])).sum().backward()
messages = [str(warning.message) for warning in caught]
assert len([text for text in messages if "_C.abi3.so is not built" in text]) == 1, messages
assert bag.weight.grad.sum() == 16
"""
    run_python_or_fail("-c", program, cwd=tmp_path)
