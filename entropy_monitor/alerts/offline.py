"""`scan`: the code that runs in training, over a recorded history."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.alerts.engine import AlertEngine
from entropy_monitor.alerts.policy import AlertPolicy


def scan(
    steps: Sequence[int] | Any,
    history: Mapping[str, Any],
    policy: AlertPolicy | str | None = None,
    *,
    layers: Sequence[str] | None = None,
) -> list[Alert]:
    """Runs the alerts over a recorded run.

    Args:
        steps: Optimiser steps, increasing, ``(steps,)``.
        history: Statistics by name, each ``(steps, layers, heads)``; any may be missing, NaN means
            absent. Arrays of another kind (a loss, ``(steps,)``) are refused rather than guessed
            at.
        policy: A policy, the name of one (``default``, ``strict``, ``quiet``) or a file; ``None``
            is the default.
        layers: Names of the layers; ``0``, ``1``, ... if not given.

    Returns:
        Alerts in order of steps.

    Raises:
        ValueError: If steps do not increase, or a statistic does not have the shape above.

    >>> steps = range(0, 400, 10)
    >>> even, spread = np.full((40, 1, 4), 0.8), np.full((40, 1, 4), 0.5)
    >>> scan(steps, {"content_evenness": even, "logit_spread_scaled": spread})
    []
    """
    count = np.asarray(steps)
    if count.ndim != 1 or not (np.diff(count) > 0).all():
        raise ValueError(
            "`steps` must be one-dimensional and increase from one record to the next."
        )
    arrays = {name: np.asarray(array, dtype=np.float64) for name, array in history.items()}
    for name, array in arrays.items():
        if array.ndim != 3 or array.shape[0] != count.size:
            raise ValueError(
                f"`history[{name!r}]` must have shape (steps, layers, heads) with {count.size} "
                f"steps, got {array.shape}."
            )
    engine = AlertEngine(AlertPolicy.load(policy), layers)
    alerts: list[Alert] = []
    for index, step in enumerate(count.tolist()):
        alerts += engine.update(step, {name: array[index] for name, array in arrays.items()})
    return alerts
