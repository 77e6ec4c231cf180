"""Stand-ins for table modules, which give vectors that they are fed, and for sparse features."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchembed.modules.dense_part.argument_tree import AnyFeatures
from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.recording import RecordedCall

_SETTINGS = (
    "reserved_columns",
    "embedding_bag_configs",
    "embedding_configs",
    "is_weighted",
    "embedding_dim",
    "num_embeddings",
    "padding_idx",
    "mode",
)


class Vectors(NamedTuple):
    """The result of a lookup.

    Attributes:
        values: ``[B, D]``; ``[B, hotness, D]`` or ``[L, D]`` of lookups of each id's vector.
        lengths: of the bags of a jagged feature whose vectors are not pooled, int64 ``[B]``.
    """

    values: Tensor
    lengths: Tensor | None = None


class FedVectors:
    """The vectors that the stand-ins give next, in ``dtype``, or as the tables gave them."""

    def __init__(
        self, calls: Mapping[str, Sequence[RecordedCall]], dtype: torch.dtype | None
    ) -> None:
        self._calls, self._dtype = calls, dtype
        self._vectors: Sequence[Vectors] = ()
        self._num_calls: dict[str, int] = {}

    def begin(self, vectors: Sequence[Vectors]) -> None:
        """Give ``vectors``, one for each lookup, from the first call of each module on."""
        self._vectors, self._num_calls = vectors, {}

    def result(self, path: str) -> Any:
        """The result of the next call of the module at ``path``."""
        number = self._num_calls.get(path, 0)
        self._num_calls[path] = number + 1
        call = self._calls[path][number]
        found = [self._vectors[lookup] for lookup in call.lookups]
        values = [vectors.values.to(self._dtype or call.dtype) for vectors in found]
        if not call.names:
            (only,) = values
            return only if only.dim() == 2 else only.reshape(-1, *call.shape)
        if call.part_kind is None:
            widths = [value.shape[1] for value in values]
            pooled = torch.cat(values, dim=1)
            return call.kind(keys=list(call.names), length_per_key=widths, values=pooled)
        parts = {}
        for name, value, vectors in zip(call.names, values, found, strict=True):
            flat, offsets = _jagged(value, vectors.lengths)
            parts[name] = call.part_kind(values=flat, offsets=offsets)
        return parts


def _jagged(values: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    if lengths is not None:
        return values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    batch_size, hotness = values.shape[:2]
    bags = torch.arange(batch_size + 1, device=values.device)
    return values.flatten(0, 1), bags * hotness


class FedModule(nn.Module):
    """Stands in a model's tree in place of a table module."""

    def __init__(self, path: str, source: nn.Module, fed: FedVectors) -> None:
        super().__init__()
        # In a tuple, since a module would be a submodule with all its rows.
        self._fed: Any = (path, source, fed)

    def forward(self, *_: object, **__: object) -> Any:
        path, _, fed = self._fed
        assert isinstance(fed, FedVectors)
        return fed.result(path)

    def __getattr__(self, name: str) -> Any:
        if name in ("_fed", "training"):
            return super().__getattr__(name)
        path, source, _ = self._fed
        if name in _SETTINGS and hasattr(source, name):
            return getattr(source, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise DeployError(
                f"model must not read {name!r} of its tables {path} in its forward, since rows "
                "are looked up elsewhere; look vectors up by calling the module"
            ) from None


class FedFeatures:
    """Stands in a model's arguments in place of sparse features, whose ids tables alone may
    read."""

    def __init__(self, source: AnyFeatures, name: str) -> None:
        self._keys, self._name = source.keys, name

    @property
    def keys(self) -> Any:
        """The names of the features, as the argument has them."""
        return self._keys

    def __getattr__(self, name: str) -> Any:
        raise DeployError(
            f"model must not read {name!r} of {self._name} in its forward, since tables alone see "
            "sparse features when it serves; give such numbers as an argument of their own"
        )


@contextlib.contextmanager
def fed_modules(model: nn.Module, paths: Sequence[str], fed: FedVectors) -> Iterator[None]:
    """A context in which stand-ins are in the places of the table modules at ``paths``."""
    sources = {model.get_submodule(path): path for path in paths}
    stand_ins = {source: FedModule(path, source, fed) for source, path in sources.items()}
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in stand_ins:
                replaced.append((parent, name, child))
    try:
        for parent, name, child in replaced:
            parent._modules[name] = stand_ins[child]
        yield
    finally:
        for parent, name, child in replaced:
            parent._modules[name] = child
