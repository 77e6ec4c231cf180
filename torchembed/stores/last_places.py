"""Keys of a call, each once."""

import numpy as np


def last_places(keys: np.ndarray) -> np.ndarray | slice:
    """Where each of ``keys``, int64 ``[n]``, stands last, in ascending order, as an index: all of
    them as a slice where they differ, so that nothing is copied, or int64 ``[U]``."""
    ordered = np.sort(keys)
    if (ordered[1:] != ordered[:-1]).all():
        return slice(None)
    _, places = np.unique(keys[::-1], return_index=True)
    return np.sort(len(keys) - 1 - places)
