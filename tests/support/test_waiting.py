"""A wait ends when its condition holds, or says why it does not."""

import pytest

from tests.support import waiting
from tests.support.waiting import wait_until


def test_a_wait_ends_once_its_condition_holds() -> None:
    asked = iter([False, False, True])
    wait_until(lambda: next(asked))
    assert next(asked, None) is None


def test_a_wait_that_takes_too_long_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LIMIT_SECONDS", 0.01)
    with pytest.raises(AssertionError, match="it does not come true"):
        wait_until(lambda: False)
    with pytest.raises(AssertionError, match="3 of 4 came"):
        wait_until(lambda: False, lambda: "3 of 4 came")
