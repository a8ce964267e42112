"""Finding the sink: keys that hold more than eps of the attention of many heads, with hysteresis.

The sink metric of Gu et al. (arXiv 2410.10781, eps = 0.3), kept as a running mean over monitored
steps. A set that changes would make every curve jump, so this only proposes: the set that is
measured with stays as it is.
"""

import torch

from entropy_monitor.statistics import RowStatistics

EPSILON = 0.3
"""A key acts as a sink for a head if it holds more than this share of the head's attention."""

_DECAY = 0.9
_ON, _OFF = EPSILON, 0.2
_LEAST_HEADS = 0.05
_WINDOWS = 5


class AutoSink:
    """Watches which key positions act as sinks.

    A position is taken in when at least 5 % of the heads have it as their best key with more than
    0.3 of their mass for five monitored steps, and dropped when that running share falls below 0.2
    / 0.3 of it.

    Attributes:
        positions: Settled key positions, ascending; None before five windows were seen.
    """

    def __init__(self) -> None:
        self.positions: tuple[int, ...] | None = None
        self._share: dict[int, float] = {}
        self._votes: dict[int, float] = {}
        self._heads = 0.0
        self._windows = 0
        self._since: dict[int, int] = {}

    def update(self, rows: RowStatistics) -> None:
        """Count the best keys of one call."""
        best, mass = rows.best_column.flatten(), rows.best_column_mass.flatten()
        keys, votes = torch.unique(best[mass > EPSILON], return_counts=True)
        self._heads += float(best.numel())
        for key, count in zip(keys.tolist(), votes.tolist(), strict=True):
            self._votes[key] = self._votes.get(key, 0.0) + count

    def close_window(self) -> None:
        """Take the votes of one monitored step into the running shares."""
        if not self._heads:
            return
        self._windows += 1
        correction = 1 - _DECAY**self._windows  # the running mean starts at 0
        for key in {*self._share, *self._votes}:
            now = self._votes.get(key, 0.0) / self._heads
            self._share[key] = _DECAY * self._share.get(key, 0.0) + (1 - _DECAY) * now
            held = self.positions is not None and key in self.positions
            least = _LEAST_HEADS * (_OFF / _ON if held else 1.0)
            above = self._share[key] / correction >= least
            self._since[key] = self._since.get(key, 0) + 1 if above else 0
        self._votes, self._heads = {}, 0.0
        if self._windows >= _WINDOWS:
            held_now = set(self.positions or ())
            self.positions = tuple(
                sorted(
                    key
                    for key, count in self._since.items()
                    if count >= _WINDOWS or (key in held_now and count > 0)
                )
            )
