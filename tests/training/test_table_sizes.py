"""Tables that are too small for their data are named before a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from torchembed.data import BackgroundLoader, ClickLog, ClickLogConfig
from torchembed.training import Epochs, TrainPipeline, train

NUM_IDS = 9
CONFIG = ClickLogConfig(table_sizes=(5, NUM_IDS), hotness=(1, 1), num_dense=2, num_train=20)
LOG = ClickLog(CONFIG, batch_size=8)


class _Model(nn.Module):
    """A model over a table for each feature of the log, or one for both."""

    def __init__(self, rows: tuple[int, ...], on_bad_id: str = "raise", **more: Any) -> None:
        super().__init__()
        features = [("cat_0", "cat_1")] if len(rows) == 1 else [("cat_0",), ("cat_1",)]
        self.tables = torchembed.EmbeddingBagCollection(
            [
                torchembed.EmbeddingBagConfig(
                    name=f"t{n}",
                    num_embeddings=num_rows,
                    embedding_dim=1,
                    feature_names=of_table,
                    **more,
                )
                for n, (num_rows, of_table) in enumerate(zip(rows, features, strict=True))
            ],
            on_bad_id=on_bad_id,
        )

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        return self.tables(sparse).values().sum(1)


def _train(model: nn.Module, batches: Any) -> int:
    optimizer = torchembed.optim.SGD(model.parameters(), lr=0.1)
    with TrainPipeline(model, F.binary_cross_entropy_with_logits, optimizer) as pipeline:
        return train(pipeline, batches).num_steps


@pytest.mark.parametrize("made", [lambda: LOG, lambda: Epochs(LOG), lambda: BackgroundLoader(LOG)])
@pytest.mark.parametrize("rows", [(5, NUM_IDS - 1), (NUM_IDS - 1,)])
def test_tables_with_fewer_rows_than_ids_are_named(
    rows: tuple[int, ...], made: Callable[[], Any]
) -> None:
    model = _Model(rows)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    table = f"t{len(rows) - 1}"
    message = (
        f"table_sizes of the batches must not exceed the rows of tables, and feature cat_1 has "
        f"{NUM_IDS} ids where table {table} has {NUM_IDS - 1} rows; give the table as many, or"
    )
    with pytest.raises(ValueError, match=message):
        _train(model, made())
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    "model",
    [
        lambda: _Model((5, NUM_IDS)),
        lambda: _Model((NUM_IDS + 1,)),
        lambda: _Model((2, 2), on_bad_id="zero"),
        lambda: _Model((5, NUM_IDS - 1), dynamic=torchembed.Dynamic()),
    ],
    ids=["equal", "larger", "zeros", "dynamic"],
)
def test_other_tables_train(model: Callable[[], nn.Module]) -> None:
    assert _train(model(), LOG) == 3


def test_ids_of_other_batches_are_not_known() -> None:
    """Each id of the batches that are taken has a row, whatever the log says of others."""
    few = [batch for batch in LOG if int(batch.sparse.values.max()) < NUM_IDS - 1]
    assert _train(_Model((5, NUM_IDS - 1)), few) == len(few)
