"""Outputs: each takes an `Emission` per monitored step, and imports its host only when used."""

from entropy_monitor.writers.base import Emission, Writer, as_grid
from entropy_monitor.writers.console import ConsoleWriter
from entropy_monitor.writers.lightning_logger import LightningLoggerWriter, writer_for
from entropy_monitor.writers.memory import MemoryWriter
from entropy_monitor.writers.record import RecordWriter
from entropy_monitor.writers.record_reader import RecordError, Run, read_run
from entropy_monitor.writers.tensorboard import (
    TensorBoardWriter,
    TooManyTagsError,
    custom_scalars_layout,
)

__all__ = [
    "ConsoleWriter",
    "Emission",
    "LightningLoggerWriter",
    "MemoryWriter",
    "RecordError",
    "RecordWriter",
    "Run",
    "TensorBoardWriter",
    "TooManyTagsError",
    "Writer",
    "as_grid",
    "custom_scalars_layout",
    "read_run",
    "writer_for",
]
