"""Read the record of a run, also while it is being written; numpy only, no torch.

`read_run` gives a `Run`: arrays over steps whose last axis is the heads of all layers that occur
anywhere in the run (NaN where a step did not have them), the summaries, the alerts and the
checkpoints. What a crash cut off is skipped and named in `Run.problems`.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.names import CHANGE_NAMES, COVARIANCE_PAIRS, STAT_NAMES
from entropy_monitor.writers.base import Array, Layers, as_grid, head_count, layer_slices

FOLDER = "entropy_monitor"
LINES = "record.jsonl"
FRAMES = "heads.bin"
VERSION = 1


class RecordError(ValueError):
    """There is no readable record at the given path; the message is one line for a person."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step line, and how its heads map to the heads of the run."""

    line: Mapping[str, Any]
    layout: Mapping[str, Any]
    columns: Array


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recorded run.

    Attributes:
        path: The record's folder.
        header: The first line: version, units, sink and whatever the writer added.
        steps: int64 (n,), increasing.
        layers: All layers of the run with their (largest) head counts, in order of first
            appearance.
        stat_names: All statistics that occur.
        alerts: Alerts by step, each once.
        checkpoints: Lines of a replay, one per checkpoint, by step.
        problems: What could not be read, in words; empty for a clean record.
    """

    path: Path
    header: Mapping[str, Any]
    steps: Array
    layers: Layers
    stat_names: tuple[str, ...]
    alerts: tuple[Alert, ...]
    checkpoints: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]
    _steps: tuple[_Step, ...] = field(repr=False)
    _frames: Array = field(repr=False)

    def __len__(self) -> int:
        return len(self._steps)

    def require_steps(self) -> None:
        """Return if there is a step to look at.

        Raises:
            RecordError: If there is none: because nothing was recorded yet, or what was is damaged.
        """
        if self._steps:
            return
        if not self.problems:
            raise RecordError(f"No step has been recorded yet in {self.path}.")
        more = len(self.problems) - 1
        rest = f" (and {more} more)" if more else ""
        raise RecordError(f"No step can be read in {self.path}: {self.problems[0]}{rest}.")

    @property
    def heads(self) -> int:
        """Number of heads of all layers."""
        return head_count(self.layers)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each layer's heads stand on the last axis."""
        return layer_slices(self.layers)

    def stat(self, name: str) -> Array:
        """Return one statistic, float32 (steps, heads of all layers), NaN where absent.

        Raises:
            RecordError: If the run has no such statistic, or no step.
        """
        self.require_steps()
        if name not in self.stat_names:
            raise RecordError(
                f"No statistic {name!r} in {self.path}; it has {', '.join(self.stat_names)}."
            )
        values = np.full((len(self), self.heads), np.nan, dtype=np.float32)
        for row, step in enumerate(self._steps):
            if name in step.layout["stats"]:
                line = step.layout["stats"].index(name)
                values[row, step.columns] = self._block(step, "stats")[line]
        return values

    def grid(self, name: str) -> Array:
        """Return one statistic as float32 (steps, layers, most heads of a layer), NaN-padded."""
        return as_grid(self.stat(name), self.layers)

    def history(self) -> dict[str, Array]:
        """Return all statistics as grids by name: what `entropy_monitor.alerts.scan` takes."""
        return {name: self.grid(name) for name in self.stat_names}

    @property
    def change(self) -> Array:
        """Total, sink, content, support since the baseline: (steps, 4, heads), NaN where absent."""
        return self._all("change", len(CHANGE_NAMES))

    @property
    def change_se(self) -> Array:
        """Standard errors of `change`, same shape."""
        return self._all("change_se", len(CHANGE_NAMES))

    @property
    def cov(self) -> Array:
        """Covariances of the means between sequences: (steps, 10, heads), NaN where absent."""
        return self._all("cov", len(COVARIANCE_PAIRS))

    def frame(self, step: int, block: str = "stats") -> Array:
        """Return one block at one step, (lines, heads of all layers), NaN where absent."""
        entry = self._steps[self.index(step)]
        lines = int(entry.layout["blocks"].get(block, 0))
        values = np.full((lines, self.heads), np.nan, dtype=np.float32)
        if lines:
            values[:, entry.columns] = self._block(entry, block)
        return values

    def stats_at(self, step: int) -> tuple[str, ...]:
        """Return the names of the lines of `frame(step)`."""
        return tuple(self._steps[self.index(step)].layout["stats"])

    def index(self, step: int) -> int:
        """Return the row of a step.

        Raises:
            RecordError: If the step was not recorded; the message names the nearest ones.
        """
        row = int(np.searchsorted(self.steps, step))
        if row == len(self) or self.steps[row] != step:
            near = sorted(self.steps.tolist(), key=lambda other: abs(other - step))[:3]
            shown = ", ".join(map(str, near)) or "none"
            raise RecordError(f"Step {step} is not in {self.path}; nearest: {shown}.")
        return row

    def summary(self, step: int | None = None) -> dict[str, Any]:
        """Return `EntropyChange.to_dict()` of a step (default: the last); empty without one."""
        if not len(self):
            return {}
        return dict(self._line(step).get("summary") or {})

    def baseline_step(self, step: int | None = None) -> int | None:
        """Return the step that the change of a step (default: the last) counts from."""
        value = self.summary(step).get("baseline_step")
        return None if value is None else int(value)

    def scalar(self, tag: str) -> Array:
        """Return one model scalar over the steps, float64 (steps,), NaN where absent."""
        values = (step.line.get("model", {}).get(tag) for step in self._steps)
        return np.array(
            [math.nan if value is None else value for value in values], dtype=np.float64
        )

    def _line(self, step: int | None) -> Mapping[str, Any]:
        return self._steps[-1 if step is None else self.index(step)].line

    def _all(self, block: str, lines: int) -> Array:
        values = np.full((len(self), lines, self.heads), np.nan, dtype=np.float32)
        for row, step in enumerate(self._steps):
            if step.layout["blocks"].get(block) == lines:
                values[row][:, step.columns] = self._block(step, block)
        return values

    def _block(self, step: _Step, block: str) -> Array:
        heads = len(step.columns)
        start = int(step.line["offset"])
        for name, lines in step.layout["blocks"].items():
            size = 4 * int(lines) * heads
            if name == block:
                raw = self._frames[start : start + size]
                return raw.view("<f4").reshape(int(lines), heads)
            start += size
        raise KeyError(block)


