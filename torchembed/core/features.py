"""Batches of sparse features.

The classes have the methods of TorchRec's ``KeyedJaggedTensor``, ``KeyedTensor`` and
``JaggedTensor`` that reading takes; :func:`as_sparse_features` takes TorchRec's own by their
methods, without importing TorchRec.
"""

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.ragged import Bags, Number, bags_of_features, flat_ids, flat_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseFeatures:
    """A batch of the ids of ``F`` features for ``B`` samples, feature after feature.

    The bag of feature f and sample b is ``values[offsets[f * B + b]:offsets[f * B + b + 1]]``. If
    every bag of feature f has ``hotness[f]`` ids, the batch has ``hotness`` and no offsets, and
    trains faster. Tensors are not copied. Offsets start at 0, do not descend and end at ``L`` or
    before; operations check that only under ``TORCHEMBED_CHECK_OPERATIONS=1``, since it takes
    reading the tensor.

    Raises:
        TypeError, ValueError: for fields of a wrong dtype or shape, duplicate keys, or not exactly
            one of ``offsets`` and ``hotness``.
    """

    keys: tuple[str, ...]
    """Feature names, ``F`` of them, all different."""
    values: Tensor
    """The ids, ``[L]``, int32 or int64. uint32 becomes int64 by value, and uint64 by its bits, in
    the same memory."""
    batch_size: int
    offsets: Tensor | None = None
    """The position in ``values`` at which each bag begins, and the one behind the last bag:
    ``[F * B + 1]``, int32 or int64; None if ``hotness`` is given."""
    hotness: tuple[int, ...] | None = None
    """The number of ids in each bag, for each feature; None if ``offsets`` is given."""
    weights: Tensor | None = None
    """A weight for each id, ``[L]``, floating, or None."""

    def __post_init__(self) -> None:
        if type(self.keys) is not tuple:
            object.__setattr__(self, "keys", names_in("keys", self.keys))
        if self.hotness is not None and type(self.hotness) is not tuple:
            object.__setattr__(self, "hotness", _counts("hotness", self.hotness))
        values = checks.signed_ids("values", self.values)
        if values is not self.values:
            object.__setattr__(self, "values", values)
        self._check()

    def _check(self) -> None:
        checks.check_dim("values", self.values, 1)
        if not all(isinstance(key, str) for key in self.keys):
            raise TypeError(f"keys must hold strings, got {list(self.keys)}")
        if not _is_count(self.batch_size):
            raise TypeError(
                f"batch_size must be a whole number that is not negative, got {self.batch_size!r}"
            )
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"keys must all be different, got {list(self.keys)}")
        if (self.offsets is None) == (self.hotness is None):
            given = "both" if self.offsets is not None else "neither"
            raise ValueError(f"give exactly one of offsets and hotness, got {given}")
        num_bags = len(self.keys) * self.batch_size
        if self.offsets is not None:
            checks.check_ids("offsets", self.offsets)
            checks.check_numel("offsets", self.offsets, num_bags + 1, "len(keys) * batch_size + 1")
        if self.hotness is not None:
            if len(self.hotness) != len(self.keys):
                raise ValueError(
                    f"hotness must hold {len(self.keys)} counts, one for each key, "
                    f"got {len(self.hotness)}"
                )
            if not all(map(_is_count, self.hotness)):
                raise TypeError(
                    "hotness must hold whole numbers that are not negative, "
                    f"got {list(self.hotness)}"
                )
            num_ids = sum(self.hotness) * self.batch_size
            checks.check_numel("values", self.values, num_ids, "sum(hotness) * batch_size")
        if self.weights is not None:
            dtypes = (*checks.FLOAT_DTYPES, torch.float64)
            checks.check_dtype("weights", self.weights, dtypes, "call .float()")
            checks.check_numel("weights", self.weights, self.values.numel(), "one for each id")

    @classmethod
    def from_dict(
        cls,
        ids: Mapping[str, Bags],
        weights: Mapping[str, Bags] | None = None,
    ) -> "SparseFeatures":
        """A batch on the CPU of ids in Python lists; its bags are jagged, whatever their lengths.

        ``SparseFeatures.from_dict({"user": [7, 7, 2], "genre": [[3, 9], [], [9]]})`` holds two
        features of three samples.

        Args:
            ids: from each feature to a bag for each sample: a sequence of ids, a one-dimensional
                tensor or array, or one id. They become int64.
            weights: one for each id, in the same form; they become float32.

        Raises:
            TypeError: for a value that is no bag, or an id that is no whole number.
            ValueError: if features differ in their number of samples, or weights from ids.
        """
        if not isinstance(ids, Mapping):
            raise TypeError(
                f"ids must be a mapping from features to bags, got {type(ids).__name__}; "
                "from_lists takes lists"
            )
        keys, bags = tuple(ids), bags_of_features("ids", ids)
        values = flat_ids(keys, bags)
        lengths = [len(bag) for of_feature in bags for bag in of_feature]
        offsets = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0)
        flat = None if weights is None else _weights_like(keys, bags, weights)
        batch_size = len(bags[0]) if bags else 0
        return cls(keys=keys, values=values, batch_size=batch_size, offsets=offsets, weights=flat)

    @classmethod
    def from_lists(
        cls,
        keys: Sequence[str],
        ids: Sequence[Bags],
        weights: Sequence[Bags] | None = None,
    ) -> "SparseFeatures":
        """A batch on the CPU of lists with the bags of each feature, in the order of ``keys``;
        otherwise as :meth:`from_dict`.

        ``SparseFeatures.from_lists(["user", "genre"], [[7, 7, 2], [[3, 9], [], [9]]])``
        """
        names = names_in("keys", keys)
        for name, lists in (("ids", ids), ("weights", weights)):
            if lists is not None and len(lists) != len(names):
                raise ValueError(
                    f"{name} must hold {len(names)} lists, one for each key, got {len(lists)}"
                )
        if len(set(names)) != len(names):
            raise ValueError(f"keys must all be different, got {list(names)}")
        of_weights = None if weights is None else dict(zip(names, weights, strict=True))
        return cls.from_dict(dict(zip(names, ids, strict=True)), of_weights)

    @classmethod
    def concatenate(cls, batches: "Sequence[SparseFeatures]") -> "SparseFeatures":
        """The samples of all ``batches``, one batch after the other.

        Bags have fixed hotness where all batches have one, and are jagged otherwise. Waits for a
        GPU.

        Raises:
            ValueError: if there is no batch, or batches differ in their keys, or some have
                weights and some have none.
        """
        return _concatenated(list(batches))

    def lengths(self) -> Tensor:
        """The number of ids of each bag, int64 ``[F, B]``, on the device of ``values``."""
        shape = len(self.keys), self.batch_size
        if self.offsets is not None:
            return self.offsets.diff().long().view(shape)
        counts = torch.tensor(self.hotness, dtype=torch.int64, device=self.values.device)
        return counts.unsqueeze(1).expand(shape)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "SparseFeatures":
        """The batch with ``function(tensor)`` for each tensor, of the same shape and dtype; itself
        where these are the same."""
        before = self.values, self.offsets, self.weights
        after = [None if tensor is None else function(tensor) for tensor in before]
        if all(map(operator.is_, before, after)):
            return self
        # Not dataclasses.replace: what has been checked is not checked again, at each step.
        other = object.__new__(type(self))
        names = ("values", "offsets", "weights")
        vars(other).update(vars(self), **dict(zip(names, after, strict=True)))
        return other

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SparseFeatures":
        """The same batch on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "SparseFeatures":
        """The same batch in page-locked host memory."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the caching allocator that ``stream`` uses this batch's tensors."""
        for tensor in (self.values, self.offsets, self.weights):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)  # type: ignore[arg-type]


