"""A server that is asked, updated and given new dense parts and versions, all at once, for long.

Each value of a model says which version it is of: a row is ``1000 * version + update`` in all of
its columns, and so is each weight of the dense part.
"""

import contextlib
import itertools
import logging
import os
import shutil
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn

import torchembed
from tests.support.kafka_brokers import running_brokers
from tests.support.server_processes import running_server
from tests.support.waiting import LIMIT_SECONDS, wait_until
from torchembed.serving.models import deploy
from torchembed.serving.protocols.model_totals import _MAX_VERSIONS
from torchembed.training import ModelPublisher

pytest.importorskip("tritonclient.http")
pytest.importorskip("rocksdict")

SECONDS = float(os.environ.get("TORCHEMBED_SOAK_SECONDS", "6"))
NUM_ROWS, DIM, NUM_WEIGHTS, NUM_SAMPLES = 5000, 16, 64, 32
PER_VERSION = 1000
"""Updates of a version that values can tell apart: float32 holds all integers below 2**24."""
MAX_VERSIONS = 2**24 // PER_VERSION
MAX_GROWTH_BYTES = 96 << 20
"""By which the arenas of the threads' allocator may differ from one time to another. An hour has
some thousand versions, each with rows of 320 kB and a program of as much at least."""
CONFIG = """
models:
  - {name: m, rows: version, num_latest_versions: 2, cache: {share: 0.5}}
"""


class Stamped(nn.Module):
    """Gives rows and dense part back, so that an answer shows what it was made of."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        self.weights = nn.Parameter(torch.zeros(NUM_WEIGHTS))
        self.stamp(version, 0)

    def stamp(self, version: int, update: int) -> None:
        value = float(PER_VERSION * version + update % PER_VERSION)
        with torch.no_grad():
            self.items.weight.fill_(value)
            self.weights.fill_(value)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        rows = self.items(ids)
        return {"rows": rows, "dense": rows[:, :1] * 0 + self.weights}


class Load:
    """Threads that ask on and on, and what they saw."""

    def __init__(self, http: str, grpc: str) -> None:
        self._addresses = {"http": http, "grpc": grpc}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.num_requests = 0
        self.failures: list[str] = []
        self.stamps: Counter[str] = Counter()
        """Answers by version."""
        self.dense_stamps: set[int] = set()
        self.row_stamps: set[int] = set()

    @contextlib.contextmanager
    def running(self, num_threads: int) -> Iterator[None]:
        protocols = itertools.islice(itertools.cycle(self._addresses), num_threads)
        threads = [
            threading.Thread(target=self._ask_on, args=(protocol, seed))
            for seed, protocol in enumerate(protocols)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def has_seen_changes(self) -> bool:
        """Whether answers were of several versions, of more dense parts and of more rows."""
        with self._lock:
            num_versions = len(self.stamps)
            return num_versions >= 3 and num_versions < min(
                len(self.dense_stamps), len(self.row_stamps)
            )

    def _ask_on(self, protocol: str, seed: int) -> None:
        import tritonclient.grpc
        import tritonclient.http

        module: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
        client, random = (
            module.InferenceServerClient(self._addresses[protocol]),
            np.random.default_rng(seed),
        )
        while not self._ended.is_set():
            ids = module.InferInput("ids", [NUM_SAMPLES, 1], "INT64")
            ids.set_data_from_numpy(random.integers(0, NUM_ROWS, (NUM_SAMPLES, 1)))
            try:
                answer = client.infer("m", [ids])
                response = answer.get_response()
                is_dict = isinstance(response, dict)
                version = response["model_version"] if is_dict else response.model_version
                self._check(version, answer)
            except Exception as error:  # noqa: BLE001 - reported by the test
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}")
        client.close()

    def _check(self, version: str, answer: Any) -> None:
        rows, dense = answer.as_numpy("rows"), answer.as_numpy("dense")
        # A row is of one update; rows of one version may be of several, which come one by one.
        assert (rows == rows[:, :1]).all(), f"a row is torn: {rows}"
        assert (dense == dense[:1, :1]).all(), f"a dense part is torn: {dense}"
        stamps = {int(value) for value in {*rows[:, 0].tolist(), dense[0, 0]}}
        assert {stamp // PER_VERSION for stamp in stamps} == {int(version)}, (version, stamps)
        assert not answer.as_numpy("default_rows").any()
        with self._lock:
            self.num_requests += 1
            self.stamps[version] += 1
            self.row_stamps.update(int(value) for value in rows[:, 0].tolist())
            self.dense_stamps.add(int(dense[0, 0]))


class Change(NamedTuple):
    """What a thread changes until it is told to end."""

    seconds: float
    change: Callable[[], None]


@contextlib.contextmanager
def changing(*changes: Change) -> Iterator[list[BaseException]]:
    """Make each of the changes over and over, each in a thread of its own; gives their errors."""
    ended, failures = threading.Event(), list[BaseException]()

    def change_on(change: Change) -> None:
        try:
            while not ended.wait(change.seconds):
                change.change()
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=change_on, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def totals(address: str) -> Counter[str]:
    """The sums of a server's metrics over their labels."""
    sums: Counter[str] = Counter()
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                sums[sample.name] += sample.value  # type: ignore[assignment]
    return sums


