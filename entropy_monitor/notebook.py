"""What a notebook shows: a sentence, a bar and a small table as plain HTML, no script, no torch.

The sentence is the one of the dashboard, so that a number read here can be found there. Every text
that comes from a model or a run (layer names above all) is escaped. Colours come from `PALETTE`;
text keeps the colour of the notebook, so that dark themes stay readable. Entropies in nats.
"""

import html
import math
from collections.abc import Mapping, Sequence

PALETTE = {"sink": "#dd7a00", "content": "#003f88", "support": "#6b7280"}
"""Colours of the channels, at least 3:1 on white and against each other."""

MINUS = "\N{MINUS SIGN}"
_TABLE_ROWS = 12
_BAR_WIDTH = 420


def sum_decimals(values: Sequence[float]) -> int:
    """Return how many decimals a sum needs so that its largest term keeps two digits.

    Args:
        values: The terms and their sum.

    Returns:
        2 from 0.1 on, 3 from 0.01 on, else 4.

    Example:
        >>> sum_decimals([-2.1, -1.3, -0.8]), sum_decimals([0.004])
        (2, 4)
    """
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest >= 0.1:
        return 2
    return 3 if largest >= 0.01 else 4


def round_sum(total: float, parts: Sequence[float], decimals: int) -> tuple[float, list[float]]:
    """Round a sum and its parts so that the rounded parts add up to the rounded sum.

    The missing last digits go to the parts whose own rounding error is largest in that direction,
    so no part moves by a whole digit from its value.

    Args:
        total: The sum.
        parts: The terms; they add up to `total`.
        decimals: Digits after the point.

    Returns:
        The rounded sum and the rounded parts.

    Example:
        >>> round_sum(-2.1351, [-1.3049, -0.8302], 2)
        (-2.14, [-1.31, -0.83])
    """
    scale = 10**decimals

    def units(value: float) -> int:
        return int(math.copysign(math.floor(abs(value) * scale + 0.5), value))

    target = units(total)
    rounded = [units(part) for part in parts]
    missing = target - sum(rounded)
    direction = 1 if missing > 0 else -1
    by_error = sorted(
        range(len(parts)), key=lambda i: direction * (parts[i] * scale - rounded[i]), reverse=True
    )
    for i in by_error[: abs(missing)]:
        rounded[i] += direction
    return target / scale, [value / scale for value in rounded]


def signed(value: float, decimals: int) -> str:
    """Format a number with its sign, a true minus and a fixed number of digits.

    Example:
        >>> signed(0.5, 2)
        '+0.50'
    """
    text = f"{abs(value):.{decimals}f}"
    if float(text) == 0.0:
        return text
    return (MINUS if value < 0 else "+") + text


def shares(total: float, parts: Sequence[float], noise: float = 0.0) -> list[int] | None:
    """Return what percentage of a change each part makes up, if that is a meaningful question.

    Args:
        total: The whole change.
        parts: Its channels; those that are exactly zero do not count.
        noise: What `total` has to exceed in absolute value, such as three standard errors.

    Returns:
        Whole percentages that add up to 100, or None where a channel has the other sign or the
        change is noise.

    Example:
        >>> shares(-2.0, [-1.5, -0.5, 0.0]), shares(0.1, [0.9, -0.8])
        ([75, 25, 0], None)
    """
    if not math.isfinite(total) or total == 0.0 or abs(total) <= noise:
        return None
    if any(part * total < 0 for part in parts) or not all(map(math.isfinite, parts)):
        return None
    _, rounded = round_sum(100.0, [100.0 * part / total for part in parts], 0)
    return [int(value) for value in rounded]


