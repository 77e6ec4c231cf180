"""A made click log: ids as skewed as real ones, and a planted signal whose best AUC is known."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchembed.core.features import SparseFeatures
from torchembed.core.random_bits import name_key
from torchembed.data.batch import Batch
from torchembed.data.counter_bits import counter_bits, nearly_normal, unit_uniform
from torchembed.data.roc_auc import roc_auc
from torchembed.data.skewed_ids import PowerLaw
from torchembed.data.source import BatchSource, BatchTask, Portion, Split

# Held-out rows count from here, so that a longer log has the same ones.
_FIRST_HELD_OUT = 1 << 40
_BLOCK_ROWS = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickLogConfig:
    """A log, wholly: every row is a function of this and of its number.

    The logit of a click is ``base + dense_effect * D + id_effect * M + cross_effect * C``, each of
    D, M and C with a variance of about 1: D is linear in the dense features; M sums an effect of
    each id; C sums the products of neighbouring features' effects, and of each feature's effect
    with a dense feature, which a model without crosses must approximate.

    The defaults are a log from which a DCNv2 of some hundred thousand parameters, in one pass over
    its two million rows, comes within 0.01 of the best AUC.
    """

    table_sizes: tuple[int, ...] = (5000, 2000, 1000, 500, 200, 100, 50, 20, 2000, 500)
    """Ids of each feature."""
    hotness: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 1, 1, 3, 2)
    """Ids a sample for each feature."""
    num_dense: int = 13
    num_train: int = 1 << 21
    num_held_out: int = 1 << 17
    exponent: float = 1.2
    """Exponent of the ids' power law."""
    click_rate: float = 0.25
    """Roughly the mean of the labels."""
    dense_effect: float = 0.6
    id_effect: float = 1.0
    cross_effect: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.table_sizes or len(self.table_sizes) != len(self.hotness):
            raise ValueError(
                "table_sizes and hotness must have one number for each feature, "
                f"got {len(self.table_sizes)} and {len(self.hotness)}"
            )
        for name, least in (
            ("hotness", 1),
            ("num_dense", 1),
            ("num_train", 1),
            ("num_held_out", 2),
        ):
            value = getattr(self, name)
            if min(value) < least if isinstance(value, tuple) else value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= self.exponent < math.inf:
            raise ValueError(f"exponent must be a number of at least 0, got {self.exponent}")
        if not 0.0 < self.click_rate < 1.0:
            raise ValueError(f"click_rate must lie in (0, 1), got {self.click_rate}")


class ClickRows(NamedTuple):
    """Rows of the log and what no model sees: how likely each click was."""

    dense: NDArray[np.float32]
    """``[rows, num_dense]``, mean 0 and variance 1."""
    ids: list[NDArray[np.int64]]
    """``[rows, hotness]`` for each feature."""
    labels: NDArray[np.float32]
    """``[rows]``, drawn with ``probabilities``."""
    probabilities: NDArray[np.float64]
    """``[rows]``."""


