"""One suite for every lane: the device, the lane, sizes that fit it, and poisoned memory."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

# Before torch is imported: one thread each, and matrix products that repeat their bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import pytest
import torch

from tests.support import interpreter, lanes
from tests.support.required_servers import required_servers
from tests.support.sizes import Sizes
from torchembed import _native

# How long examples take, and to make them, is a matter of what else the machine does.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

if TYPE_CHECKING:
    from tests.support.schedule import ByFile


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where operations are tested"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda needs a GPU that torch can use, and finds none")
    lanes.required_lane()
    required_servers()
    interpreter.leave_out_what_changes_nothing()


def pytest_report_header(config: pytest.Config) -> str:
    lane = lanes.required_lane() or "none required"
    library = "loaded" if _native.load_error() is None else f"not used ({_native.load_error()})"
    return f"torchembed: device {config.getoption('--device')}, lane {lane}, C++ library {library}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What modules hold as they are imported lasts as long as the process: the collector looks at
    it neither now, again and again, nor during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        from tests.support import schedule

        items[:] = schedule.in_order(items)
    if config.getoption("--device") == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --device cuda"))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "ByFile | None":
    from tests.support import schedule

    return schedule.ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of ``--device``."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def sizes() -> Sizes:
    """Sizes of random cases that fit the lane."""
    if lanes.is_interpreted():
        return Sizes(
            batch_size=5,
            num_parallel_ids=54,
            num_rows=23,
            max_length=4,
            dims=(5, 16),
            num_examples=5,
        )
    return Sizes(
        batch_size=37,
        num_parallel_ids=60_000,
        num_rows=211,
        max_length=9,
        dims=(1, 7, 16, 64, 100, 128, 300),
        num_examples=50,
    )


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN, or the largest integer, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Functions that other tests have had torch compile do not count: pipelines observe attributes
    in processes that have compiled nothing alone."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        compiler.counters.clear()


@pytest.fixture
def interrupting_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt``, also where a shell started the tests in the background,
    which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fastest_algorithms(poisoned_memory: None) -> None:
    """Torch as users run it: nondeterministic algorithms are allowed, memory is not poisoned."""
    torch.use_deterministic_algorithms(False)
