"""Builds ``torchembed/_C.abi3.so`` from ``csrc/``; everything else stands in pyproject.toml.

The library is a plain one on the LibTorch stable ABI, loaded by ``torch.ops.load_library``: it
knows no Python symbols, so one binary serves every Python and every torch since TORCH_TARGET.
"""

import os
import re
import shlex
import shutil
import sys
import sysconfig
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

TORCH_TARGET = (2, 11)
"""The oldest torch that the library runs on; its headers show no symbol newer than that."""


def find_torch() -> Path | None:
    """The folder of a torch that is new enough, also of the one outside an isolated build."""
    for folder in [*sys.path, sysconfig.get_path("platlib")]:
        header = Path(folder, "torch/include/torch/headeronly/version.h")
        if header.exists():
            found = re.findall(r"define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", header.read_text())
            if tuple(map(int, found)) >= TORCH_TARGET:
                return Path(folder, "torch")
    return None


def find_compiler() -> str | None:
    """The command of a C++ compiler: ``CXX``, else Python's own, else the usual names."""
    for command in (
        os.environ.get("CXX"),
        sysconfig.get_config_var("CXX"),
        "c++",
        "g++",
        "clang++",
    ):
        if command and shutil.which(shlex.split(command)[0]):
            return command
    return None


def native_library(torch: Path) -> Extension:
    major, minor = TORCH_TARGET
    return Extension(
        "torchembed._C",
        sources=sorted(map(str, Path("csrc").glob("*.cpp"))),
        depends=["setup.py", *sorted(map(str, Path("csrc").glob("*.h")))],
        include_dirs=["csrc"],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],
        define_macros=[("TORCH_TARGET_VERSION", f"0x{major:02x}{minor:02x}000000000000")],
        extra_compile_args=[
            *("-isystem", str(torch / "include")),
            *("-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"),
            "-ffp-contract=off",  # no fused multiply-adds: the same bits on every processor
        ],
        language="c++",
    )


class BuildNative(build_ext):
    """Names the library ``_C.abi3.so`` whatever the Python; compiles its files side by side."""

    def build_extensions(self) -> None:
        compile_files = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_files([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".abi3.so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel ``py3-none-<platform>``: it depends on the machine, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


torch_folder, compiler = find_torch(), find_compiler()
extensions = []
if compiler is None:
    warnings.warn(
        "no C++ compiler found: torchembed is built without its C++ library and will run slower "
        "reference operations on the CPU; install g++ or set CXX, and build again",
        stacklevel=1,
    )
elif torch_folder is not None and any(Path("csrc").glob("*.cpp")):
    os.environ["CXX"] = compiler
    extensions = [native_library(torch_folder)]

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    # Asked for by the front end of an isolated build only where no torch is at hand.
    setup_requires=["torch>=2.11"] if compiler and torch_folder is None else [],
)
