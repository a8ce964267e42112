"""Measuring: one model over all sequences, and one worker's share of a series."""

import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from entropy_monitor.capture import CaptureReport
from entropy_monitor.monitor import AttentionMonitor
from entropy_monitor.replay.checkpoints import Checkpoint, Source
from entropy_monitor.replay.errors import CheckpointError, ReplayError
from entropy_monitor.replay.models import LoadedModel, load_model, read_config
from entropy_monitor.replay.rows import Outcome, PartStore
from entropy_monitor.replay.settings import FOLDER, TRY_AGAIN, ReplaySettings, Say, Track
from entropy_monitor.replay.tokens import Tokens
from entropy_monitor.snapshot import Snapshot


@contextmanager
def unseen_is_reported() -> Iterator[None]:
    """Attention that was not seen is part of a checkpoint's outcome here, not a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="entropy_monitor: ")
        yield


def measure(
    loaded: LoadedModel, tokens: Tokens, *, step: int, batch: int, rows: int | None, sink: Any
) -> tuple[Snapshot, CaptureReport]:
    """Run one model over all sequences.

    Args:
        loaded: The model.
        tokens: ``(sequences, length)``.
        step: Its step.
        batch: Sequences per forward pass.
        rows: Rows per sequence beyond the first 16; None for all.
        sink: As in `AttentionMonitor`.

    Returns:
        The snapshot with per-row values, and the capture's report.

    Raises:
        ReplayError: If no attention was seen, or memory does not suffice.
    """
    monitor = AttentionMonitor(loaded.model, sink=sink, rows=rows, keep_rows=True, on_error="raise")
    ids = torch.from_numpy(tokens)
    with torch.no_grad(), unseen_is_reported():
        for start in range(0, len(ids), batch):
            piece = ids[start : start + batch]
            try:
                with monitor.observe(
                    step=step, input_ids=piece.to(next(loaded.model.parameters()).device)
                ):
                    loaded.forward(piece)
            except torch.OutOfMemoryError as error:
                raise ReplayError(
                    f"out of memory with {batch} sequences at a time: use a smaller --batch."
                ) from error
    report = monitor.report
    if report is None or not report.seen:
        told = report.describe() if report is not None else ""
        raise ReplayError(f"no attention was seen in this model. {told}")
    return monitor.snapshot(), report


@dataclass(kw_only=True)
class Worker:
    """One process's share of the checkpoints."""

    source: Source
    settings: ReplaySettings
    plan: dict[str, Any]
    chosen: tuple[Checkpoint, ...]
    tokens: Tokens
    config: Any
    sink: Any
    say: Say
    track: Track

    def __post_init__(self) -> None:
        self.store = PartStore(self.settings.folder / FOLDER / "parts")
        self.known: dict[int, Outcome] = {}
        self.running: str | None = None

    def run(self) -> None:
        """Measure what is not measured yet; meanwhile the next one, and no more, is fetched."""
        rank, workers = self.settings.workers
        todo = [i for i in range(len(self.chosen)) if i % workers == rank and not self._done(i)]
        done = len(range(rank, len(self.chosen), workers)) - len(todo)
        if done:
            self.say(f"{done} checkpoints are measured already")
        started = time.monotonic()
        self.track(0, len(todo))
        ahead: Future[Path | None] | None = None
        for number, index in enumerate(todo):
            current = ahead or self._start(index)
            path, problem = self._wait(current)
            self.running = self._mark(index)
            following = todo[number + 1] if number + 1 < len(todo) else None
            ahead = None
            if following is not None and self.source.remote:
                ahead = self._start(following)
            began = time.monotonic()
            self._one(index, path, problem)
            self.track(number + 1, len(todo))
            now = time.monotonic()
            self._tell(index, number + 1, len(todo), now - began, now - started)

    def _start(self, index: int) -> "Future[Path | None]":
        """Fetch in the background, on a thread that does not hold up a process being stopped."""
        future: Future[Path | None] = Future()

        def work() -> None:
            try:
                future.set_result(self._fetch(index))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=work, daemon=True).start()
        return future

    def _done(self, index: int) -> bool:
        outcome = self._outcome(index)
        return outcome is not None and outcome.status not in TRY_AGAIN

    def _outcome(self, index: int) -> Outcome | None:
        if index not in self.known:
            outcome = self.store.outcome(index)
            if outcome is None or outcome.name != self.chosen[index].name:
                return None
            self.known[index] = outcome
        return self.known[index]

    def _fetch(self, index: int) -> Path | None:
        """Fetch a checkpoint; None if its weights are known under another name, or will be."""
        mark = self._mark(index)
        if mark is not None and (
            mark == self.running or self._twin(fingerprint=mark, index=index) is not None
        ):
            return None
        return self.source.fetch(self.chosen[index])

    def _mark(self, index: int) -> str | None:
        checkpoint = self.chosen[index]
        return self.source.fingerprint(checkpoint) if checkpoint.problem is None else None

    def _wait(self, future: "Future[Any]") -> tuple[Path | None, CheckpointError | None]:
        try:
            return future.result(), None
        except CheckpointError as error:
            return None, error

    def _twin(
        self, *, index: int, fingerprint: str | None = None, weights: str | None = None
    ) -> int | None:
        """Return a measured checkpoint with the same weights."""
        if fingerprint is None and weights is None:
            return None
        for other in range(len(self.chosen)):
            outcome = self._outcome(other) if other != index else None
            if outcome is None or outcome.status != "measured":
                continue
            if (fingerprint is not None and outcome.fingerprint == fingerprint) or (
                weights is not None and outcome.weights_sha256 == weights
            ):
                return other
        return None

    def _one(self, index: int, path: Path | None, problem: CheckpointError | None) -> None:
        checkpoint = self.chosen[index]
        fingerprint = self._mark(index)
        outcome = Outcome(
            name=checkpoint.name, step=checkpoint.step, status="measured", fingerprint=fingerprint
        )
        snapshot: Snapshot | None = None
        try:
            if problem is not None:
                raise problem
            if path is None:
                twin = self._twin(fingerprint=fingerprint, index=index)
                path = self.source.fetch(checkpoint) if twin is None else None
                if twin is not None:
                    outcome, snapshot = self._copy(twin, outcome)
            if path is not None:
                outcome, snapshot = self._measure(path, outcome, index)
        except CheckpointError as error:
            outcome = replace(outcome, status=error.status, reason=error.reason, fingerprint=None)
        finally:
            self.source.release(checkpoint)
        self.store.write(index, outcome, snapshot)
        self.known[index] = outcome

    def _measure(self, path: Path, outcome: Outcome, index: int) -> tuple[Outcome, Snapshot]:
        config = self.config
        if (
            config is not None
            and (path / "config.json").is_file()
            and self.settings.spec.config is None
        ):
            config = read_config(path, self.settings.spec)
        loaded = load_model(path, self.settings.spec, config=config)
        outcome = replace(
            outcome, weights_sha256=loaded.weights_sha256, parameters=loaded.parameters
        )
        twin = self._twin(weights=loaded.weights_sha256, index=index)
        if twin is not None:
            return self._copy(twin, outcome)
        try:
            snapshot, report = measure(
                loaded,
                self.tokens,
                step=outcome.step,
                batch=self.plan["batch"],
                rows=self.settings.rows,
                sink=self.sink,
            )
        except (ReplayError, KeyboardInterrupt):
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise CheckpointError(
                "failed", f"the forward pass failed ({type(error).__name__}: {first[:160]})"
            ) from error
        return replace(outcome, unseen={**report.unseen, **report.opaque, **report.lost}), snapshot

    def _copy(self, twin: int, outcome: Outcome) -> tuple[Outcome, Snapshot]:
        known = self.known[twin]
        snapshot = replace(self.store.snapshot(twin), step=outcome.step)
        return (
            replace(
                outcome,
                weights_sha256=known.weights_sha256,
                parameters=known.parameters,
                unseen=known.unseen,
            ),
            snapshot,
        )

    def _tell(self, index: int, number: int, total: int, took: float, since: float) -> None:
        outcome = self.known[index]
        left = (total - number) * since / number
        eta = f"{total - number} left, about {duration(left)}" if number < total else "last"
        what = (
            outcome.status
            if outcome.status == "measured"
            else f"{outcome.status}: {outcome.reason}"
        )
        self.say(f"[{number}/{total}] {outcome.name}: {what} ({took:.1f} s; {eta})")


def duration(seconds: float) -> str:
    """Return a duration a person can read.

    Example:
        >>> duration(4.2), duration(75.0), duration(7300.0)
        ('4 s', '1 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
