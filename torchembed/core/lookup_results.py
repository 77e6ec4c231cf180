"""The results of looking up batches of sparse features, with the methods of TorchRec's own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.padded_dense import padded_dense


class KeyedTensor:
    """Pooled vectors of several features, side by side in one tensor ``[B, sum of widths]``.

    Args:
        keys: names of the features, in the order of their columns.
        length_per_key: the width, the number of columns, of each key.
        values: ``[B, sum of widths]``, floating; not copied.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._widths, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        """Names of the keys, in the order of their columns."""
        return self._keys

    def values(self) -> Tensor:
        """``[B, sum of widths]``, in the order of ``keys()``."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each key."""
        return self._widths

    def to_dict(self) -> dict[str, Tensor]:
        """One ``[B, width]`` view for each key."""
        return dict(zip(self._keys, self._values.split(self._widths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        return self.to_dict()[key]

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, values={self._values})"


class JaggedTensor:
    """Sequences of different lengths: sample b has ``values[offsets[b]:offsets[b + 1]]``.

    Args:
        values: ``[L, ...]``: vectors ``[L, D]``, or ids ``[L]``; not copied. There may be more than
            ``offsets[-1]``, which belong to no sample.
        offsets: ``[B + 1]``, int32 or int64, not descending, from 0.
    """

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self._values, self._offsets = values, offsets

    def values(self) -> Tensor:
        """``[L, ...]``."""
        return self._values

    def offsets(self) -> Tensor:
        """``[B + 1]``."""
        return self._offsets

    def lengths(self) -> Tensor:
        """``[B]``."""
        return self._offsets.diff()

    def __repr__(self) -> str:
        return f"JaggedTensor(values={self._values}, offsets={self._offsets})"

    def to_padded_dense(self, desired_length: int, padding_value: float = 0.0) -> Tensor:
        """Pad or cut each sample to ``desired_length`` elements, with ``padding_value`` at its end.

        Deterministic, and never waits for a GPU, so that it can be captured in a CUDA graph.

        Returns:
            ``[B, desired_length, ...]``, dtype of the values.

        Raises:
            TypeError, ValueError: unless ``desired_length`` is a whole number of at least 0.
        """
        if isinstance(desired_length, bool) or not isinstance(desired_length, (int, torch.SymInt)):
            raise TypeError(
                "desired_length must be a whole number, which no GPU has to be asked for, got "
                f"{desired_length!r}; pass the longest that the model takes"
            )
        if desired_length < 0:
            raise ValueError(f"desired_length must not be negative, got {desired_length}")
        return padded_dense(self._values, self._offsets, desired_length, padding_value)
