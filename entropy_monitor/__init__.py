"""Why attention entropy falls: sink mass and content entropy, logged apart and exactly.

For a row of attention probabilities p with sink mass s and content composition pi,

    H(p) = Hb(s) + s * H(sigma) + (1 - s) * H(pi),

so that every change of entropy is a change of the sink, of the content, or of both (Papamichalis
and Ruane, arXiv 2608.14712). Entropies are in nats, masses in [0, 1], ``step`` is the optimiser
step.

Names are loaded on first use (PEP 562): importing the package costs neither torch nor a host
framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entropy_monitor.alerts import Alert
    from entropy_monitor.attribution import EntropyChange, attribute_change
    from entropy_monitor.lightning import EntropyMonitor
    from entropy_monitor.monitor import AttentionMonitor
    from entropy_monitor.snapshot import Snapshot
    from entropy_monitor.statistics import RowStatistics, row_statistics
    from entropy_monitor.transformers import EntropyMonitorCallback

__version__ = "0.1.0"

_HOME = {
    "Alert": "alerts",
    "AttentionMonitor": "monitor",
    "EntropyChange": "attribution",
    "EntropyMonitor": "lightning",
    "EntropyMonitorCallback": "transformers",
    "RowStatistics": "statistics",
    "Snapshot": "snapshot",
    "attribute_change": "attribution",
    "row_statistics": "statistics",
}

__all__ = [
    "Alert",
    "AttentionMonitor",
    "EntropyChange",
    "EntropyMonitor",
    "EntropyMonitorCallback",
    "RowStatistics",
    "Snapshot",
    "attribute_change",
    "row_statistics",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
