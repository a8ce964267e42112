"""NaN or +inf among the attention logits: an error at once, the weights are about to go."""

import numpy as np

from entropy_monitor.alerts.view import Condition, View


def broken(view: View) -> Condition:
    """Heads with more non-finite rows than allowed, their layers, the model if most have one."""
    heads = view.reading.nonfinite > view.policy.nonfinite.share
    layers = heads.any(axis=1)
    on = np.concatenate([[layers.mean() > 0.5], layers, heads.ravel()])
    return Condition(name="broken", on=on, keep=on, persist=0.0)
