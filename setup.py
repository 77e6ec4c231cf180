"""Builds ``torchembed/_C.abi3.so`` from ``csrc/``; everything else stands in pyproject.toml.

The library is a plain one on the LibTorch stable ABI, loaded by ``torch.ops.load_library``: it
knows no Python symbols, so one binary serves every Python and every torch since TORCH_TARGET.
"""

import itertools
import os
import re
import shlex
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError
from setuptools.modified import newer_group

TORCH_TARGET = (2, 11)
"""The oldest torch that the library runs on; its headers show no symbol newer than that."""

CUDA_PARTS = ("bin/nvcc", "lib64/libcudart_static.a")
"""Files that a CUDA toolkit must have for the library's kernels for GPUs to be built."""

SANITIZED = os.environ.get("TORCHEMBED_SANITIZE", "0") == "1"
"""True where the library is to check its own accesses to memory, for `make sanitize`: for the CPU
alone, since AddressSanitizer does not see the memory of a GPU."""

# Some compilers link libstdc++ statically. Its copy must not be visible to the shared one that
# torch loads: an exception's message would be formatted by functions of both, which crashes.
LINK_FLAGS = ("-Wl,--exclude-libs,ALL",) if sys.platform == "linux" else ()

WITHOUT_CUDA = os.environ.get("TORCHEMBED_WITHOUT_CUDA", "0") == "1"
"""True where kernels for GPUs are left out although a toolkit would compile them, which takes most
of a build's time."""

OPTIMIZED_FLAGS = ("-O3", "-g0")
SANITIZED_FLAGS = (
    *("-O1", "-g1", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "-fno-wrapv",  # Python's own flags may let integers overflow, which is then not found
    "-Wno-uninitialized",  # GCC's own headers of vector instructions are said to be
)


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


def find_cuda() -> Path | None:
    """The folder of a CUDA toolkit with a compiler and a runtime to link."""
    nvcc = shutil.which("nvcc")
    for folder in (
        os.environ.get("CUDA_HOME"),
        nvcc and str(Path(nvcc).resolve().parents[1]),
        "/usr/local/cuda",
    ):
        if folder and all(Path(folder, part).exists() for part in CUDA_PARTS):
            return Path(folder)
    return None


def native_library(torch: Path) -> Extension:
    major, minor = TORCH_TARGET
    depends = [*Path("csrc").rglob("*.h"), *Path("csrc/cuda").glob("*.c*")]
    return Extension(
        "torchembed._C",
        sources=sorted(map(str, Path("csrc").glob("*.cpp"))),
        depends=["setup.py", *sorted(map(str, depends))],
        include_dirs=["csrc"],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],
        define_macros=[("TORCH_TARGET_VERSION", f"0x{major:02x}{minor:02x}000000000000")],
        extra_compile_args=[
            *("-isystem", str(torch / "include")),
            *("-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra"),
            *(SANITIZED_FLAGS if SANITIZED else OPTIMIZED_FLAGS),
            "-ffp-contract=off",  # no fused multiply-adds: the same bits on every processor
        ],
        extra_link_args=[*LINK_FLAGS, *(SANITIZED_FLAGS if SANITIZED else ())],
        language="c++",
    )


class BuildNative(build_ext):
    """Names the library ``_C.abi3.so`` whatever the Python; compiles its files side by side."""

    def run(self) -> None:
        """Build, unless a library that is to be built in place is newer than all it is made of:
        ``pip install -e`` keeps no objects of the one that it built."""
        for extension in self.extensions:
            library = self.get_ext_filename(extension.name)
            is_old = newer_group([*extension.sources, *extension.depends], library, "newer")
            if self.force or not self.inplace or is_old:
                super().run()
                return

    def build_extension(self, ext: Extension) -> None:
        compile_files = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            def compile_file(source: str) -> str:
                return compile_files([source], **options)[0]

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for_gpus = None
                if cuda_folder is not None:  # these take longest, so they are begun first
                    kernels = pool.map(self.compile_kernels, sorted(Path("csrc/cuda").glob("*.cu")))
                    callers = map(str, sorted(Path("csrc/cuda").glob("*.cpp")))
                    for_gpus = itertools.chain(kernels, pool.map(compile_file, callers))
                objects = [*pool.map(compile_file, sources)]
                return objects if for_gpus is None else objects + self.add_cuda(ext, for_gpus)

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)

    def add_cuda(self, ext: Extension, objects: Iterable[str]) -> list[str]:
        """The objects for GPUs, linked with the runtime that they call; none, and a warning, where
        the toolkit does not compile them."""
        assert cuda_folder is not None
        try:
            objects = [*objects]
        except ExecError as error:
            warnings.warn(
                f"the CUDA compiler failed, so the library is built without its kernels for GPUs, "
                f"and torch's and Triton's take their place: {error}",
                stacklevel=1,
            )
            return []
        # The runtime is linked statically: without a driver it stays idle, so the library loads on
        # machines without a GPU too.
        ext.extra_link_args += [str(cuda_folder / CUDA_PARTS[1]), "-ldl", "-lrt", "-lpthread"]
        return objects

    def compile_kernels(self, source: Path) -> str:
        """The object of a file of kernels for GPUs: machine code of each generation, or of that one
        which stands in the file's name."""
        assert cuda_folder is not None
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        compiled = str(Path(self.build_temp, f"{source.stem}.cu.o"))
        only = re.search(r"\.sm_(\w+)$", source.stem)
        generation = "-arch=all-major"
        if only is not None:
            generation = f"-gencode=arch=compute_{only[1]},code=sm_{only[1]}"
        options = (
            "-std=c++20",
            "-O3",
            "-fmad=false",  # as on the CPU
            generation,
            "-Xcompiler=-fPIC,-fvisibility=hidden",
        )
        command = [str(cuda_folder / CUDA_PARTS[0]), "-c", str(source), "-o", compiled]
        self.spawn([*command, *options, "-ccbin", shlex.split(os.environ["CXX"])[0]])
        return compiled

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".abi3.so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel ``py3-none-<platform>``: it depends on the machine, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


torch_folder, compiler = find_torch(), find_compiler()
cuda_folder = None if SANITIZED or WITHOUT_CUDA else find_cuda()
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
