"""What a replay is asked to do, and how it ended."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entropy_monitor.replay.errors import ReplayError
from entropy_monitor.replay.models import ModelSpec
from entropy_monitor.replay.rows import Outcome
from entropy_monitor.replay.tokens import TokenSpec

Say = Callable[[str], None]
"""Takes a line meant for a person."""

Track = Callable[[int, int], None]
"""Takes how many checkpoints are done, and of how many."""

Sink = str | int | tuple[int, ...] | dict[str, list[int]]

FOLDER = "replay"
"""Sub-folder of the run for the plan, the parts and downloads."""

TRY_AGAIN = ("missing", "corrupt", "failed")
"""What the same command tries again."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What to replay and how.

    Attributes:
        model: A path, or ``OWNER/NAME`` on the hub.
        logdir: Folder of the run; None: ``runs/<name>``.
        tokens: The sequences.
        spec: How to build the model.
        revisions: ``all``, ``log``, a number, or names and steps separated by commas.
        baseline: Name or step of the checkpoint that changes are counted from; None: the first that
            was measured.
        rows: Rows per sequence beyond the first 16; None for all.
        sink: As in `AttentionMonitor`; ``auto`` is found on the last checkpoint and then kept.
        batch: Sequences per forward pass; None: as many as fit about 1 GB of activations.
        threads: CPU threads; None: all cores. Part of the plan, since another number may round
            differently.
        shard: ``(i, n)``: measure every n-th checkpoint from the i-th on.
        keep: Keep downloads, in the hub's own cache.
        yes: Go on even if it does not seem to fit.
        dry_run: Say what it would cost, and stop.
        restart: Throw away what an earlier replay left in the folder.
        skip_duplicates: Leave checkpoints with identical weights out of the curves, except the last
            of each kind.
        parquet: Also write ``heads.parquet``.
        max_download_gb: Most that is downloaded without ``yes``.
    """

    model: str
    tokens: TokenSpec
    logdir: str | None = None
    spec: ModelSpec = field(default_factory=ModelSpec)
    revisions: str = "all"
    baseline: str | None = None
    rows: int | None = 64
    sink: Sink = "first"
    batch: int | None = None
    threads: int | None = None
    shard: tuple[int, int] | None = None
    keep: bool = False
    yes: bool = False
    dry_run: bool = False
    restart: bool = False
    skip_duplicates: bool = False
    parquet: bool = False
    max_download_gb: float = 50.0

    def __post_init__(self) -> None:
        for name in ("rows", "batch", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ReplayError(f"`--{name}` must be at least 1, got {value}.")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ReplayError(
                f"`--shard` must be i/n with 0 <= i < n, got {self.shard[0]}/{self.shard[1]}."
            )
        if self.restart and self.workers[1] > 1:
            raise ReplayError("`--restart` needs a single worker: others may be writing already.")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        name = (
            Path(self.model).resolve().name
            if Path(self.model).exists()
            else self.model.split("/")[-1]
        )
        return Path(self.logdir) if self.logdir is not None else Path("runs") / name

    @property
    def workers(self) -> tuple[int, int]:
        """This worker's number and how many there are: as given, or by ``torchrun``."""
        if self.shard is not None:
            return self.shard
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """How a replay ended.

    Attributes:
        folder: The run's folder.
        outcomes: What became of every checkpoint that was tried so far, in order.
        finished: Whether all workers are done and results are written.
        summary: What `write_results` found; empty before the end.
    """

    folder: Path
    outcomes: tuple[Outcome, ...]
    finished: bool
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0: all measured; 1: some were not; 2: none was."""
        measured = sum(o.status == "measured" for o in self.outcomes)
        problems = sum(o.status in TRY_AGAIN for o in self.outcomes)
        return 1 if problems and measured else 2 if problems else 0
