"""Heads that had a pattern fall back to uniform attention: a note.

Early training, where J is 1 for all heads, is not it.
"""

import numpy as np

from entropy_monitor.alerts.reading import Mask
from entropy_monitor.alerts.view import Condition, View


def diluted(view: View) -> Mask:
    """Heads, ``(L, H)``, whose 1 - J fell to a small share of what it once was."""
    rule = view.policy.dilution
    if "content_evenness" not in view.now:
        return np.zeros((view.layout.layers, view.layout.heads), dtype=bool)
    with np.errstate(invalid="ignore"):
        had: Mask = view.structure > rule.structure
        return had & (1.0 - view.now["content_evenness"] < rule.lost * view.structure)


def lost(view: View) -> Condition:
    """Enough of the heads of the model, or of a layer, lost their pattern."""
    rule = view.policy.dilution
    on, keep = view.nothing(), view.nothing()
    had = view.structure > rule.structure
    gone = diluted(view)
    count = np.concatenate([[had.sum()], had.sum(axis=1)])
    share = np.concatenate([[gone.sum()], gone.sum(axis=1)]) / np.maximum(count, 1)
    first = 1 + view.layout.layers
    on[:first] = (count > 0) & (share >= rule.heads) & view.settled
    keep[:first] = (count > 0) & (share >= rule.heads / view.policy.margin)
    return Condition(
        name="lost", on=on, keep=keep, persist=max(view.policy.persist, view.policy.smoothing)
    )
