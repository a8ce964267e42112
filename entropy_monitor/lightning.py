"""`EntropyMonitor`: the Lightning callback, which decides when to measure.

The numbers come from the layers below.

Works with ``pytorch_lightning`` and with ``lightning.pytorch``, whichever is loaded.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from entropy_monitor.distributed import Ranks
from entropy_monitor.monitor import AttentionMonitor, Sink, check_options
from entropy_monitor.names import CHANGE_PREFIX, STAT_PREFIX
from entropy_monitor.one_shot import arm, disarm
from entropy_monitor.pipeline import LAYER_STATISTICS, Action, Pipeline, warn_once
from entropy_monitor.probe import Probe
from entropy_monitor.schedules import any_of, every, log_spaced
from entropy_monitor.snapshot import Snapshot
from entropy_monitor.writers import Emission, RecordWriter, Writer, writer_for


def _import_first(names: list[str]) -> Any:
    missing: ModuleNotFoundError | None = None
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
            missing = error
    raise ModuleNotFoundError(
        "EntropyMonitor needs Lightning: pip install pytorch-lightning", name="pytorch_lightning"
    ) from missing


if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    # Both packages ship the same Trainer; the one that is loaded is the one the user trains with.
    loaded = [name for name in ("pytorch_lightning", "lightning.pytorch") if name in sys.modules]
    pl = _import_first([*loaded, "pytorch_lightning", "lightning.pytorch"])


# Under Lightning's own logger, so that it is shown like "`Trainer.fit` stopped".
_log = logging.getLogger(f"{pl.__name__}.utilities.rank_zero")


class EntropyMonitor(pl.Callback):
    """Logs why attention entropy changes: sink and content apart, per layer and head.

    Everything is measured in the training step's own forward pass; training is the same bit for
    bit. The numbers go to every logger of the trainer, to ``trainer.callback_metrics`` (so that
    ``EarlyStopping(monitor="attention/...")`` works), and to a record in the run's folder that
    needs no logger (``entropy-monitor report RUN``).

    Args:
        every_n_steps: Optimiser steps between two measurements. The default keeps the cost of a
            sampled measurement, about one percent of a step, at a thousandth of the run, while a
            collapse that takes a hundred steps is still seen ten times.
        log_early: Measure also at steps 1, 2, 4, 8, ... (four per doubling), where sinks form.
        schedule: A function of the step that says when to measure, instead of the two above.
        sink: Which keys are the sink, see `AttentionMonitor`.
        rows: Rows measured per sequence beyond the first 16; None measures every row.
        layers: Shell patterns of the layers to measure; None measures all.
        probe: A fixed batch, run without gradient and in evaluation mode at monitored steps instead
            of measuring the training batch. Its rows are paired over time, so the attribution has
            far less noise. A tensor, a tuple or a dictionary of arguments of the module's
            ``forward``, or a function of the module that runs it.
        baseline: Step from which on the first measurement is the baseline of the attribution, or
            ``(first, last)``: these steps together.
        alerts: Policy of the alerts: its name, path or the policy itself; None raises none.
        on_alert: Called with every alert; by default an alarm is a Python warning. One with a
            method ``setup_trainer(trainer, module)`` is given both first.
        layer_stats: Statistics that loggers get per layer (all are in the record).
        record: Whether to write the record, or the folder to write it into.
        writers: Further writers.
        prog_bar: Show model-wide sink mass and content entropy in the progress bar.
        attention_modules: Shell pattern for class names of attention modules that are not named so.
        name: Tells several monitors of one trainer apart; it becomes the first part of their tags.
        on_error: ``"warn"`` leaves out what fails with one warning, ``"raise"`` raises.

    Raises:
        ValueError: If an argument has a value that is not allowed.

    Example:
        >>> EntropyMonitor(every_n_steps=0)
        Traceback (most recent call last):
            ...
        ValueError: `every_n_steps` must be a number of steps >= 1; got 0.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 10,
        log_early: bool = False,
        schedule: Callable[[int], bool] | None = None,
        sink: Sink = "first",
        rows: int | None = 64,
        layers: str | Sequence[str] | None = None,
        probe: Any = None,
        baseline: int | tuple[int, int] = 0,
        alerts: Any = "default",
        on_alert: Sequence[Action] | None = None,
        layer_stats: Sequence[str] = LAYER_STATISTICS,
        record: bool | str = True,
        writers: Sequence[Writer] = (),
        prog_bar: bool = False,
        attention_modules: str | None = None,
        name: str = "",
        on_error: str = "warn",
    ) -> None:
        super().__init__()
        if (
            isinstance(every_n_steps, bool)
            or not isinstance(every_n_steps, int)
            or every_n_steps < 1
        ):
            raise ValueError(
                f"`every_n_steps` must be a number of steps >= 1; got {every_n_steps!r}."
            )
        check_options(sink=sink, rows=rows, on_error=on_error)
        if "/" in name:
            raise ValueError(f"`name` must not contain '/'; got {name!r}.")
        self.every_n_steps = every_n_steps
        self.schedule = schedule or (
            any_of(every(every_n_steps), log_spaced(per_doubling=4))
            if log_early
            else every(every_n_steps)
        )
        self.name = name
        self._options: dict[str, Any] = {
            "sink": sink,
            "rows": rows,
            "layers": layers,
            "attention_modules": attention_modules,
            "on_error": on_error,
        }
        self._probe = Probe(probe) if probe is not None else None
        self._pipeline = Pipeline(
            writers=writers,
            baseline=baseline,
            policy=alerts,
            on_alert=on_alert,
            layer_stats=layer_stats,
            on_error=on_error,
            prefix=name,
        )
        self._on_alert = tuple(on_alert or ())
        self._record = record
        self._record_folder: str | None = None
        self._prog_bar = prog_bar
        self._on_error = on_error
        self._monitor: AttentionMonitor | None = None
        self._pending: int | None = None  # the step whose micro-batches are being measured
        self._armed: tuple[Any, Any] | None = None
        self._failed = False
        self._ranks = Ranks()
        self._told: set[str] = set()

    @property
    def state_key(self) -> str:
        """Tells the states of several monitors apart in a checkpoint."""
        return f"EntropyMonitor{'-' if self.name else ''}{self.name}"

    @property
    def monitor(self) -> AttentionMonitor | None:
        """The monitor of the run; None before training starts."""
        return self._monitor

    @property
    def last(self) -> Emission | None:
        """What was emitted last."""
        return self._pipeline.last

    @property
    def pipeline(self) -> Pipeline:
        """Baseline, last change and writers."""
        return self._pipeline

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Make the monitor and the writers of this run, its state being restored by now."""
        self._told = set()
        self._pending = None
        self._failed = False
        self._ranks = Ranks()
        with self._guarded("could not start"):
            self._ranks.prepare()
            if trainer.global_step == 0:  # the callback may have served another run
                self._pipeline.restart()
                self._record_folder = None
            self._monitor = AttentionMonitor(
                pl_module, keep_rows=self._probe is not None, **self._options
            )
            self._monitor.ranks = self._ranks
            self._open_writers(trainer)
            for action in self._on_alert:
                if hasattr(action, "setup_trainer"):
                    action.setup_trainer(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Arm the measurement of this batch's forward pass, or run the probe."""
        monitor = self._monitor
        if monitor is None or self._failed:
            return
        with self._guarded("could not begin a step"):
            self._disarm()  # of a batch that was skipped
            step = _step(trainer)
            if step != self._pending and not self._due(step):
                return
            if self._probe is not None:
                self._run_probe(trainer, pl_module, step)
                return
            self._pending = step
            if monitor.enabled:
                self._arm(trainer, monitor, step, _input_ids(batch, self._options["sink"]))

    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Emit once per optimiser step, after its last micro-batch."""
        monitor = self._monitor
        if monitor is None or self._failed:
            return
        with self._guarded("could not end a step"):
            self._disarm()
            if self._pending is None or not _stepped(trainer):
                return
            step, self._pending = self._pending, None
            # Every rank takes part, also one whose monitor is off, so that none waits for it.
            self._emit(trainer, pl_module, monitor.reduced_snapshot(step))

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Measure the final weights with the probe, and close the record."""
        with self._guarded("could not measure the final weights"):
            if self._probe is not None and self._monitor is not None and not self._failed:
                last, step = self._pipeline.last, _step(trainer)
                if trainer.global_step > 0 and (last is None or last.step != step):
                    self._run_probe(trainer, pl_module, step, log=False)
        self._finish()

    def on_exception(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException
    ) -> None:
        """Leave nothing behind: after an exception Lightning calls this hook alone."""
        with suppress(Exception):  # the error to be seen is the one that ended the run
            self._finish()

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Leave nothing behind."""
        if stage == "fit":
            self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types: baseline, state of the alerts, folder of the record."""
        try:
            return {**self._pipeline.state_dict(), "record": self._record_folder}
        except Exception as error:  # the checkpoint is worth more than our part of it
            self._failed_at("its state is missing in a checkpoint", error)
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the baseline, alerts and record of the interrupted run."""
        try:
            self._pipeline.load_state_dict(state_dict)
            folder = state_dict.get("record")
            self._record_folder = folder if isinstance(folder, str) else None
        except Exception as error:
            self._failed_at("its saved state cannot be read", error)

    def _due(self, step: int) -> bool:
        with self._guarded("could not read the schedule"):
            return bool(self.schedule(step))
        return False

    def _arm(
        self, trainer: "pl.Trainer", monitor: AttentionMonitor, step: int, input_ids: Tensor | None
    ) -> None:
        def around(*_: Any, **__: Any) -> AbstractContextManager[None]:
            return monitor.observe(step, input_ids=input_ids)

        self._armed = (trainer.strategy, around)
        arm(trainer.strategy, "training_step", around)

    def _open_writers(self, trainer: "pl.Trainer") -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            # The tab of a run belongs to the monitor without a name.
            make = partial(writer_for, logger, tab=not self.name)
            self._pipeline.add_writer(make, f"logger {type(logger).__name__}")
        if self._record is not False:
            self._pipeline.add_writer(partial(self._make_record, trainer), "the record")

    def _make_record(self, trainer: "pl.Trainer") -> Writer:
        folder = self._choose_folder(trainer)
        header = {key: value for key, value in self._options.items() if key != "on_error"}
        record = f"entropy_monitor{'-' if self.name else ''}{self.name}"
        writer = RecordWriter(folder, header=header, name=record)
        self._record_folder = str(folder)
        return writer

    def _choose_folder(self, trainer: "pl.Trainer") -> Path:
        if isinstance(self._record, str):
            return Path(self._record)
        # As `trainer.log_dir` does, which asks all ranks; here one rank is alone.
        logger = trainer.loggers[0] if trainer.loggers else None
        log_dir = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        if log_dir is not None and Path(log_dir) != Path(trainer.default_root_dir):
            return Path(log_dir)
        # A logger without a folder of its own (or none): a resumed run goes on in its folder, a new
        # one gets its own.
        if self._record_folder is not None and Path(self._record_folder).is_dir():
            return Path(self._record_folder)
        return _next_version(Path(trainer.default_root_dir) / "entropy_logs")

    def _run_probe(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", step: int, *, log: bool = True
    ) -> None:
        assert self._probe is not None
        assert self._monitor is not None
        move = trainer.strategy.batch_to_device
        with self._guarded("the probe failed"):
            with trainer.precision_plugin.val_step_context():
                self._probe.run(pl_module, self._monitor, step, move=move)
            self._emit(trainer, pl_module, self._monitor.probed_snapshot(step), log=log)

    def _emit(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        snapshot: Snapshot,
        *,
        log: bool = True,
    ) -> None:
        if not snapshot.layers and self._monitor is not None and not self._monitor.enabled:
            self._give_up()
            return
        emission = self._pipeline.emit(
            snapshot, write=trainer.is_global_zero, agree=self._ranks.agree
        )
        if log and snapshot.layers:
            self._log(pl_module, emission)

    def _log(self, pl_module: "pl.LightningModule", emission: Emission) -> None:
        start = f"{self.name}/" if self.name else ""
        tops = (f"{start}{STAT_PREFIX}/", f"{start}{CHANGE_PREFIX}/")
        few = {
            tag: v
            for tag, v in emission.model.items()
            if tag.startswith(tops) and tag.count("/") == 1 + bool(start)
        }
        shown = (
            {f"{start}{STAT_PREFIX}/sink_mass", f"{start}{STAT_PREFIX}/content_entropy"}
            if self._prog_bar
            else set()
        )
        for tags, prog_bar in ((shown, True), (few.keys() - shown, False)):
            if tags:
                pl_module.log_dict(
                    {tag: few[tag] for tag in sorted(tags)},
                    logger=False,
                    prog_bar=prog_bar,
                    on_step=True,
                    on_epoch=False,
                    batch_size=1,
                )

    def _disarm(self) -> None:
        if self._armed is not None:
            strategy, around = self._armed
            disarm(strategy, "training_step", around)
            self._armed = None

    def _finish(self) -> None:
        self._disarm()
        self._pending = None
        self._monitor = None
        self._ranks = Ranks()
        self._pipeline.close()

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """An error inside ends monitoring, here and on the other ranks, and nothing else."""
        try:
            yield
        except Exception as error:
            self._give_up()
            self._failed_at(f"{what}; it is switched off for the rest of the run", error)

    def _give_up(self) -> None:
        self._failed = True
        if self._monitor is not None:
            self._monitor.enabled = False
        with suppress(Exception):
            self._ranks.leave()  # so that no other rank waits for this one

    def _failed_at(self, what: str, error: Exception) -> None:
        if self._on_error == "raise":
            raise error
        warn_once(
            f"entropy_monitor: {what}, training goes on ({type(error).__name__}: {error}).",
            self._told,
        )


def _step(trainer: "pl.Trainer") -> int:
    """Optimiser step as Lightning's own loggers count it: once per batch that stepped."""
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def _stepped(trainer: "pl.Trainer") -> bool:
    """Whether this batch ended an optimiser step (the last of its micro-batches)."""
    accumulates = getattr(trainer.fit_loop.epoch_loop, "_should_accumulate", None)
    return not accumulates() if accumulates is not None else True


def _input_ids(batch: Any, sink: Sink) -> Tensor | None:
    """The token ids of a batch, where the sink is given by them."""
    if not isinstance(sink, Mapping):
        return None
    candidates = (
        [batch.get("input_ids")]
        if isinstance(batch, Mapping)
        else [getattr(batch, "input_ids", None)]
    )
    candidates += list(batch) if isinstance(batch, (tuple, list)) else [batch]
    for found in candidates:
        if isinstance(found, Tensor) and found.ndim == 2 and not found.is_floating_point():
            return found
    raise ValueError(
        "`sink` by token ids needs a batch with `input_ids`, or whose first integer matrix holds "
        f"them; got a {type(batch).__name__}."
    )


def _next_version(folder: Path) -> Path:
    taken = [int(p.name[8:]) for p in folder.glob("version_*") if p.name[8:].isdigit()]
    return folder / f"version_{max(taken, default=-1) + 1}"
