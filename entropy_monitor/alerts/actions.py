"""What to do about an alert: plain callables ``Alert -> None``, given as ``on_alert=[...]``.

    EntropyMonitor(on_alert=[AlertFile("runs/alerts.jsonl"), StopTraining(after=2), log_alert])

Any function will do. One that acts on a trainer has ``setup_trainer(trainer, module)``, which the
callbacks call; with ``all_ranks = True`` it runs on every rank. An action that raises is
reported and does not harm the run. Hosts are duck-typed: nothing is imported here but the standard
library.
"""

import json
import logging
import os
import queue
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from entropy_monitor.alerts.alert import KINDS, SEVERITIES, Alert

Action = Callable[[Alert], None]

_LOG = logging.getLogger("entropy_monitor.alerts")
_LOG_LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class AlertWarning(UserWarning):
    """The category of `warn_alert`, to filter or to turn into an error."""


def log_alert(alert: Alert) -> None:
    """Logs the message under ``entropy_monitor.alerts``; the severity becomes the log level."""
    _LOG.log(_LOG_LEVELS[alert.severity], alert.message)


def warn_alert(alert: Alert) -> None:
    """Python warning for an alarm; notes are logged."""
    if alert.is_alarm:
        warnings.warn(f"[{alert.severity}] {alert.message}", AlertWarning, stacklevel=2)
    else:
        log_alert(alert)


class Only:
    """Passes on alerts of some severity and kind.

    Args:
        action: What to do with them.
        severity: The lowest severity that passes.
        kinds: The kinds that pass, all if ``None``.

    Raises:
        ValueError: If severity or a kind does not exist.

    >>> seen = []
    >>> only = Only(seen.append, severity="error")
    >>> only(Alert("concentration", "warn", "model", 10))
    >>> only(Alert("nonfinite", "error", "model", 20))
    >>> [alert.step for alert in seen]
    [20]
    """

    def __init__(
        self, action: Action, *, severity: str = "warn", kinds: Iterable[str] | None = None
    ) -> None:
        if severity not in SEVERITIES:
            raise ValueError(
                f"`severity` must be one of {', '.join(SEVERITIES)}, got {severity!r}."
            )
        self.kinds = KINDS if kinds is None else tuple(kinds)
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"`kinds` has {unknown}; it may have {', '.join(KINDS)}.")
        self.action, self.severity = action, severity

    @property
    def all_ranks(self) -> bool:
        """As the action itself."""
        return bool(getattr(self.action, "all_ranks", False))

    def setup_trainer(self, trainer: Any, module: Any) -> None:
        """Passed on to the action, if it has a use for it."""
        setup = getattr(self.action, "setup_trainer", None)
        if setup is not None:
            setup(trainer, module)

    def __call__(self, alert: Alert) -> None:
        """Acts if the alert passes."""
        if alert.kind in self.kinds and SEVERITIES.index(alert.severity) >= SEVERITIES.index(
            self.severity
        ):
            self.action(alert)


class AlertFile:
    """Appends every alert as one line of JSON to a file.

    The folder is made when the first one comes.

    Args:
        path: The file, or a folder, in which it is called ``alerts.jsonl``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.suffix == "":
            self.path = self.path / "alerts.jsonl"

    def __call__(self, alert: Alert) -> None:
        """Writes the line at once, so that it survives a crash of the run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(alert.to_dict(), allow_nan=False) + "\n")

    def read(self) -> list[Alert]:
        """The alerts in the file; a last line that was cut off is left out."""
        if not self.path.exists():
            return []
        alerts = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                alerts.append(Alert.from_dict(json.loads(line)))
            except ValueError:
                continue
        return alerts


