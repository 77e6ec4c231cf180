"""A training run that saves checkpoints, resumes from the last one, and can be killed."""

import contextlib
import functools
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.fork_server import fork_server
from tests.support.tiny_model import KEYS, TinyModel, make_batch, make_optimizers, step_by_hand
from torchembed import LFU, Disk, Dynamic, EmbeddingBagConfig, HostMemory, MinimumCount
from torchembed.core import ranks
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline

LOSS = F.binary_cross_entropy_with_logits
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
"""Python's audit events of what changes files."""


class DataPosition:
    """How many batches were taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def table_config(
    *, name: str, num_embeddings: int, disk: Path | None = None, **others: Any
) -> EmbeddingBagConfig:
    """A static table in host memory, and a dynamic one that has rows for some of its ids only; both
    on disk where a folder for them is given, and most of their rows nowhere else."""
    dynamic, storage = None, None
    if name == KEYS[0]:
        storage = HostMemory(cache_rows=num_embeddings // 2)
    if disk is not None:
        storage = Disk(path=disk, host_rows=13, cache_rows=7)
    if name == KEYS[1]:
        num_embeddings //= 2
        dynamic = Dynamic(eviction=LFU(), admission=MinimumCount(2))
    return EmbeddingBagConfig(
        name=name, num_embeddings=num_embeddings, dynamic=dynamic, storage=storage, **others
    )


def new_run(disk: Path | None = None) -> TrainingRun:
    """Row-wise where there is a process group; with a schedule and a position, and with dropout
    where tables are not on disk: its random numbers would keep a pipeline from capturing steps."""
    device = "meta" if dist.is_initialized() else None
    config = functools.partial(table_config, disk=disk)
    model = TinyModel(is_deep=True, device=device, config=config)
    dropout = nn.Dropout(0.25 if disk is None else 0.0)
    model.dense = nn.Sequential(nn.Linear(10, 8), dropout, nn.Linear(8, 1))
    if dist.is_initialized():
        plan = {f"tables.embedding_bags.{key}": "row_wise" for key in KEYS}
        torchembed.shard_embeddings(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    optimizers = make_optimizers(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], gamma=0.97)
    return TrainingRun(
        model=model,
        optimizers=optimizers,
        others={"schedule": schedule, "position": DataPosition()},
    )


def train_and_save(
    folder: Path,
    log: Path,
    *,
    num_steps: int,
    save_every: int,
    wait: bool,
    disk: Path | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Go on from the last checkpoint in ``folder``; each step's loss is added to ``log``, and
    ``after_step`` is called then.

    Tables on ``disk`` are trained by a pipeline, which brings the rows of the next batch in while
    it trains one, but reads no batch beyond the next checkpoint; without, steps are taken by hand.
    """
    rank = ranks.rank()
    run = new_run(disk)
    torch.manual_seed(100 + rank)  # each rank drops others
    run.model.train()
    checkpoints = CheckpointFolder(folder)
    checkpoints.load(run)
    position = run.others["position"]
    assert isinstance(position, DataPosition)
    batches = (
        make_batch(4 if disk is None else 2, seed=1000 * rank + number)
        for number in range(position.num_taken, num_steps)
    )
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(log.open("a"))
        pipeline, until_saved = None, iter(())
        if disk is not None:
            pipeline = stack.enter_context(
                TrainPipeline(run.model, LOSS, run.optimizers, device="cpu", capture=True)
            )
        while position.num_taken < num_steps:
            if position.num_taken % save_every == 0:
                until_saved = itertools.islice(batches, save_every)
            if pipeline is None:
                loss = step_by_hand(run.model, LOSS, run.optimizers, next(until_saved))
            else:
                loss = pipeline.progress(until_saved).loss
            run.others["schedule"].step()  # type: ignore[attr-defined]
            position.num_taken += 1
            print(json.dumps([position.num_taken, loss.item().hex()]), file=lines, flush=True)
            after_step()
            if position.num_taken % save_every == 0:
                checkpoints.save(position.num_taken, run, wait=wait)
    checkpoints.wait()


class InFiles(NamedTuple):
    """The end of a process just before its ``num_events``-th change of files there."""

    num_events: int
    folder: Path


class AfterSteps(NamedTuple):
    """The end of a process some time after so many of its steps, whatever it does by then."""

    num_steps: int
    seconds: float


def die_in_files(num_events: int, folder: Path) -> None:
    """Let this process kill itself as :class:`InFiles` says."""
    left, lock = [num_events], threading.Lock()

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and "w" not in str(arguments[1]):
            return
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def dying_after(num_steps: int, seconds: float) -> Callable[[], None]:
    """To be called after each step of this process, which is killed as :class:`AfterSteps` says."""
    steps = itertools.count(1)

    def after_step() -> None:
        if next(steps) == num_steps:
            end = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
            end.daemon = True
            end.start()

    return after_step


def _rank_main(
    rank: int,
    num_ranks: int,
    store: Path,
    fatal: InFiles | AfterSteps | None,
    arguments: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", rank=rank, world_size=num_ranks, store=dist.FileStore(str(store), num_ranks)
        )
    if isinstance(fatal, InFiles):
        die_in_files(*fatal)
    elif isinstance(fatal, AfterSteps):
        arguments["after_step"] = dying_after(*fatal)
    log = arguments.pop("log")
    train_and_save(log=log.with_suffix(f".{rank}"), **arguments)
    if num_ranks > 1:
        dist.destroy_process_group()


class Launcher:
    """Starts ranks quickly: they are forked from a process that has imported all that they need."""

    def __init__(self) -> None:
        self.context = fork_server()

    def start(
        self, num_ranks: int, store: Path, fatal: dict[int, Any], **arguments: Any
    ) -> list[ForkServerProcess]:
        """``train_and_save(**arguments)`` on each rank, of which some end as ``fatal`` says."""
        processes = [
            self.context.Process(
                target=_rank_main,
                args=(rank, num_ranks, store, fatal.get(rank), arguments),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        return processes
