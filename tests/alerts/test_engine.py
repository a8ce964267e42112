"""The engine over synthetic runs: what alarms, what stays quiet, cadence, resume, events."""

import json

import numpy as np
import pytest

from entropy_monitor.alerts import AlertEngine, AlertPolicy, scan
from entropy_monitor.alerts.memory import Memory
from entropy_monitor.alerts.reading import Layout, read
from tests.alerts.helpers import alarms, history, ramp, record

STEPS = range(0, 1000, 10)
COLLAPSE = {"evenness": ramp(500, 700, 0.75, 0.05), "spread": ramp(500, 700, 0.7, 20.0)}


def test_steady_run_says_nothing():
    assert scan(STEPS, history(STEPS)) == []


def test_collapse_of_the_model():
    alerts = alarms(scan(STEPS, history(STEPS, **COLLAPSE)))
    assert [alert.severity for alert in alerts] == ["warn", "error"]
    first = alerts[0]
    assert first.level == "model"
    assert 500 < first.step <= 620
    assert first.evidence["pattern"] == "gradual"
    assert first.evidence["change_total"] < 0
    assert first.evidence["change_content"] == pytest.approx(
        first.evidence["change_total"], abs=0.05
    )


def test_collapse_of_one_layer_names_it():
    def evenness(step):
        return np.array([0.75, COLLAPSE["evenness"](step), 0.75])[:, None]

    def spread(step):
        return np.array([0.7, COLLAPSE["spread"](step), 0.7])[:, None]

    alert = alarms(
        scan(STEPS, history(STEPS, evenness=evenness, spread=spread), layers=["a", "b", "c"])
    )[0]
    assert (alert.level, alert.layer, alert.head) == ("layer", "b", None)
    assert "4 of 4 heads" in alert.message


def test_collapse_of_one_head_names_it():
    def one(curve, usual):
        def values(step):
            table = np.full((3, 4), usual)
            table[2, 1] = curve(step)
            return table

        return values

    curves = {"evenness": one(COLLAPSE["evenness"], 0.75), "spread": one(COLLAPSE["spread"], 0.7)}
    alert = alarms(scan(STEPS, history(STEPS, **curves)))[0]
    assert (alert.level, alert.layer, alert.head) == ("head", "2", 1)


def test_heads_that_always_were_concentrated_are_normal():
    evenness, spread = np.full((3, 4), 0.75), np.full((3, 4), 0.7)
    evenness[1, 2], spread[1, 2] = 0.12, 12.0
    assert alarms(scan(STEPS, history(STEPS, evenness=evenness, spread=spread))) == []


def test_heads_that_learn_to_copy_are_no_collapse():
    """Concentrated with little logit spread, as seen in a copying task with RoPE."""
    curves = {"evenness": ramp(200, 260, 0.95, 0.08), "spread": ramp(200, 260, 0.2, 3.5)}
    assert alarms(scan(STEPS, history(STEPS, **curves))) == []


def test_heads_that_sharpen_over_a_hundred_steps_are_no_collapse():
    """As seen where a sink was forced on a model and its heads made up for it; the loss fell."""
    curves = {"evenness": ramp(300, 420, 0.6, 0.2), "spread": ramp(300, 420, 0.9, 2.2)}
    assert alarms(scan(STEPS, history(STEPS, **curves))) == []


def test_same_fall_at_once_is_a_collapse():
    curves = {"evenness": ramp(300, 305, 0.5, 0.22), "spread": ramp(300, 305, 0.9, 2.1)}
    alert = alarms(scan(STEPS, history(STEPS, **curves)))[0]
    assert (alert.kind, alert.evidence["pattern"]) == ("concentration", "abrupt")
    assert alert.step <= 320


def test_copying_heads_whose_logits_run_away_are():
    """No task needs logits this far apart, however sure the heads are."""
    curves = {"evenness": ramp(200, 260, 0.95, 0.004), "spread": ramp(200, 800, 0.2, 40.0)}
    assert alarms(scan(STEPS, history(STEPS, **curves)))


