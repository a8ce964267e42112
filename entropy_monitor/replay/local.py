"""A series on this machine: checkpoint folders, weight files, a folder of the hub's cache."""

import json
from pathlib import Path

from entropy_monitor.replay.checkpoints import Checkpoint, in_order, named_step, parse_step
from entropy_monitor.replay.errors import CheckpointError, ReplayError
from entropy_monitor.replay.weights import WEIGHT_SUFFIXES, find_weights, peek_step, weights_size


class LocalSource:
    """Checkpoints found under a path.

    Args:
        path: One weight file; a folder of one model; a folder whose entries are checkpoints
            (sub-folders or files with a step in their name); a Lightning run (its ``checkpoints``
            folder is used); or a folder of the hub's cache (``models--*``: revisions in ``refs``,
            files in ``snapshots``).

    Raises:
        ReplayError: If the path does not exist or holds no checkpoint.
    """

    remote = False

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.label = str(path)
        if not self.path.exists():
            raise ReplayError(
                f"`{path}` is neither a path on this machine nor a hub model (OWNER/NAME)."
            )
        self.checkpoints = in_order(_discover(self.path))
        if not self.checkpoints:
            raise ReplayError(
                f"`{path}` holds no checkpoints: expected step*/ or checkpoint-*/ folders, *.ckpt, "
                f"*.safetensors or *.bin "
                "files with a step in their name, or a model folder with config.json and weights."
            )

    def fetch(self, checkpoint: Checkpoint) -> Path:
        """Return where the checkpoint is."""
        if checkpoint.problem is not None:
            raise CheckpointError("missing", checkpoint.problem)
        return Path(checkpoint.where)

    def release(self, checkpoint: Checkpoint) -> None:
        """A person's own files stay where they are."""

    def fingerprint(self, checkpoint: Checkpoint) -> str | None:
        """Nothing is known before reading."""
        return None

    def size(self, checkpoint: Checkpoint) -> int | None:
        """Return the bytes of the weight files."""
        return checkpoint.size

    def shared_file(self, name: str) -> Path | None:
        """Return a file of the whole series: beside the checkpoints, else in the last with it."""
        top = self.path if self.path.is_dir() else self.path.parent
        folders = [top, top.parent] if top.name == "checkpoints" else [top]
        folders += [Path(c.where) for c in reversed(self.checkpoints) if Path(c.where).is_dir()]
        return next((f / name for f in folders if (f / name).is_file()), None)


def _discover(path: Path) -> list[Checkpoint]:
    if path.is_file():
        return [_checkpoint(path, allow_zero=True)] if path.suffix in WEIGHT_SUFFIXES else []
    if (path / "refs").is_dir() and (path / "snapshots").is_dir():
        return _hub_cache(path)
    found = []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith(".") or not (entry.is_dir() or entry.suffix in WEIGHT_SUFFIXES):
            continue
        if entry.is_dir() and not _looks_like_checkpoint(entry):
            continue
        if entry.is_file() and _part_of_one_model(entry):
            continue
        if parse_step(entry.name) is not None or entry.suffix == ".ckpt":
            found.append(_checkpoint(entry, allow_zero=False))
    if found:
        return found
    if find_weights(path) is not None:
        return [_checkpoint(path, allow_zero=True)]
    for nested in (
        path / "checkpoints",
        *sorted(path.glob("lightning_logs/version_*/checkpoints"), reverse=True),
    ):
        if nested.is_dir():
            return _discover(nested)
    return []


def _looks_like_checkpoint(folder: Path) -> bool:
    """Whether it holds weights, or its name says it should: they are then reported missing."""
    if find_weights(folder) is not None:
        return True
    name = folder.name.lower()
    return (
        name.startswith(("step", "checkpoint", "global_step", "iter"))
        and parse_step(name) is not None
    )


def _part_of_one_model(file: Path) -> bool:
    """Whether a file is a part of one checkpoint (a shard, an optimiser), not one by itself."""
    name = file.name
    return "-of-" in name or name in {
        "model.safetensors",
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.bin",
        "optimizer.pt",
        "scheduler.pt",
        "adapter_model.safetensors",
    }


def _checkpoint(path: Path, *, allow_zero: bool) -> Checkpoint:
    step = _trainer_step(path) if allow_zero else parse_step(path.name)
    if step is None and path.suffix == ".ckpt":
        step = peek_step(path)
    problem = None if step is not None or allow_zero else "no step in its name nor in the file"
    return Checkpoint(
        name=path.name, step=step or 0, where=str(path), size=weights_size(path), problem=problem
    )


def _trainer_step(folder: Path) -> int | None:
    """The step of a single model's folder: a name like ``llama-7`` does not tell it."""
    state = folder / "trainer_state.json"  # written by the Hugging Face Trainer
    if state.is_file():
        try:
            return int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
        except (ValueError, KeyError, TypeError):
            return None
    return named_step(folder.name)


def _hub_cache(path: Path) -> list[Checkpoint]:
    found = []
    refs = path / "refs"
    for ref in sorted(p for p in refs.rglob("*") if p.is_file()):
        name = ref.relative_to(refs).as_posix()
        step = parse_step(name)
        folder = path / "snapshots" / ref.read_text(encoding="utf-8").strip()
        if step is not None:
            found.append(
                Checkpoint(name=name, step=step, where=str(folder), size=weights_size(folder))
            )
    if found:
        return found
    folders = sorted(p for p in (path / "snapshots").iterdir() if find_weights(p) is not None)
    return (
        [Checkpoint(name="main", step=0, where=str(folders[-1]), size=weights_size(folders[-1]))]
        if folders
        else []
    )
