"""What a change of attention entropy is made of: the sink, the content, or the length.

With H = A + c h, where A = Hb(s) + s H(sigma) is the sink's own term, c the mean content mass and
h = mean(c H(pi)) / mean(c) the mass-weighted content entropy, a change between two moments closes
by midpoints:

    sink    = dA + dc mid(h)
    content = mid(c) dh

(Papamichalis and Ruane, arXiv 2608.14712.) Where the number of visible keys changed, h = l - k with
l = mean(c log m) / mean(c) and k the mass-weighted concentration; the content keeps -mid(c) dk and
the third channel, ``support = mid(c) dl``, takes what uniform attention would have gained by length
alone. Rows that are paired (a probe batch, a replay) use the same rule row by row. Everything is
done per head and then averaged over heads: pooling heads first misattributes. Nats throughout. This
file needs numpy only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from entropy_monitor.names import ATTRIBUTION_NAMES, CHANGE_NAMES, COVARIANCE_PAIRS
from entropy_monitor.notebook import change_html, change_sentence

if TYPE_CHECKING:
    from entropy_monitor.snapshot import Snapshot

Array = npt.NDArray[np.float64]

_LENGTH_TOLERANCE = 1e-6
"""Relative change of mean log m from which on lengths count as changed; above the rounding of a
float32 record."""

NOISE_FACTOR = 3.0
"""A share is reported only where the change exceeds this many standard errors."""


def _mid(before: Any, after: Any) -> Any:  # Any: arithmetic on 0-d arrays gives numpy scalars
    return 0.5 * (before + after)


def _ratio(numerator: Any, denominator: Any) -> Array:
    # A head whose content mass is exactly 0 has no content entropy; it contributes nothing through
    # c anyway.
    out = np.zeros(np.broadcast_shapes(np.shape(numerator), np.shape(denominator)))
    return np.divide(numerator, denominator, out=out, where=denominator > 0)


def _float64(means: Mapping[str, Any], name: str) -> Array:
    if name == "sink_term" and name not in means:
        inner = np.asarray(means.get("sink_entropy", 0.0), np.float64)
        return np.asarray(_float64(means, "binary_entropy") + inner)
    if name not in means:
        raise ValueError(
            f"`means` must hold {', '.join((*ATTRIBUTION_NAMES, 'log_support'))}; "
            f"{name!r} is missing."
        )
    return np.asarray(means[name], np.float64)


def split_means(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Array]:
    """Split the change of mean entropy between two sets of rows that are not paired.

    Args:
        before: Arrays of one shape by name: ``binary_entropy`` and ``sink_entropy`` (or their sum
            ``sink_term``), ``content_mass``, ``content_mass_entropy``,
            ``content_mass_log_support``, ``log_support``; means per head.
        after: The same at the later moment.

    Returns:
        ``total``, ``sink``, ``content`` and ``support`` in nats; the last three add up to the first
        (to rounding). ``support`` is 0 where the mean of log m did not change.

    Raises:
        ValueError: If a mean is missing.

    Example:
        >>> half = {"binary_entropy": 0.0, "content_mass": 1.0, "content_mass_entropy": 2.0,
        ...         "content_mass_log_support": 2.0, "log_support": 2.0}
        >>> change = split_means(half, half | {"content_mass_entropy": 1.5})
        >>> float(change["content"]), float(change["sink"])
        (-0.5, 0.0)
    """
    a0, c0, e0, l0 = (_float64(before, name) for name in ATTRIBUTION_NAMES)
    a1, c1, e1, l1 = (_float64(after, name) for name in ATTRIBUTION_NAMES)
    n0, n1 = _float64(before, "log_support"), _float64(after, "log_support")
    h0, h1 = _ratio(e0, c0), _ratio(e1, c1)
    longer = np.abs(n1 - n0) > _LENGTH_TOLERANCE * np.maximum(1.0, np.abs(n0))
    support = np.where(longer, _mid(c0, c1) * (_ratio(l1, c1) - _ratio(l0, c0)), 0.0)
    return {
        "total": np.asarray((a1 - a0) + (e1 - e0)),
        "sink": np.asarray((a1 - a0) + (c1 - c0) * _mid(h0, h1)),
        "content": np.asarray(_mid(c0, c1) * (h1 - h0) - support),
        "support": support,
    }


def split_ordered(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, dict[str, Array]]:
    """Split a change twice, moving the sink first and the content first.

    The two bracket the midpoint split: they differ from it by half of dc dh each. Any support
    channel stays inside ``content`` here.

    Args:
        before: As in `split_means`.
        after: As in `split_means`.

    Returns:
        ``{"sink_first": {"sink", "content"}, "content_first": {"sink", "content"}}`` in nats.
    """
    a0, c0, e0 = (_float64(before, name) for name in ATTRIBUTION_NAMES[:3])
    a1, c1, e1 = (_float64(after, name) for name in ATTRIBUTION_NAMES[:3])
    h0, h1 = _ratio(e0, c0), _ratio(e1, c1)
    da, dc, dh = a1 - a0, c1 - c0, h1 - h0
    return {
        "sink_first": {"sink": np.asarray(da + dc * h0), "content": np.asarray(c1 * dh)},
        "content_first": {"sink": np.asarray(da + dc * h1), "content": np.asarray(c0 * dh)},
    }


def split_se(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    covariance_before: Any,
    covariance_after: Any,
) -> dict[str, Array]:
    """Standard errors of `split_means` from the covariance of each moment's means, to first order.

    Args:
        before: As in `split_means`.
        after: As in `split_means`.
        covariance_before: ``(10, ...)``, the covariances of the means in the order of
            `COVARIANCE_PAIRS`.
        covariance_after: The same at the later moment.

    Returns:
        ``total``, ``sink``, ``content``, ``support`` in nats. The two moments count as independent.
        ``support`` has the error that the channel would have, 0 where lengths did not change.
    """
    moments = [
        {name: _float64(means, name) for name in (*ATTRIBUTION_NAMES, "log_support")}
        for means in (before, after)
    ]
    scales = {name: np.maximum(np.abs(moments[0][name]), 1e-3) for name in ATTRIBUTION_NAMES}
    variance = {name: np.zeros(np.shape(moments[0]["content_mass"])) for name in CHANGE_NAMES}
    for which, covariance in enumerate((covariance_before, covariance_after)):
        gradient: dict[str, dict[str, Array]] = {}
        for name in ATTRIBUTION_NAMES:
            # Central differences: the split is smooth in the means, and four of them keep this
            # shorter and less error-prone than sixteen derivatives by hand. Checked against the
            # jackknife in the tests.
            step = 1e-5 * scales[name]
            up, down = (
                split_means(*_replace(moments, which, name, moments[which][name] + sign * step))
                for sign in (1, -1)
            )
            gradient[name] = {
                channel: (up[channel] - down[channel]) / (2 * step) for channel in CHANGE_NAMES
            }
        for pair, value in zip(COVARIANCE_PAIRS, np.asarray(covariance, np.float64), strict=True):
            for channel in CHANGE_NAMES:
                weight = 1.0 if pair[0] == pair[1] else 2.0
                variance[channel] += (
                    weight * gradient[pair[0]][channel] * gradient[pair[1]][channel] * value
                )
    return {name: np.sqrt(np.maximum(value, 0.0)) for name, value in variance.items()}


def _replace(
    moments: list[dict[str, Array]], which: int, name: str, value: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    changed = [dict(moment) for moment in moments]
    changed[which][name] = value
    return changed[0], changed[1]


@dataclass(frozen=True, kw_only=True)
class EntropyChange:
    """A change of attention entropy and what it is made of.

    ``total == sink + content + support`` to rounding, for every head, layer and for the model
    (means over heads).

    Attributes:
        layers: Name and head count of every layer, in the model's order.
        values: ``(4, heads)`` nats in the order total, sink, content, support; heads of all layers
            one after another, 0 where a head has no counted row at one of the moments (see
            ``counted``).
        errors: ``(4, heads)`` standard errors, NaN where fewer than two sequences were seen.
        counted: ``(heads,)`` False for a head without a counted row at one of the moments.
        sink_first: ``(2, heads)`` sink and content, moving the sink first.
        content_first: ``(2, heads)`` sink and content, moving the content first.
        influence: ``{"before"| "after" | "paired": (groups, 4, heads)}``, the pseudo-values behind
            the errors, which keep the correlation between heads that saw the same sequences.
        paired: Whether the same rows were compared at both moments.
        before_step: Optimiser step of the earlier moment.
        after_step: Optimiser step of the later moment.
    """

    layers: tuple[tuple[str, int], ...]
    values: Array
    errors: Array
    counted: npt.NDArray[np.bool_]
    sink_first: Array
    content_first: Array
    paired: bool
    before_step: int | None = None
    after_step: int | None = None
    influence: Mapping[str, Array] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> float:
        """Change of mean entropy over all heads, nats."""
        return self._mean(0)

    @property
    def sink(self) -> float:
        """What the sink explains, nats."""
        return self._mean(1)

    @property
    def content(self) -> float:
        """What the content explains, nats."""
        return self._mean(2)

    @property
    def support(self) -> float:
        """What a change of length explains, nats; 0 where lengths did not change."""
        return self._mean(3)

    @property
    def se(self) -> dict[str, float]:
        """Standard errors of the four means over heads, nats; NaN below two sequences."""
        return self._se(slice(None))

    @property
    def sink_share(self) -> float | None:
        """``sink / total``, or None where a share means nothing.

        It is defined only if the change is above three standard errors and sink and content both
        have its sign (a change near zero can be the difference of large opposite channels: a
        "share" of 3000 %).
        """
        return sink_share(
            total=self.total,
            sink=self.sink,
            content=self.content,
            support=self.support,
            se_total=self.se["total"],
        )

    @property
    def ordered(self) -> dict[str, dict[str, float]]:
        """The split with the sink moved first, and with the content first; they bracket it."""
        keep = self.counted
        return {
            name: {
                part: float(values[i, keep].mean()) if keep.any() else 0.0
                for i, part in enumerate(("sink", "content"))
            }
            for name, values in (
                ("sink_first", self.sink_first),
                ("content_first", self.content_first),
            )
        }

    def heads(self, layer: str) -> Array:
        """``(heads, 4)`` total, sink, content and support of every head of a layer, nats.

        Raises:
            ValueError: If there is no such layer.
        """
        return self.values[:, self._span(layer)].T

    def layer(self, name: str) -> dict[str, Any]:
        """The four channels of a layer (means over its heads), their errors and the sink share.

        Raises:
            ValueError: If there is no such layer.
        """
        return self._describe(self._span(name))

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON, None where undefined: change, share, ordered splits, layers."""
        return {
            "baseline_step": self.before_step,
            "last_step": self.after_step,
            "paired": self.paired,
            "change": {
                **{name: self._mean(i) for i, name in enumerate(CHANGE_NAMES)},
                "se": {name: _or_none(value) for name, value in self.se.items()},
            },
            "sink_share": self.sink_share,
            "ordered": self.ordered,
            "layers": {name: self.layer(name) for name, _ in self.layers},
        }

    def __str__(self) -> str:
        return change_sentence(
            total=self.total,
            sink=self.sink,
            content=self.content,
            support=self.support,
            before=None if self.before_step is None else str(self.before_step),
            after=None if self.after_step is None else str(self.after_step),
            noise=NOISE_FACTOR * self.se["total"],
        )

    def _repr_html_(self) -> str:
        parts = {name: self.layer(name) for name, _ in self.layers}
        return change_html(
            total=self.total,
            sink=self.sink,
            content=self.content,
            support=self.support,
            before=None if self.before_step is None else f"step {self.before_step}",
            after=None if self.after_step is None else f"step {self.after_step}",
            noise=NOISE_FACTOR * self.se["total"],
            errors=self.se,
            layers=[(name, *(part[c] for c in CHANGE_NAMES)) for name, part in parts.items()],
        )

    def _span(self, layer: str) -> slice:
        start = 0
        for name, heads in self.layers:
            if name == layer:
                return slice(start, start + heads)
            start += heads
        known = ", ".join(name for name, _ in self.layers) or "none"
        raise ValueError(f"`layer` must be one of {known}; got {layer!r}.")

    def _mean(self, channel: int, span: slice = slice(None)) -> float:
        keep = self.counted[span]
        return float(self.values[channel, span][keep].mean()) if keep.any() else 0.0

    def _se(self, span: slice) -> dict[str, float]:
        keep = self.counted[span]
        if not keep.any() or not self.influence:
            return dict.fromkeys(CHANGE_NAMES, math.nan)
        variance = sum(
            (
                _jackknife_variance(part[:, :, span][:, :, keep].mean(-1))
                for part in self.influence.values()
            ),
            np.zeros(len(CHANGE_NAMES)),
        )
        return {
            name: float(math.sqrt(value))
            for name, value in zip(CHANGE_NAMES, variance, strict=True)
        }

    def _describe(self, span: slice) -> dict[str, Any]:
        channels = {name: self._mean(i, span) for i, name in enumerate(CHANGE_NAMES)}
        errors = self._se(span)
        share = sink_share(**channels, se_total=errors["total"])
        return {
            **channels,
            "se": {name: _or_none(error) for name, error in errors.items()},
            "sink_share": share,
        }


