"""Sink and content move together: which of the two, or both, a change of entropy is made of.

The unpaired split, per head, then averaged over heads (mid = midpoint of before and after, d =
after minus before, c = 1 - s, h = mean(c H(pi)) / mean(c)):

    content = mid(mean c) dh,    sink = dH - content = d mean(Hb) + d mean(c) mid(h) + d mean(s
    H(sigma))

Where the number of visible keys changed, ``mid(mean c) d log m`` is taken out of the content as a
third channel, ``support``, so that a longer batch is not called dilution.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from entropy_monitor.alerts.reading import Array, Mask

NEEDED = ("content_mass", "content_mass_entropy", "total_entropy")


@dataclass(frozen=True, kw_only=True)
class Split:
    """A change of entropy in nats, averaged over heads; total = sink + content + support."""

    total: float
    sink: float
    content: float
    support: float

    def share(self, channel: str) -> float | None:
        """Share of the fall that a channel explains; ``None`` unless both fell."""
        value: float = getattr(self, channel)
        return value / self.total if self.total < -0.02 and value < 0 else None


def split(
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    heads: Mask | None = None,
    *,
    log_support: tuple[float, float] | None = None,
) -> Split | None:
    """Splits the change between two sets of per-head means; ``None`` where one is missing."""
    if any(name not in before or name not in after for name in NEEDED):
        return None
    c0, c1 = before["content_mass"], after["content_mass"]
    with np.errstate(invalid="ignore", divide="ignore"):
        h0 = np.where(c0 > 0, before["content_mass_entropy"] / c0, 0.0)
        h1 = np.where(c1 > 0, after["content_mass_entropy"] / c1, 0.0)
    middle = 0.5 * (c0 + c1)
    content = middle * (h1 - h0)
    total = after["total_entropy"] - before["total_entropy"]
    seen = np.isfinite(content) & np.isfinite(total)
    if heads is not None:
        seen &= heads
    if not seen.any():
        return None
    longer = 0.0
    if log_support is not None and all(np.isfinite(log_support)):
        longer = float(middle[seen].mean()) * (log_support[1] - log_support[0])
    moved = float(content[seen].mean())
    fell = float(total[seen].mean())
    return Split(total=fell, sink=fell - moved, content=moved - longer, support=longer)
