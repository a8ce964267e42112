"""Sums merge exactly, means are those of the rows, undefined is never NaN."""

import json
import math

import numpy as np
import pytest
import torch

from entropy_monitor.calls import AttentionCall, RowKind, select_rows
from entropy_monitor.names import STAT_NAMES, STATISTICS
from entropy_monitor.snapshot import GROUPS, HeadSums, Snapshot, collect
from entropy_monitor.statistics import measure_call


def make_call(seed, batch=4, heads=2, length=20, owner="attn", mask=None):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, heads, length, 8, generator=generator) * 2 for _ in "qk")
    return AttentionCall(query=q, key=k, is_causal=True, owner=owner, mask=mask)


def part(call, begin, end):
    return AttentionCall(
        query=call.query[begin:end], key=call.key[begin:end], is_causal=True, owner=call.owner
    )


def add(sums, call, rows=None, **kwargs):
    batch, heads, queries, _ = call.shape
    layer = sums.setdefault(call.name, HeadSums(heads))
    index, weights = select_rows(queries, rows, batch=batch, first_slot=layer.slots)
    measured = measure_call(call, rows=index, weights=weights, **kwargs)
    layer.update(measured, weights)
    return measured


def test_means_are_over_the_rows_that_count():
    call = make_call(0)
    sums = {}
    rows = add(sums, call)
    counted = rows.kind <= RowKind.NO_SINK
    snap = collect(sums, step=3)
    assert not counted.all()
    for stat, field in {
        "content_mass": rows.content_mass,
        "binary_entropy": rows.binary_entropy,
        "content_entropy": rows.content_entropy,
        "content_mass_entropy": rows.content_mass * rows.content_entropy,
        "content_evenness": rows.evenness,
        "content_concentration": rows.concentration,
        "total_entropy": rows.total_entropy,
        "logit_spread": rows.logit_spread,
        "logit_range": rows.logit_range,
        "support": rows.support,
        "dormant_rows": rows.sink_mass > 0.5,
        "one_hot_rows": rows.evenness < 0.1,
        "sink_mass": rows.sink_mass,
    }.items():
        for head in range(2):
            by_hand = field[:, head][counted[:, head]].double().mean()
            assert float(snap.values(stat)["attn"][head]) == pytest.approx(
                float(by_hand), rel=1e-6
            ), stat
    assert float(snap.values("max_logit")["attn"][1]) == pytest.approx(
        float(rows.max_logit[:, 1].max())
    )
    counts = {
        kind: float(snap.values(f"rows_{kind}")["attn"][0])
        for kind in ("valid", "trivial", "no_content")
    }
    assert counts == {"valid": 4 * 18, "trivial": 4, "no_content": 4}


def test_identity_holds_for_the_means():
    sums = {}
    add(sums, make_call(1))
    snap = collect(sums)
    total = snap.array("total_entropy")
    terms = sum(snap.array(s) for s in ("binary_entropy", "sink_entropy", "content_mass_entropy"))
    np.testing.assert_allclose(total, terms, atol=1e-6)


