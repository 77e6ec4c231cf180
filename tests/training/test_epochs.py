"""Epochs begin on every rank at one step, and their position can be saved at any."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import TinyModel, make_batches, make_optimizers
from torchembed.core import ranks
from torchembed.data import BackgroundLoader, ClickLog, ClickLogConfig
from torchembed.training import (
    Epochs,
    History,
    StopSignal,
    TrainPipeline,
    check_ranks_agree,
    in_step,
    source_files,
    train,
)

CONFIG = ClickLogConfig(table_sizes=(9,), hotness=(1,), num_dense=2, num_train=20)
BATCH_SIZE = 4
NUM_RANKS = 2


def epochs_of(num_epochs: int, batch_size: int = BATCH_SIZE) -> Epochs:
    share = {"rank": ranks.rank(), "world_size": ranks.world_size()}
    return Epochs(ClickLog(CONFIG, batch_size=batch_size, **share), num_epochs)


def rows_of(epochs: Epochs, max_batches: int | None = None) -> list[list[list[float]]]:
    return [batch.dense.tolist() for batch in in_step(epochs, "cpu", max_batches)]


def flat(batches: Iterable[list[list[float]]]) -> list[list[float]]:
    return list(chain.from_iterable(batches))


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 8), max_size=4), num_epochs=st.integers(1, 3))
def test_any_parts_are_the_whole(cuts: list[int], num_epochs: int) -> None:
    whole = rows_of(epochs_of(num_epochs))
    assert len(whole) == num_epochs * 5
    epochs, seen = epochs_of(num_epochs), []
    for max_batches in (*cuts, None):
        seen += rows_of(epochs, max_batches)
        state, epochs = epochs.state_dict(), epochs_of(num_epochs)
        epochs.load_state_dict(state)
    assert seen == whole
    assert epochs.is_done
    assert epochs.epoch == num_epochs
    assert rows_of(epochs) == []


def test_what_is_read_ahead_does_not_count() -> None:
    loader = BackgroundLoader(ClickLog(CONFIG, batch_size=BATCH_SIZE), num_ahead=6)
    with loader:
        epochs = Epochs(loader, 2)
        rows_of(epochs, 2)
        assert epochs.state_dict() == {"epoch": 0, "read": [[1, BATCH_SIZE, 2]]}
        rows_of(epochs, 4)
        assert epochs.state_dict() == {"epoch": 1, "read": [[1, BATCH_SIZE, 1]]}


def test_other_batches_go_on_with_the_rows_that_are_left() -> None:
    epochs = epochs_of(1)
    first = rows_of(epochs, 2)
    other = epochs_of(1, batch_size=5)
    other.load_state_dict(epochs.state_dict())
    rest = rows_of(other, 1)
    assert other.state_dict()["read"] == [[1, BATCH_SIZE, 2], [1, 5, 1]]
    rest += rows_of(other)
    whole = rows_of(epochs_of(1))
    assert flat(first + rest) == flat(whole)
    assert [len(batch) for batch in rest] == [5, 5, 2]


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="batches must come from a BatchSource, got list; derive"):
        Epochs([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_epochs must be at least 1, got 0"):
        epochs_of(0)


class AskedAt(StopSignal):
    """As if a signal came to one rank before step ``step``."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__()
        self.countdown = step if ranks.rank() == rank else -1

    def tick(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            self.request()


def until_stopped(stop: AskedAt) -> tuple[int, bool]:
    num_steps = 0
    stop.tick()
    for _ in in_step(epochs_of(3), "cpu", stop=stop):
        num_steps += 1
        stop.tick()
    return num_steps, stop.is_agreed


def points_of(num_first: int) -> list[Any]:
    """Loss points where a history stops after ``num_first`` steps, if any, and loaded."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = torchembed.shard_embeddings(TinyModel(device="meta"), mesh)
    optimizers, loss = make_optimizers(model), F.binary_cross_entropy_with_logits
    batches = make_batches([4 + ranks.rank()] * 9, seed=ranks.rank())
    history = History(4)
    if num_first:
        stop = AskedAt(rank=1, step=num_first)
        asking = (batch for batch in batches if stop.tick() is None)
        train(TrainPipeline(model, loss, optimizers), asking, history=history, stop=stop)
        assert history.num_steps == num_first
        state, history = history.state_dict(), History(4)
        history.load_state_dict(state)
    train(TrainPipeline(model, loss, optimizers), batches, history=history)
    return [*map(tuple, history.losses), history.num_samples]


def points_of_one_ranks_history() -> list[Any]:
    """One rank had 2 unread samples of loss 1.5 together; each of these adds 1 of 3."""
    alone = History(4)
    state = alone.state_dict() | {"unread": [3.0, 2], "unread_steps": 1, "num_steps": 1}
    points = []
    for num_more in (0, 1):
        history = History(4)
        history.load_state_dict(state | {"num_ranks": 1})
        for _ in range(num_more):
            history.add_step(torch.tensor(3.0), 1)
        history.read_loss()
        points.append((history.losses[-1].loss, history.num_samples))
    return points


def test_a_loaded_history_forgets_what_was_on_its_way() -> None:
    history = History(4)
    state = history.state_dict()
    history.add_step(torch.tensor(3.0), 1)
    history._begin_reading()
    history.load_state_dict(state)
    assert not history.read_begun()
    assert history.losses == []


def error_of_disagreement(**texts: Any) -> str:
    try:
        check_ranks_agree(**texts)
    except ValueError as error:
        return str(error)
    return "no error"


def all_cases() -> dict[str, Any]:
    rank = dist.get_rank()
    numbers = f"seed = 1\nbatch_size = {64 >> rank}\nlr = {0.5 + rank}"
    files = source_files(torchembed)
    of_rank = files | {"torchembed/data/loader.py": f"digest {rank}"}
    shorter = {key: value for key, value in files.items() if rank == 0 or "loader" not in key}
    return {
        "epochs": [(len(batch), batch) for batch in rows_of(epochs_of(3))],
        "positions": position_while_reading(),
        "stops": [until_stopped(AskedAt(rank=1, step=step)) for step in (1, 4, 5, 100)],
        "cut short": [points_of(num_first) for num_first in (0, 3, 4, 6)],
        "one rank's": points_of_one_ranks_history(),
        "agreements": [
            error_of_disagreement(config="a = 1", code=files),
            error_of_disagreement(config=numbers, code=files),
            error_of_disagreement(config="a = 1", code=of_rank),
            error_of_disagreement(code=shorter),
            error_of_disagreement(config="a = 1\nb = 2" if rank else "b = 2\na = 1"),
        ],
    }


def position_while_reading() -> list[Any]:
    epochs = epochs_of(2)
    return [*(epochs.state_dict() for _ in in_step(epochs, "cpu")), epochs.state_dict()]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_on_ranks(NUM_RANKS, all_cases)


def test_an_epoch_begins_on_all_ranks_at_one_step(results: list[dict[str, Any]]) -> None:
    """20 rows are five blocks of 4, so the second rank has no third batch, and waits."""
    whole = flat(rows_of(epochs_of(1)))
    first, second = (of_rank["epochs"] for of_rank in results)
    assert [size for size, _ in first] == [4, 4, 4] * 3
    assert [size for size, _ in second] == [4, 4, 0] * 3
    for epoch in range(3):
        steps = range(3 * epoch, 3 * epoch + 3)
        assert flat(first[step][1] + second[step][1] for step in steps) == whole


def test_positions_are_the_same_on_every_rank(results: list[dict[str, Any]]) -> None:
    assert results[0]["positions"] == results[1]["positions"]
    assert results[0]["positions"] == [
        *({"epoch": e, "read": [[2, BATCH_SIZE, n]]} for e in (0, 1) for n in (1, 2, 3)),
        {"epoch": 2, "read": []},
    ]


def test_all_ranks_stop_at_the_step_that_one_was_asked_at(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["stops"] == [(1, True), (4, True), (5, True), (9, False)]


def test_a_history_that_is_cut_short_reads_the_same_points(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        whole, *cut = of_rank["cut short"]
        assert cut == [whole] * 3
        assert [step for step, _ in whole[:-1]] == [4, 8, 9]


def test_another_number_of_ranks_reads_the_first_ones_rest(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["one rank's"] == [(1.5, 2), (9.0 / 4, 4)]


def test_what_ranks_disagree_on_is_named(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        none, config, code, missing, reordered = of_rank["agreements"]
        assert none == "no error"
        assert config.startswith(
            "ranks must agree on config: rank 0 has batch_size = 64, rank 1 has batch_size = 32; "
        )
        assert code.startswith(
            "ranks must agree on code: rank 0 has torchembed/data/loader.py = digest 0, "
            "rank 1 has torchembed/data/loader.py = digest 1; start every rank with the same code"
        )
        assert "rank 0 has torchembed/data/loader.py = " in missing
        assert "rank 1 has no such line" in missing
        assert "rank 1 has the same lines in another order" in reordered


def test_code_is_every_file_of_the_library() -> None:
    files = source_files(torchembed)
    assert files["torchembed"] == torchembed.__version__
    assert files["torch"] == torch.__version__
    assert "torchembed/core/ranks/program_agreement.py" in files
    assert "torchembed/triton_kernels/segments.py" in files
    assert not any("__pycache__" in name for name in files)
    assert files == source_files(torchembed)