def find_record(path: str | os.PathLike[str]) -> Path:
    """Return the record's folder for a run folder, the record itself, or a parent of exactly one.

    Raises:
        RecordError: If there is none, or more than one.
    """
    base = Path(path)
    if base.is_file() and base.name in (LINES, FRAMES):
        base = base.parent
    if not base.exists():
        raise RecordError(f"{base} does not exist.")
    if not base.is_dir():
        raise RecordError(f"{base} is not a run folder (expected {FOLDER}/{LINES} in it).")
    for folder in (base, base / FOLDER):
        if (folder / LINES).is_file():
            return folder
    # A folder of Lightning logs is a few levels deep; a whole disk must not be walked.
    found = sorted(
        line.parent
        for depth in range(1, 5)
        for line in base.glob("*/" * depth + LINES)
        if line.is_file()
    )
    if not found:
        raise RecordError(f"No record of a run in {base} (looked for {FOLDER}/{LINES}).")
    if len(found) > 1:
        shown = ", ".join(str(folder) for folder in found[:6])
        raise RecordError(
            f"{len(found)} runs in {base}, name one of them: {shown}{', ...' * (len(found) > 6)}"
        )
    return found[0]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the objects of a record's lines, and what could not be read.

    A last line without its newline is still being written (or was cut off) and is not a problem.
    """
    if not path.is_file():
        return [], []
    *complete, _ = path.read_bytes().split(b"\n")
    lines, problems = [], []
    for number, raw in enumerate(complete, start=1):
        try:
            line = json.loads(raw)
        except ValueError:
            problems.append(f"{path.name}:{number} is cut off or damaged and was skipped")
            continue
        if isinstance(line, dict) and isinstance(line.get("type"), str):
            lines.append(line)
        else:
            problems.append(f"{path.name}:{number} has no type and was skipped")
    return lines, problems


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the record of a run.

    Args:
        path: The run's folder, the record's folder, or a parent that holds exactly one.

    Returns:
        The run; with no steps if none has been written yet.

    Raises:
        RecordError: If there is no record, more than one, or one of a newer version.
    """
    folder = find_record(path)
    lines, problems = read_lines(folder / LINES)
    header = next((line for line in lines if line["type"] == "header"), {})
    if int(header.get("version", VERSION)) > VERSION:
        raise RecordError(
            f"{folder} was written by a newer entropy_monitor (record version {header['version']}, "
            f"this one reads {VERSION})."
        )
    frames = _map(folder / FRAMES)
    layouts = {line["id"]: line for line in lines if line["type"] == "layout" and _is_layout(line)}
    by_step: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if line["type"] == "step":
            problem = _problem(line, layouts, frames)
            if problem:
                problems.append(problem)
            else:
                by_step[int(line["step"])] = line
    ordered = [by_step[step] for step in sorted(by_step)]
    used = {line["layout"]: layouts[line["layout"]] for line in ordered}
    layers = _union(list(used.values()))
    columns = {key: _columns(layout, layers) for key, layout in used.items()}
    return Run(
        path=folder,
        header=header,
        steps=np.array(sorted(by_step), dtype=np.int64),
        layers=layers,
        stat_names=_stat_names(list(used.values())),
        alerts=_alerts(lines, problems),
        checkpoints=_checkpoints(lines),
        problems=tuple(problems),
        _steps=tuple(
            _Step(line=line, layout=used[line["layout"]], columns=columns[line["layout"]])
            for line in ordered
        ),
        _frames=frames,
    )


