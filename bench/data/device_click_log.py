"""The made click log by tensor arithmetic: seconds on a GPU for what takes processors minutes.

Rows are those of :class:`torchembed.data.ClickLog`, whose numpy code is the specification. Only
sums of effects may be rounded otherwise, in their last bit.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchembed import SparseFeatures
from torchembed.core.random_bits import random_bits, shift_right
from torchembed.data import Batch, ClickLog
from torchembed.data.skewed_ids import PowerLaw

_CHUNK_BATCHES = 64
"""Made at a time."""


class DeviceClickLog:
    """All batches of ``log``, one rank's, of which each is full.

    Args:
        device: that makes them; they end in pinned memory where it is a GPU.
    """

    def __init__(self, log: ClickLog, device: torch.device) -> None:
        if log.num_rows % log.batch_size:
            raise ValueError(
                f"the log's {log.num_rows} rows must be a multiple of batch_size, "
                f"{log.batch_size}; cut the rows"
            )
        self._log, self._device = log, device
        self._laws = [_DeviceLaw(law, device) for law in log._laws]
        self._weights = torch.from_numpy(log._dense_weights).to(device)

    def make(self) -> tuple[list[Batch], Tensor]:
        """The batches, and how likely each row's click was, float64 ``[rows]`` on the CPU."""
        log, batches, likely = self._log, [], []
        rows_of_chunk = _CHUNK_BATCHES * log.batch_size
        for start in range(0, log.num_rows, rows_of_chunk):
            numbers = torch.arange(
                start, min(start + rows_of_chunk, log.num_rows), device=self._device
            )
            dense, ids, labels, probabilities = self._rows(numbers + log._first)
            batches += self._batches(dense, ids, labels)
            likely.append(probabilities.cpu())
        return batches, torch.cat(likely)

    def _batches(self, dense: Tensor, ids: list[Tensor], labels: Tensor) -> Iterator[Batch]:
        log = self._log
        count = len(labels) // log.batch_size
        values = torch.cat([of_feature.view(count, -1) for of_feature in ids], dim=1)
        parts = dense.view(count, log.batch_size, -1), values.int(), labels.view(count, -1)
        on_host = [
            torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).copy_(part)
            for part in parts
        ]
        for of_batch, ids_of_batch, labels_of_batch in zip(*on_host, strict=True):
            sparse = SparseFeatures(
                keys=log.keys,
                values=ids_of_batch,
                batch_size=log.batch_size,
                hotness=log.hotness,
            )
            yield Batch(of_batch, sparse, labels_of_batch)

    def _rows(self, numbers: Tensor) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        """Dense features, the ids of each feature, labels and probabilities: ``ClickLog.rows``."""
        log, config = self._log, self._log.config
        numbers = numbers[:, None]
        dense = _nearly_normal(self._bits(log._dense_key, numbers, log.num_dense))
        ids, effects = [], []
        for feature, hotness in enumerate(log.hotness):
            bits = self._bits(log._keys["ids"][feature], numbers, hotness)
            ids.append(self._laws[feature].draw(bits))
            bits = random_bits(self._key(log._keys["effects"][feature]), ids[-1])
            effects.append(_nearly_normal(bits).sum(dim=1) / math.sqrt(hotness))
        products = []
        for feature, effect in enumerate(effects):
            products += [effect * effects[feature - 1], effect * dense[:, feature % log.num_dense]]
        logits = log._base() + config.dense_effect * (dense @ self._weights)
        logits += config.id_effect * _mean_effect(effects)
        logits += config.cross_effect * _mean_effect(products)
        probabilities = 1.0 / (1.0 + torch.exp(-logits.double()))
        bits = random_bits(self._key(log._label_key), numbers[:, 0])
        labels = (shift_right(bits, 11).double() * 2.0**-53 < probabilities).float()
        return dense, ids, labels, probabilities

    def _bits(self, key: int, numbers: Tensor, count: int) -> Tensor:
        """``[rows, count]``."""
        counters = numbers * count + torch.arange(count, device=self._device)
        return random_bits(self._key(key), counters)

    def _key(self, key: int) -> Tensor:
        return torch.tensor(key, device=self._device)


class _DeviceLaw:
    """Draws what ``law`` draws."""

    def __init__(self, law: PowerLaw, device: torch.device) -> None:
        self._num_rows, self._num_bits = law.num_rows, law._bits
        self._quantiles = torch.from_numpy(law._quantiles).to(device)
        self._factors = [int(factor) for factor in law._factors]

    def draw(self, bits: Tensor) -> Tensor:
        cell_bits = (len(self._quantiles) - 1).bit_length() - 1
        fraction_bits = 64 - cell_bits
        cell = shift_right(bits, fraction_bits)
        fraction = (bits & ((1 << fraction_bits) - 1)).double() * 2.0**-fraction_bits
        low = self._quantiles[cell]
        ranks = (low + fraction * (self._quantiles[cell + 1] - low)).long()
        return self._scattered(ranks.clamp_(max=self._num_rows - 1))

    def _scattered(self, ranks: Tensor) -> Tensor:
        ids = self._mixed(ranks)
        flat = ids.view(-1)
        outside = (flat >= self._num_rows).nonzero().squeeze(1)
        while len(outside):
            flat[outside] = self._mixed(flat[outside])
            outside = outside[flat[outside] >= self._num_rows]
        return ids

    def _mixed(self, value: Tensor) -> Tensor:
        mask, shift = (1 << self._num_bits) - 1, (self._num_bits + 1) // 2
        for factor in self._factors:
            value = (value * (factor & mask) + ((factor >> 32) & mask)) & mask
            value = value ^ (value >> shift)
        return value


def _nearly_normal(bits: Tensor) -> Tensor:
    low_halves = 0x0000FFFF0000FFFF
    pairs = (bits & low_halves) + (shift_right(bits, 16) & low_halves)
    total = (pairs + (pairs >> 32)) & 0xFFFFFFFF
    return (total.float() - (2 * 65535)) * float(np.float32(3**0.5 / 65536))


def _mean_effect(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(dim=0) / math.sqrt(len(parts))
