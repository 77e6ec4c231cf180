"""The click log made by tensors is the click log."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.data.device_click_log import DeviceClickLog
from tests.support.tolerance import assert_as_near
from torchembed.data import ClickLog, ClickLogConfig, Split
from torchembed.data.counter_bits import counter_bits, nearly_normal

CONFIG = ClickLogConfig(
    table_sizes=(7, 5000, 1, 33), hotness=(1, 3, 2, 9), num_dense=5, num_train=4096,
    num_held_out=1024, seed=3,
)  # fmt: skip
CPU = torch.device("cpu")


def exact_probabilities(log: ClickLog) -> Tensor:
    """How likely clicks are by ``ClickLog``'s formula in float64, of its float32 normal numbers."""
    rows, config = log.rows(0, log.num_rows), log.config
    dense = rows.dense.astype(np.float64)
    effects = [
        nearly_normal(counter_bits(key, ids)).astype(np.float64).sum(axis=1) / math.sqrt(hotness)
        for key, ids, hotness in zip(log._keys["effects"], rows.ids, log.hotness, strict=True)
    ]
    products = [effect * effects[feature - 1] for feature, effect in enumerate(effects)]
    products += [
        effect * dense[:, feature % log.num_dense] for feature, effect in enumerate(effects)
    ]
    logits = log._base() + config.dense_effect * (dense @ log._dense_weights.astype(np.float64))
    logits += config.id_effect * sum(effects) / math.sqrt(len(effects))
    logits += config.cross_effect * sum(products) / math.sqrt(len(products))
    return torch.from_numpy(1 / (1 + np.exp(-logits)))


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
    of_numpy = torch.from_numpy(log.rows(0, log.num_rows).probabilities)
    assert_as_near(probabilities, of_numpy, exact_probabilities(log))


def test_a_part_of_a_batch_is_refused() -> None:
    log = ClickLog(CONFIG, batch_size=1000)
    with pytest.raises(ValueError, match="4096 rows must be a multiple of batch_size, 1000; cut"):
        DeviceClickLog(log, CPU)
