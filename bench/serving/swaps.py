"""Latencies of a server while dense parts are swapped, and while whole versions are loaded.

``python -m bench.serving.swaps`` serves a DLRM by ``python -m torchembed.serving`` in a process of
its own, and asks it at a stated rate, in each round three times: while nothing changes, while a
``ModelPublisher`` swaps the dense part again and again, through the broker inside librdkafka, and
while new versions are loaded with all their rows. It prints medians over rounds, and each p99 over
that of the same round while nothing changes.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro

import torchembed
from torchembed import EmbeddingBagConfig, SparseFeatures
from torchembed.models import DLRM
from torchembed.serving.bench.load import LoadResult, run_load
from torchembed.serving.bench.made_requests import MadeRequests
from torchembed.serving.bench.oip_client import OipClient
from torchembed.serving.models import deploy
from torchembed.training import ModelPublisher

_NUM_DENSE = 13
_NUM_REQUESTS = 64
"""Different requests that are sent in turn."""
_VERSIONS_APART = 1_000_000
"""Between versions that are deployed; swaps have the numbers in between."""
_LIMIT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is served, asked and changed."""

    num_tables: int = 8
    num_rows: int = 50_000
    """Of each table."""
    dim: int = 64
    dense_layers: tuple[int, ...] = (256, 128)
    """Widths of the layers over dense features, in front of one of ``dim``."""
    over_layers: tuple[int, ...] = (512, 256)
    """Widths of the layers over interactions, in front of one of 1."""
    batch_size: int = 32
    num_clients: int = 4
    rate: float = 40.0
    """Requests a second, of all clients together."""
    seconds: float = 10.0
    """Of each of a round's three loads."""
    swap_interval_seconds: float = 0.25
    """From the end of a swap to the next one."""
    load_interval_seconds: float = 4.0
    """Likewise of versions."""
    rounds: int = 5


class _Measured(NamedTuple):
    load: LoadResult
    change_seconds: list[float]
    """How long each change took that was made meanwhile."""


class _Bench:
    """A model, the folder that it is deployed into, and its changes."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.models = setting, folder / "models"
        self.version = 1
        """The last one that was deployed or published."""
        self._staged = folder / "staged"
        names = tuple(f"f{n}" for n in range(setting.num_tables))
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                num_embeddings=setting.num_rows,
                embedding_dim=setting.dim,
                feature_names=(name,),
            )
            for name in names
        ]
        self.model = DLRM(
            torchembed.EmbeddingBagCollection(tables=tables),
            _NUM_DENSE,
            [*setting.dense_layers, setting.dim],
            [*setting.over_layers, 1],
        )
        self._examples = (
            torch.zeros(2, _NUM_DENSE),
            SparseFeatures(
                keys=names,
                values=torch.zeros(2 * len(names), dtype=torch.int64),
                hotness=(1,) * len(names),
                batch_size=2,
            ),
        )
        self._deploy(self.models, 1)

    @property
    def dense_bytes(self) -> int:
        """Of the dense part."""
        of_dense = (self.model.dense_arch, self.model.over_arch)
        return sum(p.nbytes for part in of_dense if part is not None for p in part.parameters())

    @property
    def rows_bytes(self) -> int:
        """Of all rows of a version."""
        setting = self.setting
        return setting.num_tables * setting.num_rows * setting.dim * 4

    def swap(self, publisher: ModelPublisher) -> None:
        """Publish other weights, and return once the broker has them."""
        with torch.no_grad():
            for parameter in self.model.over_arch.parameters():
                parameter.mul_(1.001)
        self.version += 1
        publisher.publish(self.version)
        publisher.flush()

    def stage(self, num_versions: int) -> list[int]:
        """Write versions beside the folder of models, while nothing is measured."""
        first = self.version // _VERSIONS_APART + 1
        numbers = [n * _VERSIONS_APART for n in range(first, first + num_versions)]
        for number in numbers:
            self._deploy(self._staged, number)
        return numbers

    def load(self, number: int, url: str) -> None:
        """Put a staged version into the folder of models, and have the server load it."""
        os.rename(self._staged / "m" / str(number), self.models / "m" / str(number))
        path = f"http://{url}/v2/repository/models/m/load"
        with urllib.request.urlopen(path, data=b"{}", timeout=_LIMIT_SECONDS):
            self.version = number

    def discard(self) -> None:
        """Delete the folders of versions that are not the last, and what is staged."""
        shutil.rmtree(self._staged, ignore_errors=True)
        for folder in (self.models / "m").iterdir():
            if folder.name != str(self.version // _VERSIONS_APART * _VERSIONS_APART or 1):
                shutil.rmtree(folder)

    def _deploy(self, folder: Path, version: int) -> None:
        deploy(self.model, folder, name="m", version=version, examples=self._examples)


@contextlib.contextmanager
def _server(models: Path, brokers: str, log: Path) -> Iterator[str]:
    """The address, ``host:port``, of a server that is ready, and logs into a file."""
    addresses = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command = [sys.executable, "-m", "torchembed.serving", "--models", str(models), *addresses]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, "--kafka", brokers],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdout is not None
        url = ""
        for line in process.stdout:
            if line.startswith("http: "):
                url = line.removeprefix("http: ").strip()
            if line.strip() == "ready":
                break
        else:
            raise RuntimeError(f"the server ended before it was ready: {log.read_text()}")
        try:
            yield url
        finally:
            process.terminate()


@contextlib.contextmanager
def _changing(change: Callable[[], object], interval_seconds: float) -> Iterator[list[float]]:
    """Make a change again and again, until it raises ``StopIteration``, in a thread; gives the
    seconds that each took."""
    ended, seconds, failures = threading.Event(), list[float](), list[Exception]()

    def change_on() -> None:
        try:
            while not ended.wait(interval_seconds):
                begin = time.perf_counter()
                change()
                seconds.append(time.perf_counter() - begin)
        except StopIteration:
            pass  # the load lasts longer than what was prepared to change
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=change_on)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


class _Asking:
    """Asks a server."""

    def __init__(self, url: str, setting: Setting) -> None:
        self._url, self._setting = url, setting
        with self._client() as client:
            made = MadeRequests(
                client.inputs(), batch_size=setting.batch_size, num_ids=setting.num_rows
            )
            self._requests = [client.prepared(made.make()) for _ in range(_NUM_REQUESTS)]
            for request in self._requests:
                client.ask(request)

    def measured(
        self, change: Callable[[], object] = lambda: None, interval_seconds: float = 1e9
    ) -> _Measured:
        """Ask for some time, while ``change`` is called at intervals."""
        setting = self._setting
        with _changing(change, interval_seconds) as change_seconds:
            load = run_load(
                self._connect,
                setting.num_clients,
                self._requests,
                seconds=setting.seconds,
                rate=setting.rate,
            )
        return _Measured(load, change_seconds)

    def wait_for(self, version: int) -> None:
        """Return once a version answers."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        with self._client() as client:
            while (found := client.version(self._requests[0])) != str(version):
                assert time.monotonic() < deadline, (found, version)
                time.sleep(0.01)

    def _client(self) -> OipClient:
        return OipClient(self._url, "http", "m")

    @contextlib.contextmanager
    def _connect(self) -> Iterator[Callable[[list[Any]], None]]:
        with self._client() as client:
            yield client.ask


