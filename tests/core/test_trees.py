"""Trees of tensors: what is in them, what they become, and what their layout is."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchembed.core.trees import layout_of, map_tensors, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    names: tuple[str, ...]
    value: Any
    derived: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Found:
    """With a field that is not given."""

    given: dataclasses.InitVar[int]
    number: int = dataclasses.field(init=False)

    def __post_init__(self, given: int) -> None:
        self.number = given


def tree(start: float = 0.0) -> dict[str, Any]:
    a, b, c, d = (torch.full((n + 1,), start + n) for n in range(4))
    return {
        "pair": Pair(a, [b, None, "text", ()]),
        "record": Record(names=("x", "y"), value=(c, 7)),
        "list": [{1: d}],
    }


def test_tensors_come_in_the_order_of_the_tree() -> None:
    assert [tensor[0].item() for tensor in tensors_in(tree())] == [0, 1, 2, 3]
    assert tensors_in(torch.ones(1)) == [torch.ones(1)]
    assert tensors_in((1, "a", object())) == []


def test_a_mapped_tree_has_the_same_form() -> None:
    seen: list[float] = []

    def add(tensor: Tensor) -> Tensor:
        seen.append(tensor[0].item())
        return tensor + 10

    result = map_tensors(add, tree())
    assert seen == [0, 1, 2, 3]
    assert layout_of(result) == layout_of(tree())
    assert [tensor[0].item() for tensor in tensors_in(result)] == [10, 11, 12, 13]
    assert isinstance(result["pair"], Pair)
    assert result["record"].names == ("x", "y")
    opaque = object()
    assert map_tensors(add, (opaque,)) == (opaque,)


def test_layouts_differ_in_all_but_contents() -> None:
    same = layout_of(tree())
    assert same == layout_of(tree(start=5.0))
    others = [
        {**tree(), "list": [{1: torch.ones(5)}]},
        {**tree(), "list": [{1: torch.ones(4, dtype=torch.int32)}]},
        {**tree(), "list": [{2: torch.ones(4)}]},
        {**tree(), "list": ({1: torch.ones(4)},)},
        {**tree(), "pair": tuple(tree()["pair"])},
        {**tree(), "record": Record(names=("x", "z"), value=tree()["record"].value)},
    ]
    for other in others:
        assert layout_of(other) not in (same, None)
    assert layout_of(Found(1)) not in (layout_of(Found(2)), None)
    assert layout_of(Found(1)) == layout_of(Found(1))


@pytest.mark.parametrize("opaque", [object(), torch.Generator(), {1, 2}])
def test_what_is_opaque_has_no_layout(opaque: Any) -> None:
    assert layout_of((torch.ones(1), [opaque])) is None
