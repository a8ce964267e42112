"""The competition: what one would use without this package. Each gives the steps it alarms at.

Every detector gets its best treatment: the same smoothing (median of 3 records) and warm-up (150
steps) where it compares with the past, thresholds as in the literature or as found best on runs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Detector = Callable[[dict[str, Any]], "list[int]"]
WARMUP = 150


def _smooth(values: Any) -> Any:
    return np.stack(
        [np.median(values[max(0, index - 2) : index + 1], axis=0) for index in range(len(values))]
    )


def _normal(trace: dict[str, Any], stat: str) -> Any:
    """Total entropy over log n, or evenness, (steps, layers, heads)."""
    if stat == "evenness":
        return trace["content_evenness"]
    return trace["total_entropy"] / np.log(np.maximum(trace["support"] + 1.0, 2.0))


def floor(stat: str, level: str, bound: float) -> Detector:
    """Entropy below a fixed bound at any head, any layer's or the model's median."""

    def run(trace: dict[str, Any]) -> list[int]:
        value = _normal(trace, stat)
        size = len(value)
        if level == "head":
            low = value.reshape(size, -1).min(axis=1)
        elif level == "layer":
            low = np.median(value, axis=2).min(axis=1)
        else:
            low = np.median(value.reshape(size, -1), axis=1)
        return [int(step) for step in trace["step"][~(_smooth(low) >= bound)]]

    return run


def drop(stat: str, share: float) -> Detector:
    """The model's median falls by `share` against a slow running mean."""

    def run(trace: dict[str, Any]) -> list[int]:
        value = _smooth(np.median(_normal(trace, stat).reshape(len(trace["step"]), -1), axis=1))
        mean, hits = value[0], []
        for index, step in enumerate(trace["step"]):
            if step >= WARMUP and not value[index] >= (1.0 - share) * mean:
                hits.append(int(step))
            mean = 0.95 * mean + 0.05 * value[index]
        return hits

    return run


def max_logit(bound: float) -> Detector:
    """Any head's largest logit above a bound (QK-clip uses 100)."""

    def run(trace: dict[str, Any]) -> list[int]:
        top = np.nanmax(trace["max_logit"].reshape(len(trace["step"]), -1), axis=1)
        return [int(step) for step in trace["step"][~(top <= bound)]]

    return run


def six_sigma(column: str, sigmas: float = 6.0, window: int = 128) -> Detector:
    """OLMo-core's spike score: `sigmas` deviations above the mean of the last `window` steps."""

    def run(trace: dict[str, Any]) -> list[int]:
        values, steps = trace[column], trace.get("loss_step", trace["step"])
        hits = []
        for index, step in enumerate(steps):
            past = values[:index][steps[:index] >= step - window]
            past = past[np.isfinite(past)]
            if step < WARMUP or len(past) < 8:
                continue
            if not values[index] <= past.mean() + sigmas * max(past.std(), 1e-6):
                hits.append(int(step))
        return hits

    return run


def ratio(column: str, factor: float) -> Detector:
    """A value above `factor` times its running median of the last 20 records."""

    def run(trace: dict[str, Any]) -> list[int]:
        values, steps = trace[column], trace.get("loss_step", trace["step"])
        hits = []
        for index in range(len(values)):
            past = values[max(0, index - 20) : index]
            past = past[np.isfinite(past)]
            if (
                steps[index] >= WARMUP
                and len(past) >= 5
                and not values[index] <= factor * np.median(past)
            ):
                hits.append(int(steps[index]))
        return hits

    return run


DETECTORS: dict[str, Detector] = {
    "total entropy H/log n, any head < .12": floor("total", "head", 0.12),
    "total entropy, a layer's median < .20": floor("total", "layer", 0.20),
    "total entropy, model median < .30": floor("total", "model", 0.30),
    "total entropy, model median < .50": floor("total", "model", 0.50),
    "total entropy falls 40 % below its running mean": drop("total", 0.4),
    "evenness J, any head < .12": floor("evenness", "head", 0.12),
    "evenness J, model median < .30": floor("evenness", "model", 0.30),
    "max logit > 100": max_logit(100.0),
    "gradient norm, 6 sigma": six_sigma("grad_norm"),
    "gradient norm > 3 x running median": ratio("grad_norm", 3.0),
    "loss, 6 sigma (OLMo-core)": six_sigma("loss"),
    "loss, 4 sigma": six_sigma("loss", 4.0),
}
