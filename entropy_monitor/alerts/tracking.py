"""Averages, noise and latches over time, in optimiser steps, with states of plain types."""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def pack(array: Array | Mask | None) -> dict[str, Any] | None:
    """An array as plain types, bit for bit (a JSON number would be longer and slower to read)."""
    if array is None:
        return None
    data = np.ascontiguousarray(array)
    text = base64.b64encode(data.tobytes()).decode("ascii")
    return {"dtype": data.dtype.str, "shape": list(data.shape), "data": text}


def unpack(state: dict[str, Any] | None) -> Any:
    """The inverse of `pack`."""
    if state is None:
        return None
    raw = np.frombuffer(base64.b64decode(state["data"]), dtype=np.dtype(state["dtype"]))
    return raw.reshape(state["shape"]).copy()


class Average:
    """Exponential average with a time constant in steps, element by element.

    NaN leaves an element as it was.

    The weight of a record is ``1 - exp(-dt / tau)`` with its distance ``dt`` from the one before,
    so that the same curve, recorded more often, gives the same average. Until ``tau`` steps have
    passed it is the plain mean.

    >>> average = Average(10.0)
    >>> for step in range(0, 50, 10):
    ...     _ = average.update(np.array([1.0]), float(step))
    >>> float(average.value[0])
    1.0
    """

    def __init__(self, tau: float) -> None:
        self.tau = tau
        self.value: Array | None = None
        # As long as the same elements are present in every record, one number serves all of them.
        self.weight: float | Array = (
            1.0  # weight of the last record, for the standard error of the average
        )
        self._first: float | Array = 0.0
        self._last: float | Array = 0.0
        self._seen: Mask | None = None

    def update(self, new: Array, step: float, *, frozen: bool = False) -> Array:
        """Adds a record and returns the average; ``frozen`` keeps the values while time goes on."""
        seen = ~np.isnan(new)
        if self.value is None or self._seen is None:
            self.value, self._seen = new.copy(), seen
            self._first = self._last = float(step)
            return self.value
        if (
            isinstance(self._last, float)
            and isinstance(self._first, float)
            and np.array_equal(seen, self._seen)
        ):
            passed = step - self._last
            self.weight = float(
                max(-np.expm1(-passed / self.tau), passed / (step - self._first + passed))
            )
            self._last = float(step)
            if not frozen:
                self.value = self.value + self.weight * (new - self.value)
            return self.value
        return self._update_each(new, seen, step, frozen)

    def _update_each(self, new: Array, seen: Mask, step: float, frozen: bool) -> Array:
        assert self.value is not None
        assert self._seen is not None
        if isinstance(self._last, float) or isinstance(self._first, float):
            self._first = np.where(self._seen, self._first, np.nan)
            self._last = np.where(self._seen, self._last, np.nan)
            self.weight = np.where(self._seen, self.weight, np.nan)
        fresh = seen & np.isnan(self._last)
        passed = step - self._last
        weight = np.maximum(-np.expm1(-passed / self.tau), passed / (step - self._first + passed))
        moved = self.value + (0.0 if frozen else 1.0) * weight * (new - self.value)
        self.value = np.where(fresh, new, np.where(seen, moved, self.value))
        self.weight = np.where(fresh, 1.0, np.where(seen, weight, self.weight))
        self._first = np.where(fresh, step, self._first)
        self._last = np.where(seen, step, self._last)
        self._seen = self._seen | seen
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types."""
        times = {name: getattr(self, name) for name in ("weight", "_first", "_last")}
        plain = {
            name: item if isinstance(item, float) else pack(item) for name, item in times.items()
        }
        return {"value": pack(self.value), "seen": pack(self._seen), **plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where `state_dict` left off."""
        self.value, self._seen = unpack(state["value"]), unpack(state["seen"])
        for name in ("weight", "_first", "_last"):
            item = state[name]
            setattr(self, name, unpack(item) if isinstance(item, dict) else float(item))


