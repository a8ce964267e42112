"""The channels close, mean what they say, and their errors cover."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropy_monitor.attribution import (
    attribute_change,
    sink_share,
    split_means,
    split_ordered,
    split_se,
)
from entropy_monitor.calls import AttentionCall, select_rows
from entropy_monitor.names import CHANGE_NAMES
from entropy_monitor.snapshot import HeadSums, Snapshot, collect, row_values
from entropy_monitor.statistics import measure_call


def means(sink_term, content_mass, entropy, log_support=3.0):
    """Means of a head whose rows are all alike."""
    return {
        "sink_term": sink_term,
        "content_mass": content_mass,
        "content_mass_entropy": content_mass * entropy,
        "content_mass_log_support": content_mass * log_support,
        "log_support": log_support,
    }


def hb(s):
    return -s * np.log(s) - (1 - s) * np.log1p(-s)


unit = st.floats(0.001, 0.999)
nats = st.floats(0.0, 8.0)


@given(unit, unit, nats, nats, nats, nats)
def test_channels_close(s0, s1, h0, h1, l0, l1):
    before, after = means(hb(s0), 1 - s0, h0, l0), means(hb(s1), 1 - s1, h1, l1)
    change = split_means(before, after)
    assert change["sink"] + change["content"] + change["support"] == pytest.approx(
        float(change["total"]), abs=1e-13
    )
    by_hand = hb(s1) + (1 - s1) * h1 - hb(s0) - (1 - s0) * h0
    assert float(change["total"]) == pytest.approx(by_hand, abs=1e-13)
    ordered = split_ordered(before, after)
    for split in ordered.values():
        assert split["sink"] + split["content"] == pytest.approx(by_hand, abs=1e-13)
    # the two orders bracket the midpoint by half of dc dh each
    half = 0.5 * ((1 - s1) - (1 - s0)) * (h1 - h0)
    assert float(ordered["content_first"]["sink"]) == pytest.approx(
        float(change["sink"]) + half, abs=1e-13
    )


def test_pure_sink_growth_is_sink_alone():
    change = split_means(means(hb(0.1), 0.9, 2.5), means(hb(0.8), 0.2, 2.5))
    assert float(change["content"]) == pytest.approx(0, abs=1e-15)
    assert float(change["sink"]) == pytest.approx(hb(0.8) - hb(0.1) - 0.7 * 2.5)


def test_pure_concentration_is_content_alone():
    change = split_means(means(hb(0.3), 0.7, 2.5), means(hb(0.3), 0.7, 0.5))
    assert float(change["sink"]) == pytest.approx(0, abs=1e-15)
    assert float(change["content"]) == pytest.approx(0.7 * -2.0)


def test_longer_rows_of_uniform_attention_are_support_alone():
    before, after = means(0.0, 1.0, np.log(32), np.log(32)), means(0.0, 1.0, np.log(64), np.log(64))
    change = split_means(before, after)
    assert float(change["support"]) == pytest.approx(np.log(2))
    assert float(change["content"]) == pytest.approx(0, abs=1e-15)


def test_equal_lengths_have_no_support_channel():
    # the sink takes over the long rows: c log m / c moves although no length did
    after = means(hb(0.5), 0.5, 2.0) | {"content_mass_log_support": 0.5 * 2.0}
    assert float(split_means(means(hb(0.1), 0.9, 2.0), after)["support"]) == 0.0


def test_a_head_without_content_mass_is_finite():
    change = split_means(means(0.0, 0.0, 0.0), means(hb(0.5), 0.5, 2.0))
    assert all(np.isfinite(value) for value in change.values())
    assert float(change["total"]) == pytest.approx(hb(0.5) + 1.0)


def test_missing_mean_is_named():
    with pytest.raises(ValueError, match="content_mass_entropy"):
        split_means({"sink_term": 0.0, "content_mass": 1.0}, {})


@pytest.mark.parametrize(
    ("total", "sink", "content", "support", "se", "share"),
    [
        (-2.0, -1.5, -0.5, 0.0, 0.1, 0.75),
        (-2.0, -2.5, 0.5, 0.0, 0.1, None),  # channels of opposite sign
        (-0.2, -0.1, -0.1, 0.0, 0.1, None),  # below its noise
        (-2.0, -1.5, -0.5, 0.0, float("nan"), None),  # noise unknown
        (0.0, 0.0, 0.0, 0.0, 0.0, None),
        (1.0, 0.25, 0.25, 0.5, 0.01, 0.25),
        (1.0, 1.25, 0.25, -0.5, 0.01, None),
    ],
)
def test_share_only_where_it_means_something(total, sink, content, support, se, share):
    assert (
        sink_share(total=total, sink=sink, content=content, support=support, se_total=se) == share
    )


# Snapshots ------------------------------------------------------------------------------------


def call(seed, *, batch=6, heads=3, length=24, gain=1.0, sink=0.0, shared=0.0):
    """Attention whose sharpness is ``gain`` and whose first key gets ``sink`` more logit."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, length, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, heads, length, 8, generator=generator, dtype=torch.float64)
    # sequences differ in sharpness, all heads of a sequence alike
    q = q * (gain + shared * torch.randn(batch, 1, 1, 1, generator=generator, dtype=torch.float64))
    bias = torch.zeros(1, 1, 1, length, dtype=torch.float64)
    bias[..., 0] = sink
    return AttentionCall(query=q, key=k, mask=bias, is_causal=True, owner="attn")


