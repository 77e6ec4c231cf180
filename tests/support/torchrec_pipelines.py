"""TorchRec's pipeline and ours over one run, and batches for both."""

from collections.abc import Iterator
from typing import Any

import torch

NUM_STEPS, LAST_SIZE = 12, 5
"""The last batch is a small one. On a GPU, steps are graphs from the fifth on."""


def batches(run: Any, count: int, *, is_fixed: bool, first: int = 0) -> Iterator[Any]:
    from torchrec.datasets.utils import Batch

    from tests.support.torchrec_training import BATCH_SIZE, batch

    for step in range(first, first + count):
        is_last = step == first + count - 1
        yield Batch(
            *batch(
                step,
                torch.device("cpu"),
                weighted=run.weighted,
                ids_dtype=run.ids_dtype,
                size=LAST_SIZE if is_last else BATCH_SIZE,
                is_fixed=is_fixed,
            )
        )


def make_pipeline(whose: str, run: Any, **settings: Any) -> Any:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    from torchembed.integrations.torchrec import TrainPipeline

    kind: Any = TrainPipelineSparseDist if whose == "theirs" else TrainPipeline
    return kind(run.model, run.optimizer, run.device, **settings)
