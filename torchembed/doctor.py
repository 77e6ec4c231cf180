"""``python -m torchembed.doctor``: what is installed, what fits, which kernels run and why.

The exit status is 0 where torchembed is usable, else 1.
"""

import argparse
import importlib
import importlib.metadata
import pkgutil
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import torchembed
from torchembed import _native, ops
from torchembed.core import dispatch, environment, versions

DISTRIBUTIONS = (
    *("torch", "numpy", "triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"),
    *("onnx", "onnxscript", "onnxruntime"),
)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_gpus() -> str:
    """The GPUs that torch can use, or why it has none."""
    if torch.version.cuda is None:
        return "none: this torch is built without CUDA"
    if not torch.cuda.is_available():
        return f"none: torch is built for CUDA {torch.version.cuda} but finds no GPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    counts = (f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{', '.join(counts)}; torch is built for CUDA {torch.version.cuda}"


def misfits(installed: Mapping[str, str | None], *, for_gpus: bool = False) -> list[str]:
    """One sentence for each installed version that the table of versions does not pair,
    and for Triton where it is missing.

    Args:
        installed: the version, or None, of each name in ``DISTRIBUTIONS``.
        for_gpus: True where torch is built for GPUs, whose kernels need Triton.
    """
    torch_version = installed["torch"]
    if torch_version is None:
        return ["torch is not installed; run pip install torch"]
    oldest = versions.PAIRINGS[0].torch
    if _is_below(torch_version, oldest):
        return [f"torch is {torch_version}, and torchembed needs {oldest} or later; upgrade it"]
    sentences = []
    row = versions.pairing_of(torch_version)
    if row is not None:
        wanted = {
            "triton": row.triton,
            "torchrec": row.torchrec,
            "fbgemm-gpu": row.fbgemm,
            "fbgemm-gpu-cpu": row.fbgemm,
        }
        sentences = [
            f"{name} is {installed[name]}, and torch {versions.release(torch_version)} goes with "
            f"{versions.release(version)}; run pip install --no-deps {name}=={version}"
            for name, version in wanted.items()
            if _differ(installed[name], version)
        ]
    if for_gpus and installed["triton"] is None:
        wanted_triton = "triton" if row is None else f"triton=={row.triton}"
        sentences.append(
            "triton is not installed, and kernels on a GPU need it: operations run their slower "
            f"reference there; run pip install {wanted_triton}"
        )
    numpy_version, limit = installed["numpy"], versions.NUMPY_LIMIT
    if installed["triton"] and numpy_version and not _is_below(numpy_version, limit):
        sentences.append(
            f"numpy is {numpy_version}, and Triton's interpreter needs one below {limit}; "
            "kernels on a GPU do not mind"
        )
    return sentences


def _is_below(version: str, limit: str) -> bool:
    return versions.release_number(version) < versions.release_number(limit)


def _differ(found: str | None, wanted: str) -> bool:
    return found is not None and versions.release(found) != versions.release(wanted)


def describe_pairing(torch_version: str) -> str:
    """The releases that go with this torch, in one sentence."""
    row = versions.pairing_of(torch_version)
    if row is None:
        return (
            f"torch {torch_version} is not in the table of versions: torchembed itself needs no "
            "more than that torch, and TorchRec and FBGEMM need releases built for it"
        )
    return (
        f"torch {versions.release(row.torch)} goes with triton {versions.release(row.triton)}, "
        f"fbgemm-gpu {versions.release(row.fbgemm)}, torchrec {versions.release(row.torchrec)}"
    )


def describe_native() -> str:
    """A sentence that says if the C++ library is used, and how."""
    error = _native.load_error()
    if error is not None:
        advice = "" if environment.force_reference() else f" To use it: {_native.advice()}."
        return f"not used: {error}. Operations run their reference on the CPU.{advice}"
    instruction_set = torch.ops.torchembed_native.instruction_set()
    kernels = "with" if hasattr(torch.ops.torchembed_native, "sort_rows") else "without"
    return f"loaded, with {instruction_set} instructions, {kernels} its kernels for GPUs."


def picked_kernels() -> list[dispatch.PickedKernel]:
    """The kernels that operations run for each dispatch key; imports every operation."""
    for room in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(room.name)
    return sorted(dispatch.picked_kernels)


def _print_section(title: str, lines: list[str]) -> None:
    print(f"\n{title}")
    for line in lines:
        print(f"  {line}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 0 where torchembed is usable, else 1."""
    argparse.ArgumentParser(
        prog="python -m torchembed.doctor",
        description="Print what is installed, what does not fit together, and which kernel each "
        "operation runs.",
    ).parse_args(arguments)
    installed = {name: installed_version(name) for name in DISTRIBUTIONS}
    # The imported torch counts, also where its metadata is absent or another's.
    torch_version = installed["torch"] = str(torch.__version__)
    print(f"torchembed {torchembed.__version__}, in {Path(torchembed.__file__).parent}")
    _print_section(
        "What is installed",
        [
            f"{'python':<16}{platform.python_version()}",
            *(f"{name:<16}{version or 'not installed'}" for name, version in installed.items()),
            f"{'GPU':<16}{describe_gpus()}",
        ],
    )
    problems = misfits(installed, for_gpus=torch.version.cuda is not None)
    _print_section(
        "What fits together",
        [f"{describe_pairing(torch_version)}.", *(f"{problem}." for problem in problems)]
        if problems
        else [f"{describe_pairing(torch_version)}.", "All that is installed fits."],
    )
    _print_section("The C++ library", [describe_native()])
    picks = picked_kernels()
    width = max(len(pick.op) for pick in picks) + 2
    _print_section(
        "Which kernel each operation runs",
        [f"{pick.op:<{width}}{pick.key:<6}{pick.kernel:<11}{pick.reason}" for pick in picks],
    )
    if not torch.cuda.is_available():
        print("  CUDA says what would run if there were a GPU.")
    oldest = versions.PAIRINGS[0].torch
    usable = not _is_below(torch_version, oldest)
    print(f"\ntorchembed is {'usable' if usable else 'not usable'} here.")
    return 0 if usable else 1


if __name__ == "__main__":
    # Python would turn the end of a reader, such as head, into an error.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
