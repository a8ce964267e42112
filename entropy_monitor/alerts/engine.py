"""`AlertEngine`: records in, alerts out; the same engine runs in training and in `scan`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from entropy_monitor.alerts import (
    concentration,
    dilution,
    dormant,
    logit_growth,
    no_attention,
    nonfinite,
    notes,
    sink_growth,
    wording,
)
from entropy_monitor.alerts.alert import SEVERITIES, Alert, Kind, Severity
from entropy_monitor.alerts.events import Event, Turn, pick
from entropy_monitor.alerts.memory import Memory
from entropy_monitor.alerts.policy import AlertPolicy
from entropy_monitor.alerts.reading import Array, Layout, Mask, as_table, layer_names, read
from entropy_monitor.alerts.telling import FAMILIES, over, tell, with_sink
from entropy_monitor.alerts.view import Condition, View


class AlertEngine:
    """Judges one record after the other.

    Args:
        policy: Thresholds and time constants, the default policy if ``None``.
        layers: Names of the layers in the order of the arrays; ``0``, ``1``, ... if ``None``.

    The engine is a function of the records alone: fed with the same (reduced) statistics, every
    rank decides alike.

    >>> engine = AlertEngine(layers=["blocks.0"])
    >>> engine.update(0, {"sink_mass": [[float("nan")]]})[0].kind
    'no_attention'
    """

    VERSION = 1

    def __init__(
        self, policy: AlertPolicy | None = None, layers: Sequence[str] | None = None
    ) -> None:
        self.policy = policy if policy is not None else AlertPolicy()
        self._names = None if layers is None else tuple(layers)
        self.reset()

    def reset(self) -> None:
        """Forgets every record, as for a new run."""
        self._layout: Layout | None = None
        self._memory = Memory(self.policy)
        self._events = {name: Event(wide=name in ("collapse", "nonfinite")) for name in FAMILIES}
        self._note: Kind | None = None  # kind of the note on the sink in force
        self._pattern: str | None = None  # how the collapse in force began

    @property
    def layers(self) -> tuple[str, ...] | None:
        """Names of the layers of the next record, ``None`` if none were given.

        May be set before a record whose layers differ. Layers that are missing count as absent; a
        new layer makes the engine start afresh, since there is nothing to compare it with.
        """
        return self._names

    @layers.setter
    def layers(self, names: Sequence[str] | None) -> None:
        self._names = None if names is None else tuple(names)

    def update(
        self, step: int, values: Mapping[str, Any], change: Mapping[str, Any] | None = None
    ) -> list[Alert]:
        """Adds the record of an optimiser step.

        Args:
            step: Optimiser step. A step before the last one starts a new run; the same step again
                is ignored.
            values: Statistics by the names of `entropy_monitor.names`, each ``(layers, heads)``.
                NaN means absent (models whose layers differ in heads). ``rows_<kind>`` counts and
                ``content_evenness_se`` are used where they are given; every statistic may be
                missing.
            change: Measured channels of the change since a baseline (``total``, ``sink``,
                ``content``, ``support``), each ``(layers, heads)``; goes into the evidence of
                notes.

        Returns:
            The alerts of this record, often none.

        Raises:
            ValueError: If shapes do not fit together or to the layers.
        """
        table = as_table(values)
        if self._memory.last is not None and step <= self._memory.last:
            if step == self._memory.last:
                return []
            self.reset()
        table, present = self._align(table)
        if self._layout is None or not present.any():
            return self._blind(step)
        reading = read(
            float(step),
            table,
            self._layout,
            self._memory.known((self._layout.layers, self._layout.heads)) & present[:, None],
            min_rows=self.policy.min_rows,
            min_content=self.policy.min_content,
        )
        view = self._memory.look(reading, frozen=self._events["collapse"].open)
        alerts = [_with_change(alert, change) for alert in self._judge(view)]
        rank = SEVERITIES.index(self.policy.report)
        return [alert for alert in alerts if SEVERITIES.index(alert.severity) >= rank]

    def _align(self, table: dict[str, Array]) -> tuple[dict[str, Array], Mask]:
        """Puts the layers of a record at their places; says which layers it has."""
        layers, heads = next(iter(table.values())).shape if table else (0, 0)
        if layers * heads == 0:
            return {}, np.zeros(self._layout.layers if self._layout else 1, dtype=bool)
        names = layer_names(self._names, layers)
        old = self._layout
        if old is None or heads > old.heads or not set(names) <= set(old.names):
            known = () if old is None else old.names
            union = known + tuple(name for name in names if name not in known)
            self.reset()
            self._layout = Layout(names=union, heads=max(heads, old.heads if old else 0))
        assert self._layout is not None
        rows = [self._layout.names.index(name) for name in names]
        present = np.zeros(self._layout.layers, dtype=bool)
        present[rows] = True
        if names == self._layout.names and heads == self._layout.heads:
            return table, present
        aligned: dict[str, Array] = {}
        for name, array in table.items():
            aligned[name] = np.full((self._layout.layers, self._layout.heads), np.nan)
            aligned[name][rows, :heads] = array
        return aligned, present

    def _blind(self, step: int) -> list[Alert]:
        layout = Layout(names=("model",), heads=1)
        absent = np.full((1, 1), np.nan)
        reading = read(
            float(step),
            {"sink_mass": absent},
            layout,
            np.zeros((1, 1), dtype=bool),
            min_rows=0.0,
            min_content=0.0,
        )
        view = Memory(self.policy).look(reading, frozen=False)
        alerts: list[Alert] = []
        if self.policy.no_attention.enabled:
            self._turn(alerts, view, "no_attention", no_attention.blind(view).on, "warn")
        return alerts

    def _judge(self, view: View) -> list[Alert]:
        policy, alerts = self.policy, list[Alert]()
        if policy.nonfinite.enabled:
            self._simple(alerts, view, "nonfinite", nonfinite.broken(view), "error")
        if policy.no_attention.enabled:
            self._simple(alerts, view, "no_attention", no_attention.blind(view), "warn")
        if policy.concentration.enabled or policy.logit_growth.enabled:
            self._collapse(alerts, view)
        if policy.sink_growth.enabled:
            self._simple(alerts, view, "sink", sink_growth.rise(view), "info")
        if policy.dilution.enabled:
            self._simple(alerts, view, "dilution", dilution.lost(view), "info")
        if policy.dormant.enabled:
            self._simple(alerts, view, "dormant", dormant.parked(view), "info")
        return alerts

    def _simple(
        self, alerts: list[Alert], view: View, family: str, condition: Condition, severity: Severity
    ) -> None:
        active = self._events[family].latch([condition], view.reading.step, self.policy.clear)[
            condition.name
        ]
        self._turn(alerts, view, family, active, severity)

    def _collapse(self, alerts: list[Alert], view: View) -> None:
        conditions = []
        if self.policy.concentration.enabled:
            conditions += concentration.conditions(view)
        if self.policy.logit_growth.enabled:
            conditions += [logit_growth.growth(view), logit_growth.bound(view)]
        event = self._events["collapse"]
        on = event.latch(conditions, view.reading.step, self.policy.clear)
        severe = on.pop("severe", view.nothing())
        active = np.logical_or.reduce(list(on.values()))
        concentrated = on.get("level", view.nothing()) | on.get("drop", view.nothing())
        severity: Severity = "error" if (severe & active).any() else "warn"
        kind: Kind = "concentration" if concentrated.any() else "logit_growth"
        if not active.any():
            self._pattern = None
        elif self._pattern is None:
            self._pattern = wording.begin(view, pick(active, view.log_spread, view.layout))
        self._turn(alerts, view, "collapse", active, severity, kind)

    def _turn(
        self,
        alerts: list[Alert],
        view: View,
        family: str,
        active: Mask,
        severity: Severity,
        kind: Kind | None = None,
    ) -> None:
        event = self._events[family]
        if family == "sink" and self._events["collapse"].open:
            return  # what a sink note would say belongs to the alarm, and "normal" would mislead
        turn = event.decide(active, severity, view.reading.step, view.layout, self.policy.cooldown)
        kind = kind or FAMILIES[family]
        if family == "sink":
            turn = self._sink_turn(turn, view, active)
            kind = self._note or kind
        if turn == "over":
            alerts.append(over(view, kind if family == "sink" else FAMILIES[family]))
        elif turn is not None:
            if family == "collapse" and self._events["sink"].open:
                kind = with_sink(view, active, kind)
            pattern = self._pattern or "gradual"
            alerts.append(tell(view, family, kind, severity, turn, active, pattern))

    def _sink_turn(self, turn: Turn | None, view: View, active: Mask) -> Turn | None:
        """A sink note becomes `both` once the content took its part of the fall; said once."""
        if not active.any():
            return turn
        kind = notes.sink_kind(view, pick(active, view.log_spread, view.layout))
        if turn in ("opened", "spread"):
            self._note = kind
        elif turn is None and self._note == "sink_growth" and kind == "both":
            self._note = kind
            return "spread"
        return turn

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types; a resumed engine alerts exactly like one that never stopped."""
        return {
            "version": self.VERSION,
            "layers": None if self._layout is None else list(self._layout.names),
            "heads": None if self._layout is None else self._layout.heads,
            "memory": self._memory.state_dict(),
            "events": {name: event.state_dict() for name, event in self._events.items()},
            "note": self._note,
            "pattern": self._pattern,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where `state_dict` left off.

        Raises:
            ValueError: If the state is of another version of the engine.
        """
        if state.get("version") != self.VERSION:
            raise ValueError(
                f"alert state has version {state.get('version')!r}, "
                f"this engine reads {self.VERSION}."
            )
        self.reset()
        if state["layers"] is not None:
            self._layout = Layout(names=tuple(state["layers"]), heads=int(state["heads"]))
        self._memory.load_state_dict(state["memory"])
        for name, event in state["events"].items():
            self._events[name].load_state_dict(event)
        self._note, self._pattern = state["note"], state["pattern"]


def _with_change(alert: Alert, change: Mapping[str, Any] | None) -> Alert:
    if not change or not alert.message or alert.evidence.get("cleared"):
        return alert
    means = {
        name: float(np.nanmean(array))
        for name, array in as_table(change).items()
        if np.isfinite(array).any()
    }
    return replace(alert, evidence={**alert.evidence, "change_since_baseline": means})