def names_in(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """``names`` as a tuple.

    Raises:
        TypeError: for a single string, whose characters would be taken for names, and for anything
            else that is no sequence of strings.
    """
    if isinstance(names, str):
        raise TypeError(
            f"{argument} must be a sequence of names, got the string {names!r}; pass [{names!r}]"
        )
    found = tuple(names) if isinstance(names, Iterable) else None
    if found is None or not all(isinstance(name, str) for name in found):
        raise TypeError(f"{argument} must be a sequence of names, got {names!r}")
    return found


def _counts(argument: str, counts: Sequence[int]) -> tuple[int, ...]:
    if isinstance(counts, str) or not isinstance(counts, Iterable):
        raise TypeError(
            f"{argument} must be a sequence of counts, one for each key, got {counts!r}"
        )
    return tuple(counts)


def _is_count(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        return False
    return bool(number >= 0)


def _weights_like(
    keys: Sequence[str], bags: Sequence[Sequence[Sequence[Number]]], weights: Mapping[str, Bags]
) -> Tensor:
    """The weights of ``bags [F][B][ids]``, float32 ``[L]``."""
    if set(weights) != set(keys):
        raise ValueError(f"weights must be of the features {list(keys)}, got {list(weights)}")
    found = bags_of_features("weights", {key: weights[key] for key in keys})
    for key, of_ids, of_weights in zip(keys, bags, found, strict=True):
        counts, given = [len(bag) for bag in of_ids], [len(bag) for bag in of_weights]
        if counts != given:
            raise ValueError(
                f"weights of feature {key} must be one for each id, {counts} in its bags, "
                f"got {given}"
            )
    return flat_weights(keys, found)


def _concatenated(batches: list[SparseFeatures]) -> SparseFeatures:
    if not batches:
        raise ValueError("batches must hold at least one, got none")
    keys, hotness = batches[0].keys, batches[0].hotness
    for batch in batches:
        if batch.keys != keys:
            raise ValueError(
                f"batches must have the same keys in one order, got {list(keys)} and "
                f"{list(batch.keys)}"
            )
        if (batch.weights is None) != (batches[0].weights is None):
            raise ValueError("batches must all have weights, or none of them")
        hotness = hotness if batch.hotness == hotness else None
    lengths = torch.cat([batch.lengths() for batch in batches], dim=1)
    batch_size = lengths.shape[1]
    # Ids come batch by batch, each feature-major; a stable sort by their bag in the joint batch
    # makes them feature-major as a whole.
    bags = torch.arange(lengths.numel(), device=lengths.device).view_as(lengths)
    split = bags.split([batch.batch_size for batch in batches], dim=1)
    of_ids = torch.cat([part.reshape(-1) for part in split])
    order = of_ids.repeat_interleave(lengths.flatten()[of_ids]).argsort(stable=True)
    offsets = None
    if hotness is None:
        offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    weights = [batch.weights for batch in batches if batch.weights is not None]
    return SparseFeatures(
        keys=keys,
        values=torch.cat([batch.values[: _num_ids(batch)] for batch in batches])[order],
        batch_size=batch_size,
        offsets=offsets,
        hotness=hotness,
        weights=torch.cat(
            [part[: _num_ids(batch)] for part, batch in zip(weights, batches, strict=True)]
        )[order]
        if weights
        else None,
    )


def _num_ids(batch: SparseFeatures) -> int:
    """Number of ids in the bags of ``batch``; ``values`` may be longer."""
    return batch.values.numel() if batch.offsets is None else int(batch.offsets[-1])


def with_offsets(features: SparseFeatures) -> SparseFeatures:
    """``features`` with offsets, int64 in place of fixed hotness; the same ids and weights. Never
    synchronizes."""
    if features.hotness is None:
        return features
    # Filled on the device, since a copy from the host would wait for a GPU.
    first = torch.zeros(1, dtype=torch.int64, device=features.values.device)
    lengths = [first.new_full((features.batch_size,), count) for count in features.hotness]
    offsets = torch.cat([first, *lengths]).cumsum(0)
    return dataclasses.replace(features, offsets=offsets, hotness=None)


class KeyedJagged(Protocol):
    """The methods of TorchRec's ``KeyedJaggedTensor`` that batches are read by."""

    def keys(self) -> list[str]: ...

    def values(self) -> Tensor: ...

    def weights_or_none(self) -> Tensor | None: ...

    def stride(self) -> int: ...

    def offsets(self) -> Tensor: ...

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedJagged": ...


Features: TypeAlias = SparseFeatures | KeyedJagged
"""Sparse features, torchembed's or TorchRec's."""


def torchrec_class(like: object, name: str) -> type | None:
    """TorchRec's class ``name`` where ``like`` is an object of TorchRec's jagged-tensor module."""
    module = type(like).__module__
    if module != "torchrec.sparse.jagged_tensor":
        return None
    return getattr(sys.modules[module], name)


def as_sparse_features(features: object) -> SparseFeatures:
    """``features`` itself, or the tensors of a ``KeyedJaggedTensor``, taken by its methods.

    Raises:
        TypeError: if ``features`` is neither.
        ValueError: if the batch size differs from key to key.
    """
    if isinstance(features, SparseFeatures):
        return features
    needed = ("keys", "values", "offsets", "weights_or_none", "stride")
    missing = [name for name in needed if not callable(getattr(features, name, None))]
    if missing:
        raise TypeError(
            "features must be SparseFeatures or a KeyedJaggedTensor, got "
            f"{type(features).__name__}, which has no {', '.join(missing)}; make them by "
            "SparseFeatures(keys=, values=, hotness=, batch_size=) or SparseFeatures.from_dict"
        )
    if getattr(features, "variable_stride_per_key", lambda: False)():
        raise ValueError(
            "features must have one batch size for all keys, got a KeyedJaggedTensor with "
            "stride_per_key; pad it to one stride"
        )
    if getattr(features, "inverse_indices_or_none", lambda: None)() is not None:
        raise ValueError(
            "features must not have inverse_indices, which are not supported; index the pooled "
            "vectors by them instead"
        )
    jagged = cast(KeyedJagged, features)
    return SparseFeatures(
        keys=tuple(jagged.keys()),
        values=jagged.values(),
        batch_size=jagged.stride(),
        offsets=jagged.offsets(),
        weights=jagged.weights_or_none(),
    )
