"""DLRM-DCNv2 of MLPerf with all of its 204 M rows: made, trained, saved and resumed on real GPUs.

``torchrun --nproc-per-node 4 -m bench.training.full_model --folder /local/disk/checkpoints`` prints
seconds and GB/s. What was resumed must give, bit for bit, the losses of the run that went on.
"""

import contextlib
import dataclasses
import gc
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch.distributed.device_mesh import init_device_mesh

from bench.data import dlrm_dcnv2 as workload
from torchembed import EmbeddingBagCollection, optim, shard_embeddings
from torchembed.data import Batch
from torchembed.models import DLRM_DCNv2
from torchembed.tables import table_of
from torchembed.training import CheckpointFolder, TrainingRun, TrainPipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the model, its training and its checkpoint."""

    folder: Path
    """An empty or new folder, with room for one checkpoint; emptied at the end."""
    optimizer: Literal["Adagrad", "RowwiseAdagrad"] = "RowwiseAdagrad"
    """Optimizer of the tables. Adagrad's state is as large as the rows, row-wise Adagrad's is
    1/128."""
    max_rows: int | None = None
    """Tables are cut to this, where a machine has no room for all rows."""
    batch_size: int = 2048
    """Samples of each rank."""
    num_steps: int = 50
    """Before the checkpoint."""
    num_steps_after: int = 5
    """After it, twice: by the run that goes on and by the one that is resumed."""


class Run:
    """A model with its optimizers, and the losses of its steps."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        torch.manual_seed(0)
        model = DLRM_DCNv2(
            EmbeddingBagCollection(workload.table_configs(config.max_rows), device="meta"),
            workload.NUM_DENSE,
            workload.DENSE_ARCH,
            workload.OVER_ARCH,
            workload.NUM_CROSS_LAYERS,
            workload.LOW_RANK,
            dense_device=device,
        )
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        shard_embeddings(model, mesh, plan="auto")
        tables = [p for p in model.parameters() if table_of(p) is not None]
        dense = [p for p in model.parameters() if table_of(p) is None]
        optimizers: list[torch.optim.Optimizer] = [
            getattr(optim, config.optimizer)(tables or [{"params": []}], lr=0.004),
            optim.DenseAdagrad(dense, lr=0.004, eps=1e-8),
        ]
        self._pipeline = TrainPipeline(model, F.binary_cross_entropy_with_logits, optimizers)
        self.state = TrainingRun(model=model, optimizers=optimizers)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows and their optimizer states, over all ranks."""
        num_rows = sum(workload.table_sizes(self._config.max_rows))
        states = num_rows * (1 if self._config.optimizer == "RowwiseAdagrad" else workload.DIM)
        return (num_rows * workload.DIM + states) * torch.float32.itemsize

    def steps(self, first: int, num_steps: int) -> list[float]:
        """Train on batches that depend on step and rank alone; the losses."""
        batches = iter([self._batch(step) for step in range(first, first + num_steps)])
        return [float(self._pipeline.progress(batches).loss) for _ in range(num_steps)]

    def _batch(self, step: int) -> Batch:
        number = step * dist.get_world_size() + dist.get_rank()
        config = self._config
        batch = workload.make_batch("uniform", config.batch_size, config.max_rows, number)
        return batch.pin_memory() if self._device.type == "cuda" else batch


@contextlib.contextmanager
def timed(what: str, num_bytes: int = 0) -> Iterator[None]:
    """Print the seconds that the ranks took, and GB/s of ``num_bytes``."""
    dist.barrier()
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - start
    rate = f"  {num_bytes / seconds / 1e9:6.2f} GB/s" if num_bytes else ""
    say(f"{what:34} {seconds:8.2f} s{rate}")


def say(line: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def check_equal(resumed: list[float], went_on: list[float], how: str) -> None:
    """Raise ``AssertionError`` where a resumed run does not go on as the first one did."""
    if resumed != went_on:
        raise AssertionError(f"{how}: resumed losses {resumed} are not {went_on}")
    say(f"{how}: the resumed run's losses are the same: {[round(loss, 6) for loss in resumed]}")


def measure(config: Config, device: torch.device) -> None:
    """Train, save and resume, on ranks that have joined."""
    folder = CheckpointFolder(config.folder, keep=1)
    first, after = config.num_steps, config.num_steps_after

    with timed("made, sharded by the planner"):
        run = Run(config, device)
    size = run.num_bytes
    say(f"{size / 1e9:.1f} GB of rows and their state, {dist.get_world_size()} ranks")
    with timed(f"{first} steps, the first compile kernels"):
        losses = run.steps(0, first)
    say(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    with timed("saved", size):
        folder.save(first, run.state)
    went_on = run.steps(first, after)

    del run
    gc.collect()
    with timed("made again"):
        run = Run(config, device)
    with timed("loaded, checksums checked", size):
        assert folder.load(run.state) == first
    check_equal(run.steps(first, after), went_on, "after a save")

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(config.folder)
    with timed("asynchronous save: training waits", size):
        folder.save(first + after, run.state, wait=False)
    with timed("asynchronous save: the rest", size):
        went_on = run.steps(first + after, after)
        folder.wait()
    with timed("loaded, checksums checked", size):
        assert folder.load(run.state) == first + after
    check_equal(run.steps(first + after, after), went_on, "after an asynchronous save")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(config.folder)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    on_gpu, device = torch.cuda.is_available(), torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    measure(config, device)
    # Graphs that hold collectives are gone by now.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
