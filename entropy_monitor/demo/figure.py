"""The picture of the demo: how entropy fell, why, and what the head looks at."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from entropy_monitor.demo.words import Split, cause, split_of
from entropy_monitor.notebook import PALETTE, signed

if TYPE_CHECKING:
    from entropy_monitor.demo.train import Twin

_INK = "#1f2328"
_FAINT = "#6b7280"
_SHOWN = 28
"""Tokens of the attention map."""

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#c9ced6",
    "axes.labelcolor": _FAINT,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "text.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
}


def draw(with_bos: "Twin", without: "Twin", path: Path, *, triggers: str) -> None:
    """Write the picture as PNG.

    Args:
        with_bos: The training with ``<bos>``.
        without: The training without.
        path: Where to.
        triggers: The trigger characters, marked in the maps.
    """
    # The object interface: no global state of pyplot, no window system.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11.2, 8.8), dpi=150, facecolor="white")
        grid = figure.add_gridspec(
            2,
            2,
            width_ratios=(1.3, 1),
            left=0.065,
            right=0.985,
            top=0.81,
            bottom=0.065,
            hspace=0.47,
            wspace=0.1,
        )
        figure.text(0.065, 0.95, "Why did attention entropy fall?", fontsize=19, fontweight="bold")
        figure.text(
            0.065,
            0.915,
            "Two trainings of the same small transformer, with and without one token at the start "
            "of every text.",
            fontsize=11,
            color=_FAINT,
        )
        top = max(max(twin.curves["total_entropy"]) for twin in (with_bos, without))
        for row, twin in enumerate((with_bos, without)):
            _curve(figure.add_subplot(grid[row, 0]), twin, top=top)
            _map(figure.add_subplot(grid[row, 1]), twin, triggers)
        figure.savefig(path)


def _curve(axes: Any, twin: "Twin", *, top: float) -> None:
    split = split_of(twin)
    steps = np.array(twin.steps)
    entropy = np.array(twin.curves["total_entropy"])
    sink = np.array(twin.changes["sink"])
    start = entropy[0]
    # From the baseline down to the curve: first what the sink explains, then what the content
    # explains.
    axes.fill_between(steps, start, start + sink, color=PALETTE["sink"], alpha=0.85, linewidth=0)
    axes.fill_between(
        steps, start + sink, entropy, color=PALETTE["content"], alpha=0.8, linewidth=0
    )
    axes.axhline(start, color=_FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(steps, entropy, color=_INK, linewidth=2.2)
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(0, 1.12 * top)
    axes.set_ylabel("attention entropy, nats")
    axes.set_xlabel("optimiser step")
    axes.grid(axis="y", color="#eceef1", linewidth=1)
    axes.set_axisbelow(True)

    name = "with <bos>" if twin.bos else "without <bos>"
    axes.text(
        0,
        1.19,
        f"{name}: {signed(split.total, 2)} nats",
        transform=axes.transAxes,
        fontsize=13,
        weight="bold",
    )
    axes.text(0, 1.095, _short(cause(split)), transform=axes.transAxes, fontsize=10.5, color=_FAINT)
    for i, (part, value) in enumerate((("sink", split.sink), ("content", split.content))):
        axes.text(
            0.02,
            0.175 - 0.105 * i,
            f"{part} {signed(value, 2)}{_share(split, part)}",
            transform=axes.transAxes,
            va="center",
            fontsize=11.5,
            weight="bold",
            color="white",
            bbox={
                "boxstyle": "round,pad=0.3",
                "facecolor": PALETTE[part],
                "edgecolor": "white",
                "linewidth": 1.2,
            },
        )


def _short(words: str) -> str:
    return words[0].upper() + words[1:] if len(words) < 90 else words[0].upper() + words[1:88] + "…"


def _share(split: Split, part: str) -> str:
    if split.share is None:
        return ""
    return f"  ({split.share if part == 'sink' else 100 - split.share} %)"


def _map(axes: Any, twin: "Twin", triggers: str) -> None:
    from matplotlib.colors import to_rgb

    shown = min(_SHOWN, len(twin.tokens))
    weights = np.asarray(twin.weights)[:shown, :shown]
    # Ink in the colour of its cause: the first key is the sink, every other is content.
    colours = np.empty((shown, shown, 3))
    colours[:, 0], colours[:, 1:] = to_rgb(PALETTE["sink"]), to_rgb(PALETTE["content"])
    strength = np.sqrt(weights)[..., None]  # the eye sees small weights too
    image = 1 - strength * (1 - colours)
    image[np.triu_indices(shown, 1)] = to_rgb("#f5f6f8")
    axes.imshow(image, interpolation="nearest")
    labels = [
        "■" if token == "<bos>" else "·" if token == " " else token for token in twin.tokens[:shown]
    ]
    axes.set_xticks(range(shown), labels, fontsize=7.5)
    axes.set_yticks(range(shown), labels, fontsize=7.5)
    axes.tick_params(length=0, pad=2)
    for label, token in zip(axes.get_yticklabels(), twin.tokens, strict=False):
        if token in triggers:
            label.set_color(_INK)
            label.set_weight("bold")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title("what the head looks at after training", fontsize=10.5, color=_FAINT, pad=8)
    first = "■ is <bos>; " if twin.bos else ""
    axes.set_xlabel(f"key   ({first}orange: first key, blue: all others)", fontsize=8.5)
    axes.set_ylabel(f"query   (bold: {', '.join(triggers)}, a copy is due)", fontsize=8.5)