def snapshot(*calls, rows=None, step=0, keep=False):
    sums, kept = {}, {}
    for one in calls:
        batch, heads, queries, _ = one.shape
        layer = sums.setdefault(one.name, HeadSums(heads))
        index, weights = select_rows(queries, rows, batch=batch, first_slot=layer.slots)
        measured = measure_call(one, rows=index, weights=weights)
        layer.update(measured, weights)
        if keep:
            kept[one.name] = row_values(measured, weights)
    return collect(sums, step=step, rows=kept)


def head_entropy(one):
    """Mean total and mean content-mass entropy per head by float64 softmax, rows with m >= 2."""
    logits = one.query @ one.key.transpose(-1, -2) * one.query.shape[-1] ** -0.5 + one.mask
    length = logits.shape[-1]
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    p = logits.masked_fill(~visible, -torch.inf).softmax(-1)[:, :, 2:]
    s, content = p[..., 0], p[..., 1:]
    c = content.sum(-1)
    pi = content / c[..., None]
    h = -torch.xlogy(pi, pi).sum(-1)
    total = -torch.xlogy(p, p).sum(-1)
    return total, s, c, h


@pytest.mark.parametrize("keep", [False, True], ids=["unpaired", "paired"])
def test_change_agrees_with_float64_by_definition(keep):
    first, second = call(1, gain=0.5), call(1, gain=3.0, sink=2.0)
    change = attribute_change(snapshot(first, keep=keep), snapshot(second, step=9, keep=keep))
    assert change.paired is keep
    t0, s0, c0, h0 = head_entropy(first)
    t1, s1, c1, h1 = head_entropy(second)
    b0, b1 = (torch.special.entr(s) + torch.special.entr(c) for s, c in ((s0, c0), (s1, c1)))
    if keep:
        sink = (b1 - b0) + (c1 - c0) * (h0 + h1) / 2
        content = (c0 + c1) / 2 * (h1 - h0)
        sink, content = sink.mean((0, 2)), content.mean((0, 2))
    else:
        c0, c1, e0, e1 = (x.mean((0, 2)) for x in (c0, c1, c0 * h0, c1 * h1))
        sink = (b1.mean((0, 2)) - b0.mean((0, 2))) + (c1 - c0) * (e0 / c0 + e1 / c1) / 2
        content = (c0 + c1) / 2 * (e1 / c1 - e0 / c0)
    heads = torch.from_numpy(change.heads("attn"))
    torch.testing.assert_close(heads[:, 0], (t1 - t0).mean((0, 2)), rtol=0, atol=1e-12)
    torch.testing.assert_close(heads[:, 1], sink, rtol=0, atol=1e-12)
    torch.testing.assert_close(heads[:, 2], content, rtol=0, atol=1e-12)
    assert change.sink + change.content + change.support == pytest.approx(change.total, abs=1e-13)
    assert change.total == pytest.approx(float((t1 - t0).mean()), abs=1e-12)
    assert (change.before_step, change.after_step) == (0, 9)
    assert change.layer("attn")["sink"] == pytest.approx(change.sink)
    with pytest.raises(ValueError, match="`layer` must be one of attn"):
        change.layer("nope")


def test_longer_sequences_are_support():
    change = attribute_change(
        snapshot(call(1, gain=0, length=16)), snapshot(call(2, gain=0, length=64))
    )
    assert change.content == pytest.approx(0, abs=1e-12)
    assert change.support > 1


