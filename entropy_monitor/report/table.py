"""A report as plain text: what one reads first, then layers, heads, alerts, checkpoints."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from entropy_monitor.alerts.alert import SEVERITIES
from entropy_monitor.attribution import NOISE_FACTOR
from entropy_monitor.names import CHANGE_NAMES
from entropy_monitor.notebook import change_sentence, round_sum, sum_decimals

if TYPE_CHECKING:
    from entropy_monitor.report.build import Report

_WIDTH = 100
_MOST_ALERTS = 8
_SHOWN = (
    ("entropy H", "total_entropy", "nat", 3),
    ("sink mass s", "sink_mass", "", 3),
    ("content entropy H(pi)", "content_entropy", "nat", 3),
    ("content evenness J", "content_evenness", "", 3),
    ("dormant rows (s > 0.5)", "dormant_rows", "", 3),
    ("one-hot rows (J < 0.1)", "one_hot_rows", "", 3),
    ("largest logit", "max_logit", "", 1),
    ("content keys per row m", "support", "", 1),
)
_CAUSES = {"sink": "sink", "content": "content", "support": "length"}


def sentence(report: "Report") -> str:
    """Say the report in one sentence whose numbers add up as printed."""
    change = report.change.summary["change"]
    error = change["se"]["total"]
    return change_sentence(
        **{name: change[name] for name in CHANGE_NAMES},
        before=str(report.baseline_step),
        after=str(report.last_step),
        noise=math.inf if error is None else NOISE_FACTOR * error,
    )


def render(report: "Report", *, layers: int | None, heads: int) -> str:
    """Return the report as text."""
    # Plain characters: a report is read in terminals, logs and mails of any encoding.
    said = sentence(report).replace("\N{MINUS SIGN}", "-").replace("\N{RIGHTWARDS ARROW}", "->")
    parts = [_title(report), said, _model(report), _notes(report)]
    parts.append(_layers(report, layers))
    if heads and report.run.heads > 1:
        parts.append(_heads(report, heads))
    parts.append(_alerts(report))
    if report.run.checkpoints:
        parts.append(_checkpoints(report))
    if report.run.problems:
        parts.append("\n".join(("not readable:", *(f"  {line}" for line in report.run.problems))))
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return aligned columns, the first `left` of them flush left, the rest flush right.

    Example:
        >>> print(table(["layer", "change"], [["h.0", "-1.25"], ["h.10", "+0.5"]]))
          layer  change
          h.0     -1.25
          h.10     +0.5
    """
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            if width
        ).rstrip()
        for line in lines
    )


