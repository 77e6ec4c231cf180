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

from recipes.live.broker import own_broker
from recipes.live.following import follow, running_trainer
from recipes.live.trainer import can_train, num_ids
from recipes.output import RUNS, earlier_arguments, newest_run
from recipes.registry import RECIPES
from recipes.train import parse
from torchembed.serving.__main__ import make_parser
from torchembed.serving.models import deploy, versions_in
from torchembed.training import CheckpointFolder

_SERVED = tuple(name for name, recipe in RECIPES.items() if recipe.served is not None)
_MODELS = RUNS / "serving" / "models"


class DeployedRun(NamedTuple):
    """A run that was deployed.

    Attributes:
        name: of the model.
        version: the newest one of it.
        request: a JSON file with a request of two samples.
    """

    name: str
    version: int
    request: Path


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
        "--dense-dtype",
        choices=("float16", "bfloat16"),
        help="deploy the dense part in 16 bits",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="train the run on, publish it, ask the server, and show how it follows",
    )
    parser.add_argument("--kafka", metavar="BROKERS", help="of updates; --live makes its own")
    given, flags = parser.parse_known_args(arguments)
    if given.live and not can_train(given.recipe):
        parser.error(
            f"--live must be left out for {given.recipe}, since only a run of dlrm_dcnv2 can be "
            "trained on beside its server"
        )
    # Before a run is trained for a server that could not start.
    make_parser().parse_args(flags)
    try:
        run = given.run or newest_or_trained(given.recipe)
        dense_dtype = given.dense_dtype and getattr(torch, given.dense_dtype)
        served = deploy_run(given.recipe, run, given.models, dense_dtype)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"python -m recipes.serve: {error}") from error
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
        for output, numbers in ask(url, served.request.read_bytes()).items():
            print(f"{output} of two samples: {numbers}", flush=True)
        print(f"serving at http://{address}; ask it again with\n", flush=True)
        print(f"  curl -s {url} -d @{served.request}\n", flush=True)
        if given.live:
            assert brokers is not None
            stack.enter_context(
                running_trainer(given.recipe, run, brokers, served.name, served.version)
            )
            picture = given.models.parent / "live.png"
            print(f"the picture of what follows is {picture}", flush=True)
            known_ids = num_ids(_config_of(given.recipe, run))
            follow(address, served.name, known_ids, picture, server.is_ending)
        return server.process.wait()


def newest_or_trained(recipe: str) -> Path:
    """The newest run of a recipe that has saved a checkpoint; trains one where there is none.

    Raises:
        SystemExit: where training ends with an error, which it has printed, or a signal stops it.
    """
    with contextlib.suppress(FileNotFoundError):
        folder = newest_run(recipe)
        saved = (folder / "checkpoint", *folder.glob("seed-*/checkpoint"))
        if any(CheckpointFolder(path).steps() for path in saved):
            return folder
    print(f"{RUNS} holds no run of {recipe} yet: training one", flush=True)
    trained = subprocess.run([sys.executable, "-m", "recipes.train", recipe], check=False)
    if trained.returncode:
        raise SystemExit(trained.returncode)
    return newest_run(recipe)


def deploy_run(
    recipe: str, run: Path, models: Path, dense_dtype: torch.dtype | None = None
) -> DeployedRun:
    """Deploy the newest checkpoint of a run, or of its best seed, as the newest version of the
    recipe's model, unless it is that already; ``dense_dtype`` is that of
    :func:`~torchembed.serving.models.deploy`.

    The version is the checkpoint's number of steps, or the next one after the newest version where
    that is no smaller, as after another run. A file beside ``models`` says which checkpoint the
    newest version is of.

    Raises:
        FileNotFoundError: where the run has saved no checkpoint.
    """
    make_served = RECIPES[recipe].served
    assert make_served is not None
    served = make_served(_config_of(recipe, run), run)
    newest = max(versions_in(models, recipe), default=0)
    record = models.parent / f"{recipe}.deployed.json"
    deployed = {
        "checkpoints": str(served.checkpoints.resolve()),
        "num_steps": served.num_steps,
        "dense_dtype": None if dense_dtype is None else str(dense_dtype),
    }
    if newest == 0 or _read_record(record) != {"version": newest, **deployed}:
        newest = max(served.num_steps, newest + 1)
        deploy(
            served.load_model(),
            models,
            name=recipe,
            version=newest,
            examples=served.examples,
            output=served.output,
            output_names=served.output_names,
            dense_dtype=dense_dtype,
        )
        record.write_text(json.dumps({"version": newest, **deployed}) + "\n")
    inputs = [_as_json(name, values) for name, values in served.request.items()]
    request = models.parent / f"{recipe}.json"
    request.write_text(json.dumps({"inputs": inputs}))
    return DeployedRun(recipe, newest, request)


def _read_record(path: Path) -> object:
    """The record of the newest version; None where there is none."""
    return json.loads(path.read_text()) if path.is_file() else None


def _config_of(recipe: str, run: Path) -> Any:
    """The config with which a run was started."""
    return parse([recipe, *earlier_arguments(run, recipe, "--run")]).config


def _as_json(name: str, values: torch.Tensor) -> dict[str, Any]:
    """An input of a request in the open inference protocol."""
    data = values.flatten().tolist()
    if values.is_floating_point():
        data = [round(value, 6) for value in data]
    return {
        "name": name,
        "datatype": _DATATYPES[values.dtype],
        "shape": list(values.shape),
        "data": data,
    }


_DATATYPES = {torch.float32: "FP32", torch.int32: "INT32", torch.int64: "INT64"}


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


def ask(url: str, request: bytes) -> dict[str, list[float]]:
    """The outputs of an answer to a JSON request, flat, by name."""
    with urllib.request.urlopen(url, data=request, timeout=60) as response:
        answer = json.load(response)
    return {output["name"]: output["data"] for output in answer["outputs"]}


if __name__ == "__main__":
    sys.exit(main())