def sink_share(
    *, total: float, sink: float, content: float, support: float, se_total: float
) -> float | None:
    """``sink / total`` where it is defined, else None; see `EntropyChange.sink_share`.

    Example:
        >>> sink_share(total=-2.0, sink=-1.5, content=-0.5, support=0.0, se_total=0.1)
        0.75
        >>> sink_share(total=-0.1, sink=-3.0, content=2.9, support=0.0, se_total=0.01) is None
        True
    """
    if not abs(total) > NOISE_FACTOR * se_total:  # NaN: the noise is unknown
        return None
    if total == 0 or any(part * total < 0 for part in (sink, content, support)):
        return None
    return sink / total


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _jackknife_variance(values: Array) -> Array:
    """Variance of an estimate from its leave-one-out values, ``(groups, ...)``; NaN below two."""
    groups = values.shape[0]
    if groups < 2:
        return np.full(values.shape[1:], np.nan)
    return (groups - 1) / groups * ((values - values.mean(0)) ** 2).sum(0)


def attribute_change(before: "Snapshot", after: "Snapshot") -> EntropyChange:
    """Attribute the change of attention entropy between two snapshots to sink, content and support.

    Rows are paired if both snapshots kept the same rows (a probe batch, a replay); else the means
    are compared. Layers that only one of the two has are left out. Errors are between sequences, by
    deleting one group of sequences at a time.

    Args:
        before: The earlier snapshot, usually a frozen baseline.
        after: The later one.

    Returns:
        The change, per head and on average.

    Raises:
        TypeError: If one of the two is not a snapshot.
        ValueError: If the snapshots share no layer, or a layer changed its number of heads.
    """
    for argument, given in (("before", before), ("after", after)):
        if not hasattr(given, "pairs_with"):
            raise TypeError(f"`{argument}` must be a Snapshot; got {type(given).__name__}.")
    shared = [name for name in after.layers if name in before.layers]
    if not shared:
        raise ValueError(
            f"`before` and `after` must share a layer; got {', '.join(before.layers) or 'none'} "
            f"and {', '.join(after.layers) or 'none'}."
        )
    for name in shared:
        if before.heads(name) != after.heads(name):
            raise ValueError(
                f"layer {name} must have the same heads in `before` and `after`; "
                f"got {before.heads(name)} and {after.heads(name)}."
            )
    paired = all(before.pairs_with(after, name) for name in shared)
    parts = [
        _paired(before, after, name) if paired else _unpaired(before, after, name)
        for name in shared
    ]
    influence = {}
    for key in parts[0].influence:
        # Layers that saw fewer groups (a layer that is skipped now and then) are padded with their
        # full value, which adds nothing to the variance.
        groups = max(part.influence[key].shape[0] for part in parts)
        influence[key] = np.concatenate(
            [_pad(part.influence[key], groups) for part in parts], axis=2
        )
    values = np.concatenate([part.values for part in parts], axis=1)
    return EntropyChange(
        layers=tuple((name, after.heads(name)) for name in shared),
        values=values,
        errors=np.sqrt(
            sum((_jackknife_variance(part) for part in influence.values()), np.zeros_like(values))
        ),
        counted=np.concatenate([part.counted for part in parts]),
        sink_first=np.concatenate([part.sink_first for part in parts], axis=1),
        content_first=np.concatenate([part.content_first for part in parts], axis=1),
        paired=paired,
        before_step=before.step,
        after_step=after.step,
        influence=influence,
    )


