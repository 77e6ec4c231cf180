"""``python -m bench.serving.servers``: servers of one model, asked in turn by the same clients.

They may be ``python -m torchembed.serving`` and NVIDIA's Triton over a repository that
``python -m torchembed.serving.triton`` wrote, since both speak the Open Inference Protocol.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchembed.serving.bench.load import LoadResult, run_load
from torchembed.serving.bench.made_requests import MadeRequests
from torchembed.serving.bench.oip_client import OipClient

_NUM_REQUESTS = 64
"""Different requests that are sent in turn."""
_NUM_WARM_UP = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print medians over rounds, and the first server's over each other one's."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.servers",
        description="Ask servers of one model in turn, with the same clients and requests.",
    )
    parser.add_argument("--servers", nargs="+", required=True, metavar="NAME=HOST:PORT")
    parser.add_argument("--model", required=True, help="its name")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32, 1024])
    parser.add_argument("--clients", type=int, default=4, help="that ask at the same time")
    parser.add_argument("--num-ids", type=int, default=1000, help="ids are below this")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each server in a round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    urls: dict[str, str] = {}
    for server in given.servers:
        name, _, url = server.partition("=")
        if not url:
            parser.error(f"--servers must be NAME=HOST:PORT, got {server!r}")
        urls[name] = url
    width = max(map(len, urls)) + len("ratio to ")
    numbers = f"{'requests/s':>11} {'p50 ms':>8} {'p99 ms':>8} {'failed':>7}"
    print(f"{'samples':>8} {'server':{width}} {numbers}")
    num_failed = 0
    for batch_size in given.batch_sizes:
        found: dict[str, list[LoadResult]] = {name: [] for name in urls}
        for _ in range(given.rounds):
            for name, url in urls.items():
                found[name].append(_asked(url, batch_size, given))
        medians = {name: _medians(results) for name, results in found.items()}
        for name, (rate, p50, p99) in medians.items():
            failed = sum(result.num_failed for result in found[name])
            num_failed += failed
            print(f"{batch_size:8} {name:{width}} {rate:11.1f} {p50:8.2f} {p99:8.2f} {failed:7}")
        first, *others = medians
        for other in others:
            ratios = [a / b for a, b in zip(medians[first], medians[other], strict=True)]
            row = f"{ratios[0]:11.2f} {ratios[1]:8.2f} {ratios[2]:8.2f}"
            print(f"{batch_size:8} {f'ratio to {other}':{width}} {row}")
    return 1 if num_failed else 0


def _asked(url: str, batch_size: int, given: argparse.Namespace) -> LoadResult:
    @contextlib.contextmanager
    def connect() -> Iterator[Callable[[list[Any]], None]]:
        with OipClient(url, given.protocol, given.model) as client:
            yield client.ask

    with OipClient(url, given.protocol, given.model) as client:
        made = MadeRequests(client.inputs(), batch_size=batch_size, num_ids=given.num_ids)
        requests = [client.prepared(made.make()) for _ in range(_NUM_REQUESTS)]
        for request in requests[:_NUM_WARM_UP]:
            client.ask(request)
    return run_load(connect, given.clients, requests, seconds=given.seconds)


def _medians(results: Sequence[LoadResult]) -> tuple[float, float, float]:
    """Requests a second, p50 and p99 in milliseconds."""
    return (
        statistics.median(result.requests_per_second for result in results),
        statistics.median(result.latencies.p50 for result in results),
        statistics.median(result.latencies.p99 for result in results),
    )


if __name__ == "__main__":
    sys.exit(main())
