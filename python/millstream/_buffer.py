"""Arrays and bytes-like objects as bytes."""

import numpy as np


def bytes_of(data) -> np.ndarray:
    """The bytes of an array, of a bytes-like object or of an object with `__dlpack__`; contiguous ones without a copy."""
    if isinstance(data, np.ndarray):
        array = data
    elif hasattr(data, "__dlpack__"):
        array = np.from_dlpack(data)
    else:
        array = np.frombuffer(data, np.uint8)
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} has no bytes")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