def test_same_concentration_at_random_is_a_collapse():
    curves = {"evenness": ramp(200, 260, 0.95, 0.15), "spread": ramp(200, 260, 0.2, 3.5)}
    assert alarms(scan(STEPS, history(STEPS, **curves)))


def test_sink_growth_is_a_note():
    alerts = scan(STEPS, history(STEPS, sink=ramp(300, 600, 0.04, 0.9)))
    assert [alert.kind for alert in alerts] == ["sink_growth"]
    assert not alerts[0].is_alarm
    assert alerts[0].evidence["sink_mass"] > alerts[0].evidence["sink_mass_before"] + 0.1


def test_low_evenness_without_logit_growth_is_quiet():
    assert alarms(scan(STEPS, history(STEPS, evenness=ramp(300, 500, 0.75, 0.2)))) == []


def test_spread_without_concentration_is_quiet():
    assert alarms(scan(STEPS, history(STEPS, spread=ramp(300, 500, 0.7, 10.0)))) == []


def test_without_logits_evenness_alone_must_be_lower():
    runs = history(STEPS, **COLLAPSE)
    for name in ("logit_spread", "max_logit"):
        del runs[name]
    alert = alarms(scan(STEPS, runs))[0]
    assert alert.kind == "concentration"
    assert "spread" not in alert.message


def test_total_entropy_alone_alarms_nothing():
    runs = history(STEPS, sink=ramp(300, 600, 0.04, 0.9))
    assert alarms(scan(STEPS, {"total_entropy": runs["total_entropy"]})) == []


def test_dilution_is_a_note():
    kinds = [
        alert.kind
        for alert in scan(
            STEPS,
            history(STEPS, evenness=ramp(400, 600, 0.6, 0.99), spread=ramp(400, 600, 1.0, 0.05)),
        )
    ]
    assert set(kinds) == {"dilution"}
    assert len(kinds) <= 2


def test_dormant_is_a_note():
    sink = np.array([0.05, 0.99, 0.05])[:, None]
    kinds = [(alert.kind, alert.layer) for alert in scan(STEPS, history(STEPS, sink=sink))]
    assert kinds == [("dormant", "1")]


def test_nan_is_an_error_at_once():
    runs = history(STEPS)
    for name in runs:
        runs[name][50:, 1] = np.nan
    alert = alarms(scan(STEPS, runs))[0]
    assert (alert.kind, alert.severity, alert.step, alert.layer) == ("nonfinite", "error", 500, "1")


def test_nan_padding_of_ragged_layers_is_absent():
    runs = history(STEPS)
    for name in runs:
        runs[name][:, 1, 2:] = np.nan
    assert scan(STEPS, runs) == []


def test_rows_nonfinite_is_an_error():
    runs = history(STEPS)
    runs["rows_valid"] = np.full((100, 3, 4), 90.0)
    runs["rows_nonfinite"] = np.zeros((100, 3, 4))
    runs["rows_nonfinite"][30, 0, 0] = 1
    alert = alarms(scan(STEPS, runs))[0]
    assert (alert.kind, alert.step, alert.level, alert.head) == ("nonfinite", 300, "layer", None)


def test_heads_without_rows_are_absent():
    runs = history(STEPS)
    runs["rows_valid"] = np.full((100, 3, 4), 90.0)
    runs["rows_valid"][50:, 1] = 0
    for name in runs:
        if name != "rows_valid":
            runs[name][50:, 1] = np.nan
    assert scan(STEPS, runs) == []


@pytest.mark.parametrize(
    "values", [{}, {"sink_mass": np.zeros((0, 0))}, {"sink_mass": np.full((2, 2), np.nan)}]
)
def test_nothing_measured_is_said_once(values):
    engine = AlertEngine()
    alerts = [alert for step in range(0, 100, 10) for alert in engine.update(step, values)]
    assert [(alert.kind, alert.severity) for alert in alerts] == [("no_attention", "warn")]


