"""Labels of several tasks by name: what is taken, and what is refused by name."""

import re
from typing import Any

import pytest
import torch

from torchembed.data.tasks import Task, TaskKind, checked_tasks, task_labels

LIKE = Task(name="like", kind=TaskKind.BINARY)
RATING = Task(name="rating", kind=TaskKind.REGRESSION, mask="is_rated")
TASKS = (LIKE, RATING)
GOOD: dict[str, Any] = {
    "like": torch.tensor([0, 1, 1]),
    "rating": torch.tensor([[4.5], [float("nan")], [-3.0]], dtype=torch.float64),
    "is_rated": torch.tensor([1, 0, 1]),
}


def test_labels_are_columns_and_masks_are_bool() -> None:
    found = task_labels(GOOD, TASKS)
    assert found.keys() == GOOD.keys()
    assert torch.equal(found["like"], torch.tensor([0.0, 1.0, 1.0]))
    assert torch.equal(found["is_rated"], torch.tensor([True, False, True]))
    assert found["rating"].dtype == torch.float32
    assert found["rating"][found["is_rated"]].tolist() == [4.5, -3.0]
    again = task_labels(found, TASKS)
    assert all(torch.equal(again[name].nan_to_num(), found[name].nan_to_num()) for name in GOOD)
    empty = task_labels({name: labels[:0] for name, labels in GOOD.items()}, TASKS)
    assert {name: len(labels) for name, labels in empty.items()} == dict.fromkeys(GOOD, 0)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"like": None}, TypeError, "labels of task like must be a tensor [B], got NoneType"),
        ({"like": [0, 1, 1]}, TypeError, "labels of task like must be a tensor [B], got list"),
        (
            {"like": torch.zeros(3, 2)},
            ValueError,
            "labels of task like must be [B] or [B, 1], got [3, 2]",
        ),
        (
            {"like": torch.tensor([0.0, 3.0, 1.0])},
            ValueError,
            (
                "labels of task like must be from 0 to 1, of a binary task, or left out by a mask, "
                "got 3 for sample 1"
            ),
        ),
        (
            {"like": torch.tensor([0.0, 1.0, float("nan")])},
            ValueError,
            (
                "labels of task like must be from 0 to 1, of a binary task, or left out by a mask, "
                "got nan for sample 2"
            ),
        ),
        (
            {"is_rated": torch.ones(3)},
            ValueError,
            "labels of task rating must be finite, or left out by a mask, got nan for sample 1",
        ),
        (
            {"is_rated": torch.tensor([1, 0, 2])},
            ValueError,
            "mask is_rated must be bool, or 0 or 1, got 2 for sample 2",
        ),
        (
            {"is_rated": torch.ones(2)},
            ValueError,
            "labels of task rating must be as many as those of its mask is_rated, 2, got 3",
        ),
        (
            {"share": torch.ones(3)},
            ValueError,
            (
                "labels must be of the tasks ['like', 'rating'], got some of unknown tasks "
                "['share']; add a Task for each, or leave the labels out"
            ),
        ),
    ],
)
def test_labels_that_do_not_fit_are_named(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        task_labels(GOOD | changed, TASKS)


@pytest.mark.parametrize("name", GOOD)
def test_missing_labels_are_named(name: str) -> None:
    labels = {key: value for key, value in GOOD.items() if key != name}
    message = (
        "labels must have one tensor for each of the tasks ['like', 'rating'] and masks "
        f"['is_rated'], got {list(labels)} without ['{name}']; add the labels, or leave the tasks "
        "out"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        task_labels(labels, TASKS)


def test_labels_that_have_no_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a mapping with a tensor .* \['like', 'rating'\], got T"):
        task_labels(torch.zeros(3, 2), TASKS)


def test_tasks_are_checked() -> None:
    assert checked_tasks(iter(TASKS)) == TASKS
    with pytest.raises(ValueError, match=r"^name must be a string that is not empty, got ''$"):
        Task(name="", kind=TaskKind.BINARY)
    with pytest.raises(TypeError, match=r"^kind of task a must be a TaskKind, got 'binary'$"):
        Task(name="a", kind="binary")  # type: ignore[arg-type]
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^weight of task a must be a number above 0, got "):
            Task(name="a", kind=TaskKind.BINARY, weight=weight)
    for tasks in ((), (LIKE, LIKE)):
        with pytest.raises(ValueError, match=r"at least one, each with a name of its own, got \["):
            checked_tasks(tasks)
    with pytest.raises(TypeError, match=r"^tasks must be Tasks, got str: 'like'$"):
        checked_tasks(["like"])  # type: ignore[list-item]
    masked = Task(name="a", kind=TaskKind.BINARY, mask="like")
    with pytest.raises(ValueError, match=r"^mask of task a must be no task's labels, got 'like'"):
        checked_tasks([LIKE, masked])
