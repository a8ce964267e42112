"""The project's own record of a run: append-only, needs no logger, survives a crash in mid-write.

A folder ``RUN/entropy_monitor/`` holds two files:

``record.jsonl``
    One JSON object per line, each with a ``type``: ``header`` (version, units, sink), ``layout``
    (layers and the lines of a frame), ``step`` (scalars, summary, and where its frame lies),
    ``alert``, ``checkpoint`` (one line of a replay). Numbers that are not finite are null.
``heads.bin``
    One frame per step: little-endian float32, the blocks named in the layout one after the other,
    each (lines, heads of all layers).

The frame is written before the line that points to it, and the line carries its length and
checksum: whatever a crash cuts off is left unread, and everything before it stays readable. Both
files are opened for appending and written with one system call per piece, so a reader may look at
any time. A resumed run appends to the same files; where a step occurs twice the later one is read.
`entropy_monitor.writers.record_reader` reads them without torch.

Several processes may append to one record on a local file system; on a network file system give
each its own folder.
"""

import errno
import json
import math
import os
import time
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from entropy_monitor.names import CHANGE_NAMES, COVARIANCE_PAIRS, STATISTICS
from entropy_monitor.writers.base import Array, Emission
from entropy_monitor.writers.record_reader import FOLDER, FRAMES, LINES, VERSION, read_lines


class RecordWriter:
    """Append emissions to the record of a run.

    Args:
        run: The run's folder; the record goes to ``run/entropy_monitor``. Made when missing.
        header: What else the first line should say: the sink, the rows, the model.
        name: Name of the record's folder, for several monitors side by side.
        timestamps: Whether lines carry the time of writing; without them equal runs give equal
            bytes.

    Raises:
        OSError: If the folder cannot be made or written; also from `write`, for instance when the
            disk is full. The record stays readable and later writes may succeed.

    Example:
        >>> import tempfile
        >>> from entropy_monitor.names import STAT_NAMES
        >>> from entropy_monitor.writers.record_reader import read_run
        >>> run = tempfile.mkdtemp()
        >>> writer = RecordWriter(run, header={"sink": "first"})
        >>> stats = np.ones((len(STAT_NAMES), 2), dtype=np.float32)
        >>> writer.write(Emission(step=5, layers=(("attn", 2),), stats=stats))
        >>> writer.close()
        >>> read_run(run).steps.tolist()
        [5]
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        header: Mapping[str, Any] | None = None,
        name: str = FOLDER,
        timestamps: bool = True,
    ) -> None:
        self.folder = Path(run) / name
        self._timestamps = timestamps
        self.folder.mkdir(parents=True, exist_ok=True)
        existing, _ = read_lines(self.folder / LINES)
        layouts = [line for line in existing if line["type"] == "layout"]
        self._layout_ids = {_layout_key(line): int(line["id"]) for line in layouts}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._lines = _AppendFile(self.folder / LINES, flags)
        self._frames = _AppendFile(self.folder / FRAMES, flags)
        if not any(line["type"] == "header" for line in existing):
            self._append(self._header(header or {}))
        elif timestamps:
            self._append(
                {"type": "resumed", "steps": sum(line["type"] == "step" for line in existing)}
            )

    def write(self, emission: Emission) -> None:
        """Append one emission and its alerts.

        Raises:
            OSError: If the disk refuses; nothing of this step is then read back.
        """
        blocks = _blocks(emission)
        layout = self._layout(emission, {name: len(block) for name, block in blocks.items()})
        frame = b"".join(block.astype("<f4", copy=False).tobytes() for block in blocks.values())
        offset = self._frames.append(frame)
        # Layer scalars are means over the heads of the frame: they would be most of the text and
        # say nothing new.
        model = {tag: value for tag, value in emission.model.items() if tag.count("/") < 2}
        self._append(
            {
                "type": "step",
                "step": int(emission.step),
                "layout": layout,
                "offset": offset,
                "length": len(frame),
                "crc32": zlib.crc32(frame),
                "model": model,
                "summary": dict(emission.summary),
            }
        )
        for alert in emission.alerts:
            self._append({**alert.to_dict(), "type": "alert"})

    def checkpoint(self, step: int, status: str, detail: str = "", **more: Any) -> None:
        """Append what became of one checkpoint of a replay.

        Args:
            step: Its step.
            status: ``measured``, ``skipped``, ``duplicate``, ``corrupt`` and the like.
            detail: Why, in words.
            **more: Further plain values, such as a hash.
        """
        self._append(
            {**more, "type": "checkpoint", "step": int(step), "status": status, "detail": detail}
        )

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        self._frames.close()

    def _append(self, line: dict[str, Any]) -> None:
        if self._timestamps:
            line = {**line, "time": round(time.time(), 3)}
        text = json.dumps(_plain(line), allow_nan=False, separators=(",", ":"))
        self._lines.append_line(text.encode())

    def _header(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **more,
            "type": "header",
            "version": VERSION,
            "entropy_monitor": _package_version(),
            "frames": FRAMES,
            "dtype": "<f4",
            "units": {statistic.name: statistic.unit for statistic in STATISTICS},
        }

    def _layout(self, emission: Emission, blocks: dict[str, int]) -> int:
        """Return the layout's id; write a layout line where it has not been seen before."""
        line = {
            "type": "layout",
            "id": len(self._layout_ids),
            "layers": [[name, heads] for name, heads in emission.layers],
            "stats": list(emission.stat_names),
            "changes": list(CHANGE_NAMES),
            "cov": [list(pair) for pair in COVARIANCE_PAIRS],
            "blocks": blocks,
        }
        key = _layout_key(line)
        if key not in self._layout_ids:
            self._append(line)
            self._layout_ids[key] = int(line["id"])  # type: ignore[call-overload]
        return self._layout_ids[key]


class _AppendFile:
    """A file that is only ever appended to, one system call per piece."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd: int | None = os.open(path, flags, 0o644)
        size = os.lseek(self._fd, 0, os.SEEK_END)
        # A crash may have left half a line behind; ours must not be glued to it.
        self._broken = size > 0 and not _ends_with_newline(path)

    def append(self, data: bytes) -> int:
        """Append and return the offset the data lies at."""
        if self._fd is None:
            raise ValueError("The record is closed.")
        written = os.write(self._fd, data)
        if written < len(data):
            self._broken = True
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes fit on the disk")
        # With O_APPEND the position after a write is the end of our own data, also with other
        # writers.
        return os.lseek(self._fd, 0, os.SEEK_CUR) - written

    def append_line(self, data: bytes) -> None:
        """Append a line, on a line of its own also after one that was cut off."""
        self.append(b"\n" * self._broken + data + b"\n")
        self._broken = False

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _blocks(emission: Emission) -> dict[str, Array]:
    """Return the parts of a frame that this emission has, in order."""
    parts = {
        "stats": emission.stats,
        "change": emission.change,
        "change_se": emission.change_se,
        "cov": emission.cov,
    }
    return {name: np.asarray(part) for name, part in parts.items() if part is not None}


def _layout_key(line: Mapping[str, Any]) -> str:
    return json.dumps(
        {key: value for key, value in line.items() if key not in ("id", "time")}, sort_keys=True
    )


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _package_version() -> str:
    try:
        return metadata.version("entropy-monitor")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "unknown"


def _plain(value: Any) -> Any:
    """Return plain JSON types; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)
