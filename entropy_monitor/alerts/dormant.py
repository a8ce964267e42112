"""Heads park nearly all attention on the sink and pass on little: a note.

Large models have many such heads.
"""

import numpy as np

from entropy_monitor.alerts.reading import Mask
from entropy_monitor.alerts.view import Condition, View


def asleep(view: View) -> Mask:
    """Dormant heads, ``(L, H)``."""
    if "sink_mass" not in view.now:
        return np.zeros((view.layout.layers, view.layout.heads), dtype=bool)
    with np.errstate(invalid="ignore"):
        return np.asarray(view.now["sink_mass"] > view.policy.dormant.sink_mass)


def parked(view: View) -> Condition:
    """Enough heads of a layer are dormant; the model counts when half of its layers do."""
    rule = view.policy.dormant
    on = view.nothing()
    known = view.reading.measured.sum(axis=1)
    share = asleep(view).sum(axis=1) / np.maximum(known, 1)
    layers = (known > 0) & (share >= rule.heads)
    on[1 : 1 + view.layout.layers] = layers
    on[0] = layers.sum() > 0.5 * max(int((known > 0).sum()), 1)
    keep = on.copy()
    keep[1 : 1 + view.layout.layers] |= share >= rule.heads / view.policy.margin
    return Condition(
        name="parked", on=on, keep=keep, persist=max(view.policy.persist, view.policy.smoothing)
    )
