"""What an alert says: one sentence for a newcomer, the numbers, usual causes, what to try.

Sources for causes and remedies stand in the README, section "Alerts".
"""

import math
from typing import Any

import numpy as np

from entropy_monitor.alerts.both import Split, split
from entropy_monitor.alerts.concentration import bounds
from entropy_monitor.alerts.reading import Mask
from entropy_monitor.alerts.view import View

CAUSES: dict[str, tuple[str, str]] = {
    "start": (
        "a large q/k initialisation, a missing 1/sqrt(d), or a learning rate too high for a run "
        "without warm-up",
        "check the attention scale and the q/k initialisation, lower the learning rate, lengthen "
        "the warm-up, add QK-norm",
    ),
    "abrupt": (
        "a learning-rate spike, a resume that lost optimiser state, a changed attention scale, bad "
        "data",
        "compare the learning rate and optimiser state before and after this step, go back to the "
        "last checkpoint",
    ),
    "gradual": (
        "q/k weights that keep growing: a learning rate too high for the depth, no QK-norm, too "
        "little weight decay on q/k",
        "lower the learning rate, add QK-norm or QK-clip, lengthen the warm-up",
    ),
    "head": (
        "q/k weights of a single head that keep growing",
        "look at this head's q/k norms; QK-clip acts per head, QK-norm bounds all of them",
    ),
    "sink_growth": (
        "the model learns to park attention it does not need; that is normal",
        "nothing, unless it was not wanted",
    ),
    "both": (
        "heads that specialise while the sink takes what they do not need; that is normal as long "
        "as the loss falls",
        "watch the evenness of the content; an alarm follows if it collapses",
    ),
    "dilution": (
        "a temperature or attention scale that fell, q/k weights that decay, dead heads",
        "check the weight decay and learning rate of q/k and the attention scale",
    ),
    "dormant": (
        "heads with nothing to do on this data",
        "nothing; if most of the model is dormant, check the sink, the data and the loss",
    ),
    "nonfinite": (
        "logits beyond the range of fp16, a learning rate too high, NaN in inputs or weights",
        "go back to the last checkpoint, use bf16 or float32 for attention, lower the learning "
        "rate, clip gradients",
    ),
    "no_attention": (
        "attention that no tap can see, a module pattern that fits nothing, padding everywhere",
        "run `entropy-monitor doctor`; name the attention modules; check the mask",
    ),
}


def advice(cause: str) -> str:
    """The two closing sentences."""
    usual, remedy = CAUSES[cause]
    return f"Usual causes: {usual}. Try: {remedy}."


def number(value: float) -> str:
    """Short and readable: .12, 4.1, 31, 1.2e+06."""
    if not math.isfinite(value):
        return "n/a"
    if abs(value) < 0.995:
        return f"{value:.2f}".replace("0.", ".", 1)
    return (
        f"{value:.1f}"
        if abs(value) < 9.95
        else f"{value:.0f}"
        if abs(value) < 1e5
        else f"{value:.1e}"
    )


def nats(parts: Split) -> str:
    """``entropy -1.9 nats = content -1.8, sink -0.1``."""
    text = f"entropy {parts.total:+.2f} nats = content {parts.content:+.2f}, sink {parts.sink:+.2f}"
    return text if abs(parts.support) < 0.005 else f"{text}, support {parts.support:+.2f}"


def place_name(view: View, group: int) -> tuple[str, str | None, int | None]:
    """In words, layer, head of a group."""
    layout = view.layout
    if group == 0:
        return "the model", None, None
    if group <= layout.layers:
        return f"layer {layout.names[group - 1]}", layout.names[group - 1], None
    layer, head = layout.head(group)
    return f"head {head} of layer {layout.names[layer]}", layout.names[layer], head


def heads_of(view: View, group: int) -> Mask:
    """Heads, ``(L, H)``, that belong to a group."""
    layout = view.layout
    inside = np.zeros((layout.layers, layout.heads), dtype=bool)
    if group == 0:
        inside[:] = True
    elif group <= layout.layers:
        inside[group - 1] = True
    else:
        inside[layout.head(group)] = True
    return inside