def _map(path: Path) -> Array:
    """Return the frames' bytes, mapped: a long run is larger than what one look at it needs."""
    if not path.is_file() or path.stat().st_size == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _is_layout(line: Mapping[str, Any]) -> bool:
    try:
        sizes = [int(count) for _, count in line["layers"]] + [
            int(lines) for lines in line["blocks"].values()
        ]
        return (
            min(sizes, default=0) >= 0
            and len(line["stats"]) == line["blocks"]["stats"]
            and "id" in line
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _problem(
    line: Mapping[str, Any], layouts: Mapping[int, Mapping[str, Any]], frames: Array
) -> str | None:
    """Say why a step cannot be read, or None."""
    name = f"step {line.get('step')}"
    try:
        layout = layouts[line["layout"]]
        _, start, length = int(line["step"]), int(line["offset"]), int(line["length"])
    except (KeyError, TypeError, ValueError):
        return f"{name}: its line or its layout is incomplete"
    heads = sum(count for _, count in layout["layers"])
    if start < 0 or length != 4 * heads * sum(layout["blocks"].values()):
        return f"{name}: the frame does not fit its layout"
    if start + length > len(frames):
        return f"{name}: {FRAMES} ends before its frame"
    if zlib.crc32(frames[start : start + length].data) != line.get("crc32"):
        return f"{name}: the frame's checksum is wrong"
    return None


def _union(layouts: list[Mapping[str, Any]]) -> Layers:
    heads: dict[str, int] = {}
    for layout in layouts:
        for name, count in layout["layers"]:
            heads[name] = max(heads.get(name, 0), int(count))
    return tuple(heads.items())


def _columns(layout: Mapping[str, Any], layers: Layers) -> Array:
    slices = layer_slices(layers)
    parts = [np.arange(count) + slices[name].start for name, count in layout["layers"]]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _stat_names(layouts: list[Mapping[str, Any]]) -> tuple[str, ...]:
    seen = dict.fromkeys(name for layout in layouts for name in layout["stats"])
    known = [name for name in STAT_NAMES if name in seen]
    return (*known, *(name for name in seen if name not in STAT_NAMES))


def _alerts(lines: list[dict[str, Any]], problems: list[str]) -> tuple[Alert, ...]:
    """Return alerts by step; a resumed run raises some again, the later one counts."""
    alerts: dict[tuple[Any, ...], Alert] = {}
    for line in lines:
        if line["type"] != "alert":
            continue
        try:
            alert = Alert.from_dict({k: v for k, v in line.items() if k not in ("type", "time")})
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"an alert could not be read ({error})")
            continue
        alerts[(alert.step, alert.kind, alert.level, alert.layer, alert.head)] = alert
    return tuple(sorted(alerts.values(), key=lambda alert: alert.step))


def _checkpoints(lines: list[dict[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return checkpoint lines by step; a resumed replay tells one again, the later line counts."""
    last = {
        (line["step"], str(line.get("name", ""))): {
            k: v for k, v in line.items() if k not in ("type", "time")
        }
        for line in lines
        if line["type"] == "checkpoint" and isinstance(line.get("step"), int)
    }
    return tuple(last[key] for key in sorted(last))
