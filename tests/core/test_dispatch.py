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
    for name in ("TORCHEMBED_FORCE_REFERENCE", "TRITON_INTERPRET", "TORCHEMBED_CHECK_OPERATIONS"):
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
    _, picks = define(native="the moon is full")
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
    either = dispatch._with_fallback(launch, launch_probe)
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


def refuse_two(x: Tensor) -> None:
    if x.numel() == 2:
        raise ValueError("x must not hold 2 elements")


def refuse_zeros(x: Tensor) -> None:
    if (x == 0).any():
        raise ValueError("x must hold no zeros")


@pytest.mark.parametrize("options", [{}, {"native": native}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_arguments_are_checked_before_every_kernel(options: dict[str, Any], device: str) -> None:
    op, _ = define(check=refuse_two, **options)
    assert op(torch.zeros(1, device=device)).shape == (1,)
    with pytest.raises(ValueError, match=r"^x must not hold 2 elements$"):
        op(torch.zeros(2, device=device))


def test_contents_are_checked_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    op, _ = define(native=native, check_contents=refuse_zeros)
    assert op(torch.zeros(1)).item() == 2
    monkeypatch.setenv("TORCHEMBED_CHECK_OPERATIONS", "1")
    with torch.library._scoped_library("torchembed", "FRAGMENT") as library:
        monkeypatch.setattr(dispatch, "_library", library)
        schema = SCHEMA.replace("probe", "probe_of_contents")
        checked = dispatch.define_op(
            schema, reference=reference, fake=torch.empty_like, check_contents=refuse_zeros
        )
        assert checked(torch.ones(1)).item() == 2
        with pytest.raises(ValueError, match=r"^x must hold no zeros$"):
            checked(torch.zeros(1))
        assert checked(torch.zeros(1, device="meta")).shape == (1,)


def test_contents_are_not_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHEMBED_CHECK_OPERATIONS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    op, _ = define(check_contents=refuse_zeros)
    assert op(torch.zeros(1)).item() == 1


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
        monkeypatch.setenv("TORCHEMBED_CHECK_OPERATIONS", text)
    assert environment.check_operations() is is_on
    assert environment.force_reference() is is_on
    assert environment.triton_interpreted() is is_on
