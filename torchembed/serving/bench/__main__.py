"""``python -m torchembed.serving.bench``: loads a server, or measures a model without one."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchembed.serving.bench.in_process import InProcessResult, measure
from torchembed.serving.bench.latencies import Latencies
from torchembed.serving.bench.load import LoadResult, run_load
from torchembed.serving.bench.made_requests import MadeRequests
from torchembed.serving.bench.oip_client import OipClient
from torchembed.serving.bench.stages import hit_rate, milliseconds_each, read_totals

_NUM_REQUESTS = 64
"""Different requests that are sent in turn."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table.

    Returns:
        The exit status: 1 where a request failed, 2 where nothing could be measured.
    """
    given = _parser().parse_args(arguments)
    if (given.url is None) == (given.in_process is None):
        print("give either --url or --in-process", file=sys.stderr)
        return 2
    if given.url is not None and len(given.batch_sizes) > 1:
        sizes = " ".join(map(str, given.batch_sizes))
        print(f"--batch-sizes must be one number with --url, got {sizes}", file=sys.stderr)
        return 2
    try:
        return _measure(given)
    except (ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
        print(f"torchembed.serving.bench: {error}", file=sys.stderr)
        return 2


def _measure(given: argparse.Namespace) -> int:
    if given.in_process is not None:
        results = list(_measured(given))
        report: dict[str, Any] = {"in_process": [_plain(result) for result in results]}
        num_failed = 0
    else:
        loaded, stages = _loaded(given)
        report = {"load": _plain(loaded), **stages}
        num_failed = loaded.num_failed
    report["arguments"] = {name: str(value) for name, value in vars(given).items()}
    if given.output is not None:
        given.output.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if num_failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchembed.serving.bench", description="Measure how fast a model answers."
    )
    parser.add_argument("--url", help="host:port of a server of the Open Inference Protocol")
    parser.add_argument("--in-process", type=Path, help="a folder of models, asked without server")
    parser.add_argument("--model", required=True)
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    parser.add_argument("--metrics", help="URL of a server's metrics, for the times of its stages")
    parser.add_argument("--batch-sizes", type=_count, nargs="+", default=[32], help="samples each")
    parser.add_argument("--clients", type=_count, default=4, help="that send at once")
    parser.add_argument("--rate", type=_positive, help="requests a second; without it, all that go")
    parser.add_argument("--seconds", type=_positive, default=5.0, help="for each batch size")
    parser.add_argument("--num-ids", type=_count, default=1000, help="ids are below this")
    parser.add_argument("--exponent", type=float, default=1.05, help="of the ids' Zipf law")
    parser.add_argument("--cached", type=float, default=1.0, help="in process: part of the rows")
    parser.add_argument("--device", default="cpu", help="in process: of cache and dense part")
    parser.add_argument("--output", type=Path, help="a JSON file for all figures")
    return parser


def _count(text: str) -> int:
    """A whole number from 1 on; for argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    """A number above 0; for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def _measured(given: argparse.Namespace) -> list[InProcessResult]:
    results = []
    print(f"{'samples':>8} {'hits':>6} {_HEADER} {'samples/s':>12}")
    for result in measure(
        given.in_process,
        given.model,
        given.batch_sizes,
        device=torch.device(given.device),
        cached_share=given.cached,
        seconds=given.seconds,
        num_ids=given.num_ids,
        exponent=given.exponent,
    ):
        line = f"{result.batch_size:8} {result.hit_rate:6.1%} {_text(result.answer)}"
        print(f"{line} {result.samples_per_second:12,.0f}", flush=True)
        results.append(result)
    return results


def _loaded(given: argparse.Namespace) -> tuple[LoadResult, dict[str, Any]]:
    """The load's result, and the times of the server's stages where it tells them."""
    (batch_size,) = given.batch_sizes

    @contextlib.contextmanager
    def connect() -> Iterator[Callable[[list[Any]], None]]:
        with OipClient(given.url, given.protocol, given.model) as client:
            yield client.ask

    with OipClient(given.url, given.protocol, given.model) as client:
        made = MadeRequests(
            client.inputs(), batch_size=batch_size, num_ids=given.num_ids, exponent=given.exponent
        )
        requests = [client.prepared(made.make()) for _ in range(_NUM_REQUESTS)]
        for request in requests[:8]:
            client.ask(request)
    before = read_totals(given.metrics) if given.metrics is not None else {}
    result = run_load(connect, given.clients, requests, seconds=given.seconds, rate=given.rate)
    after = read_totals(given.metrics) if given.metrics is not None else {}
    print(f"{'requests':>8} {'failed':>6} {_HEADER} {'requests/s':>12}")
    line = f"{result.num_requests:8} {result.num_failed:6} {_text(result.latencies)}"
    print(f"{line} {result.requests_per_second:12,.0f}")
    if result.num_failed:
        print(f"first failure: {result.first_failure}", file=sys.stderr)
    stages = milliseconds_each(before, after, result.num_requests)
    for name, milliseconds in stages.items():
        print(f"{name:>16} {milliseconds:9.3f} ms a request")
    return result, {"milliseconds_by_stage": stages, "hit_rate": hit_rate(before, after)}


_HEADER = f"{'mean ms':>9} {'p50':>9} {'p99':>9} {'p99.9':>9}"


def _text(found: Latencies) -> str:
    return f"{found.mean:9.3f} {found.p50:9.3f} {found.p99:9.3f} {found.p999:9.3f}"


def _plain(result: LoadResult | InProcessResult) -> dict[str, Any]:
    """``result`` as JSON has it."""
    return {
        name: value._asdict() if isinstance(value, Latencies) else value
        for name, value in result._asdict().items()
    }


if __name__ == "__main__":
    sys.exit(main())
