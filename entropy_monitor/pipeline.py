"""From snapshots to what a person sees: baseline, attribution, alerts, writers.

Knows no host framework.
An adapter (Lightning, Hugging Face, a plain loop) decides when to measure; everything after that is
here, so that every host gives the same numbers. A writer or an action that fails is named once and
left out; training goes on.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from entropy_monitor.alerts import Alert, AlertEngine, AlertPolicy
from entropy_monitor.alerts.actions import warn_alert
from entropy_monitor.attribution import EntropyChange, attribute_change
from entropy_monitor.names import (
    CHANGE_NAMES,
    CHANGE_PREFIX,
    STAT_NAMES,
    STAT_PREFIX,
    check_statistics,
)
from entropy_monitor.snapshot import Snapshot
from entropy_monitor.writers import Emission, Writer, as_grid

LAYER_STATISTICS = (
    "sink_mass",
    "content_entropy",
    "content_evenness",
    "total_entropy",
    "max_logit",
)
"""Statistics that are also written per layer by default."""

Action = Callable[[Alert], None]
Agree = Callable[[list[Alert]], list[Alert]]

_log = logging.getLogger("entropy_monitor")


class EntropyMonitorWarning(UserWarning):
    """Something the monitor could not do or see; training is not affected."""


def warn_once(message: str, told: set[str]) -> None:
    """Warn once, never raising: where warnings are errors the message goes to the log."""
    if message in told:
        return
    told.add(message)
    try:
        warnings.warn(message, EntropyMonitorWarning, stacklevel=3)
    except Exception:  # warnings are errors here, or the host replaced `warnings.showwarning`
        _log.warning(message)


def _of_all_ranks(action: Action) -> bool:
    return bool(getattr(action, "all_ranks", False))


class Pipeline:
    """Turns the snapshots of a run into emissions.

    Args:
        writers: Where emissions go.
        baseline: Optimiser step from which on the first snapshot is the baseline of the
            attribution, or ``(first, last)``: the snapshots of these steps together.
        policy: When to alert: a policy, the name or path of one, or None for no alerts.
        on_alert: Called with every alert, in order; by default an alarm is a Python warning.
        layer_stats: Statistics written per layer.
        prefix: First part of every tag, to tell several monitors of one run apart.
        on_error: ``"warn"`` leaves a failing part out, ``"raise"`` lets its error through.
    """

    def __init__(
        self,
        *,
        writers: Iterable[Writer] = (),
        baseline: int | tuple[int, int] = 0,
        policy: AlertPolicy | str | None = "default",
        on_alert: Sequence[Action] | None = None,
        layer_stats: Sequence[str] = LAYER_STATISTICS,
        prefix: str = "",
        on_error: str = "warn",
    ) -> None:
        first, last = baseline if isinstance(baseline, tuple) else (baseline, None)
        if first < 0 or (last is not None and last < first):
            raise ValueError(
                "`baseline` must be a step >= 0 or (first, last) with last >= first; "
                f"got {baseline!r}."
            )
        self._given = tuple(writers)
        self.writers: list[Writer] = list(writers)
        self.baseline: Snapshot | None = None
        self.change: EntropyChange | None = None
        self.last: Emission | None = None
        self._first, self._last = first, last
        self._layer_stats = check_statistics(layer_stats, argument="layer_stats")
        self._policy = AlertPolicy.load(policy) if isinstance(policy, str) else policy
        self._engine = AlertEngine(self._policy) if self._policy is not None else None
        self._actions: list[Action] = list((warn_alert,) if on_alert is None else on_alert)
        self._prefix = f"{prefix}/" if prefix else ""
        self._on_error = on_error
        self._told: set[str] = set()
        self._alerts = 0

    def add_writer(self, make: Callable[[], Writer], what: str) -> None:
        """Send emissions to one more writer, or leave it out if it cannot be made.

        Args:
            make: Makes the writer.
            what: What it is, for the warning.
        """
        try:
            self.writers.append(make())
        except Exception as error:
            self._failed(f"{what} cannot be written and is left out", error)

    def emit(
        self, snapshot: Snapshot, *, write: bool = True, agree: Agree = lambda alerts: alerts
    ) -> Emission:
        """Attribute, judge and write one snapshot.

        Args:
            snapshot: What was measured, with a step; equal on all ranks.
            write: False on ranks that do not write: they only act on alerts, with actions that
                have a true attribute ``all_ranks``.
            agree: Gives every rank the alerts of rank 0, for these actions: what they do (stop,
                save) is a decision of all ranks.

        Returns:
            The emission.

        Raises:
            ValueError: If the snapshot has no step.
        """
        if snapshot.step is None:
            raise ValueError("`snapshot` must have a step; got None. Pass `step=` to `observe`.")
        self._update_baseline(snapshot)
        self.change = self._attribute(snapshot)
        alerts = self._judge(snapshot)
        layers = tuple((name, snapshot.heads(name)) for name in snapshot.layers)
        change, errors = self._aligned(layers)
        emission = Emission(
            step=snapshot.step,
            layers=layers,
            stats=np.stack([snapshot.array(stat) for stat in STAT_NAMES]).astype(np.float32),
            change=change,
            change_se=errors,
            cov=snapshot.covariance().astype(np.float32),
            model=self._scalars(snapshot),
            summary=self.change.to_dict() if self.change is not None else {},
            alerts=tuple(alerts),
        )
        self.last = emission
        if write:
            self._write(emission)
        for alert in alerts if write else ():
            self._act(alert, together=False)
        for alert in self._agreed(alerts, agree):
            self._act(alert, together=True)
        return emission

    def close(self) -> None:
        """Close all writers and forget those added by `add_writer`; harmless when called twice."""
        for writer in list(self.writers):
            try:
                writer.close()
            except Exception as error:
                self._failed(f"writer {type(writer).__name__} could not be closed", error)
        self.writers = list(self._given)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types: the baseline and the state of the alerts."""
        return {
            "baseline": self.baseline.state_dict() if self.baseline is not None else None,
            "alerts": self._engine.state_dict() if self._engine is not None else None,
            "alert_count": self._alerts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`: a resumed run attributes and alerts like an uninterrupted one.

        A state that cannot be read, or only in part, leaves everything as at the start of a run.
        """
        self.restart()
        try:
            count = int(state.get("alert_count", 0))
            if state.get("baseline") is not None:
                self.baseline = Snapshot.from_state_dict(state["baseline"])
            if self._engine is not None and state.get("alerts") is not None:
                self._engine.load_state_dict(state["alerts"])
            self._alerts = count
        except Exception as error:
            self.restart()
            self._failed("the saved state cannot be read; the baseline starts anew", error)

    def restart(self) -> None:
        """Forget the run before: no baseline, no history of alerts."""
        self.baseline, self.change, self.last = None, None, None
        self._engine = AlertEngine(self._policy) if self._policy is not None else None
        self._alerts = 0

    def _update_baseline(self, snapshot: Snapshot) -> None:
        step = snapshot.step or 0
        if not snapshot.layers or step < self._first:
            return
        if self.baseline is None:
            self.baseline = snapshot
        elif self._last is not None and (self.baseline.step or 0) < step <= self._last:
            self.baseline = self.baseline.merge(snapshot)

    def _attribute(self, snapshot: Snapshot) -> EntropyChange | None:
        baseline = self.baseline
        if baseline is None or not set(baseline.layers) & set(snapshot.layers):
            return None
        try:
            return attribute_change(baseline, snapshot)
        except ValueError as error:  # the model changed its shape in mid-run
            self._failed(
                "the change since the baseline cannot be attributed; a new baseline starts here",
                error,
            )
            self.baseline = snapshot
        except Exception as error:
            self._failed("the change since the baseline cannot be attributed", error)
        return None

    def _judge(self, snapshot: Snapshot) -> list[Alert]:
        if self._engine is None:
            return []
        layers = tuple((name, snapshot.heads(name)) for name in snapshot.layers)
        grids = {stat: as_grid(snapshot.array(stat), layers) for stat in STAT_NAMES}
        assert snapshot.step is not None
        try:
            self._engine.layers = snapshot.layers
            alerts = self._engine.update(snapshot.step, grids)
        except Exception as error:
            self._failed("alerts are switched off for the rest of the run", error)
            self._engine = None
            return []
        self._alerts += len(alerts)
        return alerts

    def _aligned(
        self, layers: tuple[tuple[str, int], ...]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Changes and errors on this snapshot's heads; NaN for layers the baseline lacks."""
        change = self.change
        if change is None:
            return None, None
        values = np.where(change.counted, change.values, np.nan)
        if change.layers == layers:
            return values.astype(np.float32), change.errors.astype(np.float32)
        spread = np.full(
            (2, len(CHANGE_NAMES), sum(heads for _, heads in layers)), np.nan, dtype=np.float32
        )
        start, known = 0, dict(change.layers)
        offsets = dict(zip(known, np.cumsum([0, *known.values()])[:-1], strict=True))
        for name, heads in layers:
            if name in known:
                span = slice(offsets[name], offsets[name] + heads)
                spread[0, :, start : start + heads] = values[:, span]
                spread[1, :, start : start + heads] = change.errors[:, span]
            start += heads
        return spread[0], spread[1]

    def _scalars(self, snapshot: Snapshot) -> dict[str, float]:
        scalars = {f"{STAT_PREFIX}/{stat}": snapshot.mean(stat) for stat in STAT_NAMES}
        for stat in ("sink_mass", "content_evenness"):
            for name, value in snapshot.quantiles(stat).items():
                scalars[f"{STAT_PREFIX}/{stat}_{name}"] = value
        if self.change is not None:
            for name in CHANGE_NAMES:
                scalars[f"{CHANGE_PREFIX}/{name}"] = float(getattr(self.change, name))
        for stat in self._layer_stats:
            for layer in snapshot.layers:
                scalars[f"{STAT_PREFIX}/{stat}/{layer}"] = snapshot.layer_mean(stat, layer)
        scalars[f"{STAT_PREFIX}/alerts"] = float(self._alerts)
        return {
            f"{self._prefix}{name}": value
            for name, value in scalars.items()
            if math.isfinite(value)
        }

    def _write(self, emission: Emission) -> None:
        for writer in list(self.writers):
            try:
                writer.write(emission)
            except Exception as error:
                self.writers.remove(writer)
                with suppress(Exception):
                    writer.close()
                self._failed(
                    f"writer {type(writer).__name__} failed and is left out from now on",
                    error,
                )

    def _agreed(self, alerts: list[Alert], agree: Agree) -> list[Alert]:
        if not any(map(_of_all_ranks, self._actions)):
            return []
        try:
            return agree(alerts)
        except Exception as error:
            self._actions = [action for action in self._actions if not _of_all_ranks(action)]
            self._failed("actions that need all ranks are left out from now on", error)
            return []

    def _act(self, alert: Alert, *, together: bool) -> None:
        for action in self._actions:
            if _of_all_ranks(action) is not together:
                continue
            try:
                action(alert)
            except Exception as error:
                name = getattr(action, "__name__", type(action).__name__)
                self._failed(f"alert action {name} failed", error)

    def _failed(self, what: str, error: Exception) -> None:
        if self._on_error == "raise":
            raise error
        warn_once(f"entropy_monitor: {what} ({type(error).__name__}: {error}).", self._told)
