"""`View`: what a rule may look at; `Condition`: what a rule says.

A view is a record, its averages, and what they are compared with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from entropy_monitor.alerts.policy import AlertPolicy
from entropy_monitor.alerts.reading import Array, Layout, Mask, Reading, by_group


@dataclass(frozen=True, kw_only=True)
class View:
    """One record with its past. Group vectors are ``(G,)``, tables ``(L, H)``; see `Reading`.

    Attributes:
        reading: The record as it is.
        policy: Thresholds and time constants.
        evenness: Fast average of J per group.
        log_spread: Fast average of log kap per group.
        evenness_last: Fast average of J per group, up to the record before.
        evenness_before: Slow average of J per group, up to the record before; still during an
            event.
        log_spread_before: The same for log kap.
        evenness_noise: Standard deviation of one record's J per group.
        spread_noise: Standard deviation of one record's log kap per group.
        weight: Weight of this record in the fast average, per group.
        now: Fast averages per head, by statistic.
        before: Slow averages per head, by statistic.
        onset: Fast averages at the record where each layer's sink last was near its lowest.
        onset_step: Step of that record, per layer.
        structure: Largest slow average of 1 - J that a head has had.
        usual_support: Slow average of the number of content keys.
        settled: Whether the warm-up is over.
        same_length: Whether the number of visible keys is what it was.
    """

    reading: Reading
    policy: AlertPolicy
    evenness: Array
    log_spread: Array
    evenness_last: Array
    evenness_before: Array
    log_spread_before: Array
    evenness_noise: Array
    spread_noise: Array
    weight: float | Array
    now: Mapping[str, Array]
    before: Mapping[str, Array]
    onset: Mapping[str, Array]
    onset_step: Array
    structure: Array
    usual_support: float
    settled: bool
    same_length: bool

    @property
    def layout(self) -> Layout:
        """Names and sizes."""
        return self.reading.layout

    @property
    def has_spread(self) -> bool:
        """Whether logit statistics were recorded."""
        return bool(np.isfinite(self.reading.spread).any())

    def by_level(self, model: float, layer: float, head: float) -> Array:
        """One number per level as a vector over groups."""
        return np.array([model, layer, head], dtype=np.float64)[self.layout.levels]

    def quantile(self) -> Array:
        """Normal quantile of the accepted chance of a false crossing, split over each level."""
        confidence = self.policy.confidence
        heads = max(int(self.reading.members[0]), 1)
        normal = NormalDist()
        return self.by_level(
            *(
                normal.inv_cdf(1.0 - confidence / count)
                for count in (1, max(self.layout.layers, 1), heads)
            )
        )

    def bound_weight(self, full_group: float) -> Array:
        """0 for a group of one head, 1 from ``full_group`` heads on, logarithmic between."""
        first = 1 + self.layout.layers  # heads are groups of one
        members = np.maximum(self.reading.members[:first], 1.0)
        weight = np.zeros(self.layout.groups)
        full = np.log(max(full_group, 1.0 + 1e-9))
        weight[:first] = np.minimum(np.log(members) / full, 1.0)
        return weight

    @cached_property
    def reliable(self) -> tuple[Array, Array]:
        """Fast averages moved towards harmless by their own uncertainty: J up, log kap down."""
        share = np.sqrt(self.weight / (2.0 - np.minimum(self.weight, 1.0)))
        error = np.where(
            np.isnan(self.reading.evenness_error), self.evenness_noise, self.reading.evenness_error
        )
        quantile = self.quantile()
        return (
            self.evenness + quantile * share * error,
            self.log_spread - quantile * share * self.spread_noise,
        )

    @cached_property
    def waste(self) -> Array:
        """H(pi) * kap in nats, the median over a group's concentrated heads (J < .5), ``(G,)``.

        How much logit spread the concentration costs. A head that has learned which key to pick
        needs little spread for it; independent Gaussian logits, which pick at random, have 1.4 to
        1.8 nats at any m and any kap above 1.5. NaN where no head of the group is concentrated.
        """
        first = 1 + self.layout.layers
        shape = (self.layout.layers, self.layout.heads)
        evenness = self.reading.evenness[first:].reshape(shape)
        kap = np.exp(self.reading.log_spread[first:]).reshape(shape)
        with np.errstate(invalid="ignore"):
            waste = evenness * self.reading.log_support * kap
            return by_group(np.where(evenness < 0.5, waste, np.nan))

    def nothing(self) -> Mask:
        """A vector over groups that is false everywhere."""
        return np.zeros(self.layout.groups, dtype=bool)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Where something holds now, where it still holds by a margin, and how long it must."""

    name: str
    on: Mask
    keep: Mask
    persist: float
