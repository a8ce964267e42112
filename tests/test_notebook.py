import math
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropy_monitor.notebook import (
    change_html,
    change_sentence,
    round_sum,
    shares,
    snapshot_html,
    sum_decimals,
)

nats = st.floats(-50, 50, allow_nan=False)
HOSTILE = '<script>alert(1)</script>"&'


def printed(text):
    return [
        float(number.replace("−", "-").replace("+", ""))
        for number in re.findall(r"[−+]?\d+\.\d+", text)
    ]


@given(nats, nats, nats)
def test_printed_parts_add_up_to_the_printed_sum(sink, content, support):
    numbers = printed(
        change_sentence(total=sink + content + support, sink=sink, content=content, support=support)
    )
    assert sum(numbers[1:]) == pytest.approx(numbers[0], abs=1e-9)


@given(st.lists(nats, min_size=1, max_size=3))
def test_no_part_moves_by_a_whole_digit(parts):
    decimals = sum_decimals([sum(parts), *parts])
    _, rounded = round_sum(sum(parts), parts, decimals)
    for part, shown in zip(parts, rounded, strict=True):
        assert abs(part - shown) <= 1.01 * 10**-decimals


def test_the_sentence_of_the_dashboard():
    assert change_sentence(total=-2.13, sink=-1.3, content=-0.83, before="100", after="2000") == (
        "Steps 100 → 2000: mean entropy −2.13 nat = sink −1.30 + content −0.83 "
        "(61% sink, 39% content)"
    )


def test_no_shares_where_a_part_has_the_other_sign():
    assert "opposite sign" in change_sentence(total=0.2, sink=0.9, content=-0.7)
    assert shares(0.2, [0.9, -0.7]) is None


def test_no_shares_within_the_noise():
    assert "within noise" in change_sentence(total=-0.02, sink=-0.01, content=-0.01, noise=0.03)


def test_shares_add_up_to_one_hundred():
    assert shares(-3.0, [-1.0, -1.0, -1.0]) is not None
    assert sum(shares(-3.0, [-1.0, -1.0, -1.0]) or []) == 100


def test_support_is_named_only_where_it_shows():
    assert "support" not in change_sentence(total=-1.0, sink=-0.5, content=-0.5, support=1e-5)
    assert "support +0.25" in change_sentence(total=-0.25, sink=-0.5, content=0.0, support=0.25)


def test_unknown_change_is_said():
    assert "not known" in change_sentence(total=math.nan, sink=0.0, content=0.0)
    assert "not known" in change_html(total=math.nan, sink=math.nan, content=math.nan)


def test_html_escapes_names_and_holds_no_script():
    change = change_html(
        total=-1.0,
        sink=-0.5,
        content=-0.5,
        before=HOSTILE,
        after=HOSTILE,
        layers=[(HOSTILE, -1.0, -0.5, -0.5, 0.0)],
    )
    snapshot = snapshot_html(
        step=3,
        heads=2,
        model={"total_entropy": 2.0, "content_mass_entropy": 1.5},
        layers=[(HOSTILE, 2, {"sink_mass": 0.1})],
    )
    for page in (change, snapshot):
        assert "<script" not in page
        assert "&lt;script&gt;" in page


def test_long_models_show_the_layers_that_changed_most_in_order():
    layers = [(f"layer{i}", -float(i), -float(i), 0.0, 0.0) for i in range(30)]
    page = change_html(total=-14.5, sink=-14.5, content=0.0, layers=layers)
    names = re.findall(r"layer\d+", page)
    assert names == [f"layer{i}" for i in range(18, 30)]
    assert "and 18 more layers" in page


def test_snapshot_without_counted_rows():
    assert "no attention row counted" in snapshot_html(step=None, heads=4, model={}, layers=[])


def test_notebook_needs_no_torch():
    code = "import sys, entropy_monitor.notebook; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
