"""Replay of a series of checkpoints, and the audit of a model.

`replay` measures every checkpoint on the same sequences and writes a run that TensorBoard and
``entropy-monitor report`` read. `audit_model` asks of one model how many nearer-head verdicts
depend on whether the sink is kept.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entropy_monitor.replay.audit import AuditSettings, audit_model
    from entropy_monitor.replay.errors import CheckpointError, ReplayError
    from entropy_monitor.replay.models import ModelSpec
    from entropy_monitor.replay.run import replay
    from entropy_monitor.replay.settings import ReplayResult, ReplaySettings
    from entropy_monitor.replay.tokens import TokenSpec

_HOME = {
    "AuditSettings": "audit",
    "CheckpointError": "errors",
    "ModelSpec": "models",
    "ReplayError": "errors",
    "ReplayResult": "settings",
    "ReplaySettings": "settings",
    "TokenSpec": "tokens",
    "audit_model": "audit",
    "replay": "run",
}

__all__ = [
    "AuditSettings",
    "CheckpointError",
    "ModelSpec",
    "ReplayError",
    "ReplayResult",
    "ReplaySettings",
    "TokenSpec",
    "audit_model",
    "replay",
]


def __getattr__(name: str) -> Any:
    # `--help` must not wait for torch
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