def begin(view: View, group: int) -> str:
    """How a collapse began: ``start``, ``abrupt``, ``gradual``, or ``head`` for a single head."""
    if group > view.layout.layers:
        return "head"
    if not view.settled:
        return "start"
    now, last = float(view.reading.evenness[group]), float(view.evenness_last[group])
    usual = float(view.evenness_before[group])
    return "abrupt" if last - now > 0.6 * (usual - now) else "gradual"


def collapse(
    view: View, group: int, active: Mask, kind: str, pattern: str
) -> tuple[str, dict[str, Any]]:
    """The text and numbers of `concentration`, `logit_growth` and `both` as an alarm."""
    reading, layout, policy = view.reading, view.layout, view.policy
    where, _, head = place_name(view, group)
    inside = heads_of(view, group) & reading.measured
    part = slice(1 + layout.layers, None)
    # On the very record of an abrupt change the fast average lags; the record itself counts then.
    now = reading if pattern == "abrupt" else view
    with np.errstate(invalid="ignore"):
        low = now.evenness[part] < policy.concentration.evenness_model
        far = now.log_spread[part] > math.log(policy.concentration.spread_model)
    hit = (low & far).reshape(inside.shape) & inside
    evenness, kap = float(now.evenness[group]), float(np.exp(now.log_spread[group]))
    scale = math.sqrt(2.0 * math.log(reading.support)) if reading.support > 1 else float("nan")
    unit = scale if math.isfinite(scale) else 1.0
    label = "logit spread" if math.isfinite(scale) else "scaled logit spread"
    after = {
        name: table[name]
        for name, table in (
            (name, reading.means if pattern == "abrupt" else view.now) for name in view.before
        )
        if name in table
    }
    length = None
    if reading.support > 1 and view.usual_support > 1 and not view.same_length:
        length = (math.log(view.usual_support), math.log(reading.support))
    parts = split(view.before, after, inside, log_support=length)
    facts: list[str] = (
        [] if head is not None else [f"{int(hit.sum())} of {int(inside.sum())} heads"]
    )
    evidence: dict[str, Any] = {
        "evenness": evenness,
        "spread_scaled": kap,
        "heads": int(hit.sum()),
        "heads_measured": int(inside.sum()),
        "layers": [
            layout.names[i]
            for i in range(layout.layers)
            if active[1 + i] or active[part].reshape(inside.shape)[i].any()
        ],
        "evenness_bound": float(bounds(view)[0][group]),
        "spread_bound": float(np.exp(bounds(view)[1][group])),
    }
    if np.isfinite(kap):
        evidence["logit_spread"] = kap * unit
    if view.settled:
        was, was_kap = (
            float(view.evenness_before[group]),
            float(np.exp(view.log_spread_before[group])),
        )
        evidence |= {
            "evenness_before": was,
            "spread_scaled_before": was_kap,
            "steps": policy.memory,
        }
        facts.append(
            f"evenness {number(was)} -> {number(evenness)} against the {policy.memory:g} steps "
            "before"
        )
        if parts is not None:
            facts.append(nats(parts))
            evidence |= {
                f"change_{name}": getattr(parts, name)
                for name in ("total", "sink", "content", "support")
            }
        if np.isfinite(kap):
            facts.append(f"{label} {number(was_kap * unit)} -> {number(kap * unit)}")
    else:
        facts.append(f"evenness {number(evenness)}")
        if np.isfinite(kap):
            facts.append(f"{label} {number(kap * unit)}")
    tops = reading.max_logit[inside]
    if np.isfinite(tops).any():
        evidence["max_logit"] = float(np.nanmax(tops))
        facts.append(f"largest logit {number(evidence['max_logit'])}")
    if group == 0 and layout.layers > 1:
        worst = int(np.nan_to_num(view.log_spread[1 : 1 + layout.layers], nan=-np.inf).argmax())
        evidence["worst_layer"] = layout.names[worst]
        facts.append(f"most in layer {layout.names[worst]}")
    evidence["pattern"] = pattern
    verb = {
        "concentration": "attention of {} concentrates on few keys",
        "logit_growth": "attention logits of {} grow fast, concentration is likely to follow",
        "both": "attention of {} concentrates on few keys while its sink grows as well",
    }[kind].format(where)
    return f"step {reading.step:g}: {verb} ({'; '.join(facts)}). {advice(pattern)}", evidence