@pytest.mark.parametrize(("every", "scale"), [(1, 0.4), (10, 1.0), (50, 1.0), (100, 1.0)])
def test_any_cadence_finds_the_same_event(every, scale):
    curves = {
        name: (lambda step, curve=curve: curve(step / scale)) for name, curve in COLLAPSE.items()
    }
    steps = range(0, int(800 * scale), every)
    alerts = alarms(scan(steps, history(steps, **curves)))
    assert alerts, "not found"
    assert 500 * scale < alerts[0].step <= 700 * scale
    assert len(alerts) <= 2


def test_log_spaced_cadence():
    steps = sorted({int(10 * 1.1**k) for k in range(70)})

    def late(curve):
        return lambda step: curve(step / 6)

    alerts = alarms(
        scan(
            steps,
            history(steps, evenness=late(COLLAPSE["evenness"]), spread=late(COLLAPSE["spread"])),
        )
    )
    assert 3000 < alerts[0].step <= 4200
    assert scan(steps, history(steps)) == []


@pytest.mark.parametrize("cut", [1, 20, 52, 58, 60, 75])
def test_resume_alerts_like_an_uninterrupted_run(cut):
    runs = history(STEPS, sink=ramp(300, 600, 0.04, 0.9), **COLLAPSE)
    whole = scan(STEPS, runs)
    assert len(whole) > 2
    engine, alerts = AlertEngine(), []
    for index, step in enumerate(STEPS):
        if index == cut:
            state = json.loads(json.dumps(engine.state_dict()))  # plain types only
            engine = AlertEngine()
            engine.load_state_dict(state)
        alerts += engine.update(step, {name: array[index] for name, array in runs.items()})
    assert [alert.to_dict() for alert in alerts] == [alert.to_dict() for alert in whole]


def test_event_is_over_and_comes_again():
    def wave(step):
        return (
            ramp(500, 700, 0.75, 0.05)(step)
            if step < 1500
            else ramp(1500, 1600, 0.05, 0.75)(step)
            if step < 2500
            else ramp(2500, 2700, 0.75, 0.05)(step)
        )

    def logits(step):
        return (
            ramp(500, 700, 0.7, 20.0)(step)
            if step < 1500
            else ramp(1500, 1600, 20.0, 0.7)(step)
            if step < 2500
            else ramp(2500, 2700, 0.7, 20.0)(step)
        )

    steps = range(0, 3000, 20)
    alerts = scan(steps, history(steps, evenness=wave, spread=logits))
    assert [alert.severity for alert in alerts] == ["warn", "error", "info", "warn", "error"]
    assert alerts[2].evidence["cleared"] is True


def test_one_event_not_one_alert_per_head():
    rng = np.random.default_rng(1)
    engine, count = AlertEngine(), 0
    for step in range(0, 1000, 10):
        values = record(
            COLLAPSE["evenness"](step), COLLAPSE["spread"](step), shape=(24, 32), rng=rng
        )
        count += len([alert for alert in engine.update(step, values) if alert.is_alarm])
    assert count == 2


def test_many_noisy_heads_stay_quiet():
    """12,800 heads, one in a hundred concentrated and noisy: crossings by chance must not alarm."""
    rng = np.random.default_rng(2)
    evenness, spread = np.full((100, 128), 0.6), np.full((100, 128), 1.0)
    special = rng.random((100, 128)) < 0.01
    evenness[special], spread[special] = 0.08, 5.0
    engine = AlertEngine()
    for step in range(0, 600, 10):
        assert (
            engine.update(step, record(evenness, spread, shape=(100, 128), rng=rng, noise=0.08))
            == []
        )


def test_shorter_rows_are_no_collapse():
    def support(step):
        return 31.5 if step < 500 else 8.0

    runs = history(STEPS, support=support)
    assert alarms(scan(STEPS, runs)) == []


