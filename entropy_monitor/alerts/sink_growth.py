"""The attention sink holds more than it did.

Entropy falls (or, below s* = 1/(1 + exp H(pi)), rises), but nothing is lost.

A note, never an alarm, with the share of the fall that it explains. Compared with the onset: the
record at which the layer's sink mass last was within .03 of its lowest value. A baseline at a fixed
step would mix in what the heads learned before the sink began to grow.
"""

import numpy as np

from entropy_monitor.alerts.reading import Array, head_means
from entropy_monitor.alerts.view import Condition, View


def rise(view: View) -> Condition:
    """Mean sink mass of the model or of a layer rose by more than the bound."""
    rule, margin = view.policy.sink_growth, view.policy.margin
    on, keep = view.nothing(), view.nothing()
    if "sink_mass" in view.now:
        grown = gain(view)
        limits = np.concatenate([[rule.rise_model], np.full(view.layout.layers, rule.rise_layer)])
        with np.errstate(invalid="ignore"):
            on[: grown.size] = grown > limits
            keep[: grown.size] = grown > limits / margin
    return Condition(name="rise", on=on, keep=keep, persist=view.policy.persist)


def gain(view: View) -> Array:
    """Rise of the mean sink mass since the onset: of the model, then of each layer."""
    rise = view.now["sink_mass"] - view.onset["sink_mass"]
    return np.concatenate([head_means(rise.reshape(1, -1)), head_means(rise)])
