"""`Memory`: what the engine keeps of the past, and the `View` it makes of a new record."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from entropy_monitor.alerts.policy import AlertPolicy
from entropy_monitor.alerts.reading import Array, Mask, Reading
from entropy_monitor.alerts.tracking import Average, Noise, pack, unpack
from entropy_monitor.alerts.view import View

_LENGTH_RATIO = 1.25  # a change of the number of visible keys by more than this is another length
_NOISE_CAP = 0.1  # in J and in log kap; row samples of trained models stay below .05


class Memory:
    """Averages, noise and the frozen baseline, all in steps."""

    def __init__(self, policy: AlertPolicy) -> None:
        self.policy = policy
        self.first: float | None = None
        self.last: float | None = None
        self._fast = Average(policy.smoothing)  # (2, G): J, log kap
        self._slow = Average(policy.memory)
        self._noise = Noise(_NOISE_CAP)
        self._names: list[str] = []
        self._now = Average(policy.smoothing)  # (S, L, H)
        self._before = Average(policy.memory)
        self._support = Average(policy.memory)
        self._start: Array | None = None
        self._base: Array | None = None
        self._base_count: Array | None = None
        self._base_done = False
        self._base_steps = (float("nan"), float("nan"))
        self._structure: Array | None = None

    def known(self, shape: tuple[int, ...]) -> Mask:
        """Heads that were measured before."""
        if self._start is None:
            return np.zeros(shape, dtype=bool)
        return np.asarray(np.isfinite(self._start).any(axis=0))

    def look(self, reading: Reading, *, frozen: bool, channels: Mapping[str, Array]) -> View:
        """Adds a record; ``frozen`` keeps the slow averages as they were before the event."""
        step, policy = reading.step, self.policy
        if self.first is None:
            self.first = step
            self._names = list(reading.means)
        since = step - self.first
        groups = np.stack([reading.evenness, reading.log_spread])
        stack = np.stack(
            [reading.means.get(name, np.full(reading.spread.shape, np.nan)) for name in self._names]
        )
        fast = self._fast.update(groups, step)
        before = groups if self._slow.value is None else self._slow.value  # never written in place
        noise = self._noise.before(groups.shape)
        now = self._now.update(stack, step)
        past = stack if self._before.value is None else self._before.value
        log_support = (
            np.log(np.array([max(reading.support, 1.0)]))
            if np.isfinite(reading.support)
            else np.array([np.nan])
        )
        usual = log_support if self._support.value is None else self._support.value
        with np.errstate(invalid="ignore"):
            same = not bool(np.abs(log_support - usual)[0] > np.log(_LENGTH_RATIO))

        self._slow.update(groups, step, frozen=frozen)
        self._before.update(stack, step, frozen=frozen)
        self._support.update(log_support, step)
        if not frozen:
            self._noise.update(groups)
        self._remember(stack, now, since, reading)
        self.last = step
        assert self._start is not None and self._structure is not None
        return View(
            reading=reading,
            policy=policy,
            evenness=fast[0],
            log_spread=fast[1],
            evenness_before=before[0],
            log_spread_before=before[1],
            evenness_noise=noise[0],
            spread_noise=noise[1],
            weight=self._fast.weight
            if isinstance(self._fast.weight, float)
            else self._fast.weight[0],
            now=self._table(now),
            before=self._table(past),
            start=self._table(self._start),
            base={} if self._base is None or not self._base_done else self._table(self._base),
            base_steps=self._base_steps,
            structure=self._structure,
            since=since,
            settled=since >= policy.warmup,
            same_length=same,
            channels=channels,
        )

    def _remember(self, stack: Array, now: Array, since: float, reading: Reading) -> None:
        """The first record, the frozen baseline, and how much pattern each head has had."""
        policy = self.policy
        if self._start is None:
            self._start = stack.copy()
        else:
            self._start = np.where(np.isnan(self._start), stack, self._start)
        if since >= policy.warmup and not self._base_done:
            if self._base is None or self._base_count is None:
                self._base, self._base_count = np.full(stack.shape, np.nan), np.zeros(stack.shape)
                self._base_steps = (reading.step, reading.step)
            seen = np.isfinite(stack)
            if since <= policy.warmup + policy.baseline or not self._base_count.any():
                self._base_count = self._base_count + seen
                old = np.where(np.isnan(self._base), 0.0, self._base)
                mean = old + (np.where(seen, stack, 0.0) - old) / np.maximum(self._base_count, 1)
                self._base = np.where(seen, mean, self._base)
                self._base_steps = (self._base_steps[0], reading.step)
            self._base_done = since >= policy.warmup + policy.baseline
        if self._structure is None:
            self._structure = np.full(stack.shape[1:], np.nan)
        slow = self._before.value
        if "content_evenness" in self._names and slow is not None:
            self._structure = np.fmax(
                self._structure, 1.0 - slow[self._names.index("content_evenness")]
            )

    def _table(self, stack: Array) -> dict[str, Array]:
        return {name: stack[index] for index, name in enumerate(self._names)}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types."""
        return {
            "first": self.first,
            "last": self.last,
            "names": list(self._names),
            "fast": self._fast.state_dict(),
            "slow": self._slow.state_dict(),
            "noise": self._noise.state_dict(),
            "now": self._now.state_dict(),
            "before": self._before.state_dict(),
            "support": self._support.state_dict(),
            "start": pack(self._start),
            "base": pack(self._base),
            "base_count": pack(self._base_count),
            "base_done": self._base_done,
            "base_steps": list(self._base_steps),
            "structure": pack(self._structure),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where `state_dict` left off."""
        self.first, self.last = state["first"], state["last"]
        self._names = list(state["names"])
        for name in ("fast", "slow", "noise", "now", "before", "support"):
            getattr(self, f"_{name}").load_state_dict(state[name])
        for name in ("start", "base", "base_count", "structure"):
            setattr(self, f"_{name}", unpack(state[name]))
        self._base_done = bool(state["base_done"])
        self._base_steps = (float(state["base_steps"][0]), float(state["base_steps"][1]))