class ClickLog(BatchSource):
    """Batches of the log of ``config``; any number of ranks share the same rows.

    Args:
        config: the log.
        batch_size: samples a batch on this rank.
        split: which rows to read; ``ALL`` is not one of them.
        rank: this rank; the ranks take blocks of ``batch_size`` rows in turn.
        world_size: number of ranks.
        table_sizes: rows of all tables, or of each, modulo which ids are taken; those of the log,
            which all ids are below, where None.
        raw_ids: give ids as they stand, for dynamic tables, whose capacity ``table_sizes`` may
            then be.
    """

    def __init__(
        self,
        config: ClickLogConfig,
        *,
        batch_size: int,
        split: Split = Split.TRAIN,
        rank: int = 0,
        world_size: int = 1,
        table_sizes: int | Sequence[int] | None = None,
        raw_ids: bool = False,
    ) -> None:
        super().__init__(
            keys=[f"cat_{feature}" for feature in range(len(config.table_sizes))],
            table_sizes=config.table_sizes if table_sizes is None else table_sizes,
            num_dense=config.num_dense,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            raw_ids=raw_ids,
        )
        self.config, self.hotness = config, config.hotness
        first_test = config.num_held_out - config.num_held_out // 2
        parts = {
            Split.TRAIN: range(config.num_train),
            Split.HELD_OUT: range(config.num_held_out),
            Split.VALIDATION: range(first_test),
            Split.TEST: range(first_test, config.num_held_out),
        }
        if split not in parts:
            raise ValueError(
                f"split must be one of {[s.value for s in parts]}, got {split.value!r}"
            )
        self.num_rows = len(parts[split])
        """Rows of the split, over all ranks."""
        self._first = parts[split].start + (0 if split is Split.TRAIN else _FIRST_HELD_OUT)
        seed = config.seed
        self._laws = [
            PowerLaw(size, config.exponent, name_key(seed, key))
            for key, size in zip(self.keys, config.table_sizes, strict=True)
        ]
        self._keys = {
            name: [name_key(seed, name, key) for key in self.keys] for name in ("ids", "effects")
        }
        self._dense_key, self._label_key = name_key(seed, "dense"), name_key(seed, "label")
        bits = counter_bits(name_key(seed, "weights"), np.arange(self.num_dense))
        self._dense_weights = nearly_normal(bits) / np.linalg.norm(nearly_normal(bits))

    def __len__(self) -> int:
        return len(self._blocks(self.num_rows))

    def tasks(self, after: Sequence[Portion] = ()) -> Iterator[BatchTask]:
        return (partial(self._batch, start) for start in self._blocks(self.num_rows, after))

    def _batch(self, start: int) -> Batch:
        rows = self.rows(start, min(start + self.batch_size, self.num_rows))
        ids = rows.ids
        if not self.raw_ids and self.table_sizes != self.config.table_sizes:
            ids = [
                of_feature % size for of_feature, size in zip(ids, self.table_sizes, strict=True)
            ]
        sparse = SparseFeatures(
            keys=self.keys,
            values=torch.from_numpy(np.concatenate([of_feature.ravel() for of_feature in ids])),
            batch_size=len(rows.labels),
            hotness=self.hotness,
        )
        return Batch(torch.from_numpy(rows.dense), sparse, torch.from_numpy(rows.labels))

    def rows(self, start: int, stop: int) -> ClickRows:
        """Rows ``[start, stop)`` of the split."""
        config = self.config
        numbers = np.arange(self._first + start, self._first + stop)[:, None]
        bits = counter_bits(self._dense_key, numbers * self.num_dense + np.arange(self.num_dense))
        dense = nearly_normal(bits)
        ids, effects = [], []
        for feature, hotness in enumerate(self.hotness):
            bits = counter_bits(self._keys["ids"][feature], numbers * hotness + np.arange(hotness))
            ids.append(self._laws[feature].draw(bits))
            bits = counter_bits(self._keys["effects"][feature], ids[-1])
            effects.append(nearly_normal(bits).sum(axis=1) / np.float32(math.sqrt(hotness)))
        products = []
        for feature, effect in enumerate(effects):
            products += [effect * effects[feature - 1], effect * dense[:, feature % self.num_dense]]
        logits = self._base() + config.dense_effect * (dense @ self._dense_weights)
        logits += config.id_effect * _mean_effect(effects)
        logits += config.cross_effect * _mean_effect(products)
        probabilities = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
        uniform = unit_uniform(counter_bits(self._label_key, numbers[:, 0]))
        labels = (uniform < probabilities).astype(np.float32)
        return ClickRows(dense, ids, labels, probabilities)

    def _base(self) -> float:
        """The logit for which the mean of the sigmoid of a normal logit is the click rate.

        By the probit approximation: E sigmoid(N(m, v)) ~ sigmoid(m / sqrt(1 + pi v / 8)).
        """
        config = self.config
        effects = (config.dense_effect, config.id_effect, config.cross_effect)
        variance = sum(effect**2 for effect in effects)
        rate = config.click_rate
        return math.log(rate / (1 - rate)) * math.sqrt(1 + math.pi * variance / 8)

    def bayes_auc(self) -> float:
        """AUC of the true probabilities over all ranks' rows: the most that a model can expect; NaN
        where all labels are equal. Needs scikit-learn (``pip install 'torchembed[recipes]'``)."""
        return roc_auc(*self._outcomes())

    def bayes_logloss(self) -> float:
        """Log loss of the true probabilities over all ranks' rows."""
        labels, probabilities = self._outcomes()
        return float(-np.log(np.where(labels == 1, probabilities, 1 - probabilities)).mean())

    def _outcomes(self) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        blocks = [
            self.rows(start, min(start + _BLOCK_ROWS, self.num_rows))
            for start in range(0, self.num_rows, _BLOCK_ROWS)
        ]
        labels = np.concatenate([block.labels for block in blocks])
        return labels, np.concatenate([block.probabilities for block in blocks])


def _mean_effect(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The sum of independent parts of variance 1, scaled to variance 1."""
    return np.sum(parts, axis=0) / np.float32(math.sqrt(len(parts)))
