"""Ten thousand replays of a captured step leak no memory, neither the GPU's nor the host's."""

import itertools
import resource

import pytest
import torch
from torch import nn

import torchembed
from tests.support.tiny_model import TinyModel, fixed_batches, make_batch
from tests.support.tiny_training import LOSS
from torchembed.tables import table_of
from torchembed.training import TrainPipeline

pytestmark = pytest.mark.gpu

NUM_BEFORE, NUM_REPLAYS = 500, 10_000
MAX_HOST_BYTES = 16 << 20
"""A leak of 2 KiB a step would be more."""


def captured_optimizers(model: nn.Module, device: torch.device) -> list[torch.optim.Optimizer]:
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    rate = torch.tensor(2.0**-10, device=device)
    return [
        torchembed.optim.Adagrad(tables, lr=2.0**-10),
        torch.optim.Adam(dense, lr=rate, capturable=True),
    ]


@pytest.mark.parametrize("is_jagged", [False, True])
def test_no_memory_is_leaked(
    device: torch.device, is_jagged: bool, fastest_algorithms: None
) -> None:
    batches = [make_batch(8, seed) for seed in range(5)] if is_jagged else fixed_batches(5)
    model = TinyModel(is_deep=True).to(device)
    stream = itertools.cycle([batch.pin_memory() for batch in batches])
    with TrainPipeline(model, LOSS, captured_optimizers(model, device)) as pipeline:
        for _ in range(NUM_BEFORE):
            pipeline.progress(stream)
        pipeline.check_ids()
        on_device, on_host = torch.cuda.memory_reserved(), peak_bytes()
        for _ in range(NUM_REPLAYS):
            pipeline.progress(stream)
        pipeline.check_ids()
        assert torch.cuda.memory_reserved() <= on_device
        assert peak_bytes() - on_host <= MAX_HOST_BYTES


def peak_bytes() -> int:
    """The most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
