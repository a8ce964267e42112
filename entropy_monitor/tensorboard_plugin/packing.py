"""Arrays on their way to the browser: a JSON header and raw numbers after it, within a byte budget.

Layout of an answer: 4 bytes little-endian length of the header, the header as UTF-8 JSON padded
with blanks to a multiple of 4, then each array, C order, padded to a multiple of 4. The header's
``blocks`` list name, dtype and shape in that order. An array that does not fit as float32 travels
as uint16 between its own minimum and maximum (65535 stands for NaN); the error is at most half of
1/65534 of that range.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

BUDGET = 8 << 20
"""Bytes of one answer."""

NAN_CODE = 65535
_TOP = 65534


def pack(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return one binary answer.

    Args:
        header: Plain types without NaN.
        arrays: float32, float64 (sent as float32), or already `quantise`-d uint16 arrays whose
            range stands in ``header["ranges"][name]``.

    Example:
        >>> len(pack({}, {"a": np.zeros(3, np.float32)})) % 4
        0
    """
    blocks, body = [], []
    for name, array in arrays.items():
        if array.dtype == np.uint16:
            dtype, data = "u2", np.ascontiguousarray(array, dtype="<u2")
        else:
            dtype, data = "f4", np.ascontiguousarray(array, dtype="<f4")
        blocks.append({"name": name, "dtype": dtype, "shape": list(array.shape)})
        raw = data.tobytes()
        body.append(raw + b"\0" * (-len(raw) % 4))
    text = json.dumps({**header, "blocks": blocks}, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    return b"".join([len(text).to_bytes(4, "little"), text, *body])


def quantise(values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint16], list[float]]:
    """Map finite values to 0..65534 and the rest to 65535.

    Returns:
        The codes and ``[lowest, highest]`` of the finite values; ``[0, 0]`` if there are none.

    Example:
        >>> quantise(np.array([0.0, 1.0, np.nan]))[0].tolist()
        [0, 65534, 65535]
    """
    finite = np.isfinite(values)
    if not finite.any():
        return np.full(values.shape, NAN_CODE, np.uint16), [0.0, 0.0]
    low = float(np.min(values, where=finite, initial=np.inf))
    high = float(np.max(values, where=finite, initial=-np.inf))
    span = high - low or 1.0
    scaled = np.rint((np.where(finite, values, low).astype(np.float64) - low) * (_TOP / span))
    codes = np.where(finite, np.clip(scaled, 0, _TOP), NAN_CODE).astype(np.uint16)
    return codes, [low, high]


def thin(count: int, limit: int) -> npt.NDArray[np.int64]:
    """Choose at most `limit` of `count` positions, evenly, always with the first and the last.

    Example:
        >>> thin(10, 4).tolist(), thin(3, 9).tolist()
        ([0, 3, 6, 9], [0, 1, 2])
    """
    if count <= limit:
        return np.arange(count)
    if limit < 2:
        return np.array([count - 1])
    return np.unique(np.rint(np.linspace(0, count - 1, limit)).astype(np.int64))