def number(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Return a number in fixed digits, or ``-`` where there is none.

    Example:
        >>> number(-0.0004, 2, sign=True), number(1.25, 1, sign=True), number(float("nan"))
        ('0.00', '+1.2', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return f"{0:.{digits}f}" if float(text) == 0 else text


def _title(report: "Report") -> str:
    run = report.run
    facts = [
        _count(len(run.layers), "layer"),
        _count(run.heads, "head"),
        f"{_count(len(run), 'step')} recorded",
    ]
    facts += [f"{name} {run.header[name]}" for name in ("sink", "rows") if run.header.get(name)]
    facts.append("same rows at both steps" if report.change.paired else "rows not paired")
    name = run.path.parent if run.path.name == "entropy_monitor" else run.path
    return f"{name}\n{', '.join(facts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _model(report: "Report") -> str:
    before, after = report.baseline_step, report.last_step
    change = report.change.summary["change"]
    digits = max(3, sum_decimals([change[name] for name in CHANGE_NAMES]))
    shown = _channels(change, digits)
    rows = []
    for label, stat, unit, places in _SHOWN:
        old = report.mean(stat, before) if _has(report, before) else math.nan
        new = report.mean(stat, after)
        if not math.isfinite(new):
            continue
        line = [label, unit, number(old, places), number(new, places)]
        if stat != "total_entropy":
            rows.append([*line, number(new - old, places, sign=True), "", ""])
            continue
        rows.append([*line, shown["total"], _error(change, "total", digits), ""])
        for name, cause in _CAUSES.items():
            if name != "support" or _has_length([change]):
                share = _share(change, name, report.change.summary["sink_share"])
                error = _error(change, name, digits)
                rows.append([f"  because of the {cause}", "", "", "", shown[name], error, share])
    head = ["mean over heads", "", f"step {before}", f"step {after}", "change", "", ""]
    return table(head, rows, left=2)


def _notes(report: "Report") -> str:
    ordered = report.change.summary["ordered"]
    change = report.change.summary["change"]
    digits = sum_decimals([change[name] for name in CHANGE_NAMES])
    orders = "; ".join(
        f"{order.split('_')[0]} first, sink {number(part['sink'], digits, sign=True)} and "
        f"content {number(part['content'], digits, sign=True)}"
        for order, part in ordered.items()
    )
    lines = [f"  The split lies midway between the two ordered ones: {orders}."]
    if change["se"]["total"] is None:
        lines.append("  No standard errors: fewer than two sequences were seen.")
    else:
        lines.append("  ± are standard errors between sequences.")
    if not report.change.recorded and report.baseline_step != report.last_step:
        lines.append("  Computed from recorded means; ± of means over heads are upper bounds.")
    return "\n".join(lines)


def _layers(report: "Report", most: int | None) -> str:
    layers = report.change.summary["layers"]
    names = [name for name in report.run.slices if name in layers]
    shown = names
    if most is not None and len(names) > most:
        largest = sorted(names, key=lambda name: -_moved(layers[name]))[:most]
        shown = [name for name in names if name in largest]
    rows = [
        (
            [name],
            report.run.slices[name],
            layers[name],
            layers[name]["se"]["total"],
            layers[name]["sink_share"],
        )
        for name in shown
    ]
    text = _change_table(
        report, ["layer"], rows, ("total_entropy", "sink_mass", "content_evenness")
    )
    if len(shown) < len(names):
        text += f"\n  ({len(shown)} of {len(names)} layers: those that moved most)"
    return text


def _heads(report: "Report", most: int) -> str:
    values, errors = report.change.values, report.change.errors
    # Sum of the channels' sizes, so that a head whose channels cancel is not overlooked.
    moved = np.nan_to_num(np.abs(values[1:]).sum(0), nan=-1.0)
    order = [int(i) for i in np.argsort(-moved, kind="stable")[:most] if moved[i] >= 0]
    if not order:
        return "No head has rows that count at both steps."
    names = [(name, str(i)) for name, count in report.run.layers for i in range(count)]
    rows = [
        (
            list(names[i]),
            slice(i, i + 1),
            dict(zip(CHANGE_NAMES, values[:, i].tolist(), strict=True)),
            float(errors[0, i]),
            None,
        )
        for i in order
    ]
    text = _change_table(report, ["layer", "head"], rows, ("sink_mass", "content_evenness"))
    return f"Heads that moved most:\n{text}"


_Row = tuple[list[str], slice, Mapping[str, Any], float | None, float | None]
_LETTERS = {"total_entropy": "H", "sink_mass": "s", "content_evenness": "J"}


def _change_table(
    report: "Report", lead: list[str], rows: Sequence[_Row], stats: Sequence[str]
) -> str:
    """Return one line per layer or head: its change, the channels, and statistics at both steps."""
    moments = [
        {stat: report.heads(stat, step) for stat in stats} if _has(report, step) else {}
        for step in (report.baseline_step, report.last_step)
    ]
    changes = [change for _, _, change, _, _ in rows]
    digits = sum_decimals([change[name] for change in changes for name in CHANGE_NAMES])
    names = ["sink", "content", *["support"] * _has_length(changes)]
    with_share = any(share is not None for *_, share in rows)
    cells = []
    for labels, span, change, error, share in rows:
        shown = _channels(change, digits)
        line = [*labels, shown["total"], "", *(shown[name] for name in names)]
        if error is not None and math.isfinite(error):
            line[len(labels) + 1] = f"± {error:.{digits + 1}f}"
        line.append("" if not with_share else "-" if share is None else f"{100 * share:.0f}%")
        for stat in stats:
            line += [number(_mean(moment.get(stat), span), 2) for moment in moments]
        cells.append(line)
    head = [*lead, "change", "", *(_CAUSES[name] for name in names), "sink share" * with_share]
    for stat in stats:
        head += [f"{_LETTERS[stat]} then", "now"]
    return table(head, cells)


def _channels(change: Mapping[str, Any], digits: int) -> dict[str, str]:
    """Return the four numbers of a change, rounded so that they add up as printed."""
    if not all(math.isfinite(change[name]) for name in CHANGE_NAMES):
        return dict.fromkeys(CHANGE_NAMES, "-")
    total, parts = round_sum(change["total"], [change[name] for name in CHANGE_NAMES[1:]], digits)
    return {
        name: number(value, digits, sign=True)
        for name, value in zip(CHANGE_NAMES, (total, *parts), strict=True)
    }


def _error(change: Mapping[str, Any], name: str, digits: int) -> str:
    error = change["se"][name]
    return "" if error is None else f"± {error:.{digits}f}"


def _share(change: Mapping[str, Any], name: str, sink_share: float | None) -> str:
    return "" if sink_share is None else f"{100 * change[name] / change['total']:.0f}%"


def _has_length(changes: Iterable[Mapping[str, Any]]) -> bool:
    return any(abs(change["support"]) >= 0.0005 for change in changes)


def _alerts(report: "Report") -> str:
    if not report.alerts:
        return "Alerts: none."
    worst = sorted(report.alerts, key=lambda a: SEVERITIES.index(a.severity), reverse=True)
    counts = Counter(alert.severity for alert in worst)
    lines = [f"Alerts: {', '.join(f'{n} {severity}' for severity, n in counts.items())}."]
    for alert in sorted(worst[:_MOST_ALERTS], key=lambda a: a.step):
        text = f"step {alert.step}, {alert.severity}, {alert.place}: {alert.kind}. {alert.message}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    if len(report.alerts) > _MOST_ALERTS:
        lines.append(f"  ({_MOST_ALERTS} of {len(report.alerts)}: the most severe)")
    return "\n".join(lines)


def _checkpoints(report: "Report") -> str:
    lines = report.run.checkpoints
    counts = Counter(str(line["status"]) for line in lines)
    text = [f"Checkpoints: {', '.join(f'{n} {status}' for status, n in counts.items())}."]
    text += [
        f"  {line.get('name') or 'step ' + str(line['step'])}, {line['status']}"
        + f": {line['detail']}" * bool(line.get("detail"))
        for line in lines
        if line["status"] != "measured"
    ]
    return "\n".join(text)


def _moved(layer: Mapping[str, Any]) -> float:
    return sum(abs(float(layer[name])) for name in CHANGE_NAMES[1:])


def _has(report: "Report", step: int) -> bool:
    return bool((report.run.steps == step).any())


def _mean(heads: Any, span: slice) -> float | None:
    if heads is None:
        return None
    values = heads[span][np.isfinite(heads[span])]
    return float(values.mean()) if values.size else None