def change_sentence(
    *,
    total: float,
    sink: float,
    content: float,
    support: float = 0.0,
    before: str | None = None,
    after: str | None = None,
    noise: float = 0.0,
) -> str:
    """Say a change of mean entropy in one sentence whose numbers add up as printed.

    Args:
        total: Change of the mean entropy H(p), in nats.
        sink: The part that comes from mass moving between the sink and the content.
        content: The part that comes from the content composition.
        support: The part that comes from rows seeing more or fewer keys; not printed where it
            rounds to zero.
        before: Name of the first moment, such as a step.
        after: Name of the second moment.
        noise: Shares are given only where the change exceeds this, in nats.

    Returns:
        The sentence; where a number is not finite it says that the change is not known.

    Example:
        >>> change_sentence(total=-2.13, sink=-1.3, content=-0.83)
        'mean entropy −2.13 nat = sink −1.30 + content −0.83 (61% sink, 39% content)'
    """
    lead = "" if before is None or after is None else f"Steps {before} → {after}: "
    if not all(map(math.isfinite, (total, sink, content, support))):
        return f"{lead}the change of mean entropy is not known"
    named = [("sink", sink), ("content", content), ("support", support)]
    decimals = sum_decimals([total, sink, content, support])
    if abs(support) * 10**decimals < 0.5:
        named.pop()
    whole, parts = round_sum(total, [value for _, value in named], decimals)
    terms = [
        f"{name} {signed(value, decimals)}" for (name, _), value in zip(named, parts, strict=True)
    ]
    split = shares(total, [value for _, value in named], noise)
    if split is None:
        note = "shares undefined: within noise"
        if abs(total) > noise and total != 0.0:
            note = "shares undefined: parts of opposite sign"
    else:
        note = ", ".join(f"{share}% {name}" for share, (name, _) in zip(split, named, strict=True))
    return f"{lead}mean entropy {signed(whole, decimals)} nat = {' + '.join(terms)} ({note})"


def change_html(
    *,
    total: float,
    sink: float,
    content: float,
    support: float = 0.0,
    before: str | None = None,
    after: str | None = None,
    noise: float = 0.0,
    errors: Mapping[str, float] | None = None,
    layers: Sequence[tuple[str, float, float, float, float]] = (),
) -> str:
    """Show a change of entropy: the sentence, a split bar, and the layers that changed most.

    Args:
        total: Change of the mean entropy, in nats.
        sink: Its sink part.
        content: Its content part.
        support: Its support part.
        before: Name of the first moment.
        after: Name of the second moment.
        noise: Shares are given only where the change exceeds this.
        errors: Standard error per channel, keys ``total``, ``sink``, ``content``, ``support``.
        layers: Name, total, sink, content and support of each layer; the dozen largest changes are
            shown.

    Returns:
        A ``<div>`` without script; every text is escaped.
    """
    sentence = change_sentence(
        total=total,
        sink=sink,
        content=content,
        support=support,
        before=before,
        after=after,
        noise=noise,
    )
    parts = [("sink", sink), ("content", content), ("support", support)]
    body = [_sentence(sentence), _signed_bar(parts)]
    if errors:
        told = ", ".join(
            f"{name} ±{errors[name]:.3f}"
            for name in ("total", "sink", "content", "support")
            if name in errors and math.isfinite(errors[name])
        )
        if told:
            body.append(_small(f"Standard errors in nats: {told}."))
    if layers:
        ranked = sorted(layers, key=lambda row: -abs(row[1]) if math.isfinite(row[1]) else 0.0)
        chosen = sorted(ranked[:_TABLE_ROWS], key=layers.index)
        with_support = any(abs(row[4]) >= 5e-4 for row in chosen)
        heads = ["layer", "total", "sink", "content"] + ["support"] * with_support
        rows = [
            [name, *(signed(value, 3) for value in values[: len(heads) - 1])]
            for name, *values in chosen
        ]
        body.append(_table(heads, rows, hidden=len(layers) - len(chosen)))
    return _frame(body)