class StopTraining:
    """Stops training after some errors.

    Args:
        trainer: What to stop: anything with ``should_stop`` (Lightning),
            ``control.should_training_stop`` (a transformers Trainer) or a callable.
            ``None``: the trainer that the callback passes.
        after: Number of alerts of ``severity`` that stop the run.
        severity: What counts, ``error`` by default: a warning means look, an error means act.
        grace: Steps that must lie between two alerts that are counted.

    Raises:
        ValueError: If ``after`` is below 1 or the severity does not exist.
    """

    all_ranks = True

    def __init__(
        self, trainer: Any = None, *, after: int = 1, severity: str = "error", grace: int = 0
    ) -> None:
        if after < 1:
            raise ValueError(f"`after` must be at least 1, got {after}.")
        if severity not in SEVERITIES:
            raise ValueError(
                f"`severity` must be one of {', '.join(SEVERITIES)}, got {severity!r}."
            )
        self.trainer, self.after, self.severity, self.grace = trainer, after, severity, grace
        self.count = 0
        self._last: int | None = None

    def setup_trainer(self, trainer: Any, module: Any) -> None:
        """Called by the callbacks."""
        del module
        if self.trainer is None:
            self.trainer = trainer

    def __call__(self, alert: Alert) -> None:
        """Counts, and stops at the count."""
        if SEVERITIES.index(alert.severity) < SEVERITIES.index(self.severity):
            return
        if self._last is not None and alert.step - self._last < self.grace:
            return
        self.count, self._last = self.count + 1, alert.step
        if self.count >= self.after:
            self._stop(alert)

    def _stop(self, alert: Alert) -> None:
        trainer = self.trainer
        if trainer is None:
            raise RuntimeError("StopTraining has no trainer; pass one or use it in a callback.")
        if hasattr(trainer, "should_stop"):
            trainer.should_stop = True
        elif hasattr(trainer, "control"):
            trainer.control.should_training_stop = True
        elif callable(trainer):
            trainer()
        else:
            raise TypeError(
                "`trainer` must have `should_stop` or `control` or be callable, got "
                f"{type(trainer).__name__}."
            )
        _LOG.error("training is stopped at step %d: %s", alert.step, alert.message)


class CheckpointNow:
    """Saves a checkpoint when an alarm comes, before things get worse.

    Args:
        trainer: What saves: anything with ``save_checkpoint(path)`` (Lightning),
            ``save_model(path)`` (a transformers Trainer) or a callable of the path. ``None``: the
            trainer of the callback.
        folder: Where to. ``None``: ``default_root_dir`` of the trainer, else the current folder.
        severity: The lowest severity that saves.
        at_most: Number of checkpoints per run.

    In distributed runs saving is a collective operation, hence it runs on every rank.
    """

    all_ranks = True

    def __init__(
        self,
        trainer: Any = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        severity: str = "warn",
        at_most: int = 3,
    ) -> None:
        if severity not in SEVERITIES:
            raise ValueError(
                f"`severity` must be one of {', '.join(SEVERITIES)}, got {severity!r}."
            )
        self.trainer, self.folder, self.severity, self.at_most = trainer, folder, severity, at_most
        self.saved: list[Path] = []

    def setup_trainer(self, trainer: Any, module: Any) -> None:
        """Called by the callbacks."""
        del module
        if self.trainer is None:
            self.trainer = trainer

    def __call__(self, alert: Alert) -> None:
        """Saves to ``<folder>/alert-<kind>-step<step>.ckpt``."""
        low = SEVERITIES.index(alert.severity) < SEVERITIES.index(self.severity)
        if low or len(self.saved) >= self.at_most:
            return
        trainer = self.trainer
        if trainer is None:
            raise RuntimeError("CheckpointNow has no trainer; pass one or use it in a callback.")
        root = self.folder or getattr(trainer, "default_root_dir", None) or "."
        path = Path(root) / f"alert-{alert.kind}-step{alert.step}.ckpt"
        for name in ("save_checkpoint", "save_model"):
            save = getattr(trainer, name, None)
            if save is not None:
                break
        else:
            if not callable(trainer):
                raise TypeError(
                    "`trainer` must have `save_checkpoint` or `save_model` or be callable, got "
                    f"{type(trainer).__name__}."
                )
            save = trainer
        save(str(path))
        self.saved.append(path)


