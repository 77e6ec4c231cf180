"""The arguments of a model's ``forward`` as named leaves: tensors and sparse features."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard

from torch import Tensor, nn

from torchembed.core.features import Features, SparseFeatures
from torchembed.core.mixed_features import MixedFeatures
from torchembed.modules.dense_part.errors import DeployError

AnyFeatures: TypeAlias = Features | MixedFeatures
Path: TypeAlias = tuple[str, ...]


def is_features(value: object) -> TypeGuard[AnyFeatures]:
    """True for sparse features, torchembed's or TorchRec's."""
    if isinstance(value, SparseFeatures | MixedFeatures):
        return True
    needed = ("keys", "values", "offsets", "weights_or_none", "stride")
    return all(callable(getattr(value, name, None)) for name in needed)


class ArgumentTree:
    """Example arguments of a model; others of the same form are made by :meth:`with_leaves`.

    Tuples, named ones too, lists, mappings and dataclasses are walked; all else that is no leaf
    stays as it is. A leaf has the name of its argument of ``forward``, or where that is the only
    one, of its place in it.

    Attributes:
        leaves: by name.
        packed: of named tuples with ``PACKED_IDS``, the name of ``offsets`` by that of each field
            that ``PACKED_IDS`` names, where it is a tensor.
    """

    def __init__(self, model: nn.Module, examples: object) -> None:
        """
        Args:
            examples: the arguments: a tuple that is no named one for several, else the only one.

        Raises:
            DeployError: where several leaves would have one name.
        """
        positional = examples if type(examples) is tuple else (examples,)
        bound = inspect.signature(model.forward).bind(*positional)
        self._arguments = dict(bound.arguments)
        self.leaves: dict[str, Tensor | AnyFeatures] = {}
        _mapped(self._arguments, (), self._collect)
        pairs = _packed_fields(self._arguments, ())
        self.packed = {self._name(ids): self._name(offsets) for ids, offsets in pairs}

    def _name(self, path: Path) -> str:
        return ".".join(path[1:] if len(self._arguments) == 1 and len(path) > 1 else path)

    def _collect(self, path: Path, leaf: Tensor | AnyFeatures) -> None:
        name = self._name(path)
        if name in self.leaves:
            raise DeployError(
                f"examples must have a name of its own for each tensor, and several are named "
                f"{name!r}; rename a key"
            )
        self.leaves[name] = leaf

    def with_leaves(self, leaves: Mapping[str, object]) -> list[Any]:
        """The arguments, positional ones, with other leaves in the places of the examples'."""
        made = _mapped(self._arguments, (), lambda path, _: leaves[self._name(path)])
        return list(made.values())


def _packed_fields(tree: Any, path: Path) -> Iterator[tuple[Path, Path]]:
    """The paths of packed ids and of the offsets that they lie between."""
    if isinstance(tree, Tensor) or is_features(tree):
        return
    if isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        for field in getattr(tree, "PACKED_IDS", ()):
            yield (*path, field), (*path, "offsets")
        tree = tree._asdict()  # type: ignore[attr-defined]
    elif isinstance(tree, tuple | list):
        tree = dict(enumerate(tree))
    elif dataclasses.is_dataclass(tree):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from _packed_fields(child, (*path, str(name)))


def _mapped(tree: Any, path: Path, leaf: Callable[[Path, Any], object]) -> Any:
    """``tree`` with what ``leaf`` gives for each leaf in its place."""
    if isinstance(tree, Tensor) or is_features(tree):
        return leaf(path, tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, (*path, str(key)), leaf) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names = type(tree)._fields  # type: ignore[attr-defined]
        pairs = zip(names, tree, strict=True)
        return type(tree)(*(_mapped(value, (*path, name), leaf) for name, value in pairs))
    if isinstance(tree, tuple | list):
        items = (_mapped(value, (*path, str(n)), leaf) for n, value in enumerate(tree))
        return type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        changed = {name: _mapped(value, (*path, name), leaf) for name, value in fields.items()}
        return dataclasses.replace(tree, **changed)
    return tree
