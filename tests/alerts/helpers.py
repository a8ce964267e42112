"""Synthetic records: heads with a given evenness and logit spread, with noise, in any cadence."""

import numpy as np

SUPPORT = 31.5
LAYERS, HEADS = 3, 4


def record(
    evenness=0.75,
    spread=0.7,
    sink=0.05,
    *,
    shape=(LAYERS, HEADS),
    rng=None,
    noise=0.01,
    support=SUPPORT,
):
    """One record with consistent entropies; the values broadcast to (layers, heads)."""
    evenness, spread, sink = (
        np.broadcast_to(np.asarray(value, dtype=float), shape).copy()
        for value in (evenness, spread, sink)
    )
    if rng is not None:
        evenness += noise * rng.standard_normal(shape)
        spread *= np.exp(noise * rng.standard_normal(shape))
    evenness = np.clip(evenness, 0.0, 1.0)
    content = evenness * np.log(support)
    with np.errstate(divide="ignore", invalid="ignore"):
        binary = -np.nan_to_num(sink * np.log(sink)) - np.nan_to_num((1 - sink) * np.log1p(-sink))
    return {
        "sink_mass": sink,
        "content_mass": 1 - sink,
        "binary_entropy": binary,
        "content_entropy": content,
        "content_mass_entropy": (1 - sink) * content,
        "content_evenness": evenness,
        "total_entropy": binary + (1 - sink) * content,
        "max_logit": 3 * spread * np.sqrt(2 * np.log(support)),
        "logit_spread": spread * np.sqrt(2 * np.log(support)),
        "support": np.full(shape, support),
    }


def history(steps, **curves):
    """A run: every keyword is a function of the step, or a constant."""
    rng = np.random.default_rng(0)
    rows = [
        record(
            **{name: curve(step) if callable(curve) else curve for name, curve in curves.items()},
            rng=rng,
        )
        for step in steps
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def alarms(alerts):
    return [alert for alert in alerts if alert.is_alarm]


def ramp(start, stop, before, after):
    """A curve that goes from `before` to `after` between two steps, geometrically."""

    def curve(step):
        share = np.clip((step - start) / (stop - start), 0.0, 1.0)
        return before * (after / before) ** share

    return curve
