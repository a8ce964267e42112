"""Turns an event into an `Alert`: picks the place, the text and the numbers."""

from entropy_monitor.alerts import notes, wording
from entropy_monitor.alerts.alert import Alert, Kind, Level, Severity
from entropy_monitor.alerts.events import Turn, pick
from entropy_monitor.alerts.reading import Mask
from entropy_monitor.alerts.view import View

FAMILIES: dict[str, Kind] = {
    "collapse": "concentration",  # or logit_growth, both
    "sink": "sink_growth",  # or both
    "dilution": "dilution",
    "dormant": "dormant",
    "nonfinite": "nonfinite",
    "no_attention": "no_attention",
}
"""Families of events, each with the kind it usually has. One family is one event at a time."""


def tell(
    view: View,
    family: str,
    kind: Kind,
    severity: Severity,
    turn: Turn,
    active: Mask,
    pattern: str,
) -> Alert:
    """The alert for an event that began, got worse or spread."""
    group = pick(active, view.log_spread, view.layout)
    if family == "collapse":
        message, evidence = wording.collapse(view, group, active, kind, pattern)
    elif family == "sink":
        message, evidence = notes.sink(view, group, kind)
    elif family == "nonfinite":
        message, evidence = notes.nonfinite(view, group)
    elif family == "no_attention":
        message, evidence = notes.no_attention(view)
    elif family == "dilution":
        message, evidence = notes.dilution(view, group)
    else:
        message, evidence = notes.dormant(view, group)
    _, layer, head = wording.place_name(view, group)
    level: Level = "model" if layer is None else "layer" if head is None else "head"
    evidence["turn"] = turn
    return Alert(kind, severity, level, int(view.reading.step), layer, head, message, evidence)


def over(view: View, kind: Kind) -> Alert:
    """The note that an event has ended."""
    step, clear = view.reading.step, view.policy.clear
    what = kind.replace("_", " ")
    message = f"step {step:g}: {what} is over; its bounds have been kept for {clear:g} steps."
    evidence = {"turn": "over", "cleared": True}
    return Alert(kind, "info", "model", int(step), None, None, message, evidence)


def with_sink(view: View, active: Mask, kind: Kind) -> Kind:
    """`both` instead of `concentration` where the sink takes its part of the fall too."""
    parts = notes.sink_split(view, pick(active, view.log_spread, view.layout))
    share = parts.share("sink") if parts is not None else None
    if kind == "concentration" and share is not None:
        return "both" if share >= view.policy.sink_growth.content_share else kind
    return kind
