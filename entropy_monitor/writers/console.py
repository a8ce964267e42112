"""One line per monitored step on a terminal, and one per alert."""

import sys
from typing import TextIO

from entropy_monitor.writers.base import Emission

_SHOWN = (
    ("H", "attention/total_entropy", "{:.2f} nat"),
    ("sink mass", "attention/sink_mass", "{:.3f}"),
    ("H(pi)", "attention/content_entropy", "{:.2f} nat"),
    ("evenness", "attention/content_evenness", "{:.2f}"),
)


class ConsoleWriter:
    """Print emissions as lines.

    Args:
        stream: Where to; standard error by default, looked up at each line so that progress bars
            may redirect it.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, emission: Emission) -> None:
        """Print one emission."""
        stream = self._stream or sys.stderr
        parts = [
            f"{name} {form.format(emission.model[tag])}"
            for name, tag, form in _SHOWN
            if tag in emission.model
        ]
        change = emission.summary.get("change")
        if change:
            since = emission.summary.get("baseline_step")
            split = f"sink {change['sink']:+.2f} + content {change['content']:+.2f}"
            if abs(change.get("support", 0.0)) >= 0.005:
                split += f" + support {change['support']:+.2f}"
            parts.append(f"since step {since}: {change['total']:+.2f} = {split}")
        lines = [f"attention, step {emission.step}: {', '.join(parts) or 'nothing measured'}"]
        lines += [
            f"attention, step {emission.step}: {alert.severity.upper()} {alert.message}"
            for alert in emission.alerts
        ]
        stream.write("\n".join(lines) + "\n")
        stream.flush()

    def close(self) -> None:
        """Nothing is held."""
