"""The click log made by tensors is the click log."""

import numpy as np
import pytest
import torch

from bench.data.device_click_log import DeviceClickLog
from torchembed.data import ClickLog, ClickLogConfig, Split

CONFIG = ClickLogConfig(
    table_sizes=(7, 5000, 1, 33), hotness=(1, 3, 2, 9), num_dense=5, num_train=4096,
    num_held_out=1024, seed=3,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("split", [Split.TRAIN, Split.HELD_OUT])
def test_rows_are_the_same(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.data.device_click_log._CHUNK_BATCHES", 3)
    log = ClickLog(CONFIG, batch_size=256, split=split)
    batches, probabilities = DeviceClickLog(log, CPU).make()
    expected = list(log)
    assert len(batches) == len(expected)
    for batch, same in zip(batches, expected, strict=True):
        assert torch.equal(batch.dense, same.dense)
        assert torch.equal(batch.labels, same.labels)
        assert batch.sparse.values.dtype is torch.int32
        assert torch.equal(batch.sparse.values.long(), same.sparse.values)
        assert batch.sparse.keys == same.sparse.keys
        assert batch.sparse.hotness == same.sparse.hotness
    true = log.rows(0, log.num_rows).probabilities
    np.testing.assert_allclose(probabilities.numpy(), true, rtol=0, atol=1e-6)


def test_a_part_of_a_batch_is_refused() -> None:
    log = ClickLog(CONFIG, batch_size=1000)
    with pytest.raises(ValueError, match="4096 rows must be a multiple of batch_size, 1000; cut"):
        DeviceClickLog(log, CPU)
