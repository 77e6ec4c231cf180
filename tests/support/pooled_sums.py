"""A served model without tables: each sample's sum of numbers, and how many ids it has."""

from collections.abc import Mapping, Sequence

import numpy as np

from torchembed.serving.interface import Answer, InvalidRequestError, ModelForm, TensorForm

_FLOATS, _IDS, _COUNTS = (np.dtype(kind) for kind in (np.float32, np.int64, np.int32))


class PooledSums:
    """Answers ``sums``, each sample's numbers and ids added, and ``default_rows``, how many of its
    ids are negative. With jagged ids they come with their lengths."""

    def __init__(self, name: str, version: str, *, is_jagged: bool) -> None:
        ids = TensorForm(name="ids", dtype=_IDS, shape=(-1,) if is_jagged else (-1, 2))
        lengths = TensorForm(name="ids.lengths", dtype=_COUNTS, shape=(-1,))
        self.form = ModelForm(
            name=name,
            version=version,
            inputs=(
                TensorForm(name="numbers", dtype=_FLOATS, shape=(-1, 3)),
                *((ids, lengths) if is_jagged else (ids,)),
            ),
            outputs=(
                TensorForm(name="sums", dtype=_FLOATS, shape=(-1,)),
                TensorForm(name="rows", dtype=_FLOATS, shape=(-1, 3)),
                TensorForm(name="default_rows", dtype=_COUNTS, shape=(-1,)),
            ),
        )

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        numbers, ids = inputs["numbers"], inputs["ids"]
        if np.isnan(numbers).any():
            raise InvalidRequestError("numbers must not be NaN; leave such samples out")
        num_samples = len(numbers)
        if "ids.lengths" in inputs:
            sample = np.repeat(np.arange(num_samples), inputs["ids.lengths"])
        else:
            sample = np.repeat(np.arange(num_samples), ids.shape[1])
        flat = ids.reshape(-1)
        sums = numbers.sum(axis=1, dtype=np.float32)
        np.add.at(sums, sample, flat.astype(np.float32))
        negative = np.bincount(sample[flat < 0], minlength=num_samples).astype(np.int32)
        every = {"sums": sums, "rows": numbers * np.float32(2), "default_rows": negative}
        return Answer(
            {name: every[name] for name in outputs or every},
            self.form.version,
            int(negative.sum()),
        )


def load(name: str, version: str, is_jagged: bool) -> PooledSums:
    return PooledSums(name, version, is_jagged=is_jagged)
