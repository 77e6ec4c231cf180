"""A trainer beside a server, and a load that asks the server meanwhile."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes.live.view import LivePoint, Totals, freshness, hit_rate, plot
from torchembed.serving.bench.load import run_load
from torchembed.serving.bench.made_requests import MadeRequests
from torchembed.serving.bench.oip_client import OipClient

_BATCH_SIZE, _NUM_CLIENTS, _RATE = 32, 2, 20.0
_NUM_REQUESTS = 64
"""Different requests that are sent in turn."""
_WINDOW_SECONDS = 2.0
"""Of a line of the view."""


@contextlib.contextmanager
def running_trainer(
    recipe: str, run: Path, brokers: str, name: str, version: int
) -> Iterator[None]:
    """A process that trains a run on and publishes it, ended with the context.

    Args:
        name: of the deployed model.
        version: that is deployed of it.
    """
    command = [sys.executable, "-m", "recipes.live.trainer", recipe, str(run)]
    command += ["--kafka", brokers, "--name", name, "--version", str(version)]
    # The server and the load want processors, too.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def follow(
    address: str, name: str, num_ids: int, picture: Path, is_over: Callable[[], bool]
) -> list[LivePoint]:
    """Ask a server and show how it follows, until ``is_over``; the picture is drawn anew with each
    line.

    Args:
        address: of the server, for HTTP.
        name: of the model.
        num_ids: ids of requests are below this.
    """

    @contextlib.contextmanager
    def connect() -> Iterator[Callable[[list[Any]], None]]:
        with OipClient(address, "http", name) as client:
            yield client.ask

    with OipClient(address, "http", name) as client:
        made = MadeRequests(client.inputs(), batch_size=_BATCH_SIZE, num_ids=num_ids)
        requests = [client.prepared(made.make()) for _ in range(_NUM_REQUESTS)]
        points: list[LivePoint] = []
        begin, before = time.perf_counter(), Totals.read(address)
        while not is_over():
            try:
                load = run_load(
                    connect, _NUM_CLIENTS, requests, seconds=_WINDOW_SECONDS, rate=_RATE
                )
                after, version = Totals.read(address), client.version(requests[0])
            except (OSError, RuntimeError):
                if is_over():
                    break
                raise
            point = LivePoint(
                seconds=time.perf_counter() - begin,
                version=version,
                requests_per_second=load.requests_per_second,
                p50_milliseconds=load.latencies.p50,
                p99_milliseconds=load.latencies.p99,
                rows_per_second=(after.num_rows - before.num_rows) / load.seconds,
                freshness_seconds=freshness(before, after),
                hit_rate=hit_rate(before, after),
                num_failed=load.num_failed,
            )
            before = after
            points.append(point)
            print(point, flush=True)
            plot(points, picture)
    return points
