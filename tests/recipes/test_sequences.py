"""Recipes of sequences: what they read, how they pack it, and whole runs that are tiny."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.sequences.config import SequenceConfig
from recipes.sequences.evaluate import Score, evaluate
from recipes.sequences.interactions import Interactions, read
from recipes.sequences.packed import HistoryWindows, PackedBatches, needed_capacity
from recipes.sequences.samples import SampleBatches, Samples
from recipes.train import main, parse
from tests.support import made_data
from torchembed.models import Histories, Impressions
from torchembed.training import read_metrics

SMALL = [
    *("--embedding-dim", "4", "--max-length", "12", "--num-negatives", "3", "--batch-size", "4"),
    *("--epochs", "2", "--evaluate-every", "1", "--seeds", "1", "2"),
]
INTERACTIONS = Interactions(
    items=torch.tensor([5, 1, 4, 2, 7, 3, 0, 6, 8, 9]),
    offsets=torch.tensor([0, 4, 5, 10]),
    times=torch.arange(10) * 10,
    num_items=10,
)
"""Users of four items, one and five."""


def histories_of(batch: Histories) -> list[tuple[list[int], list[int]]]:
    """Items and next items of each user."""
    bounds = list(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True))
    return [(batch.items[a:b].tolist(), batch.next_items[a:b].tolist()) for a, b in bounds]


def test_windows_hold_the_newest_items_but_those_left_out() -> None:
    trained = HistoryWindows(INTERACTIONS, max_length=3, num_left_out=1)
    batch = trained.batch(torch.tensor([2, 0, 1]), num_users=4, capacity=8)
    assert histories_of(batch) == [([3, 0, 6], [0, 6, 8]), ([5, 1], [1, 4]), ([], []), ([], [])]
    assert len(batch.items) == 8 and not batch.items[5:].any()
    assert batch.times is not None and batch.next_times is not None
    assert batch.times[:5].tolist() == [50, 60, 70, 0, 10]
    assert batch.next_times[:5].tolist() == [60, 70, 80, 10, 20]
    held_out = HistoryWindows(INTERACTIONS, max_length=3, num_left_out=0)
    batch = held_out.batch(torch.tensor([0, 1, 2]), num_users=3, capacity=6)
    assert histories_of(batch) == [([5, 1, 4], [1, 4, 2]), ([], []), ([0, 6, 8], [6, 8, 9])]


def test_batches_of_ranks_have_one_shape_and_every_user_once() -> None:
    windows = HistoryWindows(INTERACTIONS, max_length=3, num_left_out=0)
    orders = [torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])]
    assert needed_capacity(windows, orders, batch_size=2, num_ranks=1) == 8  # of 6
    found = []
    for rank in range(2):
        batches = PackedBatches(
            windows, orders[0], batch_size=2, capacity=8, rank=rank, num_ranks=2
        )
        assert len(batches) == 2
        assert all(len(batch.items) == 8 and len(batch.offsets) == 2 for batch in batches)
        found += [of_user for batch in batches for of_user in histories_of(batch)]
    assert [items for items, _ in found] == [[0, 6, 8], [], [5, 1, 4], []]


def test_the_files_of_movielens_are_read_alike(tmp_path: Path) -> None:
    """Movies that nobody has rated are items, and ratings at one time stay in order."""
    home = tmp_path / "ml-1m"
    home.mkdir()
    (home / "movies.dat").write_text("".join(f"{n}::Film (1990)::Drama\n" for n in (2, 5, 6, 9)))
    (home / "ratings.dat").write_text("1::9::3::50\n1::2::5::40\n7::6::1::9\n1::6::4::40\n")
    found = read(home / "ratings.dat")
    assert found.items.tolist() == [0, 2, 3, 2]
    assert found.offsets.tolist() == [0, 3, 4]
    assert found.times is not None and found.times.tolist() == [40, 40, 50, 9]
    assert (found.num_items, found.num_users) == (4, 2)
    np.savez(
        home / "ratings.npz",
        user=np.array([1, 1, 7, 1], np.int16),
        movie=np.array([9, 2, 6, 6], np.int16),
        rating=np.array([3, 5, 1, 4], np.int8),
        time_rank=np.array([2, 0, 0, 1], np.int16),
    )
    ranked = read(home / "ratings.npz")
    assert ranked.times is None
    assert torch.equal(ranked.items, found.items)
    assert torch.equal(ranked.offsets, found.offsets)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ratings", "1::3::5::9\n", r"ratings.dat, line 1: must be of a movie .* and 3 is not"),
        ("ratings", "1::2::5\n", r"ratings.dat, line 1: must have 4 fields"),
        (
            "movies",
            "2::A::B\n2::A::B\n",
            r"movies.dat, line 2: MovieID must be .* before, 2, got '2'",
        ),
        ("movies", "x\n", r"movies.dat, line 1: must have 3 columns .*, got \['x'\]"),
        ("movies", "", r"movies.dat: must hold lines of MovieID::Title::Genres, got none"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = made_data.write_ml1m(tmp_path)
    path.with_name(f"{name}.dat").write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path.parent)) + "/" + message):
        read(path)


def test_samples_hold_what_was_before_them() -> None:
    samples = Samples(INTERACTIONS, max_length=2, num_left_out=1)
    assert samples.places.tolist() == [1, 2, 6, 7, 8]
    assert samples.chosen.tolist() == [1, 4, 0, 6, 8]
    assert samples.lengths.tolist() == [1, 2, 1, 2, 2]
    batch = samples.batch(torch.tensor([3, 0]), None)
    assert batch.items.tolist() == [3, 0, 5, 0]
    assert batch.offsets.tolist() == [0, 2, 3]
    assert batch.candidates.tolist() == [[6], [1]]
    assert batch.labels is None


def test_negatives_are_other_items_and_differ_from_epoch_to_epoch() -> None:
    samples = Samples(INTERACTIONS, max_length=2, num_left_out=1)

    def of_epoch(seed: int, rank: int = 0) -> list[Impressions]:
        numbers = torch.arange(5)
        batches = SampleBatches(
            samples, numbers, batch_size=2, rank=rank, num_ranks=2, negatives_seed=seed
        )
        assert len(batches) == 2  # the last sample fills no batch
        return list(batches)

    found = of_epoch(1) + of_epoch(1, rank=1)
    assert sorted(int(batch.candidates[0, 0]) for batch in found) == [0, 1, 4, 6]
    for batch in found:
        assert batch.labels is not None and batch.labels.tolist() == [[1.0, 0.0]]
        assert batch.candidates.shape == (1, 2)
        assert batch.candidates[0, 0] != batch.candidates[0, 1]
    drawn = [[batch.candidates.tolist() for batch in of_epoch(seed)] for seed in range(1, 9)]
    assert drawn[0] == [batch.candidates.tolist() for batch in of_epoch(1)]
    assert any(other != drawn[0] for other in drawn[1:])


def test_held_out_items_are_ranked_among_those_not_seen() -> None:
    model = torch.nn.Dropout()
    windows = HistoryWindows(INTERACTIONS, max_length=2, num_left_out=0)

    def make_score() -> Score:
        assert not model.training
        in_order = -torch.arange(10.0)  # users prefer items in the order of their numbers
        return lambda histories: in_order.expand(len(histories.offsets) - 1, -1)

    found = evaluate(model, make_score, windows, device=torch.device("cpu"), num_users=2)
    # 2 is after 0, since 1 was seen; 9 after 1, 2, 4, 5 and 7; one user has no history.
    assert found.num_users == 2
    assert found.hit_rate[10] == 1.0
    gains = [1 / np.log2(3), 1 / np.log2(7)]
    assert abs(found.ndcg[10] - np.mean(gains)) <= 4 * np.finfo(np.float64).eps
    assert model.training


def test_runs_end_with_a_ranking_and_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_data.write_ml1m(tmp_path)
    results = []
    for output, flags in (
        ("whole", ()),
        ("first", ("--epochs", 1)),
        ("first", ("--resume", "--epochs", 2)),
        ("first", ("--resume", "--epochs", 3, "--batch-size", 2)),
        ("first", ("--resume", "--epochs", 1)),
    ):
        folder = tmp_path / output
        given = ["--data", tmp_path, "--output", folder, *SMALL]
        if flags[:1] == ("--resume",):
            given, flags = ["--resume", folder], flags[1:]
        main([str(argument) for argument in ("sasrec", *given, *flags)])
        word, _, text = capsys.readouterr().out.splitlines()[-1].partition(" ")
        assert word == "RESULT"
        results.append(json.loads(text))
        assert len(list(Path(results[-1]["checkpoint"]).glob("step-*/complete.json"))) == 1
    whole, first, resumed, in_smaller_batches, done = results
    assert (whole["num_steps"], first["num_steps"]) == (2 * 2 * 3, 2 * 1 * 3)
    assert set(whole["hr_10_by_seed"]) == {"1", "2"}
    assert 0 <= whole["ndcg_10"] <= whole["hr_10"] <= whole["hr_50"] <= 1
    assert resumed["num_steps"] == whole["num_steps"]
    # One epoch more, of twice as many batches, and none where fewer are asked for than are done.
    assert in_smaller_batches["num_steps"] == 2 * (2 * 3 + 6)
    for figure in ("num_steps", "hr_10", "samples_per_second"):
        assert done[figure] == in_smaller_batches[figure]


def test_hstu_goes_by_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_data.write_ml1m(tmp_path)
    output = tmp_path / "out"
    main(["hstu", "--data", str(tmp_path), "--output", str(output), *SMALL, "--seeds", "1"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("RESULT")
    assert "Encoder.HSTU" in (output / "config.txt").read_text()


@pytest.mark.parametrize("recipe", ["din", "two-tower"])
def test_models_of_candidates(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_data.write_ml1m(tmp_path)
    common = ["--data", str(tmp_path), "--epochs", "4", "--max-length", "6", "--batch-size", "64"]
    small = ["--embedding-dim", "8", "--layer-sizes", "8", "--learning-rate", "0.05"]
    losses = []
    for precision in ("FP32", "BF16"):
        output = tmp_path / precision
        main([recipe, *common, *small, "--output", str(output), "--precision", precision])
        word, _, text = capsys.readouterr().out.splitlines()[-1].partition(" ")
        assert word == "RESULT" and json.loads(text)["num_steps"] == 4 * (676 // 64)
        lines = read_metrics(output / "seed-1")
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert lines[-1]["hr@10"] == pytest.approx(json.loads(text)["hr_10"], abs=5e-7)
        assert (output / "seed-1" / "training.png").is_file()
    assert losses[0] != losses[1]
    with pytest.raises(ValueError, match=r"batch_size must be at most .*, 676, got 1000"):
        main([recipe, *common, "--batch-size", "1000", "--output", str(tmp_path / "bad")])


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"seeds must be different and at least one, got \(1, 1\)"):
        SequenceConfig(seeds=(1, 1))
    with pytest.raises(ValueError, match="num_negatives must be at least 1, got 0"):
        SequenceConfig(num_negatives=0)


def test_help_says_which_files_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["sasrec", "--help"])
    assert "ratings.dat" in capsys.readouterr().out