@dataclass(frozen=True, kw_only=True)
class _LayerChange:
    values: Array
    counted: npt.NDArray[np.bool_]
    sink_first: Array
    content_first: Array
    influence: Mapping[str, Array]


def _pad(influence: Array, groups: int) -> Array:
    missing = groups - influence.shape[0]
    if not missing:
        return influence
    if not influence.shape[0]:  # no row of this layer counts
        return np.zeros((missing, *influence.shape[1:]))
    return np.concatenate([influence, np.repeat(influence.mean(0, keepdims=True), missing, axis=0)])


def _stack(channels: Mapping[str, Array]) -> Array:
    return np.stack([channels[name] for name in CHANGE_NAMES])


def _means(sums: Array) -> dict[str, Array]:
    """Means from ``(..., 6)`` sums in the order rows, ATTRIBUTION_NAMES, log_support."""
    names = (*ATTRIBUTION_NAMES, "log_support")
    return {name: _ratio(sums[..., i], sums[..., 0]) for i, name in enumerate(names, start=1)}


def _leave_one_out(groups: Array) -> Array:
    """``(groups, heads, k)`` sums of all groups but one, for every group that holds something."""
    held = groups[(groups[..., 0] > 0).any(-1)]
    return held.sum(0) - held


def _unpaired(before: "Snapshot", after: "Snapshot", layer: str) -> _LayerChange:
    groups0, groups1 = before.group_sums(layer), after.group_sums(layer)
    sums0, sums1 = groups0.sum(0), groups1.sum(0)
    counted = (sums0[:, 0] > 0) & (sums1[:, 0] > 0)
    means0, means1 = _means(sums0), _means(sums1)
    ordered = split_ordered(means0, means1)

    def values(first: dict[str, Array], second: dict[str, Array]) -> Array:
        # (4, heads), or (groups, 4, heads) when one side has a leading axis of left-out groups
        return np.where(counted, np.moveaxis(_stack(split_means(first, second)), 0, -2), 0.0)

    return _LayerChange(
        values=values(means0, means1),
        counted=counted,
        sink_first=np.where(
            counted, np.stack([ordered["sink_first"][p] for p in ("sink", "content")]), 0.0
        ),
        content_first=np.where(
            counted, np.stack([ordered["content_first"][p] for p in ("sink", "content")]), 0.0
        ),
        influence={
            "before": values(_means(_leave_one_out(groups0)), means1),
            "after": values(means0, _means(_leave_one_out(groups1))),
        },
    )