def snapshot_html(
    *,
    step: int | None,
    heads: int,
    model: Mapping[str, float],
    layers: Sequence[tuple[str, int, Mapping[str, float]]],
) -> str:
    """Show one moment: a sentence, a bar of what the entropy is made of, and a line per layer.

    Args:
        step: The optimiser step, if the snapshot has one.
        heads: Number of heads of the model.
        model: Means over heads, by statistic name; missing names are left out.
        layers: Name, number of heads and means over heads, by statistic name, of each layer.

    Returns:
        A ``<div>`` without script; every text is escaped.
    """
    moment = "" if step is None else f"Step {step:,}: "
    total = model.get("total_entropy", math.nan)
    content = model.get("content_mass_entropy", math.nan)
    sink = total - content
    if math.isfinite(sink):
        decimals = sum_decimals([total, sink, content])
        whole, (left, right) = round_sum(total, [sink, content], decimals)
        text = (
            f"{moment}mean entropy {whole:.{decimals}f} nat = sink term {left:.{decimals}f} + "
            f"content term {right:.{decimals}f}"
        )
        extra = [
            f"{label} {model[name]:.2f}"
            for name, label in (
                ("sink_mass", "sink mass"),
                ("content_evenness", "content evenness"),
            )
            if math.isfinite(model.get(name, math.nan))
        ]
        body = [
            _sentence(", ".join([text, *extra])),
            _signed_bar([("sink", sink), ("content", content)]),
        ]
    else:
        body = [_sentence(f"{moment}no attention row counted in {heads} heads")]
    columns = [
        (name, label)
        for name, label in (
            ("sink_mass", "s"),
            ("content_entropy", "H(π)"),
            ("content_evenness", "J"),
            ("total_entropy", "H"),
            ("max_logit", "max logit"),
        )
        if name in model
    ]
    rows = [
        [name, str(count), *(_plain(values.get(stat, math.nan)) for stat, _ in columns)]
        for name, count, values in layers[:_TABLE_ROWS]
    ]
    body.append(
        _table(
            ["layer", "heads", *(label for _, label in columns)],
            rows,
            hidden=len(layers) - len(rows),
        )
    )
    return _frame(body)


def _plain(value: float) -> str:
    return f"{value:.3f}".replace("-", MINUS) if math.isfinite(value) else "–"


def _frame(body: Sequence[str]) -> str:
    return '<div style="max-width:720px">' + "".join(body) + "</div>"


def _sentence(text: str) -> str:
    return f'<p style="margin:0 0 6px;font-weight:600">{html.escape(text)}</p>'


def _small(text: str) -> str:
    return f'<p style="margin:4px 0;font-size:85%">{html.escape(text)}</p>'


def _signed_bar(parts: Sequence[tuple[str, float]]) -> str:
    """Draw the parts as one bar, negative ones left of the zero line, positive ones right of it."""
    shown = [(name, value) for name, value in parts if math.isfinite(value) and value != 0.0]
    left = sum(-value for _, value in shown if value < 0)
    right = sum(value for _, value in shown if value > 0)
    if left + right == 0.0:
        return ""
    scale = _BAR_WIDTH / (left + right)
    cells = []
    start = {-1: left * scale, 1: left * scale}
    for name, value in shown:
        width = abs(value) * scale
        side = -1 if value < 0 else 1
        x = start[side] - width if side < 0 else start[side]
        start[side] = x if side < 0 else x + width
        cells.append(
            f'<rect x="{x:.1f}" y="2" width="{width:.1f}" height="14" fill="{PALETTE[name]}">'
            f"<title>{name} {signed(value, 3)} nat</title></rect>"
        )
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{PALETTE[name]}">■</span> '
        f"{name} {signed(value, 3)}</span>"
        for name, value in shown
    )
    zero = left * scale
    label = html.escape(", ".join(f"{name} {signed(value, 3)} nat" for name, value in shown))
    return (
        f'<svg role="img" aria-label="{label}" width="{_BAR_WIDTH}" height="18" '
        f'viewBox="0 0 {_BAR_WIDTH} 18" style="max-width:100%">{"".join(cells)}'
        f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="18" stroke="currentColor"/></svg>'
        f'<div style="font-size:85%">{legend}</div>'
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, hidden: int) -> str:
    right = ' style="text-align:right"'
    left = ' style="text-align:left"'

    def line(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(
                f"<{tag}{left if i == 0 else right}>{html.escape(cell)}</{tag}>"
                for i, cell in enumerate(cells)
            )
            + "</tr>"
        )

    table = (
        f"<table><thead>{line(heads, 'th')}</thead>"
        f"<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"
    )
    return table + (_small(f"and {hidden} more layers") if hidden > 0 else "")
