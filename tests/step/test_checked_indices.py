"""Indices out of range are found before an operation reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchembed.step.watches.checked_indices import check_indices


class Checked(TorchDispatchMode):
    """Checks the indices of each call."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        check_indices(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


TABLE = torch.arange(12.0).view(4, 3)
USES: dict[str, Callable[[Tensor], object]] = {
    "index": lambda index: TABLE[index],
    "index of columns": lambda index: TABLE[:, index - 1],
    "index_put": lambda index: TABLE.clone().index_put_((index,), torch.zeros(())),
    "index_select": lambda index: TABLE.index_select(0, index),
    "index_add": lambda index: TABLE.index_add(0, index, torch.ones(len(index), 3)),
    "gather": lambda index: TABLE.gather(0, index.unsqueeze(1)),
    "scatter_add": lambda index: torch.zeros(4).scatter_add_(0, index, torch.ones(len(index))),
    "scatter_reduce": lambda index: torch.zeros(4).scatter_reduce(
        0, index, torch.ones(len(index)), "amax"
    ),
    "embedding": lambda index: torch.nn.functional.embedding(index, TABLE),
    "take": lambda index: TABLE.take(index + 8),
}


@pytest.mark.parametrize("name", USES)
def test_an_index_past_the_end_is_found(name: str) -> None:
    with Checked():
        USES[name](torch.tensor([0, 3, 3]))
        with pytest.raises(IndexError, match=r"aten::\w+: index \d+ is out of bounds for size"):
            USES[name](torch.tensor([0, 4, 3]))


def test_an_index_may_count_from_the_end_where_the_operation_lets_it() -> None:
    last = torch.tensor([-1, 3])
    with Checked():
        assert TABLE[last].tolist() == TABLE[[3, 3]].tolist()
        assert TABLE[TABLE[:, 0] > 2].shape == (3, 3)
        with pytest.raises(IndexError, match="index -1 is out of bounds for size 4"):
            TABLE.index_select(0, last)


def test_lengths_add_up_to_their_size() -> None:
    lengths = torch.tensor([1, 0, 2])
    with Checked():
        found = torch.repeat_interleave(torch.arange(3), lengths, output_size=3)
        assert found.tolist() == [0, 2, 2]
        with pytest.raises(ValueError, match="lengths add up to 3, and not to the given size 5"):
            torch.repeat_interleave(torch.arange(3), lengths, output_size=5)
