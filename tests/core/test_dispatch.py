"""Which kernel an operation gets for each key, and that it is the one that runs."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torchembed.core import dispatch, environment

SCHEMA = "dispatch_probe(Tensor x) -> Tensor"


def reference(x: Tensor) -> Tensor:
    return x + 1


def native(x: Tensor) -> Tensor:
    return x + 2


def launch_probe(x: Tensor) -> Tensor:
    return x + 3


@pytest.fixture(autouse=True)
def scratch_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Definitions that are gone after the test, in an environment that sets nothing."""
    for name in ("TORCHEMBED_FORCE_REFERENCE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "picked_kernels", [])
    with torch.library._scoped_library("torchembed", "FRAGMENT") as library:
        monkeypatch.setattr(dispatch, "_library", library)
        yield


def define(**options: Any) -> tuple[Any, dict[str, dispatch.PickedKernel]]:
    op = dispatch.define_op(SCHEMA, reference=reference, fake=torch.empty_like, **options)
    return op, {pick.key: pick for pick in dispatch.picked_kernels}


def triton_path() -> str:
    return f"{__name__}:launch_probe"


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_without_kernels_the_reference_runs() -> None:
    op, picks = define()
    assert op(torch.zeros(1)).item() == 1
    assert picks["CPU"] == ("dispatch_probe", "CPU", "reference", "it has no C++ kernel")
    assert picks["CUDA"].kernel == "reference"
    assert picks["CUDA"].reason == "it has no Triton kernel"


def test_says_why_the_native_kernel_is_missing() -> None:
    _, picks = define(native_missing="the moon is full")
    assert picks["CPU"].reason == "the moon is full"


@needs_triton
def test_native_serves_the_cpu_and_triton_cuda() -> None:
    op, picks = define(native=native, triton=triton_path())
    assert op(torch.zeros(1)).item() == 2
    assert picks["CPU"].kernel == "native"
    assert picks["CUDA"].kernel == "triton"


@needs_triton
def test_a_cuda_kernel_leaves_the_calls_it_does_not_take_to_triton() -> None:
    def launch(x: Tensor) -> Any:
        return x + 4 if x.numel() == 1 else NotImplemented

    _, picks = define(cuda=dispatch.CudaKernel(launch, "one number"), triton=triton_path())
    assert picks["CUDA"].kernel == "triton"
    assert picks["CUDA"].reason == "triton is installed; the C++ library takes one number"
    either = dispatch._first_of(launch, launch_probe)
    assert [either(torch.zeros(size)).tolist() for size in (1, 2)] == [[4], [3, 3]]


@needs_triton
def test_the_interpreter_puts_triton_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op, picks = define(native=native, triton=triton_path())
    assert op(torch.zeros(1)).item() == 3
    assert (picks["CPU"].kernel, picks["CPU"].reason) == ("triton", "TRITON_INTERPRET is set")


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHEMBED_FORCE_REFERENCE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op, picks = define(native=native, triton=triton_path())
    assert op(torch.zeros(1)).item() == 1
    assert {pick.kernel for pick in picks.values()} == {"reference"}


def test_without_triton_cuda_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: False)
    _, picks = define(triton=triton_path())
    assert picks["CUDA"].kernel == "reference"
    assert picks["CUDA"].reason == "triton is not installed"


def test_without_triton_its_interpreter_is_not_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op, picks = define(native=native, triton=triton_path())
    assert op(torch.zeros(1)).item() == 2
    assert picks["CPU"].reason == (
        "the C++ library is loaded; TRITON_INTERPRET is set, but triton is not installed"
    )


def test_a_launcher_is_imported_at_its_first_call() -> None:
    launch = dispatch._launcher("no_such_module:launch_nothing")
    assert launch.__name__ == "launch_nothing"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        launch()


def test_the_fake_serves_meta_tensors() -> None:
    op, _ = define()
    assert op(torch.zeros(3, device="meta")).shape == (3,)


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        *((text, False) for text in (None, "", "0", "false", "No")),
        *((text, True) for text in ("1", "true", "yes")),
    ],
)
def test_environment_variables_are_on_or_off(
    text: str | None, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        monkeypatch.setenv("TORCHEMBED_FORCE_REFERENCE", text)
        monkeypatch.setenv("TRITON_INTERPRET", text)
    assert environment.force_reference() is is_on
    assert environment.triton_interpreted() is is_on
