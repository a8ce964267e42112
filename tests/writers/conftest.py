import numpy as np
import pytest

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.names import CHANGE_NAMES, COVARIANCE_PAIRS, STAT_NAMES
from entropy_monitor.writers import Emission

RAGGED = (("blocks.0.attn", 2), ("blocks.1.attn#1", 4), ("cross", 1))


def emission(step, layers=RAGGED, *, attributed=True, alerts=(), **more):
    """An emission whose every number tells where it came from: step, line and head."""
    heads = sum(count for _, count in layers)
    stats = (
        1000.0 * step + np.arange(len(STAT_NAMES))[:, None] + 0.01 * np.arange(heads)[None, :]
    ).astype(np.float32)
    model = {
        "attention/sink_mass": 0.25,
        "attention/total_entropy": 1.5,
        "attention_change/sink": float("nan"),
    }
    model |= {f"attention/sink_mass/{name}": float(i) for i, (name, _) in enumerate(layers)}
    fields: dict = {}
    if attributed:
        lines = np.arange(len(CHANGE_NAMES))[:, None] * np.ones(heads, dtype=np.float32)
        fields = {
            "change": -lines,
            "change_se": lines / 8,
            "cov": np.full((len(COVARIANCE_PAIRS), heads), 0.5, dtype=np.float32),
            "summary": {
                "baseline_step": 0,
                "last_step": step,
                "change": {
                    "total": -1.0,
                    "sink": -0.75,
                    "content": -0.25,
                    "support": 0.0,
                    "se": {"total": None},
                },
                "sink_share": 0.75,
            },
        }
    fields = {"stats": stats, "model": model} | fields | more
    return Emission(step=step, layers=layers, alerts=tuple(alerts), **fields)


def alert(step=10, layer="blocks.0.attn", head=1, **more):
    fields = {
        "kind": "concentration",
        "severity": "warn",
        "level": "head",
        "step": step,
        "layer": layer,
        "head": head,
        "message": "content entropy fell",
        "evidence": {"content_evenness": 0.05},
    }
    return Alert(**fields | more)


@pytest.fixture
def make():
    return emission


@pytest.fixture
def make_alert():
    return alert