class Webhook:
    """Posts alerts as JSON to a URL, from a thread of its own: a step never waits for the network.

    Opt-in. The body is `Alert.to_dict` plus ``text``, the message, which chat services show. If the
    receiver is slow, alerts wait in a short queue; what does not fit is dropped and counted.

    Args:
        url: ``http`` or ``https``.
        severity: The lowest severity that is sent.
        timeout: Seconds per request.
        headers: Further headers, e.g. a token.

    Raises:
        ValueError: If the URL is of another scheme, the time-out not positive, or the severity
            unknown.
    """

    def __init__(
        self,
        url: str,
        *,
        severity: str = "warn",
        timeout: float = 5.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`url` must begin with http:// or https://, got {url!r}.")
        if timeout <= 0:
            raise ValueError(f"`timeout` must be positive, got {timeout}.")
        if severity not in SEVERITIES:
            raise ValueError(
                f"`severity` must be one of {', '.join(SEVERITIES)}, got {severity!r}."
            )
        self.url, self.severity, self.timeout = url, severity, timeout
        self.headers = {"Content-Type": "application/json", **(headers or {})}
        self.sent = self.failed = self.dropped = 0
        self._queue: queue.Queue[Alert] = queue.Queue(maxsize=32)
        self._thread: threading.Thread | None = None

    def __call__(self, alert: Alert) -> None:
        """Puts the alert into the queue and returns at once."""
        if SEVERITIES.index(alert.severity) < SEVERITIES.index(self.severity):
            return
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self.dropped += 1
            return
        if self._thread is None or not self._thread.is_alive():
            # A daemon: a receiver that hangs cannot keep the run from ending.
            self._thread = threading.Thread(target=self._work, name="alert-webhook", daemon=True)
            self._thread.start()

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until the queue is empty, at most ``timeout`` seconds; says whether it is."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return self._queue.empty() and (thread is None or not thread.is_alive())

    def _work(self) -> None:
        while True:
            try:
                alert = self._queue.get(timeout=0.2)
            except queue.Empty:
                return
            self._post(alert)

    def _post(self, alert: Alert) -> None:
        body = json.dumps(
            {"text": f"[{alert.severity}] {alert.message}", **alert.to_dict()}
        ).encode()
        request = urllib.request.Request(self.url, data=body, headers=self.headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout):
                self.sent += 1
        except (urllib.error.URLError, OSError, ValueError) as error:
            self.failed += 1
            if self.failed == 1:  # once: a receiver that is down must not fill the log
                _LOG.warning("webhook %s failed: %s", self.url, error)


class LoggerAlert:
    """Sends alarms to a logger with alerts of its own (``wandb.alert``, ``trackio.alert``).

    Does nothing where no logger has them.

    Args:
        experiment: The run object with ``alert(title=..., text=..., level=...)``; ``None``: the
            ``experiment`` of a logger of the trainer that the callback passes.
        severity: The lowest severity that is sent.
    """

    def __init__(self, experiment: Any = None, *, severity: str = "warn") -> None:
        if severity not in SEVERITIES:
            raise ValueError(
                f"`severity` must be one of {', '.join(SEVERITIES)}, got {severity!r}."
            )
        self.experiment, self.severity = experiment, severity

    def setup_trainer(self, trainer: Any, module: Any) -> None:
        """Called by the callbacks; takes the first logger whose experiment has alerts."""
        del module
        if self.experiment is None:
            for logger in getattr(trainer, "loggers", ()):
                experiment = getattr(logger, "experiment", None)
                if hasattr(experiment, "alert"):
                    self.experiment = experiment
                    return

    def __call__(self, alert: Alert) -> None:
        """Sends; does nothing where no logger has alerts."""
        if self.experiment is None or SEVERITIES.index(alert.severity) < SEVERITIES.index(
            self.severity
        ):
            return
        title = f"{alert.kind.replace('_', ' ')} in {alert.place}"
        level = {"info": "INFO", "warn": "WARN", "error": "ERROR"}[alert.severity]
        self.experiment.alert(title=title, text=alert.message, level=level)