def answers_by_version(address: str) -> dict[str, float]:
    """The requests that were answered, of each version that a server holds the counts of."""
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    name = "nv_inference_request_success"
    return {sample.labels["version"]: sample.value for sample in samples if sample.name == name}


@pytest.mark.timeout(SECONDS + 900)
def test_nothing_fails_is_torn_or_grows(tmp_path: Path) -> None:
    import tritonclient.http

    models, config = tmp_path / "models", tmp_path / "server.yaml"
    config.write_text(CONFIG)
    model = Stamped(1)
    examples = torch.zeros(3, 1, dtype=torch.int64)
    deploy(model, models, name="m", version=1, examples=examples)
    version, update, published = 1, 0, 0
    version_lock = threading.Lock()
    with running_brokers() as brokers, contextlib.ExitStack() as stack:
        publisher = stack.enter_context(ModelPublisher(model, "m", brokers.addresses))
        publisher.publish(1, whole=True)
        publisher.flush()
        flags = ("--config", str(config), "--kafka", brokers.addresses)
        rows = ("--persistent", str(tmp_path / "stored"))
        server = stack.enter_context(running_server(models, tmp_path / "log", *flags, *rows))
        process = psutil.Process(server.process.pid)
        load = Load(server.http, server.grpc)

        def publish() -> None:
            nonlocal update, published
            with version_lock:
                update += 1
                model.stamp(version, update)
                publisher.publish(version, whole=True)
                publisher.flush()
                published += 1

        def replace() -> None:
            nonlocal version
            # The folder is written beside the publisher, which goes on with the version before.
            with version_lock:
                version += 1
                assert version < MAX_VERSIONS, "raise PER_VERSION's room for a longer soak"
                model.stamp(version, 0)
                deploy(model, models, name="m", version=version, examples=examples)
            client = tritonclient.http.InferenceServerClient(server.http, network_timeout=120)
            client.load_model("m")
            client.close()
            shutil.rmtree(models / "m" / str(version - 2), ignore_errors=True)

        memory: list[int] = []
        with load.running(3), changing(Change(0.2, publish), Change(1.0, replace)) as failures:
            began = time.monotonic()
            # Short runs go on until they have shown what they are for: versions, and in them dense
            # parts that were swapped and rows that were updated.
            while time.monotonic() < began + SECONDS or not load.has_seen_changes():
                memory.append(process.memory_info().rss)
                assert not failures, failures
                assert not load.failures, (load.failures[:3], server.log.read_text()[-3000:])
                assert time.monotonic() < began + SECONDS + LIMIT_SECONDS
                time.sleep(0.25)
        assert not failures and not load.failures, (failures, load.failures[:3])
        warm = memory[: len(memory) // 3]
        series = [n >> 20 for n in memory[:: max(1, len(memory) // 30)]]
        logging.getLogger(__name__).info("megabytes over time: %s", series)
        growth = max(memory[-max(1, len(memory) // 3) :]) - max(warm)
        assert growth < MAX_GROWTH_BYTES, [n >> 20 for n in memory]

        def is_settled() -> bool:
            # A server holds the counts of the versions that were asked last.
            held = answers_by_version(server.http)
            return len(held) == min(len(load.stamps), _MAX_VERSIONS) and all(
                count == load.stamps[version] for version, count in held.items()
            )

        wait_until(is_settled)
        found = totals(server.http)
        num_held = sum(answers_by_version(server.http).values())
        assert found["nv_inference_count"] == NUM_SAMPLES * num_held
        assert found["nv_inference_request_failure"] == found["torchembed_default_rows_total"] == 0
        assert found["torchembed_requests_in_progress"] == 1  # for these metrics
        assert found["torchembed_refused_requests_total"] == 0
        assert found["torchembed_failed_metric_reads_total"] == 0
        assert found["torchembed_lookup_keys_total"] == (
            found["torchembed_cache_hits_total"] + found["torchembed_cache_misses_total"]
        )
        summary = {
            "seconds": round(time.monotonic() - began),
            "requests": load.num_requests,
            "versions": version,
            "published": published,
            "dense parts seen": len(load.dense_stamps),
            "megabytes": [memory[0] >> 20, max(warm) >> 20, memory[-1] >> 20],
        }
        logging.getLogger(__name__).info("%s", summary)
        assert server.end() == 0
