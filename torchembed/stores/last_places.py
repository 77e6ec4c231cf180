"""Keys of a call, each once."""

import numpy as np


def last_places(keys: np.ndarray) -> np.ndarray | None:
    """Where each key of ``keys`` stands last: positions in ascending order, int64 ``[U]``; None
    where all keys differ."""
    distinct, places = np.unique(keys[::-1], return_index=True)
    if len(distinct) == len(keys):
        return None
    return np.sort(len(keys) - 1 - places)
