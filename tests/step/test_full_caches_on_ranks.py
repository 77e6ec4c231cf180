"""A batch that one rank's cache has no room for: what each rank raises."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from torchembed import HostMemory, SparseFeatures
from torchembed.training import TrainPipeline

NUM_ROWS, CACHE_ROWS = 400, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = torchembed.EmbeddingBagConfig(
            name="t",
            num_embeddings=NUM_ROWS,
            embedding_dim=4,
            feature_names=("f",),
            storage=HostMemory(cache_rows=CACHE_ROWS),
        )
        self.table, self.over = torchembed.EmbeddingBagCollection([config]), nn.Linear(4, 1)

    def forward(self, features: SparseFeatures) -> Tensor:
        return self.over(self.table(features).values()).mean()


def errors() -> tuple[str, float]:
    """The error of a batch of all rows, and the loss of the next one."""
    model = Model()
    plan = {"table.embedding_bags.t": "table_wise"}
    torchembed.shard_embeddings(model, init_device_mesh("cpu", (2,)), plan)
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.1)
    batches = iter(
        SparseFeatures(keys=("f",), values=torch.arange(n), batch_size=n, hotness=(1,))
        for n in (NUM_ROWS, 2)
    )
    with TrainPipeline(model, None, optimizer) as pipeline:
        with pytest.raises((IndexError, RuntimeError)) as error:
            pipeline.progress(batches)
        loss = float(pipeline.progress(batches).loss)
    return f"{error.typename}: {error.value}", loss


def test_other_ranks_are_told_that_there_may_be_no_room() -> None:
    (message, loss), (other_message, other_loss) = run_on_ranks(2, errors)
    assert message.startswith(f"RuntimeError: tables t share a cache of {CACHE_ROWS} rows")
    assert other_message == (
        "IndexError: id out of range, or no room for rows, in another rank's batch, whose error "
        "says more. That step changed nothing"
    )
    assert loss == other_loss
