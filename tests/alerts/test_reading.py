import warnings

import numpy as np
import pytest

from entropy_monitor.alerts.both import split
from entropy_monitor.alerts.reading import Layout, by_group, median, read
from tests.alerts.helpers import SUPPORT, record

LAYOUT = Layout(names=("a", "b"), heads=3)
KNOWN = np.ones((2, 3), dtype=bool)


def reading(**changes):
    table = {**record(shape=(2, 3)), **changes}
    return read(0.0, table, LAYOUT, KNOWN, min_rows=4.0, min_content=0.03)


@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_median_is_nanmedian(missing):
    values = np.random.default_rng(0).standard_normal((5, 8))
    values[np.random.default_rng(1).random((5, 8)) < missing] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = np.nanmedian(values, axis=1) if missing < 1 else np.full(5, np.nan)
    np.testing.assert_allclose(median(values), expected)


def test_groups_are_model_layers_heads():
    heads = np.array([[1.0, 2.0, 9.0], [3.0, np.nan, 5.0]])
    groups = by_group(heads)
    np.testing.assert_allclose(groups[:3], [3.0, 2.0, 4.0])
    np.testing.assert_array_equal(groups[3:], heads.ravel())
    assert LAYOUT.head(3 + 4) == (1, 1)


def test_spread_is_scaled_by_length():
    """Gaussian logits of standard deviation sqrt(2 log m) have kap 1, whatever m."""
    for support in (8.0, SUPPORT, 1000.0):
        now = reading(
            logit_spread=np.full((2, 3), np.sqrt(2 * np.log(support))),
            support=np.full((2, 3), support),
        )
        np.testing.assert_allclose(now.spread, 1.0)


def test_evenness_from_content_entropy():
    table = record(0.4, shape=(2, 3))
    del table["content_evenness"]
    now = read(0.0, table, LAYOUT, KNOWN, min_rows=4.0, min_content=0.03)
    np.testing.assert_allclose(now.evenness, 0.4)


def test_heads_with_few_rows_are_left_out():
    rows = np.full((2, 3), 50.0)
    rows[1, 2] = 2
    now = reading(rows_valid=rows)
    assert not now.measured[1, 2]
    assert now.members[:3].tolist() == [5, 3, 2]
    assert np.isnan(now.evenness[-1])


def test_rows_that_see_no_sink_count():
    now = reading(rows_valid=np.zeros((2, 3)), rows_no_sink=np.full((2, 3), 50.0))
    assert now.measured.all()


def test_heads_without_content_do_not_enter_content_medians():
    sink = np.full((2, 3), 0.1)
    sink[0] = 0.99
    now = reading(**record(sink=sink, shape=(2, 3)))
    assert now.measured.all()
    assert np.isnan(now.evenness[1])
    assert np.isfinite(now.evenness[2])


def test_nonfinite_by_counts_or_by_value():
    broken = np.full((2, 3), 0.5)
    broken[0, 1] = np.nan
    assert reading(content_evenness=broken).nonfinite[0, 1] == 1
    counted = reading(
        content_evenness=broken,
        rows_valid=np.full((2, 3), 30.0),
        rows_nonfinite=np.array([[0, 10, 0], [0, 0, 0]]),
    )
    assert counted.nonfinite[0, 1] == 0.25
    empty = np.full((2, 3), 30.0)
    empty[0, 1] = 0
    assert (
        reading(
            content_evenness=broken, rows_valid=empty, rows_nonfinite=np.zeros((2, 3))
        ).nonfinite[0, 1]
        == 0
    )
    assert reading(max_logit=np.where(np.isnan(broken), np.inf, 1.0)).nonfinite[0, 1] == 1


def test_split_closes_and_names_the_channel():
    before = record(0.8, sink=0.05, shape=(2, 3))
    sink_only = split(before, record(0.8, sink=0.7, shape=(2, 3)))
    assert sink_only.content == pytest.approx(0.0, abs=1e-12)
    assert sink_only.sink == pytest.approx(sink_only.total)
    content_only = split(before, record(0.2, sink=0.05, shape=(2, 3)))
    assert content_only.sink == pytest.approx(0.0, abs=1e-12)
    assert content_only.share("content") == pytest.approx(1.0)
    both = split(before, record(0.2, sink=0.7, shape=(2, 3)))
    assert both.sink + both.content == pytest.approx(both.total)
    assert both.sink < 0 > both.content


def test_split_by_hand():
    """c 1 -> .5, H(pi) 2 -> 1: content = .75 (1 - 2), the rest of the change is the sink's."""
    hand = np.ones((1, 1))
    before = {"content_mass": hand, "content_mass_entropy": 2 * hand, "total_entropy": 2 * hand}
    after = {
        "content_mass": 0.5 * hand,
        "content_mass_entropy": 0.5 * hand,
        "total_entropy": (np.log(2) + 0.5) * hand,
    }
    parts = split(before, after)
    assert parts.content == pytest.approx(-0.75)
    assert parts.sink == pytest.approx(np.log(2) + 0.5 - 2 + 0.75)


def test_split_needs_its_statistics():
    assert split({}, {}) is None


def test_longer_rows_are_support_not_content():
    before = record(0.8, support=16.0, shape=(2, 3))
    after = record(0.8, support=64.0, shape=(2, 3))
    parts = split(before, after, log_support=(np.log(16.0), np.log(64.0)))
    assert parts.support == pytest.approx(0.95 * np.log(4.0))
    assert parts.sink + parts.content + parts.support == pytest.approx(parts.total)
    assert abs(parts.content) < 0.3
