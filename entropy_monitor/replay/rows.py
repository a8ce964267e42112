"""What is kept of every checkpoint: sums per head, and the values of every sampled row.

One file per checkpoint, written under another name and moved into place, so that a killed run
leaves either a whole file or none. Files hold no time and no host: the same checkpoint gives the
same bytes. Rows make attribution against any checkpoint possible without measuring again.
"""

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from entropy_monitor.snapshot import HeadSums, RowValues, Snapshot

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one checkpoint.

    Attributes:
        name: Its name.
        step: Its step.
        status: ``measured``, ``missing``, ``corrupt``, ``failed`` or ``skipped``.
        reason: Why it was not measured, or what is to be known about it.
        weights_sha256: Hash of its weights.
        fingerprint: What the source knew of the weights before they were fetched.
        parameters: Number of parameters.
        unseen: Attention modules whose attention was not seen, by name, with the reason.
    """

    name: str
    step: int
    status: str
    reason: str = ""
    weights_sha256: str | None = None
    fingerprint: str | None = None
    parameters: int | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)


class PartStore:
    """The parts of a replay, one file per checkpoint.

    Args:
        folder: Made when missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, index: int) -> Path:
        """Return where the part of the checkpoint with this position in the plan lies."""
        return self.folder / f"{index:05d}.npz"

    def write(self, index: int, outcome: Outcome, snapshot: Snapshot | None) -> None:
        """Store what was measured, all or nothing."""
        arrays: dict[str, Any] = {}
        layers = []
        for number, (name, sums) in enumerate(
            snapshot.sums.items() if snapshot is not None else ()
        ):
            layers.append({"name": name, "slots": sums.slots})
            arrays[f"{number}.packed"] = sums.packed().numpy()
            rows = snapshot.rows.get(name) if snapshot is not None else None
            for key, value in vars(rows).items() if rows is not None else ():
                arrays[f"{number}.{key}"] = _compact(value)
        about = {"format": FORMAT, "outcome": asdict(outcome), "layers": layers}
        arrays["about"] = np.frombuffer(json.dumps(about, sort_keys=True).encode(), dtype=np.uint8)
        temporary = self.folder / f".{index:05d}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as handle:
                np.savez_compressed(handle, **arrays)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(self.path(index))
        finally:
            temporary.unlink(missing_ok=True)

    def outcome(self, index: int) -> Outcome | None:
        """Return what became of a checkpoint, None if there is no part that can be read."""
        try:
            with np.load(self.path(index), allow_pickle=False) as part:
                about = _about(part)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
            return None
        return Outcome(**about["outcome"]) if about.get("format") == FORMAT else None

    def snapshot(self, index: int) -> Snapshot:
        """Read the numbers of a measured checkpoint."""
        with np.load(self.path(index), allow_pickle=False) as part:
            about = _about(part)
            sums, rows = {}, {}
            for number, layer in enumerate(about["layers"]):
                packed = torch.from_numpy(part[f"{number}.packed"])
                sums[layer["name"]] = HeadSums.unpack(packed, int(layer["slots"]))
                if f"{number}.query" in part:
                    values = {
                        key: part[f"{number}.{key}"] for key in RowValues.__dataclass_fields__
                    }
                    rows[layer["name"]] = RowValues(
                        **{key: _expand(value) for key, value in values.items()}
                    )
        return Snapshot(step=int(about["outcome"]["step"]), sums=sums, rows=rows)

    def clean(self) -> None:
        """Remove what killed processes left half-written."""
        for file in self.folder.glob(".*.tmp"):
            file.unlink(missing_ok=True)


def _about(part: Any) -> dict[str, Any]:
    return dict(json.loads(part["about"].tobytes()))


def _compact(values: Any) -> Any:
    """Store float64 that came from float32 as float32: half the size, the same numbers."""
    if values.dtype == np.float64:
        narrow = values.astype(np.float32)
        if np.array_equal(narrow.astype(np.float64), values):
            return narrow
    return values


def _expand(values: Any) -> Any:
    return values.astype(np.float64) if values.dtype == np.float32 else values
