"""The benchmark: its judge on hand-made curves, and two short runs, trained for real."""

from dataclasses import replace

import numpy as np
import pytest

from entropy_monitor.alerts import Alert, scan
from tests.benchmarks.collapse.detectors import DETECTORS, six_sigma
from tests.benchmarks.collapse.judge import concentrated, damage_step, outcome, verdict
from tests.benchmarks.collapse.kinds import KINDS
from tests.benchmarks.collapse.table import table

STEPS = np.arange(0, 300, 10)


def trace(loss=2.0, evenness=0.8):
    return {
        "step": STEPS,
        "loss_step": STEPS,
        "val_loss": np.broadcast_to(loss, STEPS.shape).astype(float),
        "content_evenness": np.broadcast_to(evenness, (30, 1, 2)).astype(float),
    }


def test_damage_is_a_loss_that_stays_above_the_twin():
    worse = np.where(STEPS >= 200, 2.2, 2.0)
    assert damage_step(trace(worse), trace()) == 210  # the median of 3 sees it a record later
    assert damage_step(trace(np.where(STEPS == 200, 9.0, 2.0)), trace()) is None
    assert damage_step(trace(np.where(STEPS >= 200, np.nan, 2.0)), trace()) == 210


def test_outcome_needs_damage_and_concentration():
    low = np.where(STEPS >= 100, 0.2, 0.8)[:, None, None]
    worse = np.where(STEPS >= 200, 2.2, 2.0)
    assert concentrated(trace(evenness=low), trace())
    assert outcome("collapse", trace(worse, low), trace())[0] == "collapse"
    assert outcome("collapse", trace(2.0, low), trace())[0] == "harmless"
    assert outcome("collapse", trace(worse), trace())[0] == "elsewhere"


def test_verdict_and_table():
    alarm = Alert("concentration", "warn", "model", 150)
    found = verdict("a", "collapse", 100, 200, [alarm])
    assert (found.alarm, found.lead, found.early) == (150, 50, False)
    assert verdict("b", "collapse", 160, 200, [alarm]).early
    assert "| ours | 1/1 |" in table({"ours": [found]})


def test_six_sigma_finds_a_spike():
    loss = np.full(30, 2.0) + 0.01 * np.sin(STEPS)
    loss[25] = 3.0
    assert six_sigma("loss")({"loss": loss, "loss_step": STEPS, "step": STEPS}) == [250]


def test_twins_have_no_fault():
    for name, run in KINDS.items():
        twin = run.twin()
        assert twin.fault is None, name
        assert (run.group == "healthy") == (run == twin), name


@pytest.mark.parametrize(("name", "alarm"), [("no_scale", True), ("h_window", False)])
def test_one_short_run(name, alarm):
    """Lightning, the callback, the statistics and the alerts, end to end."""
    pytest.importorskip("pytorch_lightning")
    from tests.benchmarks.collapse.train import train

    result = train(replace(KINDS[name], steps=31, batch=4, length=48), seed=0)
    assert result["content_evenness"].shape == (4, 2, 4)
    losses = ("loss_step", "loss", "val_loss", "grad_norm", "step")
    history = {key: array for key, array in result.items() if key not in losses}
    alarms = [alert for alert in scan(result["step"], history) if alert.is_alarm]
    assert bool(alarms) == alarm
    if alarm:
        assert alarms[0].evidence["pattern"] == "start"
    for detector in DETECTORS.values():
        detector(result)