def main(setting: Setting) -> int:
    """Measure, and print; 1 where a request failed."""
    import confluent_kafka

    torch.set_num_threads(1)
    broker = confluent_kafka.Producer({"test.mock.num.brokers": "1"})
    (address,) = broker.list_topics(timeout=10).brokers.values()
    brokers = f"{address.host}:{address.port}"
    found: dict[str, list[_Measured]] = {"nothing": [], "swaps": [], "versions": []}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        bench = _Bench(setting, Path(folder))
        publisher = ModelPublisher(bench.model, "m", brokers, is_deployed=True)
        stack.enter_context(publisher)
        # Its topic must be there when the server looks for topics.
        bench.swap(publisher)
        url = stack.enter_context(_server(bench.models, brokers, Path(folder) / "log"))
        asking = _Asking(url, setting)
        swap = functools.partial(bench.swap, publisher)
        print(
            f"{bench.dense_bytes} bytes of weights, {bench.rows_bytes} of rows; "
            f"{setting.rate:g} requests/s of {setting.batch_size} samples, "
            f"{setting.rounds} rounds of {setting.seconds:g} s"
        )
        for _ in range(setting.rounds):
            asking.wait_for(bench.version)
            found["nothing"].append(asking.measured())
            found["swaps"].append(asking.measured(swap, setting.swap_interval_seconds))
            asking.wait_for(bench.version)
            # The last request may be answered behind the end, and one more version loaded by then.
            most = int(setting.seconds / setting.load_interval_seconds) + 1
            load = _each(iter(bench.stage(most)), lambda number: bench.load(number, url))
            found["versions"].append(asking.measured(load, setting.load_interval_seconds))
            asking.wait_for(bench.version)
            bench.discard()
    return _report(found)


def _each(numbers: Iterator[int], change: Callable[[int], object]) -> Callable[[], object]:
    """Calls ``change`` with the next of ``numbers`` at each call."""
    return lambda: change(next(numbers))


def _report(found: dict[str, list[_Measured]]) -> int:
    print(
        f"{'changes':>9} {'number':>6} {'ms each':>8} {'requests':>9} {'failed':>6} "
        f"{'p50 ms':>8} {'p99 ms':>8} {'ratio':>6} {'of rounds':>12}"
    )
    num_failed = 0
    for name, rounds in found.items():
        loads = [measured.load for measured in rounds]
        seconds = [s for measured in rounds for s in measured.change_seconds]
        ratios = [
            load.latencies.p99 / quiet.load.latencies.p99
            for load, quiet in zip(loads, found["nothing"], strict=True)
        ]
        failed = sum(load.num_failed for load in loads)
        num_failed += failed
        for load in loads:
            if load.num_failed:
                print(load.first_failure)
        print(
            f"{name:>9} {len(seconds):6} {1000 * statistics.fmean(seconds or [0.0]):8.1f} "
            f"{sum(load.num_requests for load in loads):9} {failed:6} "
            f"{statistics.median(load.latencies.p50 for load in loads):8.2f} "
            f"{statistics.median(load.latencies.p99 for load in loads):8.2f} "
            f"{statistics.median(ratios):6.2f} {f'{min(ratios):.2f}-{max(ratios):.2f}':>12}"
        )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Setting)))