def test_probe_of_another_length_is_not_paired():
    short, long = (snapshot(call(1, length=n), keep=True) for n in (16, 32))
    assert not attribute_change(short, long).paired


def coverage(keep, trials=150):
    """How often the 95 % interval of the model's sink channel holds the truth."""
    first, second = (
        call(1000 + i, batch=1500, gain=g, shared=0.6, length=8) for i, g in ((0, 1.0), (1, 2.0))
    )
    if keep:
        second = call(1000, batch=1500, gain=2.0, shared=0.6, length=8)
    truth = attribute_change(snapshot(first, keep=keep), snapshot(second, keep=keep))
    inside = dict.fromkeys(CHANGE_NAMES[:3], 0)
    for trial in range(trials):
        a = call(2 * trial, batch=16, gain=1.0, shared=0.6, length=8)
        b = call(2 * trial + (not keep), batch=16, gain=2.0, shared=0.6, length=8)
        change = attribute_change(snapshot(a, keep=keep), snapshot(b, keep=keep))
        for name in inside:
            error = abs(getattr(change, name) - getattr(truth, name))
            inside[name] += error < 2.13 * change.se[name]  # t with 15 degrees of freedom
    return {name: count / trials for name, count in inside.items()}


@pytest.mark.parametrize("keep", [False, True], ids=["unpaired", "paired"])
def test_intervals_cover(keep):
    # heads of a sequence move together: errors that took them as independent would cover far less
    for name, covered in coverage(keep).items():
        assert 0.88 <= covered <= 1.0, (name, covered)


def test_first_order_errors_agree_with_the_jackknife():
    before, after = snapshot(call(1, batch=32, gain=1.0)), snapshot(call(2, batch=32, gain=2.0))
    change = attribute_change(before, after)

    def heads(snap):
        stats = ("binary_entropy", "sink_entropy", "content_mass", "content_mass_entropy")
        more = ("content_mass_log_support", "log_support")
        return {stat: snap.array(stat) for stat in (*stats, *more)}

    errors = split_se(heads(before), heads(after), before.covariance(), after.covariance())
    for i, name in enumerate(CHANGE_NAMES[:3]):
        np.testing.assert_allclose(errors[name], change.errors[i], rtol=0.15)


def test_one_sequence_has_no_error_and_no_share():
    change = attribute_change(snapshot(call(1, batch=1)), snapshot(call(2, batch=1, gain=9)))
    assert np.isnan(change.se["total"])
    assert change.sink_share is None
    assert change.to_dict()["change"]["se"]["total"] is None


def test_snapshots_without_a_common_layer_are_refused():
    with pytest.raises(ValueError, match="must share a layer; got attn and none"):
        attribute_change(snapshot(call(1)), Snapshot())


def test_what_is_no_snapshot_is_refused():
    with pytest.raises(TypeError, match="`before` must be a Snapshot; got dict"):
        attribute_change.__wrapped__({}, Snapshot())


def test_other_head_count_is_refused():
    with pytest.raises(ValueError, match="got 3 and 2"):
        attribute_change(snapshot(call(1)), snapshot(call(1, heads=2)))


def test_pooling_heads_first_would_say_something_else():
    """Why attribution is per head: one head gains a sink, the other concentrates."""
    head = {
        "sink_term": np.array([0.0, 0.0]),
        "content_mass": np.array([1.0, 1.0]),
        "content_mass_entropy": np.array([4.0, 1.0]),
        "content_mass_log_support": np.array([4.0, 4.0]),
        "log_support": np.array([4.0, 4.0]),
    }
    later = head | {
        "content_mass": np.array([0.2, 1.0]),
        "content_mass_entropy": np.array([0.8, 0.2]),
    }
    change = split_means(head, later)
    pooled = split_means(
        {k: v.mean() for k, v in head.items()}, {k: v.mean() for k, v in later.items()}
    )
    assert change["sink"].mean() == pytest.approx(-1.6)
    assert abs(float(pooled["sink"]) - change["sink"].mean()) > 0.3


def test_notebook_view_adds_up_and_has_no_script():
    html = attribute_change(snapshot(call(1)), snapshot(call(2, gain=4.0), step=7))._repr_html_()
    assert "step 7" in html
    assert "<script" not in html


def test_a_printed_change_is_a_sentence():
    text = str(attribute_change(snapshot(call(1)), snapshot(call(2, gain=4.0), step=7)))
    assert text.startswith("Steps 0 → 7: mean entropy −")
    assert "sink" in text
    assert "content" in text
