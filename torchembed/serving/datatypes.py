"""The names that the Open Inference Protocol gives to dtypes."""

import numpy as np

from torchembed.serving.interface import InvalidRequestError

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(object),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

DATATYPES = tuple(_DTYPES)
"""All datatypes that are served."""


def dtype_of(datatype: object) -> np.dtype:
    """The dtype in memory of a datatype's name; objects for BYTES.

    Raises:
        InvalidRequestError: where no datatype that is served has that name.
    """
    dtype = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise InvalidRequestError(
            f"datatype must be one of {', '.join(DATATYPES)}, got {str(datatype)[:40]!r}"
        )
    return dtype


def datatype_of(dtype: np.dtype) -> str:
    """The datatype's name of a dtype; strings of any kind are BYTES.

    Raises:
        TypeError: where the protocol has no name for it.
    """
    if dtype.kind in "SU":
        return "BYTES"
    name = _NAMES.get(dtype.newbyteorder("="))
    if name is None:
        raise TypeError(f"the Open Inference Protocol has no datatype for {dtype}")
    return name
