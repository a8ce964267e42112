"""The history of one run as the dashboard reads it: steps, frames of all heads, changes.

Built from tensors out of a log folder or from a record (the one-file report); nothing here knows
which. Tensors that do not fit the layout are left out and counted in words, never guessed at.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from entropy_monitor.attribution import split_means
from entropy_monitor.names import CHANGE_NAMES, CHANGE_STAT_NAMES
from entropy_monitor.tensorboard_plugin.layout import Layout
from entropy_monitor.writers.tensorboard import SINCE_NAME

Floats = npt.NDArray[Any]

_MAX_ANSWERS = 8

SPLIT_NAMES = (
    "binary_entropy",
    "sink_entropy",
    "content_mass",
    "content_mass_entropy",
    "content_mass_log_support",
    "log_support",
)
"""The statistics from which a change between two steps is computed."""


class HistoryError(ValueError):
    """Something was asked of a run that it does not have."""


@dataclass(frozen=True, kw_only=True)
class History:
    """All that is known about one run.

    Attributes:
        name: The run's name.
        layout: Its statistics and layers.
        steps: ``(n,)`` optimiser steps, ascending.
        frames: ``(n, stats, heads)`` float32, heads of all layers one after another.
        alerts: Alerts as plain dictionaries, oldest first.
        alerts_total: How many were raised; a log keeps the latest few hundred.
        notices: What a reader has to know: tensors left out, steps thinned.
        baseline_step: The step that recorded changes count from, where the source tells it.
    """

    name: str
    layout: Layout
    steps: npt.NDArray[np.int64]
    frames: Floats
    alerts: tuple[Mapping[str, Any], ...] = ()
    alerts_total: int = 0
    notices: tuple[str, ...] = ()
    baseline_step: int | None = None
    _changes: dict[str, Floats] = field(default_factory=dict, repr=False, compare=False)
    _answers: dict[object, bytes] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Memory held, for the cache."""
        return self.frames.nbytes + sum(array.nbytes for array in self._changes.values())

    @property
    def baseline(self) -> int | None:
        """The step that recorded changes count from, or None if no change was recorded."""
        if not set(CHANGE_STAT_NAMES) <= set(self.layout.stats):
            return None
        recorded = np.isfinite(self.stat("change_total")).any(axis=1)
        if not recorded.any():
            return None
        if self.baseline_step is not None:
            return self.baseline_step
        if SINCE_NAME in self.layout.stats:
            since = self.stat(SINCE_NAME)
            known = since[np.isfinite(since)]
            if known.size:
                return int(known[-1])
        return int(self.steps[np.argmax(recorded)])

    def cached(self, key: object, make: Callable[[], bytes]) -> bytes:
        """Return an answer that takes long to compute, made once per key; the last few are kept."""
        found = self._answers.get(key)
        if found is None:
            found = make()
            while len(self._answers) >= _MAX_ANSWERS:
                self._answers.pop(next(iter(self._answers), key), None)
            self._answers[key] = found
        return found

    def stat(self, name: str) -> Floats:
        """Return one recorded statistic, ``(n, heads)``.

        Raises:
            HistoryError: If it was not recorded.
        """
        if name not in self.layout.stats:
            raise HistoryError(f"`stat` must be one of the recorded statistics, got {name[:80]!r}.")
        frames: Floats = self.frames[:, self.layout.stats.index(name)]
        return frames

    def position(self, step: int) -> int:
        """Return where a step stands.

        Raises:
            HistoryError: If it was not recorded.
        """
        found = int(np.searchsorted(self.steps, step))
        if found == len(self.steps) or self.steps[found] != step:
            raise HistoryError(f"Step {step} is not among the recorded steps.")
        return found

    def changes(self, since: int | None) -> Floats:
        """Return every head's change at every step, ``(n, 4, heads)``, as in `CHANGE_NAMES`.

        Args:
            since: A recorded step: the change is split from the means of the two steps. None: since
                the run's own frozen baseline as recorded (rows paired, where they were), or since
                the first step if the run recorded none.
        """
        key = "recorded" if since is None and self.baseline is not None else str(since)
        found = self._changes.get(key)
        if found is None:
            found = self._compute_changes(since, recorded=key == "recorded")
            # One at a time: a change for each of many steps would hold the run many times over.
            # TensorBoard serves from several threads, so nothing is read back from the cache here.
            self._changes.clear()
            self._changes[key] = found
        return found

    def _compute_changes(self, since: int | None, *, recorded: bool) -> Floats:
        if recorded:
            return np.stack([self.stat(name) for name in CHANGE_STAT_NAMES], axis=1)
        start = 0 if since is None else self.position(since)
        missing = [name for name in SPLIT_NAMES if name not in self.layout.stats]
        if missing:
            raise HistoryError(f"A change cannot be split: {', '.join(missing)} was not recorded.")
        means = {name: self.stat(name) for name in SPLIT_NAMES}
        split = split_means({name: values[start] for name, values in means.items()}, means)
        changes = np.stack([split[name] for name in CHANGE_NAMES], axis=1).astype(np.float32)
        counted = np.isfinite(means["content_mass"]) & np.isfinite(means["content_mass"][start])
        changes[~np.broadcast_to(counted[:, None], changes.shape)] = np.nan
        return changes


def build_history(
    name: str,
    layout: Layout,
    tensors: Iterable[tuple[int, Any]],
    *,
    alerts: tuple[Mapping[str, Any], ...] = (),
    alerts_total: int = 0,
    notices: tuple[str, ...] = (),
) -> History:
    """Check tensors against their layout and put them in order of steps.

    Args:
        name: The run's name.
        layout: What the tensors should be.
        tensors: ``(step, array)`` in the order written; a step written twice keeps the later one,
            as after a resume.
        alerts: The run's alerts.
        alerts_total: How many there were, if more than these.
        notices: Notices found before.
    """
    kept: dict[int, Floats] = {}
    shapes: dict[tuple[int, ...], int] = {}
    wrong = 0
    for step, tensor in tensors:
        array = np.asarray(tensor)
        if array.dtype.kind != "f":
            wrong += 1
        elif array.shape != layout.shape:
            shapes[array.shape] = max(shapes.get(array.shape, step), step)
        else:
            kept[int(step)] = array
    told = list(notices)
    if shapes:
        told.append(
            f"The shape changed in mid-run: steps up to {max(shapes.values())} with another number "
            "of layers, heads or statistics are not shown. Log a changed model to a new run."
        )
    if wrong:
        told.append(f"{wrong} tensors that hold no floating-point numbers are not shown.")
    steps = sorted(kept)
    ragged = not layout.mask.all()
    frames = np.empty((len(steps), len(layout.stats), layout.heads), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, step in enumerate(steps):
            grid = kept.pop(step)
            # Picking by a mask takes ten times as long as a copy; most models need none.
            frames[i] = grid[:, layout.mask] if ragged else grid.reshape(len(grid), -1)
    return History(
        name=name,
        layout=layout,
        steps=np.array(steps, np.int64),
        frames=frames,
        alerts=alerts,
        alerts_total=max(alerts_total, len(alerts)),
        notices=tuple(told),
    )
