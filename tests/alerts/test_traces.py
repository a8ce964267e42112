"""Real runs: a few traces that travel with the tests, and a larger set where it is present."""

import json
from pathlib import Path

import numpy as np
import pytest

from entropy_monitor.alerts import scan

SHIPPED = Path(__file__).parents[1] / "data" / "alerts"
RECORDED = Path(__file__).parents[3] / "shared" / "alert_traces"
FOUND = ("concentration", "both", "logit_growth", "nonfinite")


def load(path):
    with np.load(path) as data:
        history = {key: data[key].astype(np.float64) for key in data.files if data[key].ndim == 3}
        return data["step"], history


def labels(folder):
    return json.loads((folder / "labels.json").read_text()) if folder.exists() else {}


def check(label, alerts):
    """What must hold for a run of each group."""
    alarms = [alert for alert in alerts if alert.is_alarm]
    fault = label.get("fault_step") or 0
    assert all(alert.step >= fault for alert in alarms), "alarm before the fault"
    if label["group"] in ("collapse", "POS"):
        assert alarms, "collapse not found"
        assert alarms[0].kind in FOUND
    elif label["group"] not in ("harmless", "CONC"):
        assert not alarms, alarms[0].message
    kinds = {alert.kind for alert in alerts}
    if label["group"] in ("sink", "SINK"):
        assert kinds & {"sink_growth", "both"}
    if label["group"] in ("dilution", "DIL"):
        assert "dilution" in kinds


@pytest.mark.parametrize("name", labels(SHIPPED))
def test_shipped(name):
    check(labels(SHIPPED)[name], scan(*load(SHIPPED / f"{name}.npz")))


@pytest.mark.slow
@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded traces are not in this checkout")
def test_one_recorded_run_of_each_kind():
    """The first seed of every kind; the whole table comes from the benchmark."""
    for name, label in labels(RECORDED).items():
        if name.endswith("_s0"):
            check(label, scan(*load(RECORDED / f"{name}.npz")))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_cadence_of_shipped_collapses(every):
    """Recorded every 10, 20 or 50 steps, a collapse is found, and not much later."""
    for name, label in labels(SHIPPED).items():
        if label["group"] != "collapse":
            continue
        steps, history = load(SHIPPED / f"{name}.npz")
        alerts = scan(steps[::every], {key: array[::every] for key, array in history.items()})
        first = next(alert for alert in alerts if alert.is_alarm)
        whole = next(alert for alert in scan(steps, history) if alert.is_alarm)
        assert first.step <= whole.step + 2 * 10 * every
