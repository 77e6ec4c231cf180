"""A script for ``torchrun``: two ranks train a tiny model, and one fails as its arguments say.

``raises``, ``is-killed`` or ``stalls`` (its GPU does, for minutes), on
``cpu`` or ``cuda``. There it happens once the steps are CUDA graphs. It says when, by the clock of
the machine.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

import torchembed
from tests.support.tiny_model import TinyModel, fixed_batch, make_optimizers
from torchembed.data import Batch
from torchembed.training import StopSignal, TrainPipeline, train

LAST_STEP = {"cpu": 3, "cuda": 20}
TIMEOUT_SECONDS = 5.0


def fail(how: str) -> None:
    sys.stdout.write(f"fails at {time.monotonic()} s\n")
    sys.stdout.flush()
    if how == "raises":
        raise RuntimeError("the third batch is bad")
    if how == "is-killed":
        os.kill(os.getpid(), signal.SIGKILL)
    assert how == "stalls"
    torch.cuda._sleep(1 << 40)  # cycles: minutes


def batches(how: str, pipeline: TrainPipeline) -> Iterator[Batch]:
    rank, device = dist.get_rank(), pipeline.device.type
    for step in range(100_000):
        if step == LAST_STEP[device] and rank == 1:
            assert pipeline.engine.is_captured == (device == "cuda")
            fail(how)
        yield fixed_batch(8, seed=2 * step + rank)


@record
def main() -> None:
    how, device_type = sys.argv[1:]
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    model = TinyModel(device="meta")
    model.dense.to(device)
    placements = {f"tables.embedding_bags.f{n}": "row_wise" for n in (0, 1)}
    torchembed.shard_embeddings(model, mesh, plan=placements)
    with (
        StopSignal() as stop,
        TrainPipeline(
            model,
            F.binary_cross_entropy_with_logits,
            make_optimizers(model),
            device=device,
            timeout_seconds=TIMEOUT_SECONDS,
        ) as pipeline,
    ):
        train(pipeline, batches(how, pipeline), stop=stop)


if __name__ == "__main__":
    main()
