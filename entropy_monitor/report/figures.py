"""A report as a figure for a paper: the change over training, by layer, and heat maps of heads."""

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from entropy_monitor.names import CHANGE_NAMES
from entropy_monitor.notebook import PALETTE
from entropy_monitor.report.changes import change_between
from entropy_monitor.report.table import sentence
from entropy_monitor.writers.base import Array, as_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from entropy_monitor.report.build import Report

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 200,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
_TOTAL = "#1a1a1a"
_DASHES = {"sink": (4, 1.4), "content": (), "support": (1, 1.2)}
_WORDS = {
    "sink": "because of the sink",
    "content": "because of the content",
    "support": "because of length",
}
_MOST_STEPS = 400
_LABELLED_LAYERS = 16


def draw(report: "Report", path: str | os.PathLike[str]) -> None:
    """Draw a report to a file; the suffix decides (png, pdf, svg).

    Raises:
        ImportError: If matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own and the canvas given: pyplot's state and the user's backend stay alone.
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 5.8), layout="constrained")
        FigureCanvasAgg(figure)
        _compose(figure, report)
        figure.savefig(os.fspath(path))


def _compose(figure: "Figure", report: "Report") -> None:
    figure.suptitle(sentence(report), fontsize=10, x=0.01, ha="left")
    axes = figure.subplots(2, 2)
    steps = _steps(report)
    _change_curves(axes[0, 0], report, steps)
    if len(report.run.layers) > 1:
        _layer_bars(axes[0, 1], report)
    else:
        _terms(axes[0, 1], report, steps)
    if report.run.heads > 2 and len(report.run.layers) > 1:
        _heat_map(axes[1, 0], report, "sink_mass", "Sink mass s", "viridis", (0.0, 1.0))
        _heat_map(
            axes[1, 1], report, "content_evenness", "Content evenness J", "viridis", (0.0, 1.0)
        )
    else:
        _curves(axes[1, 0], report, steps, "sink_mass", "Sink mass s", PALETTE["sink"])
        _curves(
            axes[1, 1], report, steps, "content_evenness", "Content evenness J", PALETTE["content"]
        )


def _steps(report: "Report") -> list[int]:
    """Return the recorded steps between baseline and last, thinned where there are too many."""
    steps = report.run.steps
    between = steps[(steps >= report.baseline_step) & (steps <= report.last_step)]
    if len(between) > _MOST_STEPS:
        between = between[
            np.unique(np.linspace(0, len(between) - 1, _MOST_STEPS).round().astype(int))
        ]
    return [int(step) for step in between]


def _change_curves(axes: "Axes", report: "Report", steps: list[int]) -> None:
    summaries = [change_between(report.run, report.baseline_step, step).summary for step in steps]
    curves = {name: np.array([s["change"][name] for s in summaries]) for name in CHANGE_NAMES}
    errors = {
        name: np.array([_nan(s["change"]["se"].get(name)) for s in summaries])
        for name in CHANGE_NAMES
    }
    for error in errors.values():
        error[0] = 0.0  # the first step is the baseline itself
    names = ["total", "sink", "content"]
    if np.abs(curves["support"]).max(initial=0.0) >= 0.005:
        names.append("support")
    axes.axhline(0, color="0.6", linewidth=0.8)
    for name in names:
        colour = PALETTE.get(name, _TOTAL)
        (line,) = axes.plot(
            steps, curves[name], color=colour, linewidth=1.6, label=_WORDS.get(name, "total")
        )
        line.set_dashes(_DASHES.get(name, ()))
        if np.isfinite(errors[name]).any():
            low, high = curves[name] - 2 * errors[name], curves[name] + 2 * errors[name]
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_title(f"Change of mean entropy since step {report.baseline_step} (nat)")
    axes.legend(loc="best", fontsize=8, handlelength=2.6)
    _step_axis(axes, steps)


def _terms(axes: "Axes", report: "Report", steps: list[int]) -> None:
    """Stack what the entropy is made of: the sink's own term and the content's."""
    total = np.array([report.mean("total_entropy", step) for step in steps])
    content = np.array([report.mean("content_mass_entropy", step) for step in steps])
    axes.fill_between(
        steps,
        0,
        content,
        color=PALETTE["content"],
        alpha=0.8,
        linewidth=0,
        label="content, (1-s) H(pi)",
    )
    axes.fill_between(
        steps, content, total, color=PALETTE["sink"], alpha=0.9, linewidth=0, label="sink, Hb(s)"
    )
    axes.plot(steps, total, color=_TOTAL, linewidth=1.2, label="H(p)")
    axes.set_ylim(bottom=0)
    axes.set_title("What the entropy is made of (nat)")
    axes.legend(loc="lower left", fontsize=8, frameon=True, framealpha=0.85, edgecolor="none")
    _step_axis(axes, steps)


def _curves(
    axes: "Axes", report: "Report", steps: list[int], stat: str, title: str, colour: str
) -> None:
    """Draw a statistic over the steps: thin lines for heads, a thick one for their mean."""
    heads = np.stack([report.heads(stat, step) for step in steps])
    if heads.shape[1] > 1:
        axes.plot(steps, heads, color=colour, linewidth=0.7, alpha=0.4)
    axes.plot(steps, [report.mean(stat, step) for step in steps], color=colour, linewidth=1.8)
    axes.set_ylim(0, 1.02)
    axes.set_title(title if heads.shape[1] == 1 else f"{title}, heads and their mean")
    _step_axis(axes, steps)


def _layer_bars(axes: "Axes", report: "Report") -> None:
    """Draw the change by layer; parts of opposite sign go to opposite sides."""
    from matplotlib.ticker import MaxNLocator

    layers = report.change.summary["layers"]
    names = [name for name, _ in report.run.layers if name in layers]
    places = np.arange(len(names))
    parts = {c: np.array([layers[n][c] for n in names]) for c in ("sink", "content", "support")}
    left = {1: np.zeros(len(names)), -1: np.zeros(len(names))}
    for channel, values in parts.items():
        if np.abs(values).max(initial=0.0) < 0.0005:
            continue
        start = np.where(values >= 0, left[1], left[-1])
        axes.barh(
            places, values, left=start, height=0.8, color=PALETTE[channel], label=_WORDS[channel]
        )
        left[1] += np.maximum(values, 0)
        left[-1] += np.minimum(values, 0)
    total = np.array([layers[name]["total"] for name in names])
    size = max(2.5, min(6.0, 100.0 / len(names)))
    axes.plot(total, places, "D", color=_TOTAL, markersize=size, markeredgecolor="white")
    axes.axvline(0, color="0.4", linewidth=0.8)
    # No legend: colours are those of the curves, and a long list of layers leaves no free corner.
    axes.set_title(f"Change by layer, steps {report.baseline_step} to {report.last_step} (nat)")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.use_sticky_edges = False
    axes.margins(x=0.04)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _layer_axis(axes, names)


def _heat_map(
    axes: "Axes", report: "Report", stat: str, title: str, colours: str, limits: tuple[float, float]
) -> None:
    import matplotlib as mpl
    from matplotlib.ticker import MaxNLocator

    grid: Array = as_grid(report.heads(stat, report.last_step), report.run.layers)
    colour_map = mpl.colormaps[colours].with_extremes(bad="0.87")
    image = axes.imshow(
        np.ma.masked_invalid(grid),
        cmap=colour_map,
        vmin=limits[0],
        vmax=limits[1],
        aspect="auto",
        interpolation="nearest",
    )
    axes.grid(visible=False)
    axes.set_title(f"{title} at step {report.last_step}")
    axes.set_xlabel("head")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _layer_axis(axes, [name for name, _ in report.run.layers])
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)


def _layer_axis(axes: "Axes", names: list[str]) -> None:
    short = _short(names)
    every = math.ceil(len(names) / _LABELLED_LAYERS)
    places = list(range(0, len(names), every))
    axes.set_yticks(places, [short[i] for i in places], fontsize=8)
    if all(name.isdigit() for name in short):
        axes.set_ylabel("layer")


def _short(names: list[str]) -> list[str]:
    """Return layer names without the parts that all of them share.

    Example:
        >>> _short(["model.layers.0.attn", "model.layers.11.attn"])
        ['0', '11']
        >>> _short(["encoder.0.attn", "decoder.0.attn"])
        ['encoder', 'decoder']
    """
    parts = [name.split(".") for name in names]
    if len(names) < 2 or len({len(part) for part in parts}) != 1:
        return [name if len(name) <= 24 else f"...{name[-21:]}" for name in names]
    differ = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    return [".".join(part[i] for i in differ) for part in parts]


def _step_axis(axes: "Axes", steps: list[int]) -> None:
    axes.set_xlabel("step")
    positive = [step for step in steps if step > 0]
    # Steps that are spaced by factors would crowd at the left end of a linear axis.
    if len(positive) > 4 and positive[len(positive) // 2] < 0.2 * positive[-1]:
        axes.set_xscale("symlog", linthresh=max(1, positive[0]), linscale=0.4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
