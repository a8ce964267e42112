"""What a replay will cost, said before anything is fetched; and the plan all workers share.

Everything that decides the numbers is in the plan: the checkpoints, the sequences, which rows, the
sink, the precision, the batch and the threads. Resuming or joining with other settings is refused.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entropy_monitor.replay.checkpoints import Checkpoint
from entropy_monitor.replay.errors import ReplayError
from entropy_monitor.replay.tokens import Tokens

GB = 1e9
EXACT_FIRST = 16
"""Rows that are always measured beside the sampled ones."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a replay; bytes.

    Attributes:
        checkpoints: How many will be measured.
        download: Bytes to fetch; 0 for a local series, None if the hub does not say.
        disk: Bytes on disk at once, weights and rows.
        rows: Of these, rows and sums.
        memory: Bytes of RAM for weights, activations and statistics.
        free_disk: Bytes free where they are needed.
        free_memory: Bytes of RAM free, None where that cannot be found out.
        budget: Most bytes that are downloaded without being asked for.
    """

    checkpoints: int
    download: int | None
    disk: int
    rows: int
    memory: int
    free_disk: int
    free_memory: int | None
    budget: float = 50 * GB

    def problems(self) -> list[str]:
        """Say what does not fit."""
        found = []
        if self.disk > self.free_disk:
            found.append(f"disk: needs {_gb(self.disk)}, {_gb(self.free_disk)} free")
        if self.free_memory is not None and self.memory > self.free_memory:
            found.append(f"memory: needs about {_gb(self.memory)}, {_gb(self.free_memory)} free")
        if self.download is not None and self.download > self.budget:
            found.append(f"download: {_gb(self.download)} is more than {_gb(self.budget)}")
        return found

    def describe(self) -> list[str]:
        """Return the lines that are printed."""
        if self.download is None:
            fetched = "download size unknown"
        elif self.download:
            each = self.download / max(1, self.checkpoints)
            fetched = f"{_gb(self.download)} to download ({_gb(each)} each)"
        else:
            fetched = "nothing to download"
        memory = f", {_gb(self.free_memory)} free" if self.free_memory is not None else ""
        return [
            f"{self.checkpoints} checkpoints, {fetched}",
            f"disk {_gb(self.disk)} at once ({_gb(self.rows)} of rows; {_gb(self.free_disk)} "
            f"free), "
            f"memory about {_gb(self.memory)}{memory}",
        ]


def estimate_cost(
    *,
    checkpoints: list[Checkpoint],
    weight_bytes: int | None,
    remote: bool,
    keep: bool,
    config: Any,
    tokens: Tokens,
    batch: int,
    rows: int | None,
    dtype_bytes: int,
    folder: Path,
    budget: float = 50 * GB,
) -> Cost:
    """Estimate what a replay costs.

    Args:
        checkpoints: Those to measure.
        weight_bytes: Bytes of one checkpoint.
        remote: Whether they are downloaded.
        keep: Whether downloads stay.
        config: The model's configuration, or None.
        tokens: ``(sequences, length)``.
        batch: Sequences per forward pass.
        rows: Sampled rows per sequence, None for all.
        dtype_bytes: Bytes per weight in memory (0: as stored).
        folder: Where results and downloads go.
        budget: Most bytes to download without being asked for.
    """
    count = len(checkpoints)
    known = weight_bytes or 0
    layers, heads = shape_of(config)
    sequences, length = tokens.shape
    row_count = sequences * (length if rows is None else min(length, rows + EXACT_FIRST))
    row_bytes = count * layers * heads * (12 * row_count + 8 * 240)
    at_once = known * (count if keep else min(2, count)) if remote else 0
    stored = stored_bytes(config)
    in_memory = known * (dtype_bytes / stored if dtype_bytes else 1.0)
    # the state dict as stored and the model are in memory together; rows are float64 while two
    # checkpoints are compared
    memory = (
        known
        + in_memory
        + batch * sequence_bytes(config, length, rows)
        + 3 * 40 * layers * heads * row_count
    )
    download = (None if weight_bytes is None else known * count) if remote else 0
    return Cost(
        checkpoints=count,
        download=download,
        disk=int(at_once + row_bytes),
        rows=int(row_bytes),
        memory=int(memory + 4e8),  # the interpreter with torch and transformers
        free_disk=shutil.disk_usage(_existing(folder)).free,
        free_memory=free_memory(),
        budget=budget,
    )


def shape_of(config: Any) -> tuple[int, int]:
    """Return (layers, heads) of a configuration; (12, 12) where it does not say."""
    layers = _first_int(config, ("num_hidden_layers", "n_layer", "n_layers", "num_layers")) or 12
    heads = _first_int(config, ("num_attention_heads", "n_head", "n_heads", "num_heads")) or 12
    return layers, heads


def stored_bytes(config: Any) -> int:
    """Return the bytes per weight of a series as stored, by its configuration."""
    # transformers 5 warns when it is asked for the old name
    old = None if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)
    name = str(getattr(config, "dtype", None) or old or "float32")
    return 2 if "16" in name else 4


def sequence_bytes(config: Any, length: int, rows: int | None) -> int:
    """Estimate the bytes that one sequence needs in a forward pass, beside the weights."""
    hidden = _first_int(config, ("hidden_size", "n_embd", "d_model", "dim")) or 768
    inner = _first_int(config, ("intermediate_size", "n_inner", "ffn_dim", "d_ff")) or 4 * hidden
    _, heads = shape_of(config)
    measured = heads * (length if rows is None else min(length, rows + EXACT_FIRST))
    # q, k, v, residuals in float32; the MLP's inner layer twice; about 30 numbers per measured row
    return 4 * (10 * length * hidden + 2 * length * inner + 30 * measured)


def batch_for(config: Any, tokens: Tokens, rows: int | None, *, budget: float = 1 * GB) -> int:
    """Return how many sequences go through the model at once: as many as fit the budget.

    It depends on the model and the sequences alone, never on the machine, since other batches round
    differently.
    """
    sequences, length = tokens.shape
    return max(1, min(sequences, int(budget // sequence_bytes(config, length, rows))))


def free_memory() -> int | None:
    """Return the bytes of RAM that can be used now, None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def tokens_sha256(tokens: Tokens) -> str:
    """Return the hash of the sequences."""
    digest = hashlib.sha256(str(tokens.shape).encode())
    digest.update(np.ascontiguousarray(tokens, dtype="<i8").tobytes())
    return digest.hexdigest()


def share_plan(path: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Store the plan, or check that the stored one is the same.

    Args:
        path: Where it lies.
        plan: Plain types; everything that decides the numbers.

    Returns:
        The stored plan.

    Raises:
        ReplayError: If the folder holds a replay with other settings; the message names the first
            one.
    """
    if path.is_file():
        try:
            stored = dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ReplayError(
                f"{path} cannot be read ({error}); use another --logdir or --restart."
            ) from error
        for key in (*plan, *stored):
            if plan.get(key) != stored.get(key):
                raise ReplayError(
                    f"{path.parent.parent} holds a replay with other settings ({key}: "
                    f"{_short(stored.get(key))}, now "
                    f"{_short(plan.get(key))}): use another --logdir, or --restart to measure "
                    f"again."
                )
        return stored
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(plan, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)
    return plan


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_int(config: Any, names: tuple[str, ...]) -> int | None:
    for holder in (config, getattr(config, "text_config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _gb(size: int | float) -> str:
    if size >= 0.1 * GB:
        return f"{size / GB:.2f} GB" if size < 10 * GB else f"{size / GB:.0f} GB"
    return f"{size / 1e6:.1f} MB"
