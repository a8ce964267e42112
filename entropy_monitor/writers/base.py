"""What a monitored step hands to the outputs: `Emission`, and the two methods of a `Writer`.

One emission per optimiser step. The numbers of all heads travel as one compact array whose last
axis runs over the heads of all layers in layer order, so that layers of different head counts need
no padding. Entropies are in nats, masses in [0, 1]; NaN means "not defined here" (no layer of this
name, no row that counts).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.names import CHANGE_NAMES, COVARIANCE_PAIRS, STAT_NAMES

Array = npt.NDArray[Any]
Layers = tuple[tuple[str, int], ...]
"""Layers in the order of the forward pass: (qualified name, number of query heads)."""


@dataclass(frozen=True, kw_only=True)
class Emission:
    """All that one monitored step has to say.

    Attributes:
        step: The optimiser step.
        layers: Name and number of heads of each layer, in the order of the last axis of the arrays.
        stats: float32 (statistics, heads of all layers), one line per name in `stat_names`.
        stat_names: Names of the statistics.
        change: (4, heads): total, sink, content, support since the baseline; None before there is
            one.
        change_se: Standard errors of `change`, same shape.
        cov: (10, heads): upper triangle of the covariance between sequences of the means in
            `entropy_monitor.names.COVARIANCE_PAIRS`, from which the error of a change between any
            two steps follows.
        model: Scalars by their tag, such as ``attention/sink_mass`` and
            ``attention/sink_mass/<layer>``.
        summary: `EntropyChange.to_dict()`, plain types; empty before there is a baseline.
        alerts: Alerts raised at this step.
    """

    step: int
    layers: Layers
    stats: Array
    stat_names: tuple[str, ...] = STAT_NAMES
    change: Array | None = None
    change_se: Array | None = None
    cov: Array | None = None
    model: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()

    def __post_init__(self) -> None:
        heads = head_count(self.layers)
        lines = {
            "stats": len(self.stat_names),
            "change": len(CHANGE_NAMES),
            "change_se": len(CHANGE_NAMES),
            "cov": len(COVARIANCE_PAIRS),
        }
        for name, count in lines.items():
            array = getattr(self, name)
            if array is not None and array.shape != (count, heads):
                raise ValueError(
                    f"`{name}` must have shape {(count, heads)} for these layers; "
                    f"got {array.shape}."
                )

    def stat(self, name: str) -> Array:
        """Return one statistic of all heads, shape (heads,)."""
        line: Array = self.stats[self.stat_names.index(name)]
        return line


@runtime_checkable
class Writer(Protocol):
    """An output: takes emissions. Errors are raised; the monitor decides what they mean."""

    def write(self, emission: Emission) -> None:
        """Put one emission out."""

    def close(self) -> None:
        """Release what is held; harmless when called twice."""


def head_count(layers: Layers) -> int:
    """Return the number of heads of all layers together."""
    return sum(heads for _, heads in layers)


def layer_slices(layers: Layers) -> dict[str, slice]:
    """Return where each layer's heads stand on the last axis.

    Example:
        >>> layer_slices((("a", 2), ("b", 3)))
        {'a': slice(0, 2, None), 'b': slice(2, 5, None)}
    """
    slices, start = {}, 0
    for name, heads in layers:
        slices[name] = slice(start, start + heads)
        start += heads
    return slices


def as_grid(values: Array, layers: Layers) -> Array:
    """Spread (..., heads of all layers) to (..., layers, most heads of a layer), NaN-padded.

    Example:
        >>> as_grid(np.array([1.0, 2.0, 3.0]), (("a", 1), ("b", 2))).tolist()
        [[1.0, nan], [2.0, 3.0]]
    """
    most = max((heads for _, heads in layers), default=0)
    if all(heads == most for _, heads in layers):
        return values.reshape(*values.shape[:-1], len(layers), most)
    counts = np.array([heads for _, heads in layers], dtype=np.int64)
    grid = np.full((*values.shape[:-1], len(layers), most), np.nan, dtype=values.dtype)
    # A boolean mask fills in layer order, which is the order of the last axis.
    grid[..., np.arange(most) < counts[:, None]] = values
    return grid


def clean_tag(tag: str) -> str:
    """Return a tag of letters, digits and ``_ / . -``, which every backend accepts.

    Example:
        >>> clean_tag("attention/sink_mass/blocks.0.attn#1")
        'attention/sink_mass/blocks.0.attn_1'
    """
    return re.sub(r"[^A-Za-z0-9_/.\-]", "_", tag)


def clean_tags(values: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values under tags that every backend accepts.

    A value that is not defined is left out rather than written as NaN. Two tags that become the
    same (``a#1`` and ``a_1``) are kept apart by a number, in order of appearance.
    """
    clean: dict[str, float] = {}
    taken: set[str] = set()
    for tag, value in values.items():
        name, copy = clean_tag(tag), 2
        while name in taken:
            name, copy = f"{clean_tag(tag)}-{copy}", copy + 1
        taken.add(name)
        if np.isfinite(float(value)):
            clean[name] = float(value)
    return clean
