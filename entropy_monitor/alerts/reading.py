"""`Reading`: one record as the rules see it.

Absent is NaN, counts have been applied, lengths divided out.

Shapes: ``L`` layers, ``H`` heads (padded with NaN where layers differ), ``G = 1 + L + L*H`` groups
in the order model, layers, heads. A group's value is the median over its heads, a head's group is
itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_ROWS = ("rows_valid", "rows_no_sink")
_MEANS = (
    "sink_mass",
    "content_mass",
    "binary_entropy",
    "content_mass_entropy",
    "total_entropy",
    "content_evenness",
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many layers and heads, and what the layers are called."""

    names: tuple[str, ...]
    heads: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.names)

    @property
    def groups(self) -> int:
        """Number of groups: the model, each layer, each head."""
        return 1 + self.layers * (1 + self.heads)

    @cached_property
    def levels(self) -> NDArray[np.intp]:
        """0 for the model, 1 for a layer, 2 for a head, ``(G,)``."""
        return np.repeat([0, 1, 2], [1, self.layers, self.layers * self.heads])

    def head(self, group: int) -> tuple[int, int]:
        """Layer and head of a group that is a head."""
        return divmod(group - 1 - self.layers, self.heads)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One record.

    Attributes:
        step: Optimiser step.
        layout: Names and sizes.
        means: The averages that were recorded, each ``(L, H)``.
        spread: kap per head, ``(L, H)``; NaN where no logit statistics were recorded.
        max_logit: Largest logit per head, ``(L, H)``.
        support: Mean number of content keys over the heads, NaN if not recorded.
        log_support: Mean log m per head, ``(L, H)``.
        evenness: J per group, ``(G,)``.
        log_spread: log kap per group, ``(G,)``.
        evenness_error: Standard error of J per group where recorded, else NaN, ``(G,)``.
        members: Heads measured per group, ``(G,)``.
        measured: Heads with at least one counted row, ``(L, H)``.
        nonfinite: Share of a head's rows that were NaN or +inf, ``(L, H)``.
    """

    step: float
    layout: Layout
    means: dict[str, Array]
    spread: Array
    max_logit: Array
    support: float
    log_support: Array
    evenness: Array
    log_spread: Array
    evenness_error: Array
    members: Array
    measured: Mask
    nonfinite: Array


def as_table(values: Mapping[str, Any]) -> dict[str, Array]:
    """Checks that every statistic is ``(layers, heads)`` of one size.

    Raises:
        ValueError: If shapes differ or are not two-dimensional; the message names the statistic.
    """
    table: dict[str, Array] = {}
    shape: tuple[int, ...] | None = None
    for name, value in values.items():
        array = np.asarray(value, dtype=np.float64)
        if array.ndim != 2:
            raise ValueError(f"`{name}` must have shape (layers, heads), got {array.shape}.")
        if shape is not None and array.shape != shape:
            raise ValueError(
                f"`{name}` must have shape {shape} like the statistics before it, "
                f"got {array.shape}."
            )
        shape = array.shape
        table[name] = array
    return table


def layer_names(layers: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """The given names, or ``0``, ``1``, ... where none were given.

    Raises:
        ValueError: If the number of names does not fit.
    """
    if layers is None:
        return tuple(str(index) for index in range(count))
    if len(layers) != count:
        raise ValueError(f"`layers` names {len(layers)} layers, the statistics have {count}.")
    return tuple(layers)


def median(values: Array) -> Array:
    """Median over the last axis without NaNs; NaN where nothing is left.

    `numpy.nanmedian` takes a hundred times longer.
    """
    size = values.shape[-1]
    missing = np.isnan(values)
    if not missing.any():
        low, high = (size - 1) // 2, size // 2
        ordered = np.partition(values, (low, high), axis=-1)
        return np.asarray(0.5 * (ordered[..., low] + ordered[..., high]))
    count = size - missing.sum(axis=-1)
    lows, highs = np.maximum((count - 1) // 2, 0), np.minimum(count // 2, size - 1)
    ordered = np.sort(values, axis=-1)  # NaNs go last
    pick = np.take_along_axis(ordered, np.stack([lows, highs], axis=-1), axis=-1)
    return np.asarray(pick.mean(axis=-1))


def by_group(heads: Array) -> Array:
    """Per-head values ``(..., L, H)`` as ``(..., G)``: medians of model and layers, heads."""
    flat = heads.reshape(*heads.shape[:-2], -1)
    return np.concatenate([median(flat)[..., None], median(heads), flat], axis=-1)


def read(
    step: float,
    table: Mapping[str, Array],
    layout: Layout,
    known: Mask,
    *,
    min_rows: float,
    min_content: float,
) -> Reading:
    """Turns one record into a `Reading`.

    A head without counted rows is absent. A head that was measured before (``known``) and is NaN
    now, without a count that explains it, is non-finite.
    """
    shape = (layout.layers, layout.heads)
    absent = np.full(shape, np.nan)
    counts = {name[5:]: array for name, array in table.items() if name.startswith("rows_")}
    means = {name: table[name].copy() for name in _MEANS if name in table}
    if "content_mass" not in means and "sink_mass" in means:
        means["content_mass"] = 1.0 - means["sink_mass"]
    support = table.get("support", absent)
    log_support = table.get("log_support", np.log(np.maximum(support, 1.0)))
    if "content_evenness" not in means and "content_entropy" in table:
        with np.errstate(divide="ignore", invalid="ignore"):
            means["content_evenness"] = np.where(
                log_support > 0, table["content_entropy"] / log_support, np.nan
            )
    spread = _spread(table, log_support, absent)
    max_logit = table.get("max_logit", absent).copy()

    broken = _nonfinite_share(means, spread, max_logit, counts, known)
    seen = np.zeros(shape, dtype=bool)
    for array in means.values():
        seen |= np.isfinite(array)
    rows = [np.nan_to_num(counts[name]) for name in ("valid", "no_sink") if name in counts]
    if rows:
        seen &= np.sum(rows, axis=0) >= max(min_rows, 1.0)
    for array in (*means.values(), spread, max_logit):
        array[~seen | ~np.isfinite(array)] = np.nan

    evenness = means.get("content_evenness", absent)
    with np.errstate(invalid="ignore"):
        noisy = means.get("content_mass", absent) < min_content
    evenness = np.where(noisy, np.nan, evenness)
    groups = by_group(np.stack([evenness, np.where(noisy, np.nan, spread)]))
    log_spread = np.log(np.maximum(groups[1], 1e-9))
    counted = ~np.isnan(evenness) if "content_evenness" in means else ~np.isnan(spread)
    members = np.concatenate([[counted.sum()], counted.sum(axis=1), counted.ravel()]).astype(
        np.float64
    )
    return Reading(
        step=step,
        layout=layout,
        means=means,
        spread=spread,
        max_logit=max_logit,
        support=_mean(np.where(seen, support, np.nan)),
        log_support=log_support,
        evenness=groups[0],
        log_spread=log_spread,
        evenness_error=_group_error(table.get("content_evenness_se"), members, layout),
        members=members,
        measured=seen,
        nonfinite=broken,
    )


def _spread(table: Mapping[str, Array], log_support: Array, absent: Array) -> Array:
    if "logit_spread_scaled" in table:
        return table["logit_spread_scaled"].copy()
    if "logit_spread" not in table:
        return absent.copy()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(log_support > 0, table["logit_spread"] / np.sqrt(2.0 * log_support), np.nan)


def _nonfinite_share(
    means: Mapping[str, Array],
    spread: Array,
    max_logit: Array,
    counts: Mapping[str, Array],
    known: Mask,
) -> Array:
    infinite = np.isposinf(max_logit) | np.isinf(spread)
    if "nonfinite" in counts:
        total = np.maximum(sum(np.nan_to_num(array) for array in counts.values()), 1.0)
        return np.maximum(np.nan_to_num(counts["nonfinite"]) / total, infinite)
    lost = np.zeros(known.shape, dtype=bool)
    for name in ("content_evenness", "total_entropy", "sink_mass"):
        if name in means:
            lost |= ~np.isfinite(means[name])
    if counts:  # the counts say whether there was a row to be non-finite
        rows = [np.nan_to_num(counts[name]) for name in ("valid", "no_sink") if name in counts]
        lost &= np.sum(rows, axis=0) > 0 if rows else True
    return (infinite | (lost & known)).astype(np.float64)


def _group_error(heads: Array | None, members: Array, layout: Layout) -> Array:
    """Standard errors of group medians from those of heads: 1.25 sd/sqrt(n) for a median."""
    if heads is None:
        return np.full(layout.groups, np.nan)
    groups = by_group(heads)
    with np.errstate(divide="ignore"):
        shrink = np.where(members > 1, 1.25 / np.sqrt(members), 1.0)
    return groups * shrink


def _mean(values: Array) -> float:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if kept.size else float("nan")


def head_means(heads: Array) -> Array:
    """Mean of each layer over its measured heads, ``(L,)``; NaN where none is."""
    seen = np.isfinite(heads)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Array = np.where(seen, heads, 0.0).sum(axis=1) / seen.sum(axis=1)
    return means
