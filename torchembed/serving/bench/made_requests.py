"""Requests made of a model's metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchembed.data.skewed_ids import PowerLaw

_LENGTHS, _WEIGHTS = ".lengths", ".weights"
_DTYPES = {"FP32": np.float32, "FP64": np.float64, "FP16": np.float16, "INT32": np.int32}


class MadeRequests:
    """Makes requests of random numbers and skewed ids.

    Args:
        inputs: of the model's metadata: name, datatype and shape of each.
        batch_size: samples of a request.
        num_ids: ids are in ``[0, num_ids)``.
        exponent: of the ids' distribution; 0 for uniform ones.
        max_length: a jagged feature has up to so many ids.
        seed: of all that is random.

    Raises:
        ValueError: for an input of another datatype than features and numbers have.
    """

    def __init__(
        self,
        inputs: Sequence[Mapping[str, Any]],
        *,
        batch_size: int,
        num_ids: int,
        exponent: float = 1.05,
        max_length: int = 10,
        seed: int = 0,
    ) -> None:
        self._shapes = {i["name"]: [int(n) for n in i["shape"]] for i in inputs}
        self._datatypes = {i["name"]: i["datatype"] for i in inputs}
        self._batch_size, self._max_length = batch_size, max_length
        self._ids = PowerLaw(num_ids, exponent, seed)
        self._random = np.random.default_rng(seed)
        for name, datatype in self._datatypes.items():
            if datatype != "INT64" and datatype not in _DTYPES:
                raise ValueError(
                    f"input {name} must be INT64 or one of {', '.join(_DTYPES)}, got {datatype}"
                )

    def make(self) -> dict[str, np.ndarray]:
        """The arrays of one request."""
        lengths = {
            name.removesuffix(_LENGTHS): self._random.integers(
                self._max_length + 1, size=self._batch_size, dtype=np.int32
            )
            for name in self._shapes
            if name.endswith(_LENGTHS)
        }
        return {name: self._array(name, lengths) for name in self._shapes}

    def _array(self, name: str, lengths: Mapping[str, np.ndarray]) -> np.ndarray:
        if name.endswith(_LENGTHS):
            return lengths[name.removesuffix(_LENGTHS)]
        of_feature = lengths.get(name.removesuffix(_WEIGHTS))
        first = self._batch_size if of_feature is None else int(of_feature.sum())
        shape = (first, *self._shapes[name][1:])
        if self._datatypes[name] == "INT64":
            bits = self._random.integers(1 << 64, size=shape, dtype=np.uint64)
            ranks = self._ids.ranks(bits.ravel())
            return self._ids.scatter(ranks).reshape(shape)
        return self._random.random(shape).astype(_DTYPES[self._datatypes[name]])
