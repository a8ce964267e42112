"""What happened in a run, judged without attention: validation loss against the twin."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from entropy_monitor.alerts import Alert

MARGIN, RECORDS = 0.1, 5  # nats of validation loss
FOUND_KINDS = ("concentration", "both", "logit_growth", "nonfinite")


def damage_step(
    trace: dict[str, Any], twin: dict[str, Any], *, margin: float = MARGIN
) -> int | None:
    """First step from which the smoothed validation loss stays `margin` above the twin's."""
    steps, loss, usual = trace["loss_step"], _median3(trace["val_loss"]), _median3(twin["val_loss"])
    size = min(len(loss), len(usual))
    worse = ~(loss[:size] <= usual[:size] + margin)  # a NaN loss is damage
    for index in range(size - RECORDS + 1):
        if worse[index : index + RECORDS].all():
            return int(steps[index])
    return None


def concentrated(trace: dict[str, Any], twin: dict[str, Any]) -> bool:
    """Whether at least one head's evenness was below half of its twin's for 5 records."""
    size = min(len(trace["step"]), len(twin["step"]))
    mine, usual = trace["content_evenness"][:size], twin["content_evenness"][:size]
    if mine.shape != usual.shape:
        return False
    low = (~(mine >= 0.5 * usual)).reshape(size, -1)
    run = np.zeros(low.shape[1], dtype=int)
    for row in low:
        run = np.where(row, run + 1, 0)
        if (run >= RECORDS).any():
            return True
    return False


def _median3(values: Any) -> Any:
    loss = np.where(np.isfinite(values), values, np.inf)
    return np.array([np.median(loss[max(0, index - 2) : index + 1]) for index in range(len(loss))])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One run under one detector. `group` is what the run turned out to be."""

    name: str
    group: str
    fault: int
    damage: int | None
    alarm: int | None  # first alarm at or after the fault
    early: bool  # an alarm before the fault
    kinds: tuple[str, ...]

    @property
    def lead(self) -> int | None:
        """Steps from the alarm to the damage."""
        return None if self.alarm is None or self.damage is None else self.damage - self.alarm


def outcome(
    group: str, trace: dict[str, Any], twin: dict[str, Any] | None
) -> tuple[str, int | None]:
    """What the run turned out to be, and when it was damaged.

    A run meant to collapse counts as collapse only if it was damaged and concentrated; concentrated
    without damage is ``harmless`` (an alarm there is neither right nor wrong), damage without
    concentration is ``elsewhere``.
    """
    if twin is None:
        return group, None
    damage = damage_step(trace, twin)
    if group != "collapse":
        return group, damage
    if concentrated(trace, twin):
        return ("collapse" if damage is not None else "harmless"), damage
    return ("elsewhere" if damage is not None else "healthy"), damage


def verdict(name: str, group: str, fault: int, damage: int | None, alerts: list[Alert]) -> Verdict:
    """Puts alerts and outcome together."""
    alarms = [alert for alert in alerts if alert.is_alarm]
    after = [alert.step for alert in alarms if alert.step >= fault and alert.kind in FOUND_KINDS]
    return Verdict(
        name=name,
        group=group,
        fault=fault,
        damage=damage,
        alarm=after[0] if after else None,
        early=any(alert.step < fault for alert in alarms),
        kinds=tuple(
            dict.fromkeys(alert.kind for alert in alerts if not alert.evidence.get("cleared"))
        ),
    )