def _paired(before: "Snapshot", after: "Snapshot", layer: str) -> _LayerChange:
    rows0, rows1 = before.row_values(layer), after.row_values(layer)
    # (batch, heads, rows); a row that became non-finite is left out at both moments
    keep = rows0.counted & rows1.counted
    weight = np.where(keep, rows0.weight, 0.0)
    a0, a1 = rows0.sink_term, rows1.sink_term
    c0, c1 = rows0.content_mass, rows1.content_mass
    h0, h1 = rows0.content_entropy, rows1.content_entropy
    da, dc, dh = a1 - a0, c1 - c0, h1 - h0
    support = _mid(c0, c1) * (rows1.log_support - rows0.log_support)
    channels = {
        "total": da + (c1 * h1 - c0 * h0),
        "sink": da + dc * _mid(h0, h1),
        "content": _mid(c0, c1) * dh - support,
        "support": support,
    }
    stack = np.stack(
        [*(channels[name] for name in CHANGE_NAMES), da + dc * h0, c1 * dh, da + dc * h1, c0 * dh]
    )
    # where(): an uncounted row may hold anything, and 0 * inf is NaN
    sums = (np.where(keep, stack, 0.0) * weight).sum(-1)  # (8, batch, heads)
    rows = weight.sum(-1)  # (batch, heads)
    means = _ratio(sums.sum(1), rows.sum(0))
    seen = (rows > 0).any(-1)
    left = _ratio(sums.sum(1, keepdims=True) - sums, rows.sum(0) - rows)[:4, seen]
    return _LayerChange(
        values=means[:4],
        counted=rows.sum(0) > 0,
        sink_first=means[4:6],
        content_first=means[6:8],
        influence={"paired": np.moveaxis(left, 0, 1)},
    )
