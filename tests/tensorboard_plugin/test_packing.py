import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from entropy_monitor.tensorboard_plugin.packing import pack, quantise, thin


def unpack(content):
    """The front-end's reader, in Python."""
    length = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + length])
    at, found = 4 + length, {}
    for block in header.pop("blocks"):
        dtype = np.dtype("<u2" if block["dtype"] == "u2" else "<f4")
        count = int(np.prod(block["shape"]))
        found[block["name"]] = np.frombuffer(content, dtype, count, at).reshape(block["shape"])
        at += count * dtype.itemsize
        at += -at % 4
    assert at == len(content)
    return header, found


def test_round_trip_with_odd_sizes():
    arrays_in = {
        "a": np.arange(3, dtype=np.float64).reshape(1, 3),
        "b": np.array([1, 2, 3], np.uint16),
        "c": np.array([np.nan, np.inf], np.float32),
    }
    header, found = unpack(pack({"text": "ü<é", "ranges": {"b": [0.0, 1.0]}}, arrays_in))
    assert header["text"] == "ü<é"
    for name, array in arrays_in.items():
        np.testing.assert_array_equal(found[name], array)


@given(
    arrays(
        np.float32,
        st.integers(1, 40),
        elements=st.floats(-1e6, 1e6, width=32, allow_nan=False) | st.just(np.nan),
    )
)
def test_codes_are_within_half_a_level(values):
    codes, (low, high) = quantise(values)
    back = low + codes.astype(np.float64) * ((high - low) / 65534)
    finite = np.isfinite(values)
    assert (codes[~finite] == 65535).all()
    error = np.abs(back[finite] - values[finite])
    assert (error <= 0.5001 * (high - low) / 65534 + 1e-9).all()


def test_infinite_values_do_not_stretch_the_range():
    codes, limits = quantise(np.array([0.0, 2.0, np.inf, -np.inf]))
    assert limits == [0.0, 2.0]
    assert codes.tolist() == [0, 65534, 65535, 65535]


@pytest.mark.parametrize("values", [np.array([]), np.array([np.nan]), np.array([3.0, 3.0])])
def test_ranges_without_width(values):
    codes, (low, high) = quantise(values)
    assert low == high
    assert len(codes) == len(values)


@given(st.integers(0, 500), st.integers(0, 60))
def test_thinning_keeps_both_ends(count, limit):
    chosen = thin(count, limit)
    assert len(chosen) <= max(1, limit)
    assert (np.diff(chosen) > 0).all()
    if count and limit >= 2:
        assert chosen[0] == 0
        assert chosen[-1] == count - 1
