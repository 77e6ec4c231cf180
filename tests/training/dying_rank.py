"""A script for ``torchrun``: two ranks train a tiny model, and one fails as its argument says."""

import os
import signal
import sys
from collections.abc import Iterator

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

import torchembed
from tests.training.models import TinyModel, make_batches, make_optimizers
from torchembed.data import Batch
from torchembed.training import StopSignal, TrainPipeline, train


def batches(how: str) -> Iterator[Batch]:
    for step, batch in enumerate(make_batches([8] * 100_000, seed=dist.get_rank())):
        if step == 3 and dist.get_rank() == 1:
            if how == "raises":
                raise RuntimeError("the third batch is bad")
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


@record
def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torchembed.shard_embeddings(TinyModel(device="meta"), mesh)
    with StopSignal() as stop:
        train(
            TrainPipeline(model, F.binary_cross_entropy_with_logits, make_optimizers(model)),
            batches(sys.argv[1]),
            stop=stop,
        )


if __name__ == "__main__":
    main()
