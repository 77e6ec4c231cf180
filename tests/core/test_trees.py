"""Trees of tensors: what is in them, what they become, and what their layout is."""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchembed.core.trees import is_tensor, layout_of, map_tensors, nodes_by_path, tensors_in


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


class Movable:
    """An object of a class with a method ``to`` is a tree of its attributes."""

    def __init__(self, value: Any) -> None:
        self.value, self.name = value, "a"

    def to(self, device: torch.device) -> "Movable":
        return self


class Bare:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_objects_that_can_be_moved_are_trees_of_their_attributes() -> None:
    given = Movable({"x": torch.ones(2)})
    mapped = map_tensors(lambda tensor: tensor + 1, given)
    assert type(mapped) is Movable
    assert mapped.name == "a"
    assert mapped.value["x"].tolist() == [2, 2]
    assert given.value["x"].tolist() == [1, 1]
    assert layout_of(mapped) == layout_of(given) is not None
    assert layout_of(Movable(1)) != layout_of(Movable(2))
    assert layout_of(Bare(1)) is None
    assert tensors_in(Bare(torch.ones(1))) == []


@pytest.mark.parametrize(
    "kind", [collections.UserDict, collections.OrderedDict, types.MappingProxyType]
)
def test_mappings_keep_their_class(kind: Any) -> None:
    given = kind({"x": torch.ones(2), "y": None})
    mapped = map_tensors(lambda tensor: tensor + 1, given)
    assert type(mapped) is kind
    assert mapped["x"].tolist() == [2, 2]
    assert given["x"].tolist() == [1, 1]
    assert layout_of(mapped) == layout_of(given) != layout_of(dict(given))


def test_paths_lead_to_what_holds_no_others() -> None:
    given = {"a": Pair(1, [Movable(torch.ones(1)), Bare(2)]), "b": collections.UserDict(c=None)}
    found = nodes_by_path(given, is_tensor)
    paths = ["['a'].first", "['a'].second[0].value", "['a'].second[0].name", "['a'].second[1]"]
    assert list(found) == [*paths, "['b']['c']"]


class ByGetItem(dict[str, Any]):
    """Items as attributes; other attributes raise KeyError."""

    __getattr__ = dict.__getitem__


class IsItsAttributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class SetsBoth(collections.OrderedDict[str, Any]):
    """Items are set as attributes too, and not by ``update``."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError


@pytest.mark.parametrize("kind", [ByGetItem, IsItsAttributes, SetsBoth])
def test_items_that_are_attributes_too_change_with_them(kind: Any) -> None:
    one, name = torch.ones(2), "a name"
    mapping = kind(x=one, name=name)
    mapped = map_tensors(lambda tensor: tensor * 2, mapping)
    assert type(mapped) is kind
    assert mapped.x is mapped["x"]
    assert mapped.x.tolist() == [2, 2]
    assert mapped.name == name
    assert mapping.x is one
    assert layout_of(mapped) == layout_of(mapping)
    assert list(nodes_by_path(mapping, is_tensor)) == ["['x']", "['name']"]


def test_defaults_of_dicts_stay() -> None:
    mapped = map_tensors(Tensor.neg, collections.defaultdict(list, x=torch.ones(1)))
    assert mapped["y"] == []


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """Computes fields and takes other arguments than fields."""

    x: Tensor = dataclasses.field(init=False)
    doubled: Tensor = dataclasses.field(init=False)
    unset: int = dataclasses.field(init=False)
    given: dataclasses.InitVar[Tensor]

    def __post_init__(self, given: Tensor) -> None:
        object.__setattr__(self, "x", given)
        object.__setattr__(self, "doubled", given * 2)


@dataclasses.dataclass(init=False)
class OfOne:
    """Keeps something in an attribute that is no field."""

    x: Tensor

    def __init__(self, whole: Tensor) -> None:
        self.x, self.is_large = whole, whole > 1


def test_constructors_of_users_are_not_called() -> None:
    x = torch.tensor([1.0, 2.0])
    computed = map_tensors(lambda tensor: tensor + 1, Computed(x))
    assert [tensor.tolist() for tensor in tensors_in(computed)] == [[2, 3], [3, 5]]
    found = map_tensors(lambda tensor: tensor.clone(), OfOne(x))
    assert [tensor.tolist() for tensor in tensors_in(found)] == [[1, 2], [False, True]]
    assert found.is_large.tolist() == [False, True]
    assert list(nodes_by_path(found, is_tensor)) == [".x", ".is_large"]
    assert layout_of(found) == layout_of(OfOne(x))


def test_tuples_and_lists_of_other_classes_stay_of_theirs() -> None:
    class Swapped(collections.namedtuple("Swapped", ("a", "b"))):  # noqa: PYI024
        def __new__(cls, pair: Any) -> Any:
            return super().__new__(cls, pair[1], pair[0])

    class Numbered(list[Any]):
        number = 0

    swapped = map_tensors(Tensor.neg, Swapped((torch.ones(1), torch.zeros(1))))
    assert (type(swapped), swapped.b.tolist()) == (Swapped, [-1])
    numbered = Numbered([torch.ones(1)])
    numbered.number = 5
    mapped = map_tensors(Tensor.neg, numbered)
    assert (type(mapped), mapped.number, mapped[0].tolist()) == (Numbered, 5, [-1])
    assert numbered[0].tolist() == [1]


def test_what_cannot_be_changed_is_kept_where_nothing_changes() -> None:
    record = Record(names=("a",), value=torch.zeros(1))
    pair = Pair(record, (torch.ones(1), "name"))
    assert map_tensors(lambda tensor: tensor, pair) is pair
    other = map_tensors(lambda tensor: tensor + 1, pair)
    assert other is not pair and other.first is not record
    lists = Pair([record], {"a": record})
    found = map_tensors(lambda tensor: tensor, lists)
    assert found.first is not lists.first and found.second is not lists.second
    assert found.first[0] is record
