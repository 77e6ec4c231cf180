"""``bench.tiers.equality``: what it trains, and what it calls equal."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

from bench.tiers import equality
from bench.tiers.equality_ids import DIMS, FIXED_ROWS, most_rows, turnover_batch, zipf_batch

CPU = torch.device("cpu")


def test_tables_anywhere_train_the_bits_of_those_on_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equality, "SHARES", (0.0, 1.0))
    arguments = ["--steps", "6", "--optimizers", "Adam", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["equality", *arguments])
    equality.main()
    out = capsys.readouterr().out
    assert out.endswith("10 cases: 10 train the same bits as on the device, 0 do not\n")
    line = r"^Adam .* (in host|on disk) +equal +equal "
    assert len(re.findall(line, out, re.MULTILINE)) == 10
    assert not list(tmp_path.iterdir())


def test_a_difference_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [turnover_batch(number) for number in range(3)]
    case = next(equality.cases("turnover", batches))
    expected = equality.trained(dict.fromkeys(DIMS), "SGD", batches, CPU)
    stored = equality.storages_of(case, Path())
    found = equality.trained(stored, "SGD", batches, CPU)
    assert equality.outcome(case, found, expected).is_equal
    one_bit = dict(found.state)
    name = next(name for name in one_bit if name.endswith(".rows"))
    one_bit[name] = one_bit[name].clone()
    one_bit[name].view(torch.int32)[0, 0] ^= 1
    changes = {
        "state": {"state": one_bit},
        "losses": {"losses": [*found.losses[:-1], (0.5).hex()]},
        "no row left a cache; raise --steps": {"moved": {**found.moved, "write_backs": 0}},
    }
    outcomes = [equality.outcome(case, found._replace(**c), expected) for c in changes.values()]
    assert [one.is_equal for one in outcomes] == [False] * 3
    assert [one.state_equal for one in outcomes] == [False, True, True]
    assert [one.losses_equal for one in outcomes] == [True, False, True]
    assert [one.problem for one in outcomes] == [None, None, list(changes)[2]]
    for words, one in zip(("differ", "differ", "wrong: no row"), outcomes, strict=True):
        assert words in equality.line_text("SGD", case, one)
    on_disk = case._replace(host_rows=case.cache_rows)
    assert equality.outcome(on_disk, found, expected).problem == (
        "no row reached the disk; raise --steps"
    )
    # A batch that is too large must be refused, and in words that say by how much.
    refused = case._replace(refused=batches[0])
    for error in (None, "out of memory"):
        problem = equality.outcome(refused, found._replace(error=error), expected).problem
        assert problem is not None and problem.endswith(f"got {error!r}")


def test_a_difference_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = equality.Outcome(True, False, None, {})
    monkeypatch.setattr(equality, "compare", lambda *_: [failed])
    monkeypatch.setattr(sys, "argv", ["equality"])
    with pytest.raises(SystemExit, match="1"):
        equality.main()


def test_zeros_of_either_sign_differ_and_equal_nans_do_not() -> None:
    zero, nan = torch.zeros(1), torch.full((1,), torch.nan)
    assert equality.same_bits({"a": nan}, {"a": nan.clone()})
    assert not equality.same_bits({"a": zero}, {"a": -zero})
    assert not equality.same_bits({"a": zero}, {"b": zero})
    assert not equality.same_bits({"a": zero}, {"a": zero.view(torch.int32)})


def test_batches_have_the_rows_that_they_say() -> None:
    for number in range(50):
        exactly = turnover_batch(number)
        assert most_rows([exactly]) == dict.fromkeys(DIMS, FIXED_ROWS)
        assert most_rows([turnover_batch(number, 1)]) == dict.fromkeys(DIMS, FIXED_ROWS + 1)
        ids, after = exactly.sparse.values, turnover_batch(number + 1, 1).sparse.values
        assert not torch.isin(ids, after).any()
    # Of 48 and 32 Zipf ids, which repeat.
    zipf = most_rows([zipf_batch(0)])
    assert 0 < zipf["item"] < 48 and 0 < zipf["user"] < 32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"optimizers": ("SGD", "Lion")}, ValueError, "optimizers must be of SGD, .*, got Lion"),
        ({"steps": 1}, ValueError, "steps must be at least 2, .* got 1"),
        ({"folder": Path("none")}, FileNotFoundError, "folder must exist, got none; make it"),
    ],
)
def test_settings_that_compare_nothing(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(equality.Config(), **change)