class Noise:
    """Standard deviation of one record, from second differences: no trend inflates it.

    For independent records of variance v, ``x[t] - 2 x[t-1] + x[t-2]`` has variance 6 v. A
    difference beyond four deviations counts as four, so that the jump that is to be judged does
    not hide itself; ``cap`` bounds what early training, where everything bends, may claim as
    noise. The deviation used for a record is that from before it.
    """

    MEMORY = 16  # records; the one time constant that is not in steps, since it counts draws
    CLIP = 4.0
    _STATE = ("variance", "last", "older", "count")

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self._variance: Array | None = None
        self._last: Array | None = None  # the record before
        self._older: Array | None = None  # and the one before that
        self._count: Array | None = None

    def before(self, shape: tuple[int, ...]) -> Array:
        """The deviation so far; 0 where fewer than three records were seen."""
        if self._variance is None:
            return np.zeros(shape)
        deviation: Array = np.minimum(np.sqrt(self._variance), self.cap)
        return deviation

    def update(self, new: Array) -> None:
        """Adds a record."""
        if (
            self._variance is None
            or self._last is None
            or self._older is None
            or self._count is None
        ):
            self._variance = np.zeros_like(new)
            self._last, self._older = new.copy(), np.full_like(new, np.nan)
            self._count = np.zeros_like(new)
            return
        square = (new - 2.0 * self._last + self._older) ** 2 / 6.0
        seen = ~np.isnan(square)
        self._count += seen
        limit = np.where(self._count > 4, self.CLIP**2 * self._variance + 1e-8, np.inf)
        weight = np.maximum(1.0 / self.MEMORY, 1.0 / np.maximum(self._count, 1.0))
        change = weight * (np.minimum(square, limit) - self._variance)
        change[~seen] = 0.0
        self._variance += change
        here = ~np.isnan(new)
        if here.all():
            self._older, self._last = self._last, new
        else:
            self._older = np.where(here, self._last, self._older)
            self._last = np.where(here, new, self._last)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types."""
        return {name: pack(getattr(self, f"_{name}")) for name in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where `state_dict` left off."""
        for name in self._STATE:
            setattr(self, f"_{name}", unpack(state[name]))


class Latch:
    """Persistence and hysteresis, element by element.

    An element switches on once its condition has held for ``persist`` steps, counted from the last
    record at which it did not hold; it switches off once ``keep`` has been false for ``clear``
    steps.

    >>> latch = Latch()
    >>> for step, on in ((0.0, False), (10.0, True), (20.0, True)):
    ...     active = latch.update(np.array([on]), np.array([on]), step, persist=20.0, clear=100.0)
    >>> bool(active[0])
    True
    """

    def __init__(self) -> None:
        self._quiet: float | Array | None = (
            None  # last step at which the condition did not hold; one for all if so
        )
        self._kept: float | Array = 0.0  # last step at which `keep` held, where active
        self.active: Mask | None = None

    def update(self, on: Mask, keep: Mask, step: float, *, persist: float, clear: float) -> Mask:
        """Adds a record and returns which elements are on."""
        if self._quiet is None or self.active is None:
            self._quiet = self._kept = float(step)
            self.active = np.zeros(on.shape, dtype=bool)
        if not on.any() and not self.active.any():
            self._quiet = self._kept = float(step)
            return self.active
        held = on & (step - self._quiet >= persist)
        self._quiet = np.where(on, self._quiet, step)
        self._kept = np.where(keep | on, step, self._kept)
        self.active = (self.active & (step - self._kept < clear)) | held
        return self.active

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types."""
        times = {"quiet": self._quiet, "kept": self._kept}
        plain = {
            name: pack(item) if isinstance(item, np.ndarray) else item
            for name, item in times.items()
        }
        return {**plain, "active": pack(self.active)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where `state_dict` left off."""
        self._quiet = unpack(state["quiet"]) if isinstance(state["quiet"], dict) else state["quiet"]
        self._kept = unpack(state["kept"]) if isinstance(state["kept"], dict) else state["kept"]
        self.active = unpack(state["active"])
