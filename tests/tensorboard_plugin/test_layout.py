import json

import numpy as np
import pytest

from entropy_monitor.tensorboard_plugin.layout import Layer, Layout, LayoutError, parse_layout

RAGGED = Layout(
    stats=("sink_mass", "total_entropy"),
    layers=(Layer(name="a", heads=1), Layer(name="b", heads=3), Layer(name="b#1", heads=2)),
)


def content(**changes):
    good = {"version": 1, "stats": ["s"], "layers": [{"name": "a", "heads": 2}]}
    return json.dumps({**good, **changes}).encode()


def test_shape_and_heads_of_a_ragged_model():
    assert RAGGED.shape == (2, 3, 3)
    assert RAGGED.heads == 6
    assert RAGGED.head(1, 2) == 3
    assert RAGGED.head(2, 0) == 4


def test_mask_picks_heads_in_layer_order():
    grid = np.array([[0, -1, -1], [1, 2, 3], [4, 5, -1]])
    assert grid[RAGGED.mask].tolist() == [0, 1, 2, 3, 4, 5]


def test_layer_means_leave_out_what_is_not_defined():
    means = RAGGED.layer_means(np.array([np.nan, 1.0, np.nan, 3.0, 5.0, 7.0]))
    np.testing.assert_array_equal(means, [np.nan, 2.0, 6.0])


@pytest.mark.parametrize(("layer", "head"), [(-1, 0), (3, 0), (0, 1), (1, -1)])
def test_no_such_head(layer, head):
    with pytest.raises(LayoutError, match="must be in"):
        RAGGED.head(layer, head)


def test_what_the_writer_writes_is_read():
    layout = parse_layout(content())
    assert layout == Layout(stats=("s",), layers=(Layer(name="a", heads=2),))


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"not json",
        b"[" * 100_000,
        b"[]",
        content(version=2),
        content(stats=[]),
        content(stats="s"),
        content(stats=["s", "s"]),
        content(stats=[1]),
        content(stats=["x" * 600]),
        content(stats=[f"s{i}" for i in range(300)]),
        content(layers=[]),
        content(layers=[7]),
        content(layers=[{"name": "a"}]),
        content(layers=[{"name": "a", "heads": 0}]),
        content(layers=[{"name": "a", "heads": True}]),
        content(layers=[{"name": "a", "heads": 10**9}]),
        content(layers=[{"name": "a", "heads": 2.5}]),
        content(layers=[{"name": "", "heads": 2}]),
        content(layers=[{"name": "a", "heads": 4096}] * 4096, stats=[f"s{i}" for i in range(16)]),
        content(layers=[{"name": "a", "heads": 1}] * 5000),
        b" " * ((4 << 20) + 1),
    ],
    ids=lambda bad: repr(bad[:40]),
)
def test_anything_else_is_refused_in_words(bad):
    with pytest.raises(LayoutError):
        parse_layout(bad)


def test_a_lone_surrogate_cannot_break_an_answer():
    layout = parse_layout(content(layers=[{"name": "a\ud800b", "heads": 2}]))
    layout.layers[0].name.encode("utf-8")
