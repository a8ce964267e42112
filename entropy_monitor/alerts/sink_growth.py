"""The attention sink holds more than it did: entropy falls (or, below s* = 1/(1 + exp H(pi)),
rises), nothing is lost.

A note, never an alarm, with the share of the fall that it explains. Compared with the baseline or,
if the sink grew before that was complete, with the first record.
"""

import numpy as np

from entropy_monitor.alerts.reading import Array
from entropy_monitor.alerts.view import Condition, View


def rise(view: View) -> Condition:
    """Mean sink mass of the model or of a layer rose by more than the bound."""
    rule, margin = view.policy.sink_growth, view.policy.margin
    on, keep = view.nothing(), view.nothing()
    if "sink_mass" in view.now:
        gain = reference_gain(view)
        limits = np.concatenate([[rule.rise_model], np.full(view.layout.layers, rule.rise_layer)])
        with np.errstate(invalid="ignore"):
            on[: gain.size] = gain > limits
            keep[: gain.size] = gain > limits / margin
    return Condition(name="rise", on=on, keep=keep, persist=view.policy.persist)


def reference_gain(view: View) -> Array:
    """Rise of the mean sink mass since the lower of first record and baseline: model, then layers."""
    now = _means(view.now["sink_mass"])
    gain = now - _means(view.start["sink_mass"])
    if "sink_mass" in view.base:
        gain = np.fmax(gain, now - _means(view.base["sink_mass"]))
    return gain


def _means(heads: Array) -> Array:
    """Means over the measured heads: of the model, then of each layer."""
    seen = np.isfinite(heads)
    filled = np.where(seen, heads, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        layers = filled.sum(axis=1) / seen.sum(axis=1)
        model = filled.sum() / seen.sum() if seen.any() else np.nan
    return np.concatenate([[model], layers])