def test_no_sink_rows_enter_as_what_they_are():
    call = make_call(2)
    window = AttentionCall(query=call.query, key=call.key, is_causal=True, window=6, owner="attn")
    sums = {}
    rows = add(sums, window)
    snap = collect(sums)
    seeing = rows.kind == RowKind.VALID
    assert int((rows.kind == RowKind.NO_SINK).sum()) == 4 * 2 * 14
    by_hand = rows.sink_mass[:, 0][seeing[:, 0]].double().mean()
    assert float(snap.values("sink_mass")["attn"][0]) == pytest.approx(float(by_hand), rel=1e-6)
    # content mass is over all counted rows, 1 where no sink is in sight
    counted = rows.kind[:, 0] <= RowKind.NO_SINK
    by_hand = rows.content_mass[:, 0][counted].double().mean()
    assert float(snap.values("content_mass")["attn"][0]) == pytest.approx(float(by_hand), rel=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_merging_parts_equals_seeing_all(order):
    call = make_call(3, batch=9)
    whole = {}
    add(whole, call)
    parts = []
    for begin, end in ((0, 2), (2, 6), (6, 9)):
        sums = {"attn": HeadSums(2)}
        sums["attn"].slots = begin
        add(sums, part(call, begin, end))
        parts.append(collect(sums, step=1))
    merged = Snapshot(step=1)
    for i in order:
        merged = merged.merge(parts[i])
    for stat in STAT_NAMES:
        np.testing.assert_allclose(
            merged.array(stat), collect(whole).array(stat), rtol=1e-12, atol=1e-12
        )
    np.testing.assert_allclose(
        merged.group_sums("attn"), collect(whole).group_sums("attn"), rtol=1e-12, atol=1e-12
    )


def test_more_sequences_than_groups_are_all_kept():
    sums = {}
    add(sums, make_call(4, batch=GROUPS + 5, length=6))
    groups = collect(sums).group_sums("attn")
    assert groups[..., 0].sum() == (GROUPS + 5) * 4 * 2
    assert groups[0, 0, 0] == 8  # two sequences of four counted rows
    assert groups[GROUPS - 1, 0, 0] == 4


def test_sampled_rows_estimate_the_exact_means():
    call = make_call(5, batch=16, length=300)
    exact, sampled = {}, {}
    add(exact, call)
    add(sampled, call, rows=32)
    exact, sampled = collect(exact), collect(sampled)
    assert float(sampled.values("rows_valid")["attn"][0]) == float(
        exact.values("rows_valid")["attn"][0]
    )
    assert sampled.mean("content_entropy") == pytest.approx(exact.mean("content_entropy"), abs=0.05)
    assert sampled.mean("sink_mass") == pytest.approx(exact.mean("sink_mass"), abs=0.02)


def test_a_head_that_saw_nothing_is_zero_not_nan():
    mask = torch.zeros(4, 1, 20, 20, dtype=torch.bool)
    sums = {}
    add(sums, make_call(6, mask=mask))
    snap = collect(sums)
    json.dumps(snap.to_dict(), allow_nan=False)
    assert snap.to_dict()["attn"]["rows_empty"] == [80.0, 80.0]
    assert snap.to_dict()["attn"]["content_entropy"] == [0.0, 0.0]
    assert np.isnan(snap.array("content_entropy")).all()
    assert snap.mean("content_entropy") == 0.0
    assert snap.quantiles("content_entropy") == {}


def test_nonfinite_rows_are_counted_and_left_out():
    call = make_call(7)
    call.query[0, 0, 5] = math.nan
    sums = {}
    add(sums, call)
    snap = collect(sums)
    assert snap.to_dict()["attn"]["rows_nonfinite"] == [1.0, 0.0]
    json.dumps(snap.to_dict(), allow_nan=False)


def test_round_trip_through_a_file(tmp_path):
    sums = {}
    add(sums, make_call(8))
    snap = collect(sums, step=12)
    torch.save(snap.state_dict(), tmp_path / "state.pt")
    loaded = Snapshot.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert loaded.to_dict() == snap.to_dict()
    assert loaded.step == 12
    assert loaded.sums["attn"].slots == snap.sums["attn"].slots


def test_state_of_another_layout_is_refused():
    with pytest.raises(ValueError, match="`state` must hold lines of"):
        HeadSums.from_state_dict({"packed": torch.zeros(2, 5), "slots": 1})


def test_tables():
    sums = {}
    add(sums, make_call(9))
    add(sums, make_call(10, heads=3, owner="other"))
    snap = collect(sums, step=5)
    table = snap.to_pandas()
    assert len(table) == 5
    assert list(table.columns[:3]) == ["step", "layer", "head"]
    assert snap.layers == ("attn", "other")
    assert snap.array("sink_mass").shape == (5,)
    assert snap.mean("sink_mass") == pytest.approx(table["sink_mass"].mean())
    assert snap.layer_mean("sink_mass", "other") == pytest.approx(
        table[table.layer == "other"]["sink_mass"].mean()
    )
    assert snap.quantiles("sink_mass")["p50"] == pytest.approx(table["sink_mass"].median())
    with pytest.raises(ValueError, match="`stat` must be names out of sink_mass"):
        snap.values("sink")
    with pytest.raises(ValueError, match="`layer` must be one of attn, other; got 'x'"):
        snap.heads("x")
    assert "<table" in snap._repr_html_()


def test_counts_and_maxima_are_not_averaged():
    sums = {}
    add(sums, make_call(11))
    snap = collect(sums)
    values = snap.values("max_logit")["attn"]
    assert snap.mean("max_logit") == float(values.max())
    assert snap.mean("rows_valid") == 2 * 4 * 18


def test_one_transfer_does_not_alias_the_running_sums():
    sums = {}
    add(sums, make_call(12))
    before = collect(sums)
    values = before.array("sink_mass").copy()
    add(sums, make_call(13))
    np.testing.assert_array_equal(before.array("sink_mass"), values)


def test_every_statistic_has_a_unit_and_a_sentence():
    units = {"mass", "nat", "1", "share", "logit", "keys", "rows"}
    assert {statistic.unit for statistic in STATISTICS} == units
    assert all(statistic.doc.endswith(".") for statistic in STATISTICS)
    assert len(set(STAT_NAMES)) == len(STAT_NAMES)


def test_other_head_count_is_refused():
    sums = {}
    add(sums, make_call(14))
    with pytest.raises(ValueError, match="must have 2 heads as before; got 3"):
        add(sums, make_call(14, heads=3))


def test_a_printed_snapshot_is_one_line():
    sums = {}
    add(sums, make_call(15))
    text = str(collect(sums, step=4))
    assert text.startswith("Snapshot at step 4: 1 layer, 2 heads, entropy ")
    assert "\n" not in text
    assert str(Snapshot()) == "Snapshot: no attention was measured"


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"x": 1}, "`step`, `sums` and `rows`; step, sums, rows missing, got 'x'"),
        ({"step": 1, "sums": {"a": {}}, "rows": {}}, "`packed` and `slots`; got noth"),
    ],
)
def test_a_state_that_is_none_is_named(state, match):
    with pytest.raises(ValueError, match=match):
        Snapshot.from_state_dict(state)
