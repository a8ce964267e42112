"""`Alert`: what happened, where, how sure, as one plain value.

Steps are optimiser steps, entropies nats.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal[
    "concentration",
    "logit_growth",
    "sink_growth",
    "both",
    "dilution",
    "dormant",
    "nonfinite",
    "no_attention",
]
Severity = Literal["info", "warn", "error"]
Level = Literal["model", "layer", "head"]

KINDS: tuple[str, ...] = get_args(Kind)
SEVERITIES: tuple[str, ...] = get_args(Severity)
"""From harmless to urgent: ``info`` is a note, ``warn`` means look, ``error`` means act."""
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True)
class Alert:
    """One event in a run.

    Attributes:
        kind: What happened, one of `KINDS`.
        severity: ``info``, ``warn`` or ``error``; an *alarm* is ``warn`` or ``error``.
        level: Where it was decided: the model, one layer, one head.
        step: Optimiser step of the record that decided.
        layer: Qualified name of the layer, ``None`` at model level.
        head: Index of the head inside the layer, ``None`` above head level.
        message: A sentence for a newcomer, the numbers, usual causes and what to try.
        evidence: The numbers behind the message, plain types only.

    Raises:
        ValueError: If kind, severity or level is not one of the names above.

    >>> alert = Alert("sink_growth", "info", "model", 300, message="the sink grew")
    >>> alert.is_alarm, Alert.from_dict(alert.to_dict()) == alert
    (False, True)
    """

    kind: Kind
    severity: Severity
    level: Level
    step: int
    layer: str | None = None
    head: int | None = None
    message: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kind", self.kind, KINDS),
            ("severity", self.severity, SEVERITIES),
            ("level", self.level, LEVELS),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}.")

    @property
    def is_alarm(self) -> bool:
        """Whether someone should look: severity ``warn`` or ``error``."""
        return self.severity != "info"

    @property
    def place(self) -> str:
        """Where, in words: ``the model``, ``layer blocks.3``, ``head 2 of layer blocks.3``."""
        if self.layer is None:
            return "the model"
        return (
            f"layer {self.layer}"
            if self.head is None
            else f"head {self.head} of layer {self.layer}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON; numbers that are not finite become ``None``."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "level": self.level,
            "step": self.step,
            "layer": self.layer,
            "head": self.head,
            "message": self.message,
            "evidence": _plain(self.evidence),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Alert":
        """The inverse of `to_dict`.

        Raises:
            ValueError: If a key is missing or unknown.
        """
        known = {"kind", "severity", "level", "step", "layer", "head", "message", "evidence"}
        missing = {"kind", "severity", "level", "step"} - set(data)
        if missing or set(data) - known:
            raise ValueError(
                "an alert needs kind, severity, level and step and may have layer, head, message "
                f"and evidence; missing {sorted(missing)}, unknown {sorted(set(data) - known)}."
            )
        return cls(**dict(data))


def _plain(value: Any) -> Any:
    """Numpy scalars and containers as JSON knows them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
