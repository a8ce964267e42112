"""`EntropyMonitorCallback`: the same monitor for the Hugging Face ``Trainer``."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from entropy_monitor.distributed import Ranks
from entropy_monitor.monitor import AttentionMonitor, Sink, check_options
from entropy_monitor.names import CHANGE_NAMES, CHANGE_PREFIX, STAT_PREFIX
from entropy_monitor.one_shot import arm, disarm
from entropy_monitor.pipeline import LAYER_STATISTICS, Action, Pipeline, warn_once
from entropy_monitor.probe import Probe
from entropy_monitor.schedules import any_of, every, log_spaced
from entropy_monitor.snapshot import Snapshot
from entropy_monitor.writers import Emission, RecordWriter, TensorBoardWriter, Writer
from entropy_monitor.writers.base import clean_tag

_STATE_FILE = "entropy_monitor.pt"

_LOGGED = (
    *(f"{STAT_PREFIX}/{stat}" for stat in LAYER_STATISTICS),
    *(f"{CHANGE_PREFIX}/{name}" for name in CHANGE_NAMES),
    f"{STAT_PREFIX}/alerts",
)
"""Model-wide numbers that the Trainer logs; it prints them too."""


class EntropyMonitorCallback(transformers.TrainerCallback):
    """Logs why attention entropy changes, from inside a Hugging Face ``Trainer``.

    The numbers are those of `entropy_monitor.EntropyMonitor`: measured in the training step's own
    forward pass, which stays the same bit for bit. They go through ``Trainer.log`` to whatever the
    Trainer reports to (tags become ``train/attention/...``), to TensorBoard's own tab where the
    Trainer writes TensorBoard logs, and to a record in the output folder (``entropy-monitor report
    OUTPUT_DIR``).

    Args:
        every_n_steps: Optimiser steps between two measurements.
        log_early: Measure also at steps 1, 2, 4, 8, ... (four per doubling).
        schedule: A function of the step that says when to measure, instead of the two above.
        sink: Which keys are the sink, see `AttentionMonitor`.
        rows: Rows measured per sequence beyond the first 16; None measures every row.
        layers: Shell patterns of the layers to measure; None measures all.
        probe: A fixed batch measured instead of the training batch, see `EntropyMonitor`.
        baseline: Step of the baseline of the attribution, or ``(first, last)``.
        alerts: Policy of the alerts; None raises none.
        on_alert: Called with every alert; by default an alarm is a Python warning. One with a
            method ``setup_trainer(trainer, module)`` is given both first.
        layer_stats: Statistics that are logged per layer. None by default, since the Trainer prints
            all that it logs; record and tab have every layer and head.
        record: Whether to write the record, or the folder to write it into.
        writers: Further writers.
        attention_modules: Shell pattern for class names of attention modules that are not named so.
        name: Tells several monitors of one trainer apart; the first part of their tags.
        on_error: ``"warn"`` leaves out what fails with one warning, ``"raise"`` raises.

    Raises:
        ValueError: If an argument has a value that is not allowed.
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
        layer_stats: Sequence[str] = (),
        record: bool | str = True,
        writers: Sequence[Writer] = (),
        attention_modules: str | None = None,
        name: str = "",
        on_error: str = "warn",
    ) -> None:
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
        self._on_error = on_error
        self._trainer: Any = None
        self._monitor: AttentionMonitor | None = None
        self._pending: int | None = None
        self._around: Any = None
        self._failed = False
        self._ranks = Ranks()
        self._told: set[str] = set()

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

    def attach(self, trainer: "transformers.Trainer") -> "EntropyMonitorCallback":
        """Name the Trainer to measure; needed only where it cannot be found by itself.

        Args:
            trainer: The Trainer that this callback was given to.

        Returns:
            This callback.
        """
        self._trainer = trainer
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the monitor and the writers of this run."""
        self._told, self._pending, self._failed = set(), None, False
        self._ranks = Ranks()
        with self._guarded("could not start"):
            self._ranks.prepare()
            if state.global_step == 0:
                self._pipeline.restart()  # the callback may have served another run
            trainer = self._trainer or _calling_trainer()
            if trainer is None:
                raise RuntimeError(
                    "the Trainer was not found; call `callback.attach(trainer)` before `train`"
                )
            self._trainer = trainer
            model: nn.Module = kwargs["model"]
            self._monitor = AttentionMonitor(
                model, keep_rows=self._probe is not None, **self._options
            )
            self._monitor.ranks = self._ranks
            self._restore(args, state)
            if state.is_world_process_zero:
                self._open_writers(args)
            for action in self._on_alert:
                if hasattr(action, "setup_trainer"):
                    action.setup_trainer(trainer, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Arm the measurement of the coming forward pass, or run the probe."""
        if self._monitor is None or self._failed or not self._due(state.global_step):
            return
        if self._probe is not None:
            self._run_probe(state.global_step, control)
            return
        self._pending = state.global_step
        self._arm()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the next micro-batch of the same step too."""
        if self._pending is not None and self._monitor is not None:
            self._arm()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Emit once per optimiser step."""
        self._disarm()
        monitor, step = self._monitor, self._pending
        self._pending = None
        if monitor is None or step is None or self._failed:
            return
        with self._guarded("could not add up what was measured"):
            # Every rank takes part, also one whose monitor is off, so that none waits for it.
            snapshot = monitor.reduced_snapshot(step)
            self._emit(snapshot, control, write=state.is_world_process_zero)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep baseline and state of the alerts beside the Trainer's checkpoint."""
        if not state.is_world_process_zero or self._monitor is None:
            return
        try:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                torch.save(self._pipeline.state_dict(), folder / self._file_name())
        except Exception as error:
            self._failed_at("its state is missing in a checkpoint", error)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the final weights with the probe, and close the record."""
        self._disarm()
        last = self._pipeline.last
        if (
            self._probe is not None
            and self._monitor is not None
            and (last is None or last.step != state.global_step)
        ):
            self._run_probe(state.global_step, control)
        self._monitor, self._pending = None, None
        self._ranks = Ranks()
        self._pipeline.close()

    def _due(self, step: int) -> bool:
        with self._guarded("could not read the schedule"):
            return bool(self.schedule(step))
        return False

    def _arm(self) -> None:
        monitor, step = self._monitor, self._pending
        if monitor is None or not monitor.enabled:
            return
        self._disarm()

        def around(
            model: Any = None, inputs: Any = None, *_: Any, **__: Any
        ) -> AbstractContextManager[None]:
            ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
            if ids is None and isinstance(self._options["sink"], Mapping):
                with self._guarded("could not read the batch"):
                    raise ValueError("`sink` by token ids needs a batch with `input_ids`")
                return nullcontext()
            return monitor.observe(step, input_ids=ids)

        self._around = around
        arm(self._trainer, "compute_loss", around)

    def _disarm(self) -> None:
        if self._around is not None:
            disarm(self._trainer, "compute_loss", self._around)
            self._around = None

    def _run_probe(self, step: int, control: Any) -> None:
        assert self._probe is not None
        assert self._monitor is not None
        if self._failed:
            return
        with self._guarded("the probe failed"):
            with self._trainer.compute_loss_context_manager():
                self._probe.run(
                    self._monitor.model, self._monitor, step, move=self._trainer._prepare_input
                )
            snapshot = self._monitor.probed_snapshot(step)
            self._emit(snapshot, control, write=self._trainer.is_world_process_zero())

    def _emit(self, snapshot: Snapshot, control: Any, *, write: bool) -> None:
        if not snapshot.layers and self._monitor is not None and not self._monitor.enabled:
            self._give_up()
            return
        emission = self._pipeline.emit(snapshot, write=write, agree=self._ranks.agree)
        if snapshot.layers:
            # `Trainer.log` clears the flag by which the Trainer remembers to log its own loss at
            # this step.
            should_log = control.should_log
            self._trainer.log(self._logged(emission))
            control.should_log = should_log

    def _logged(self, emission: Emission) -> dict[str, float]:
        start = f"{self.name}/" if self.name else ""
        wanted = {f"{start}{tag}" for tag in _LOGGED}
        return {
            clean_tag(tag): value
            for tag, value in emission.model.items()
            if tag in wanted or tag.removeprefix(start).count("/") > 1
        }

    def _open_writers(self, args: Any) -> None:
        record = f"entropy_monitor{'-' if self.name else ''}{self.name}"
        if self._record is not False:
            folder = self._record if isinstance(self._record, str) else args.output_dir
            header = {key: value for key, value in self._options.items() if key != "on_error"}
            make = partial(RecordWriter, folder, header=header, name=record)
            self._pipeline.add_writer(make, "the record")
        board = _tensorboard_writer(self._trainer)
        if board is not None and not self.name:
            # The Trainer logs the scalars; the tab needs the heads and alerts.
            make_tab = partial(TensorBoardWriter, board, scalars=False)
            self._pipeline.add_writer(make_tab, "TensorBoard's tab")

    def _restore(self, args: Any, state: Any) -> None:
        if state.global_step == 0:
            return
        found = Path(args.output_dir) / f"checkpoint-{state.global_step}" / self._file_name()
        if found.is_file():
            self._pipeline.load_state_dict(torch.load(found, map_location="cpu", weights_only=True))

    def _file_name(self) -> str:
        return f"{self.name}-{_STATE_FILE}" if self.name else _STATE_FILE

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
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


def _calling_trainer() -> Any:
    """The Trainer that calls this callback: not an argument, but a few frames up the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, transformers.Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _tensorboard_writer(trainer: Any) -> Any:
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "TensorBoardCallback":
            return getattr(callback, "tb_writer", None)
    return None
