"""The change of entropy between any two recorded steps.

Where the later step recorded its change against the earlier one, that is taken: it knows which rows
were paired and how heads vary together. Between other steps the change follows from the recorded
means and their covariances: the same formulas, rows not paired. The error of a mean over heads
needs their correlation, which a record does not keep; there the mean of the heads' errors is given,
which is an upper bound.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropy_monitor.attribution import sink_share, split_means, split_ordered, split_se
from entropy_monitor.names import CHANGE_NAMES
from entropy_monitor.writers.base import Array
from entropy_monitor.writers.record_reader import RecordError, Run

_MEANS = (
    "binary_entropy",
    "sink_entropy",
    "content_mass",
    "content_mass_entropy",
    "content_mass_log_support",
    "log_support",
)


@dataclass(frozen=True, kw_only=True)
class RecordedChange:
    """What entropy did between two steps.

    Attributes:
        before: Step counted from.
        after: Step counted to.
        values: float64 (4, heads): total, sink, content, support in nats; NaN for heads that do not
            count at one of the two steps.
        errors: Standard errors of `values`, NaN where unknown.
        summary: Means over heads as plain types: ``change``, ``sink_share``, ``ordered``,
            ``layers``.
        recorded: Whether the change was recorded in training; else it is computed from means, and
            the errors of means over heads are upper bounds.
        paired: Whether the same rows were compared at both steps.
    """

    before: int
    after: int
    values: Array
    errors: Array
    summary: Mapping[str, Any]
    recorded: bool
    paired: bool


def change_between(run: Run, before: int, after: int) -> RecordedChange:
    """Return the change between two recorded steps.

    Raises:
        RecordError: If a step was not recorded, or lacks the statistics that a change needs.
    """
    values = run.frame(after, "change").astype(np.float64)
    if values.size and run.baseline_step(after) == before:
        summary = run.summary(after)
        return RecordedChange(
            before=before,
            after=after,
            values=values,
            errors=_lines(run, after, "change_se", values.shape),
            summary={key: summary[key] for key in ("change", "sink_share", "ordered", "layers")},
            recorded=True,
            paired=bool(summary.get("paired", False)),
        )
    return _computed(run, before, after)


def _computed(run: Run, before: int, after: int) -> RecordedChange:
    frames = {step: _stats(run, step) for step in (before, after)}
    means = [{name: frames[step][name] for name in _MEANS} for step in (before, after)]
    rows = [frames[step]["rows_valid"] + frames[step]["rows_no_sink"] for step in (before, after)]
    counted = (rows[0] > 0) & (rows[1] > 0)
    for moment in means:
        counted &= np.isfinite(np.stack(list(moment.values()))).all(0)
    split = split_means(*means)
    values = np.where(counted, np.stack([split[name] for name in CHANGE_NAMES]), np.nan)
    shape = (10, run.heads)
    covariances = [_lines(run, step, "cov", shape) for step in (before, after)]
    error = split_se(means[0], means[1], covariances[0], covariances[1])
    errors = np.where(counted, np.stack([error[name] for name in CHANGE_NAMES]), np.nan)
    halves = split_ordered(*means)
    return RecordedChange(
        before=before,
        after=after,
        values=values,
        errors=errors,
        summary={
            **_describe(values, errors, counted),
            "ordered": {
                order: {name: _mean(part[name], counted) for name in ("sink", "content")}
                for order, part in halves.items()
            },
            "layers": {
                name: _layer(values[:, span], errors[:, span], counted[span])
                for name, span in run.slices.items()
            },
        },
        recorded=False,
        paired=False,
    )


def _stats(run: Run, step: int) -> dict[str, Array]:
    names = (*_MEANS, "rows_valid", "rows_no_sink")
    missing = [name for name in names if name not in run.stat_names]
    if missing:
        raise RecordError(f"{run.path} does not have {missing[0]!r}, which a change needs.")
    frame = run.frame(step)
    recorded = run.stats_at(step)
    nowhere = np.full(run.heads, np.nan)
    return {
        name: frame[recorded.index(name)].astype(np.float64) if name in recorded else nowhere
        for name in names
    }


def _lines(run: Run, step: int, block: str, shape: tuple[int, ...]) -> Array:
    lines = run.frame(step, block).astype(np.float64)
    return lines if lines.shape == shape else np.full(shape, np.nan)


def _mean(values: Array, counted: npt.NDArray[np.bool_]) -> float:
    return float(values[counted].mean()) if counted.any() else 0.0


def _describe(values: Array, errors: Array, counted: npt.NDArray[np.bool_]) -> dict[str, Any]:
    change = {name: _mean(values[i], counted) for i, name in enumerate(CHANGE_NAMES)}
    error = {
        name: _mean(errors[i], counted) if counted.any() else math.nan
        for i, name in enumerate(CHANGE_NAMES)
    }
    return {
        "change": {
            **change,
            "se": {name: value if math.isfinite(value) else None for name, value in error.items()},
        },
        "sink_share": sink_share(**change, se_total=error["total"]),
    }


def _layer(values: Array, errors: Array, counted: npt.NDArray[np.bool_]) -> dict[str, Any]:
    described = _describe(values, errors, counted)
    return {**described["change"], "sink_share": described["sink_share"]}
