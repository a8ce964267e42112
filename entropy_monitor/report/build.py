"""`build_report`: what a recorded run says about its attention entropy."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.names import STATISTICS
from entropy_monitor.report.changes import RecordedChange, change_between
from entropy_monitor.writers.record_reader import RecordError, Run, read_run

_REDUCE = {statistic.name: statistic.reduce for statistic in STATISTICS}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run between two steps.

    Attributes:
        run: The recorded run.
        change: What entropy did between the two steps, per head and on average.
        alerts: Alerts up to the later step.
    """

    run: Run
    change: RecordedChange
    alerts: tuple[Alert, ...]

    @property
    def baseline_step(self) -> int:
        """The step counted from."""
        return self.change.before

    @property
    def last_step(self) -> int:
        """The step counted to."""
        return self.change.after

    def mean(self, stat: str, step: int) -> float:
        """Return the model's value of a statistic at a step: over heads, as it was logged."""
        value = float(self.run.scalar(f"attention/{stat}")[self.run.index(step)])
        if math.isnan(value):
            heads = self.heads(stat, step)
            heads = heads[np.isfinite(heads)]
            if not heads.size:
                return math.nan
            how = _REDUCE.get(stat, "mean")
            reduced = (
                heads.max() if how == "max" else heads.sum() if how == "count" else heads.mean()
            )
            value = float(reduced)
        return value

    def heads(self, stat: str, step: int) -> Any:
        """Return a statistic of every head at a step, float64 (heads,), NaN where absent."""
        names = self.run.stats_at(step)
        if stat not in names:
            return np.full(self.run.heads, np.nan)
        return self.run.frame(step)[names.index(stat)].astype(np.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types; what is not defined is None.

        Keys: ``baseline_step``, ``last_step``, ``change`` (total, sink, content, support and their
        ``se``, means over all heads, nats), ``sink_share``, ``ordered``, ``layers``, ``alerts``,
        ``checkpoints`` (of a replay).
        """
        summary = self.change.summary
        report = {
            "baseline_step": self.baseline_step,
            "last_step": self.last_step,
            **{key: summary[key] for key in ("change", "sink_share", "ordered", "layers")},
            "alerts": [alert.to_dict() for alert in self.alerts],
            "checkpoints": [dict(line) for line in self.run.checkpoints],
        }
        return {key: _plain(value) for key, value in report.items()}

    def to_json(self) -> str:
        """Return `to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def to_text(self, *, layers: int | None = 16, heads: int = 8) -> str:
        """Return the report as text for a terminal or a mail.

        Args:
            layers: Most layers in the table, those that changed most; None for all.
            heads: Number of heads to list, those that changed most.
        """
        from entropy_monitor.report.table import render

        return render(self, layers=layers, heads=heads)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line per step, layer and head."""
        from entropy_monitor.report.export import write_csv

        write_csv(self, path)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the table of `to_csv` as parquet.

        Raises:
            ImportError: If pyarrow is not installed.
        """
        from entropy_monitor.report.export import write_parquet

        write_parquet(self, path)

    def to_png(self, path: str | os.PathLike[str]) -> None:
        """Draw the report as a figure.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from entropy_monitor.report.figures import draw

        draw(self, path)


def build_report(
    run: Run | str | os.PathLike[str], *, baseline: int | None = None, last: int | None = None
) -> Report:
    """Report on a run between two steps.

    Args:
        run: A run that was read, or its folder.
        baseline: The step to count from; by default the one the record counts from, else the first.
        last: The step to count to; by default the last.

    Returns:
        The report.

    Raises:
        RecordError: If there is no record, nothing in it yet, or no such step.
    """
    if not isinstance(run, Run):
        run = read_run(run)
    run.require_steps()
    after = int(run.steps[-1]) if last is None else last
    before = baseline
    if before is None:
        before = run.baseline_step(after)
    if before is None:
        before = int(run.steps[0])
    if before > after:
        raise RecordError(f"The baseline, step {before}, must not come after step {after}.")
    return Report(
        run=run,
        change=change_between(run, before, after),
        alerts=tuple(alert for alert in run.alerts if alert.step <= after),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
