"""Keys of a call, each once."""

import numpy as np


def last_places(keys: np.ndarray) -> np.ndarray | slice:
    """The last position of each of ``keys``, int64 ``[n]``, in ascending order, as an index: a
    slice of all positions where keys differ, so that nothing is copied, or int64 ``[U]``."""
    ordered = np.sort(keys)
    if (ordered[1:] != ordered[:-1]).all():
        return slice(None)
    _, places = np.unique(keys[::-1], return_index=True)
    return np.sort(len(keys) - 1 - places)
