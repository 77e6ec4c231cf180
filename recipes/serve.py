"""Serves a trained run: ``python -m recipes.serve <recipe>``.

It takes the newest run of the recipe, or trains one where there is none, deploys its newest
checkpoint, starts ``python -m torchembed.serving``, and asks it one example. Flags that it does not
know are the server's.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.dlrm_dcnv2.run import build_model, open_split
from recipes.live.broker import own_broker
from recipes.live.following import follow, running_trainer
from recipes.output import RUNS, earlier_arguments, newest_run
from recipes.registry import RECIPES
from recipes.train import parse
from torchembed.data import Batch, Split
from torchembed.serving.models import deploy, versions_in
from torchembed.training import CheckpointFolder, TrainingRun

_SERVED = tuple(name for name in RECIPES if name.startswith("dlrm_dcnv2"))
_MODELS = RUNS / "serving" / "models"


class Served(NamedTuple):
    """A run that was deployed.

    Attributes:
        name: of the model.
        version: number of steps after which its checkpoint was saved.
        request: a JSON file with a request of two samples.
        num_ids: each table has at least so many.
    """

    name: str
    version: int
    request: Path
    num_ids: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Train where nothing was, deploy, and serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.serve",
        description="Serve the newest run of a recipe, or one that is trained first.",
        epilog="Other flags are those of python -m torchembed.serving.",
    )
    parser.add_argument("recipe", choices=_SERVED, metavar="RECIPE", help=", ".join(_SERVED))
    parser.add_argument("--run", type=Path, help="the run's folder, in place of the newest one")
    parser.add_argument("--models", type=Path, default=_MODELS, help="where it is deployed")
    parser.add_argument(
        "--live",
        action="store_true",
        help="train the run on, publish it, ask the server, and show how it follows",
    )
    parser.add_argument("--kafka", metavar="BROKERS", help="of updates; --live makes its own")
    given, flags = parser.parse_known_args(arguments)
    run = given.run or newest_or_trained(given.recipe)
    served = deploy_run(given.recipe, run, given.models)
    print(f"serving version {served.version} of {served.name}, from {run}", flush=True)
    with contextlib.ExitStack() as stack:
        brokers = given.kafka
        if brokers is None and given.live:
            brokers = stack.enter_context(own_broker())
        if brokers is not None:
            flags += ["--kafka", brokers]
        server = stack.enter_context(running_server(given.models, flags))
        address = server.address
        url = f"http://{address}/v2/models/{served.name}/infer"
        clicks = ask(url, served.request.read_bytes())
        print(f"the probabilities of two clicks: {clicks}", flush=True)
        print(f"serving at http://{address}; ask it again with\n", flush=True)
        print(f"  curl -s {url} -d @{served.request}\n", flush=True)
        if given.live:
            assert brokers is not None
            stack.enter_context(running_trainer(given.recipe, run, brokers, served.name))
            picture = given.models.parent / "live.png"
            print(f"the picture of what follows is {picture}", flush=True)
            follow(address, served.name, served.num_ids, picture, server.is_ending)
        return server.process.wait()


def newest_or_trained(recipe: str) -> Path:
    """The newest run of a recipe that has saved a checkpoint; trains one where there is none."""
    with contextlib.suppress(FileNotFoundError):
        folder = newest_run(recipe)
        if CheckpointFolder(folder / "checkpoint").steps():
            return folder
    print(f"{RUNS} holds no run of {recipe} yet: training one", flush=True)
    subprocess.run([sys.executable, "-m", "recipes.train", recipe], check=True)
    return newest_run(recipe)


def deploy_run(recipe: str, run: Path, models: Path) -> Served:
    """Deploy the newest checkpoint of a run, unless it is deployed; the version is its number of
    steps.

    Raises:
        FileNotFoundError: where the run has saved no checkpoint.
    """
    config = parse([recipe, *earlier_arguments(run, recipe)]).config
    assert isinstance(config, DlrmConfig)
    checkpoints = CheckpointFolder(run / "checkpoint")
    if not checkpoints.steps():
        raise FileNotFoundError(f"run {run} must have saved a checkpoint, and has none")
    name, version = "dlrm_dcnv2", checkpoints.steps()[-1]
    rows = open_split(config, Split.VALIDATION)
    batch = next(iter(rows))
    request = models.parent / f"{name}.json"
    if version not in versions_in(models, name):
        model = build_model(config, rows, torch.device("cpu"))
        checkpoints.load(TrainingRun(model=model), version)
        assert batch.dense is not None
        deploy(
            model,
            models,
            name=name,
            version=version,
            examples=(batch.dense, batch.sparse),
            output="sigmoid",
            output_names=["click"],
        )
    request.write_text(json.dumps(_request(batch)))
    return Served(name, version, request, min(rows.table_sizes))


def _request(batch: Batch) -> dict[str, Any]:
    """A request of the first two samples of a batch."""
    assert batch.dense is not None
    inputs = [_tensor("dense_features", "FP32", batch.dense[:2])]
    features = batch.sparse
    lengths = features.lengths()
    begins = lengths.flatten().cumsum(0).view_as(lengths) - lengths
    for key, counts, (begin, *_) in zip(features.keys, lengths, begins.tolist(), strict=True):
        ids = features.values[begin : begin + int(counts[:2].sum())]
        if features.hotness is None:
            inputs.append(_tensor(f"{key}.lengths", "INT32", counts[:2]))
        else:
            ids = ids.view(2, -1)
        inputs.append(_tensor(key, "INT64", ids))
    return {"inputs": inputs}


def _tensor(name: str, datatype: str, values: torch.Tensor) -> dict[str, Any]:
    data = [round(value, 6) if datatype == "FP32" else value for value in values.flatten().tolist()]
    return {"name": name, "datatype": datatype, "shape": list(values.shape), "data": data}


class RunningServer(NamedTuple):
    """A server that is ready.

    Attributes:
        process: in which it runs.
        address: for HTTP.
        signalled: set once it was told to end.
    """

    process: subprocess.Popen[str]
    address: str
    signalled: threading.Event

    def is_ending(self) -> bool:
        """True once it ends, or has ended."""
        return self.signalled.is_set() or self.process.poll() is not None


@contextlib.contextmanager
def running_server(models: Path, flags: Sequence[str]) -> Iterator[RunningServer]:
    """A server in a process of its own, which ends when this one is told to."""
    command = [sys.executable, "-m", "torchembed.serving", "--models", str(models), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None

    signalled = threading.Event()

    def end(number: int, _: object) -> None:
        signalled.set()
        process.send_signal(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        address = ""
        for line in process.stdout:
            if line.startswith("http: "):
                address = line.removeprefix("http: ").strip()
            if line.strip() == "ready":
                break
        else:
            raise SystemExit(process.wait())
        yield RunningServer(process, address, signalled)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.terminate()
        process.wait()
        process.stdout.close()


def ask(url: str, request: bytes) -> list[float]:
    """The output ``click`` of an answer to a JSON request."""
    with urllib.request.urlopen(url, data=request, timeout=60) as response:
        answer = json.load(response)
    (clicks,) = (output["data"] for output in answer["outputs"] if output["name"] == "click")
    return clicks


if __name__ == "__main__":
    sys.exit(main())
