"""The argument of a model, or the columns of it, that the ids of a lookup are."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from torchembed.modules.dense_part.errors import DeployError


class IdPlace(NamedTuple):
    """The ids of a lookup among the arguments.

    Attributes:
        name: of the feature that requests are to give.
        hotness: ids of each sample; None where bags are between offsets.
        offsets: name of the argument that packed ids of an ``Embedding`` lie between; None for
            others.
    """

    name: str
    hotness: int | None
    offsets: str | None = None


class IdPlaces:
    """Finds the arguments that ids are, by the memory that these have in common."""

    def __init__(self, leaves: Mapping[str, Tensor], packed: Mapping[str, str]) -> None:
        """
        Args:
            leaves: the arguments by name, contiguous, each with memory of its own.
            packed: the name of the offsets by that of the ids between them.
        """
        self._leaves = {n: t for n, t in leaves.items() if t.numel()}
        self._packed = packed
        self.whole: dict[str, str] = {}
        """The feature that each argument is, where it is one as a whole, with fixed hotness."""
        self.taken: set[str] = set()
        """Arguments that are ids, weights or offsets of lookups."""

    def find(
        self,
        path: str,
        ids: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        batch_size: int,
        *,
        is_each: bool,
    ) -> IdPlace:
        """The place of the arguments of a call of the module at ``path``.

        Args:
            is_each: whether the module gives the vector of each id.

        Raises:
            DeployError: where they were computed in the model.
        """
        name = self._leaf_of(f"ids of {path}", ids)
        leaf = self._leaves[name]
        self.taken.add(name)
        if offsets is not None:
            self.taken.add(self._leaf_of(f"offsets of {path}", offsets))
            if weights is not None:
                self.taken.add(self._leaf_of(f"per_sample_weights of {path}", weights))
            _check_whole(path, name, ids, leaf)
            return IdPlace(name, None)
        if name in self._packed and is_each:
            self.taken.add(self._packed[name])
            _check_whole(path, name, ids, leaf)
            return IdPlace(name, None, self._packed[name])
        if weights is not None:
            self._check_weights(path, name, weights)
        hotness = ids[0].numel()
        if ids.numel() == leaf.numel() and leaf.shape[0] == batch_size:
            self.whole[name] = name
            return IdPlace(name, hotness)
        return IdPlace(f"{name}.{self._columns(path, name, ids)}", hotness)

    def offsets_of(self, place: IdPlace) -> Tensor:
        """The offsets that the packed ids of ``place`` lie between."""
        assert place.offsets is not None
        return self._leaves[place.offsets]

    def _leaf_of(self, what: str, tensor: Tensor) -> str:
        if not tensor.numel():
            raise DeployError(
                f"{what} must be some in the examples, to be found in the arguments, and are none"
            )
        memory = tensor.untyped_storage().data_ptr()
        for name, leaf in self._leaves.items():
            if leaf.untyped_storage().data_ptr() == memory:
                return name
        raise DeployError(
            f"{what} must be an argument of the model, or columns of one, and are computed in its "
            "forward; compute them before, and give them as an argument"
        )

    def _check_weights(self, path: str, ids: str, weights: Tensor) -> None:
        name = self._leaf_of(f"per_sample_weights of {path}", weights)
        self.taken.add(name)
        if self._leaves[name].shape != self._leaves[ids].shape:
            raise DeployError(
                f"per_sample_weights of {path} must have the shape of its ids "
                f"{list(self._leaves[ids].shape)}, got {list(self._leaves[name].shape)}"
            )

    def _columns(self, path: str, name: str, ids: Tensor) -> str:
        """The columns of an argument ``[B, n]``, or the rows of one ``[n, B]``, that ``ids``
        are."""
        leaf = self._leaves[name]
        first = ids.storage_offset()
        if leaf.dim() == 2 and ids.dim() in (1, 2):
            count = 1 if ids.dim() == 1 else ids.shape[1]
            is_dense = ids.dim() == 1 or count == 1 or ids.stride(1) == 1
            if leaf.shape[0] == ids.shape[0] and ids.stride(0) == leaf.shape[1] and is_dense:
                return str(first) if count == 1 else f"{first}-{first + count - 1}"
            if leaf.shape[1] == ids.shape[0] and count == 1 and ids.stride(0) == 1:
                return str(first // leaf.shape[1])
        raise DeployError(
            f"ids of {path} must be an argument of the model or consecutive columns of one, got "
            f"{list(ids.shape)} with strides {list(ids.stride())} of {name} {list(leaf.shape)}; "
            "give them as an argument of their own"
        )


def _check_whole(path: str, name: str, ids: Tensor, leaf: Tensor) -> None:
    if ids.shape != leaf.shape:
        raise DeployError(
            f"ids of {path} between offsets must be a whole argument of the model, got "
            f"{list(ids.shape)} of {name} {list(leaf.shape)}"
        )