def test_layers_may_appear_and_vanish():
    engine = AlertEngine(layers=["a", "b"])
    assert engine.update(0, record(shape=(2, 4))) == []
    engine.layers = ["b"]
    assert engine.update(10, record(shape=(1, 4))) == []
    engine.layers = ["a", "b", "c"]
    assert engine.update(20, record(shape=(3, 4))) == []


def test_step_going_back_starts_a_new_run():
    engine = AlertEngine()
    engine.update(100, record())
    assert engine.update(100, record(0.01, 50.0)) == []
    assert engine.update(0, record()) == []


def test_wrong_shapes_are_refused_in_words():
    with pytest.raises(
        ValueError, match=r"`sink_mass` must have shape \(layers, heads\), got \(3,\)"
    ):
        AlertEngine().update(0, {"sink_mass": [0.1, 0.2, 0.3]})
    with pytest.raises(ValueError, match="names 1 layers, the statistics have 3"):
        AlertEngine(layers=["a"]).update(0, record())
    with pytest.raises(ValueError, match="increase"):
        scan([0, 0], {"sink_mass": np.zeros((2, 1, 1))})
    with pytest.raises(ValueError, match="steps, layers, heads"):
        scan([0, 1], {"loss": np.zeros(2)})


def test_what_is_compared_with_stands_still_during_an_event():
    """500 steps after the warning the error still compares with the time before it."""

    def stairs(low, lower):
        return lambda step: 0.75 if step < 500 else low if step < 1000 else lower

    def logits(step):
        return 0.7 if step < 500 else 3.5 if step < 1000 else 20.0

    steps = range(0, 1300, 10)
    alerts = alarms(scan(steps, history(steps, evenness=stairs(0.3, 0.05), spread=logits)))
    assert [alert.severity for alert in alerts] == ["warn", "error"]
    assert alerts[1].step > 1000
    assert alerts[1].evidence["evenness_before"] == pytest.approx(0.75, abs=0.05)


def test_growth_is_not_judged_across_a_change_of_length():
    def curves(length):
        return {
            "evenness": lambda step: 0.75 if step < 500 else 0.45,
            "spread": lambda step: 0.4 if step < 500 else 2.0,
            "support": lambda step: 31.5 if step < 500 else length,
        }

    assert alarms(scan(STEPS, history(STEPS, **curves(31.5))))[0].kind == "logit_growth"
    assert alarms(scan(STEPS, history(STEPS, **curves(8.0)))) == []


def test_chance_is_split_over_all_heads():
    """The margin of a head's bound, in standard errors, grows with the number of heads."""
    table = {name: np.asarray(array) for name, array in record(shape=(100, 128)).items()}
    layout = Layout(names=tuple(map(str, range(100))), heads=128)
    known = np.zeros((100, 128), dtype=bool)
    reading = read(0.0, table, layout, known, min_rows=1.0, min_content=0.0)
    margins = Memory(AlertPolicy(confidence=0.02)).look(reading, frozen=False).quantile()
    assert margins[[0, 1, -1]] == pytest.approx([2.05, 3.54, 4.66], abs=0.01)


def test_no_note_on_the_sink_during_a_collapse():
    curves = {**COLLAPSE, "sink": ramp(560, 700, 0.04, 0.5)}
    assert {alert.kind for alert in scan(STEPS, history(STEPS, **curves))} <= {
        "concentration",
        "logit_growth",
        "both",
    }


def test_ranks_decide_alike():
    """Every rank has its own engine and the same reduced statistics."""
    runs = history(STEPS, **COLLAPSE)
    ranks = [scan(STEPS, {name: array.copy() for name, array in runs.items()}) for _ in range(2)]
    assert ranks[0] == ranks[1]


def test_report_keeps_notes_back():
    policy = AlertPolicy(report="warn")
    assert scan(STEPS, history(STEPS, sink=ramp(300, 600, 0.04, 0.9)), policy) == []
