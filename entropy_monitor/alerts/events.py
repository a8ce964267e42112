"""From conditions to events: a report when one begins, gets worse, and is over."""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from entropy_monitor.alerts.alert import SEVERITIES
from entropy_monitor.alerts.reading import Array, Layout, Mask
from entropy_monitor.alerts.tracking import Latch, pack, unpack
from entropy_monitor.alerts.view import Condition

Turn = Literal["opened", "worse", "spread", "over"]


class Event:
    """One kind of event in a run, wherever in the model it is.

    Conditions are latched one by one; the event is on where any of them is. While it lasts, only a
    higher severity is reported at once; new layers (``wide=True``) or the step from layers to the
    whole model are reported when ``cooldown`` steps have passed since the last report.
    """

    def __init__(self, *, wide: bool) -> None:
        self.wide = wide
        self.latches: dict[str, Latch] = {}
        self.open = False
        self._shown = -1  # rank of the severity reported in this event; -1: none yet
        self._last: float | None = None  # step of the last report, of this event or one before
        self._places: Mask | None = None  # model and layers reported

    def latch(self, conditions: Iterable[Condition], step: float, clear: float) -> dict[str, Mask]:
        """Adds a record and returns where each condition is on."""
        active: dict[str, Mask] = {}
        for item in conditions:
            latch = self.latches.setdefault(item.name, Latch())
            active[item.name] = latch.update(
                item.on, item.keep, step, persist=item.persist, clear=clear
            )
        return active

    def decide(
        self, active: Mask, severity: str, step: float, layout: Layout, cooldown: float
    ) -> Turn | None:
        """Whether to report, given where the event is on now."""
        rank = SEVERITIES.index(severity)
        if not active.any():
            was = self.open and self._shown >= 0
            self.open, self._shown, self._places = False, -1, None
            return "over" if was else None
        self.open = True
        places = _places(active, layout)
        cool = self._last is None or step - self._last >= cooldown
        turn: Turn | None = None
        if self._shown < 0:
            turn = "opened" if cool or rank == len(SEVERITIES) - 1 else None
        elif rank > self._shown:
            turn = "worse"
        elif cool and self._places is not None:
            new = places & ~self._places
            turn = "spread" if new[0] or (self.wide and new.any() and not self._places[0]) else None
        if turn is not None:
            self._shown = max(rank, self._shown)
            self._last = step
            self._places = places if self._places is None else places | self._places
        return turn

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types."""
        return {
            "latches": {name: latch.state_dict() for name, latch in self.latches.items()},
            "open": self.open,
            "shown": self._shown,
            "last": self._last,
            "places": pack(self._places),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where `state_dict` left off."""
        self.latches = {}
        for name, latch in state["latches"].items():
            self.latches[name] = Latch()
            self.latches[name].load_state_dict(latch)
        self.open = bool(state["open"])
        self._shown = int(state["shown"])
        self._last = state["last"]
        self._places = unpack(state["places"])


def _places(active: Mask, layout: Layout) -> Mask:
    """Model and layers, a layer also when one of its heads is on."""
    places: Mask = active[: 1 + layout.layers].copy()
    heads = active[1 + layout.layers :].reshape(layout.layers, layout.heads)
    places[1:] |= heads.any(axis=1)
    return places


def pick(active: Mask, score: Array, layout: Layout) -> int:
    """The group to name: the model if it is on, else the worst layer, else the worst head."""
    if active[0]:
        return 0
    layers = active[1 : 1 + layout.layers]
    first, size = (
        (1, layers.size) if layers.any() else (1 + layout.layers, layout.layers * layout.heads)
    )
    part = slice(first, first + size)
    ranked = np.where(active[part], np.nan_to_num(score[part], nan=-np.inf), -np.inf)
    on = np.flatnonzero(active[part])
    return first + (int(ranked.argmax()) if np.isfinite(ranked).any() else int(on[0]))
