"""The sdist and the wheel carry everything; the wheel knows no Python and only the stable ABI."""

import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.source_tree import ROOT, copy_sources, run_python, run_python_or_fail

COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
CUDA_PARTS = ("bin/nvcc", "lib64/libcudart_static.a")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


class Distributions(NamedTuple):
    sources: Path
    sdist: Path
    wheel: Path


def quick_compilers(folder: Path) -> dict[str, str]:
    """Environment of a build that takes objects of C++ from the checkout, where they are newer than
    all sources, and compiles others without optimization, and kernels for one generation of GPUs
    in PTX, not in machine code: which takes a tenth of the time, and everything that stands in a
    distribution is compiled all the same. The library that the other tests load is built as
    ``setup.py`` says."""
    compiler = folder / "c++"
    _write_program(
        compiler,
        "object= previous=\n"
        "for argument do\n"
        '  if [ "$previous" = -o ]; then object=$argument; fi\n'
        "  previous=$argument\n"
        "done\n"
        f'built="{ROOT}/$object"\n'
        'if [ "${object%.o}" != "$object" ] && [ -f "$built" ] && '
        f'[ -z "$(find "{ROOT}/csrc" "{ROOT}/setup.py" -newer "$built")" ]; then\n'
        '  exec cp "$built" "$object"\n'
        f'fi\nexec {COMPILER} "$@" -O0',
    )
    toolkit = find_cuda()
    if toolkit is None:
        return {"CXX": str(compiler)}
    cuda = folder / "cuda"
    _write_program(
        cuda / "bin" / "nvcc",
        "for argument do\n"
        '  shift; case "$argument" in\n'
        "    -arch=all-major) argument=-gencode=arch=compute_90,code=compute_90 ;;\n"
        '    -gencode=*) argument="${argument%sm_*}compute_${argument##*sm_}" ;;\n'
        "  esac\n"
        '  set -- "$@" "$argument"\n'
        f'done\nexec {toolkit}/bin/nvcc "$@" -Xcicc -O0',
    )
    (cuda / "lib64").symlink_to(toolkit / "lib64")
    return {"CXX": str(compiler), "CUDA_HOME": str(cuda)}


def find_cuda() -> Path | None:
    """The toolkit that ``setup.py`` takes; the ``nvcc`` of the path may be a script elsewhere that
    calls the toolkit's."""
    nvcc = shutil.which("nvcc")
    beside_nvcc = Path(nvcc).resolve().parents[1] if nvcc else None
    for folder in (os.environ.get("CUDA_HOME"), beside_nvcc, "/usr/local/cuda"):
        if folder and all(Path(folder, part).exists() for part in CUDA_PARTS):
            return Path(folder)
    return None


def _write_program(path: Path, lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """A copy of the sources, an sdist of it, and a wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    sources = copy_sources(folder / "sources")
    run_python_or_fail(
        *("-m", "build", "--no-isolation", "--outdir", "dist"),
        cwd=sources,
        **quick_compilers(folder),
    )
    (sdist,), (wheel,) = sources.glob("dist/*.tar.gz"), sources.glob("dist/*.whl")
    return Distributions(sources, sdist, wheel)


@pytest.fixture(scope="module")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("installed")
    run_python_or_fail(
        *("-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--no-index"),
        *("--target", str(folder), str(distributions.wheel)),
        cwd=folder,
    )
    return folder


def modules(sources: Path) -> set[str]:
    """Every module, the kernels that are reached through the symbolic link among them."""
    names = {
        path.relative_to(sources).as_posix()
        for package in ("torchembed", "triton_kernels")
        for path in (sources / package).rglob("*.py")
    }
    return {re.sub(r"^triton_kernels/", "torchembed/triton_kernels/", name) for name in names}


def csrc_files(sources: Path) -> set[str]:
    files = (path for path in (sources / "csrc").rglob("*") if path.is_file())
    return {path.relative_to(sources).as_posix() for path in files}


@needs_compiler
def test_sdist_carries_modules_kernels_and_cpp_sources(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        members = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    assert modules(distributions.sources) <= members
    assert csrc_files(distributions.sources) <= members
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= members


@needs_compiler
def test_wheel_carries_modules_kernels_and_library(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as archive:
        members = set(archive.namelist())
    expected = modules(distributions.sources) | {"torchembed/py.typed", "torchembed/_C.abi3.so"}
    assert expected <= members
    assert {name for name in members if not name.startswith("torchembed")} == set()


@needs_compiler
def test_wheel_is_tagged_for_the_platform_and_any_python(distributions: Distributions) -> None:
    assert re.fullmatch(
        r"torchembed-[\d.]+-py3-none-(linux|macosx)\w+\.whl", distributions.wheel.name
    )


@needs_compiler
def test_installed_wheel_runs_its_kernels(installed: Path) -> None:
    program = """
import torch
import torchembed.triton_kernels
from torchembed import _native
from torchembed.ops.segments import find_runs

assert _native.load_error() is None, _native.load_error()
assert find_runs(torch.tensor([3, 1, 3]), 4).num_runs.item() == 2
print(torchembed.__file__)
print(torchembed.triton_kernels.__file__)
"""
    output = run_python_or_fail("-c", program, cwd=installed, PYTHONPATH=str(installed))
    assert [Path(line).is_relative_to(installed) for line in output.splitlines()] == [True, True]


needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")


def symbols_of(installed: Path, kind: str) -> list[str]:
    """The lines of ``nm``: an address where the symbol is defined, a letter, a name."""
    library = installed / "torchembed" / "_C.abi3.so"
    command = ["nm", "--dynamic", kind, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@needs_compiler
@needs_nm
def test_library_exports_nothing_of_the_libraries_in_it(installed: Path) -> None:
    """Weak symbols alone are exported: those of headers, which all libraries share."""
    functions = [line for line in symbols_of(installed, "--defined-only") if " T " in line]
    assert functions == []


@needs_compiler
@needs_nm
def test_library_imports_only_the_stable_abi(installed: Path) -> None:
    symbols = [line.split()[-1] for line in symbols_of(installed, "--undefined-only")]
    assert any(symbol.startswith("aoti_torch_") for symbol in symbols)
    assert [
        symbol for symbol in symbols if re.search(r"_Z.*(2at|3c10|5torch|6caffe2)", symbol)
    ] == []
    assert [symbol for symbol in symbols if re.match(r"_?Py[A-Z_]", symbol)] == []


def test_without_a_compiler_the_build_warns_once_and_succeeds(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    run = run_python("setup.py", "--quiet", "bdist_wheel", cwd=sources, PATH="/nowhere", CXX="")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("no C++ compiler found") == 1
    (wheel,) = sources.glob("dist/*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "torchembed/_C.abi3.so" not in archive.namelist()


def test_build_needs_nothing_more_where_torch_is_installed(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    program = "import setuptools.build_meta as b; print(b.get_requires_for_build_wheel())"
    assert run_python_or_fail("-c", program, cwd=sources).splitlines()[-1] == "[]"


@needs_compiler
def test_build_asks_for_torch_where_it_finds_none(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    program = """
import pathlib, sys, sysconfig
import setuptools.build_meta

sys.path = [folder for folder in sys.path if not pathlib.Path(folder, "torch").exists()]
get_path = sysconfig.get_path
sysconfig.get_path = lambda name, *rest: "/" if name == "platlib" else get_path(name, *rest)
print(setuptools.build_meta.get_requires_for_build_wheel())
"""
    assert run_python_or_fail("-c", program, cwd=sources).splitlines()[-1] == "['torch>=2.11']"
