"""The made click log: the same rows for all, labels that follow their probabilities, and AUC."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import reading
from tests.support.tolerance import relative_error
from torchembed.data import ClickLog, ClickLogConfig, Split
from torchembed.data.roc_auc import roc_auc

SMALL = ClickLogConfig(
    table_sizes=(300, 20, 50), hotness=(1, 2, 3), num_dense=4, num_train=1003, num_held_out=501
)


@pytest.mark.parametrize("split", [Split.TRAIN, Split.HELD_OUT, Split.TEST])
def test_any_ranks_and_batches_give_the_same_log(split: Split) -> None:
    whole = ClickLog(SMALL, batch_size=10_000, split=split)
    expected = reading.samples(whole)
    for batch_size, world_size in ((7, 1), (100, 3)):
        ranks = [
            ClickLog(SMALL, batch_size=batch_size, split=split, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        got = reading.samples(reading.in_turn(ranks))
        reading.assert_same_samples(got, expected)
    assert len(expected.labels) == whole.num_rows


def test_splits_are_other_rows_and_halves() -> None:
    log = {
        split: ClickLog(SMALL, batch_size=2000, split=split)
        for split in Split
        if split is not Split.ALL
    }
    got = {split: reading.samples(source) for split, source in log.items()}
    counts = {split: len(part.labels) for split, part in got.items()}
    assert counts == {
        Split.TRAIN: 1003,
        Split.HELD_OUT: 501,
        Split.VALIDATION: 251,
        Split.TEST: 250,
    }
    held_out = got[Split.HELD_OUT]
    assert got[Split.VALIDATION].labels.tolist() == held_out.labels[:251].tolist()
    assert got[Split.TEST].dense.tolist() == held_out.dense[251:].tolist()
    assert got[Split.TRAIN].dense[:501].tolist() != held_out.dense.tolist()
    longer = ClickLog(
        dataclasses.replace(SMALL, num_train=5000), batch_size=2000, split=Split.HELD_OUT
    )
    reading.assert_same_samples(reading.samples(longer), held_out)


def test_seed_makes_another_log() -> None:
    other = ClickLog(dataclasses.replace(SMALL, seed=1), batch_size=100).rows(0, 100)
    same = ClickLog(SMALL, batch_size=100).rows(0, 100)
    assert (other.dense != same.dense).mean() > 0.9
    assert (other.ids[0] != same.ids[0]).mean() > 0.5


def test_ids_and_dense_are_in_range() -> None:
    rows = ClickLog(SMALL, batch_size=100).rows(0, 1000)
    for ids, size, hotness in zip(rows.ids, SMALL.table_sizes, SMALL.hotness, strict=True):
        assert ids.shape == (1000, hotness)
        assert ids.min() >= 0
        assert ids.max() < size
    assert rows.dense.dtype == np.float32
    assert abs(rows.dense.mean()) < 0.1
    assert abs(rows.dense.std() - 1) < 0.1


def test_labels_follow_their_probabilities() -> None:
    config = ClickLogConfig(num_train=1 << 17)
    rows = ClickLog(config, batch_size=1).rows(0, config.num_train)
    assert abs(rows.labels.mean() - config.click_rate) < 0.05
    # Calibrated in each tenth of the probabilities, within five standard errors.
    for tenth in np.array_split(np.argsort(rows.probabilities), 10):
        probability = rows.probabilities[tenth]
        error = np.sqrt((probability * (1 - probability)).sum()) / len(tenth)
        assert abs(rows.labels[tenth].mean() - probability.mean()) < 5 * error


def test_crosses_and_ids_carry_the_signal() -> None:
    whole = ClickLogConfig(num_held_out=1 << 15)
    aucs = [
        ClickLog(
            dataclasses.replace(whole, **without), batch_size=1, split=Split.HELD_OUT
        ).bayes_auc()
        for without in ({}, {"cross_effect": 0.0}, {"cross_effect": 0.0, "id_effect": 0.0})
    ]
    assert aucs[0] > aucs[1] + 0.02 > aucs[2] + 0.06 > 0.6
    silent = dataclasses.replace(whole, dense_effect=0.0, id_effect=0.0, cross_effect=0.0)
    auc = ClickLog(silent, batch_size=1, split=Split.HELD_OUT).bayes_auc()
    # All probabilities are equal, so half of the pairs count, which float64 holds exactly.
    assert auc == 0.5


def test_bayes_metrics_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    log = ClickLog(SMALL, batch_size=64, split=Split.TEST)
    rows = log.rows(0, log.num_rows)
    assert log.bayes_auc() == metrics.roc_auc_score(rows.labels, rows.probabilities)
    logloss = metrics.log_loss(rows.labels, rows.probabilities)
    # The same logarithms, added up in another order.
    rounding = 2 * relative_error(log.num_rows, torch.float64)
    assert log.bayes_logloss() == pytest.approx(logloss, rel=rounding, abs=0)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=30))
def test_auc_counts_pairs(rows: list[tuple[bool, int]]) -> None:
    labels = np.array([label for label, _ in rows], np.float32)
    scores = np.array([score for _, score in rows], np.float64)
    if labels.min() == labels.max():
        assert math.isnan(roc_auc(labels, scores))
        return
    pairs = scores[labels == 1][:, None] - scores[labels == 0]
    # Five roundings: quotients of whole numbers, their sum, and half of one. Scikit-learn adds up a
    # trapezium for each row at most, of numbers with three roundings.
    expected = (pairs > 0).mean() + (pairs == 0).mean() / 2
    rounding = relative_error(5 + len(rows) + 3, torch.float64)
    assert roc_auc(labels, scores) == pytest.approx(expected, rel=rounding, abs=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hotness": (1, 2)}, "table_sizes and hotness must have one number .*, got 3 and 2"),
        ({"hotness": (1, 0, 2)}, r"hotness must be at least 1, got \(1, 0, 2\)"),
        ({"num_dense": 0}, "num_dense must be at least 1, got 0"),
        ({"num_held_out": 1}, "num_held_out must be at least 2, got 1"),
        ({"click_rate": 1.0}, r"click_rate must lie in \(0, 1\), got 1.0"),
    ],
)
def test_config_is_checked(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_split_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"split must be one of .*'train'.*, got 'all'"):
        ClickLog(SMALL, batch_size=1, split=Split.ALL)
