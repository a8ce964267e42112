"""Any Lightning logger, through `log_metrics`, which all of them have."""

import sys
from typing import Any

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.writers.base import Emission, Writer, clean_tags
from entropy_monitor.writers.tensorboard import TensorBoardWriter

_LEVELS = {"info": "INFO", "warn": "WARN", "error": "ERROR"}


class LightningLoggerWriter:
    """Write scalars to a Lightning logger, and alerts to its service (wandb, trackio).

    Tags are those of TensorBoard with the logger's own group separator; MLflow gets
    ``attention/<stat>.<layer>`` for layers.

    Args:
        logger: A `pytorch_lightning.loggers.Logger`, or anything with `log_metrics(metrics, step)`.
        layers: Whether to write the scalars of single layers too.

    Raises:
        TypeError: If `logger` has no `log_metrics`.
    """

    def __init__(self, logger: Any, *, layers: bool = True) -> None:
        if not callable(getattr(logger, "log_metrics", None)):
            raise TypeError(
                f"`logger` must have a method log_metrics, got {type(logger).__name__}."
            )
        self.logger = logger
        self.layers = layers
        self._count = 0

    def write(self, emission: Emission) -> None:
        """Write one emission; values that are not defined are left out."""
        self._count += len(emission.alerts)
        scalars = {
            tag: value for tag, value in emission.model.items() if self.layers or tag.count("/") < 2
        }
        values = clean_tags({"attention/alerts": float(self._count), **scalars})
        self.logger.log_metrics(
            {self._tag(tag): value for tag, value in values.items()}, step=emission.step
        )
        for alert in emission.alerts:
            _raise_alert(self.logger, alert)

    def close(self) -> None:
        """Save what the logger holds back; the logger itself belongs to the Trainer."""
        save = getattr(self.logger, "save", None)
        if callable(save):
            save()

    def _tag(self, tag: str) -> str:
        if _is_a(self.logger, "MLFlowLogger"):
            # MLflow's file store keeps a metric in a file of its name: attention/sink_mass cannot
            # be a file and the folder of attention/sink_mass/<layer> at once.
            group, _, name = tag.partition("/")
            return f"{group}/{name.replace('/', '.')}"
        return tag.replace("/", getattr(self.logger, "group_separator", "/"))


def writer_for(logger: Any, **tensorboard: Any) -> Writer:
    """Return the writer that suits a Lightning logger.

    Args:
        logger: Any Lightning logger.
        **tensorboard: Options of `TensorBoardWriter`, used if the logger is TensorBoard's.
    """
    if _is_a(logger, "TensorBoardLogger"):
        return TensorBoardWriter(logger.experiment, **tensorboard)
    return LightningLoggerWriter(logger)


def _is_a(logger: Any, name: str) -> bool:
    """Say whether a logger is of a class by this name, without importing its host."""
    return any(cls.__name__ == name for cls in type(logger).__mro__)


def _raise_alert(logger: Any, alert: Alert) -> None:
    """Raise an alert in the logger's service; only a library that is already loaded is asked."""
    home = type(logger).__module__.split(".")[0]
    name = type(logger).__name__.lower()
    title = f"attention: {alert.kind}"
    for library in ("wandb", "trackio"):
        module = sys.modules.get(library)
        if module is None or not (library in name or library == home):
            continue
        # A run's own `alert` first: with several runs in one process the module's goes to the
        # latest.
        run = getattr(logger, "experiment", None)
        send = getattr(run, "alert", None) or getattr(module, "alert", None)
        levels = getattr(module, "AlertLevel", None)
        level = getattr(levels, _LEVELS.get(alert.severity, "WARN"), None)
        if callable(send):
            options = {} if level is None else {"level": level}
            send(title=title, text=f"step {alert.step}: {alert.message}", **options)
        return
