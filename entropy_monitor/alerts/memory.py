"""`Memory`: what the engine keeps of the past, and the `View` it makes of a new record."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from entropy_monitor.alerts.policy import AlertPolicy
from entropy_monitor.alerts.reading import Array, Mask, Reading, head_means
from entropy_monitor.alerts.tracking import Average, Noise, pack, unpack
from entropy_monitor.alerts.view import View

_LENGTH_RATIO = 1.25  # another number of visible keys by more than this is another length
_NOISE_CAP = 0.1  # in J and in log kap; row samples of trained models stay below .05
_ONSET = 0.03  # a layer's sink mass this close to its lowest value has not begun to grow


class Memory:
    """Averages, noise and frozen references, all in steps."""

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
        self._seen: Mask | None = None
        self._structure: Array | None = None
        self._onset: Array | None = (
            None  # (S, L, H): fast averages when a layer's sink last was low
        )
        self._onset_step: Array | None = None  # (L,)
        self._lowest: Array | None = None  # (L,): lowest sink mass

    def known(self, shape: tuple[int, ...]) -> Mask:
        """Heads that were measured before."""
        return np.zeros(shape, dtype=bool) if self._seen is None else self._seen

    def look(self, reading: Reading, *, frozen: bool) -> View:
        """Adds a record; ``frozen`` keeps the slow averages as they were before the event."""
        step, policy = reading.step, self.policy
        if self.first is None:
            self.first = step
            self._names = list(reading.means)
        groups = np.stack([reading.evenness, reading.log_spread])
        absent = np.full(reading.spread.shape, np.nan)
        stack = np.stack([reading.means.get(name, absent) for name in self._names])
        log_support = np.log(np.maximum(np.array([reading.support]), 1.0))
        # Averages make new arrays instead of writing into old ones, so these are the values before.
        before = groups if self._slow.value is None else self._slow.value
        past = stack if self._before.value is None else self._before.value
        usual = log_support if self._support.value is None else self._support.value
        with np.errstate(invalid="ignore"):
            other_length = bool(np.abs(log_support - usual)[0] > np.log(_LENGTH_RATIO))

        noise = self._noise.before(groups.shape)
        last = groups if self._fast.value is None else self._fast.value
        fast = self._fast.update(groups, step)
        now = self._now.update(stack, step)
        self._slow.update(groups, step, frozen=frozen)
        self._before.update(stack, step, frozen=frozen)
        self._support.update(log_support, step)
        if not frozen:
            self._noise.update(groups)
        self._remember(now, step, reading)
        self.last = step
        assert self._structure is not None
        assert self._onset is not None
        assert self._onset_step is not None
        weight = self._fast.weight
        return View(
            reading=reading,
            policy=policy,
            evenness=fast[0],
            log_spread=fast[1],
            evenness_last=last[0],
            evenness_before=before[0],
            log_spread_before=before[1],
            evenness_noise=noise[0],
            spread_noise=noise[1],
            weight=weight if isinstance(weight, float) else weight[0],
            now=self._table(now),
            before=self._table(past),
            onset=self._table(self._onset),
            onset_step=self._onset_step,
            structure=self._structure,
            usual_support=float(np.exp(usual[0])),
            settled=step - self.first >= policy.warmup,
            same_length=not other_length,
        )

    def _remember(self, now: Array, step: float, reading: Reading) -> None:
        """Which heads exist, how much pattern each has had, and where each sink began to grow."""
        layers = now.shape[1]
        if self._seen is None or self._structure is None:
            self._seen = np.zeros(now.shape[1:], dtype=bool)
            self._structure = np.full(now.shape[1:], np.nan)
        self._seen = self._seen | reading.measured
        slow = self._before.value
        if "content_evenness" in self._names and slow is not None:
            evenness = slow[self._names.index("content_evenness")]
            self._structure = np.fmax(self._structure, 1.0 - evenness)
        if self._onset is None or self._onset_step is None or self._lowest is None:
            self._onset = now.copy()
            self._onset_step = np.full(layers, step)
            self._lowest = np.full(layers, np.nan)
        if "sink_mass" in self._names:
            sink = head_means(now[self._names.index("sink_mass")])
            self._lowest = np.fmin(self._lowest, sink)
            with np.errstate(invalid="ignore"):
                low = sink <= self._lowest + _ONSET
            self._onset = np.where(low[None, :, None], now, self._onset)
            self._onset_step = np.where(low, step, self._onset_step)

    def _table(self, stack: Array) -> dict[str, Array]:
        return {name: stack[index] for index, name in enumerate(self._names)}

    _AVERAGES = ("fast", "slow", "noise", "now", "before", "support")
    _ARRAYS = ("seen", "structure", "onset", "onset_step", "lowest")

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types."""
        averages = {name: getattr(self, f"_{name}").state_dict() for name in self._AVERAGES}
        arrays = {name: pack(getattr(self, f"_{name}")) for name in self._ARRAYS}
        return {
            "first": self.first,
            "last": self.last,
            "names": list(self._names),
            **averages,
            **arrays,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where `state_dict` left off."""
        self.first, self.last = state["first"], state["last"]
        self._names = list(state["names"])
        for name in self._AVERAGES:
            getattr(self, f"_{name}").load_state_dict(state[name])
        for name in self._ARRAYS:
            setattr(self, f"_{name}", unpack(state[name]))
