"""Batches that a pipeline prepares and does not train as it has prepared them."""

import random

import pytest
import torch

from tests.support.disk_tables import (
    LOSS,
    StoredRanker,
    assert_same_tables,
    batches,
    most_rows,
    optimizers_of,
    train_by_hand,
)
from tests.support.raising_ranker import Mark, RaisingRanker, marked
from tests.support.tiny_model import step_by_hand
from torchembed import Dynamic, HostMemory
from torchembed.optim import Adam
from torchembed.training import TrainPipeline

CPU = torch.device("cpu")
BATCHES = batches("fixed", 14)
ONE_BATCH = HostMemory(cache_rows=-(-most_rows(BATCHES) // 2))


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("mark", Mark)
def test_batches_that_are_not_trained_keep_no_place_of_others(mark: Mark, capture: bool) -> None:
    """Several in succession, in a cache that has room for one batch."""
    left_out = (2, 6, 7, 11, 12)
    expected, model = RaisingRanker(None), RaisingRanker(ONE_BATCH)
    of_model, of_expected = (Adam.with_dense(m.parameters(), lr=0.05) for m in (model, expected))
    pipeline = TrainPipeline(model, LOSS, of_model, device=CPU, capture=capture)
    given = [marked(one, mark) if n in left_out else one for n, one in enumerate(BATCHES)]
    iterator = iter(given)
    for number, one in enumerate(given):
        if number in left_out:
            with pytest.raises(IndexError if mark is Mark.BAD_ID else RuntimeError):
                pipeline.progress(iterator)
        else:
            loss = pipeline.progress(iterator).loss.item()
            assert loss == step_by_hand(expected, LOSS, [of_expected], one).item()
    assert_same_tables(model, expected)
    (statistics,) = model.bags.cache_statistics().values()
    if mark is Mark.BAD_ID:  # those that raise do so with their rows there
        assert statistics.batches_fetched_late <= len(given) - len(left_out)


def test_batches_that_were_prepared_and_are_trained_eagerly_keep_no_place_of_others() -> None:
    """A hook comes when a batch was prepared, and stays for several."""
    expected, model = StoredRanker(None), StoredRanker(ONE_BATCH)
    losses = train_by_hand(expected, BATCHES)
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
    iterator = iter(BATCHES)
    found = [pipeline.progress(iterator).loss.item() for _ in range(6)]
    handle = model.dense.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hook"):
        found += [pipeline.progress(iterator).loss.item() for _ in range(4)]
    handle.remove()
    found += [pipeline.progress(iterator).loss.item() for _ in range(4)]
    assert found == losses
    assert_same_tables(model, expected)


def test_what_was_read_of_another_iterator_keeps_no_place() -> None:
    """A batch that was prepared is left out after each step, and its rows find places there."""
    expected, model = StoredRanker(None), StoredRanker(ONE_BATCH)
    given = [BATCHES[n % 2] for n in range(6)] + BATCHES[6:]
    losses = train_by_hand(expected, given)
    pipeline = TrainPipeline(model, LOSS, optimizers_of(model), device=CPU, capture=True)
    iterator = iter(given[:6])
    found = [pipeline.progress(iterator).loss.item() for _ in range(6)]
    # The next batch is the same one again, so that there is room for it beside this one.
    found += [pipeline.progress(iter([one, one])).loss.item() for one in given[6:]]
    assert found == losses
    assert_same_tables(model, expected)


@pytest.mark.parametrize("cache_rows", [16, 20, 24, 50])
def test_pipelines_take_turns_over_tables_in_host_memory(cache_rows: int) -> None:
    """Each has a batch prepared while the other one trains, for several steps at times: a cache
    that has too few places for all of these says so, and loses no row."""
    num_trained = 0
    for seed in range(4):
        expected, model = StoredRanker(None), StoredRanker(HostMemory(cache_rows=cache_rows))
        generator, given = random.Random(seed), batches("fixed", 60, 100 * seed)
        optimizers, of_expected = optimizers_of(model), optimizers_of(expected)
        pipelines = [
            TrainPipeline(model, LOSS, optimizers, device=CPU, capture=True) for _ in range(2)
        ]
        taken, turn = [0, 0], 0
        iterators = [iter(given[first::2]) for first in range(2)]
        for _ in range(24):
            turn = 1 - turn if generator.random() < 0.4 else turn
            one = given[2 * taken[turn] + turn]
            taken[turn] += 1
            try:
                loss = pipelines[turn].progress(iterators[turn]).loss.item()
            except RuntimeError as error:
                assert "share a cache of" in str(error)  # noqa: PT017 - some of them do
                assert cache_rows < 50
                continue
            assert loss == step_by_hand(expected, LOSS, of_expected, one).item()
            num_trained += 1
        assert_same_tables(model, expected)
    assert num_trained > 20


def test_a_pipeline_refuses_tables_of_which_another_one_has_prepared_a_batch() -> None:
    dynamic = Dynamic()
    expected, model = StoredRanker(None, dynamic=dynamic), StoredRanker(None, dynamic=dynamic)
    # Few enough ids that none is evicted.
    given = [BATCHES[n % 2] for n in range(7)]
    losses = train_by_hand(expected, given)
    optimizers = optimizers_of(model)
    one, other = (
        TrainPipeline(model, LOSS, optimizers, device=CPU, capture=True) for _ in range(2)
    )
    iterator, of_other = iter([*given[:5], given[6]]), iter([given[5]])
    found = [one.progress(iterator).loss.item() for _ in range(4)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="dynamic tables a, b hold rows of a batch that another"):
        other.progress(of_other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    found.append(one.progress(iterator).loss.item())
    one.close()
    found.append(other.progress(of_other).loss.item())
    found.append(one.progress(iterator).loss.item())
    assert found == losses
    assert_same_tables(model, expected)
