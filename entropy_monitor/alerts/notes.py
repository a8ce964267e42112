"""Texts and numbers of the notes and plain errors; `wording.collapse` has the alarm's."""

from typing import Any

import numpy as np

from entropy_monitor.alerts.alert import Kind
from entropy_monitor.alerts.both import Split, split
from entropy_monitor.alerts.dilution import diluted
from entropy_monitor.alerts.dormant import asleep
from entropy_monitor.alerts.view import View
from entropy_monitor.alerts.wording import advice, heads_of, nats, number, place_name


def sink_split(view: View, group: int) -> Split | None:
    """What the change of entropy since the onset of sink growth is made of."""
    return split(view.onset, view.now, heads_of(view, group) & view.reading.measured)


def sink_kind(view: View, group: int) -> Kind:
    """`both` where the content took its share of the fall and lost evenness."""
    rule = view.policy.sink_growth
    parts = sink_split(view, group)
    if parts is None or "content_evenness" not in view.now:
        return "sink_growth"
    share = parts.share("content")
    inside = heads_of(view, group) & view.reading.measured
    fall = view.onset["content_evenness"] - view.now["content_evenness"]
    both = share is not None and share >= rule.content_share
    return "both" if both and _average(fall[inside]) > rule.content_fall else "sink_growth"


def sink(view: View, group: int, kind: str) -> tuple[str, dict[str, Any]]:
    """The text of `sink_growth` and of `both` as a note."""
    where, _, _ = place_name(view, group)
    inside = heads_of(view, group) & view.reading.measured
    was = _average(np.where(inside, view.onset["sink_mass"], np.nan))
    now = _average(np.where(inside, view.now["sink_mass"], np.nan))
    evidence: dict[str, Any] = {"sink_mass": now, "sink_mass_before": was}
    since = view.onset_step if group == 0 else view.onset_step[group - 1 : group]
    steps = max(int(view.reading.step - float(np.median(since))), 0)
    evidence["steps"] = steps
    facts = [f"sink mass {number(was)} -> {number(now)} in {steps} steps"]
    if "content_evenness" in view.now:
        evidence["evenness"] = _average(np.where(inside, view.now["content_evenness"], np.nan))
        facts.append(f"evenness of the content {number(evidence['evenness'])}")
    parts = sink_split(view, group)
    if parts is not None:
        facts.append(nats(parts))
        evidence |= {
            f"change_{name}": getattr(parts, name)
            for name in ("total", "sink", "content", "support")
        }
        share = parts.share("sink")
        evidence["sink_share"] = share
        if share is not None and share <= 1.0:
            facts.append(f"the sink explains {share:.0%} of the fall")
    what = (
        f"the attention sink of {where} grows"
        if kind == "sink_growth"
        else f"the attention sink of {where} grows and its heads specialise"
    )
    return f"step {view.reading.step:g}: {what} ({'; '.join(facts)}). {advice(kind)}", evidence


def dilution(view: View, group: int) -> tuple[str, dict[str, Any]]:
    """The text of `dilution`."""
    where, _, _ = place_name(view, group)
    inside = heads_of(view, group) & view.reading.measured
    gone = diluted(view) & inside
    was = 1.0 - _average(np.where(gone, view.structure, np.nan))
    now = _average(np.where(gone, view.now["content_evenness"], np.nan))
    evidence = {
        "heads": int(gone.sum()),
        "heads_measured": int(inside.sum()),
        "evenness": now,
        "evenness_before": was,
    }
    text = (
        f"{int(gone.sum())} of {int(inside.sum())} heads; evenness {number(was)} -> {number(now)}"
    )
    return (
        f"step {view.reading.step:g}: attention of {where} goes back to uniform ({text}). "
        f"{advice('dilution')}",
        evidence,
    )


def dormant(view: View, group: int) -> tuple[str, dict[str, Any]]:
    """The text of `dormant`."""
    where, _, _ = place_name(view, group)
    inside = heads_of(view, group) & view.reading.measured
    count = int((asleep(view) & inside).sum())
    now = _average(np.where(inside, view.now["sink_mass"], np.nan))
    bound = number(view.policy.dormant.sink_mass)
    text = f"{count} of {int(inside.sum())} heads above {bound}; mean sink mass {number(now)}"
    evidence = {"heads": count, "heads_measured": int(inside.sum()), "sink_mass": now}
    return (
        f"step {view.reading.step:g}: heads of {where} are dormant, nearly all attention is on the "
        f"sink ({text}). {advice('dormant')}",
        evidence,
    )


def nonfinite(view: View, group: int) -> tuple[str, dict[str, Any]]:
    """The text of `nonfinite`."""
    where, _, _ = place_name(view, group)
    inside = heads_of(view, group)
    bad = (view.reading.nonfinite > view.policy.nonfinite.share) & inside
    share = float(view.reading.nonfinite[bad].max()) if bad.any() else 0.0
    names = [name for row, name in enumerate(view.layout.names) if bad[row].any()]
    evidence = {"heads": int(bad.sum()), "share": share, "layers": names}
    first = names[0] if names else "?"
    text = f"{int(bad.sum())} heads; up to {share:.0%} of their rows; first in layer {first}"
    return (
        f"step {view.reading.step:g}: attention logits of {where} are NaN or infinite ({text}). "
        f"{advice('nonfinite')}",
        evidence,
    )


def no_attention(view: View) -> tuple[str, dict[str, Any]]:
    """The text of `no_attention`."""
    return f"step {view.reading.step:g}: no attention was measured. {advice('no_attention')}", {}


def _average(values: Any) -> float:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if kept.size else float("nan")
