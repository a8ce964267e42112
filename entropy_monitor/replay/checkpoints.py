"""Checkpoints of a series: their names, steps, natural order, and which of them to take.

``step`` is the optimiser step. Where checkpoints come from is `entropy_monitor.replay.local` and
`entropy_monitor.replay.hub`; both give a `Source`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log1p
from pathlib import Path
from typing import Protocol, runtime_checkable

from entropy_monitor.replay.errors import ReplayError

_NAMED_STEP = re.compile(
    r"(?:^|[^a-z])(?:global[-_]?step|step|checkpoint|ckpt|iteration|iter|it)[-_=]*(\d+)([km]?)(?![a-z0-9])",
    re.IGNORECASE,
)
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_FACTOR = {"": 1, "k": 1_000, "m": 1_000_000}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint of a series.

    Attributes:
        name: Folder, file or revision name.
        step: Optimiser step, from the name.
        where: Path or revision, for the source that listed it.
        size: Bytes of its weights, if known without fetching.
        problem: Why it will not be measured, if that is known already.
    """

    name: str
    step: int
    where: str
    size: int | None = None
    problem: str | None = None


@runtime_checkable
class Source(Protocol):
    """Where a series lives.

    Attributes:
        label: What to call it in a report.
        remote: Whether `fetch` downloads.
        checkpoints: All of them, in order of step.
    """

    label: str
    remote: bool
    checkpoints: tuple[Checkpoint, ...]

    def fetch(self, checkpoint: Checkpoint) -> Path:
        """Return a local folder or file with the weights; raises `CheckpointError`."""
        ...

    def release(self, checkpoint: Checkpoint) -> None:
        """The weights of this checkpoint are no longer needed."""
        ...

    def fingerprint(self, checkpoint: Checkpoint) -> str | None:
        """Return what identifies the weights before they are fetched, if anything does."""
        ...

    def size(self, checkpoint: Checkpoint) -> int | None:
        """Return the bytes of the weights, if that can be known without fetching."""
        ...

    def shared_file(self, name: str) -> Path | None:
        """Return a file that belongs to the whole series (config, tokenizer), if there is one."""
        ...


def parse_step(name: str) -> int | None:
    """Return the optimiser step in a name, or None if it has no number.

    A number after ``step``, ``checkpoint``, ``iter`` wins (``step`` before the others); otherwise
    the last number counts.

    Example:
        >>> parse_step("step512"), parse_step("checkpoint-500"), parse_step("epoch=3-step=400.ckpt")
        (512, 500, 400)
        >>> parse_step("step-10k"), parse_step("000250"), parse_step("final")
        (10000, 250, None)
    """
    named = named_step(name)
    last = _LAST_NUMBER.search(_stem(name))
    return named if named is not None else int(last.group(1)) if last else None


def named_step(name: str) -> int | None:
    """Return the number after a word like ``step`` in a name, or None.

    Example:
        >>> named_step("model-step7.bin"), named_step("llama-7b-q4_1.gguf")
        (7, None)
    """
    stem = _stem(name)
    found = list(_NAMED_STEP.finditer(stem))
    if not found:
        return None
    best = next((m for m in found if "step" in m.group(0).lower()), found[0])
    return int(best.group(1)) * _FACTOR[best.group(2).lower()]


def _stem(name: str) -> str:
    return re.sub(r"\.(ckpt|safetensors|bin|pt|pth|gguf)$", "", name, flags=re.IGNORECASE)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key in which ``step2`` comes before ``step10``.

    Example:
        >>> sorted(["step10", "step2", "step2-v1"], key=natural_key)
        ['step2', 'step2-v1', 'step10']
    """
    pieces = re.split(r"(\d+)", name)
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in pieces if p)


def in_order(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Sort by step, then name; a second checkpoint of the same step gets a `problem`."""
    ordered = sorted(checkpoints, key=lambda c: (c.step, natural_key(c.name)))
    result: list[Checkpoint] = []
    owner: dict[int, str] = {}
    for checkpoint in ordered:
        if checkpoint.problem is None and checkpoint.step in owner:
            problem = f"same step as {owner[checkpoint.step]}, which is measured in its place"
            checkpoint = replace(checkpoint, problem=problem)
        elif checkpoint.problem is None:
            owner[checkpoint.step] = checkpoint.name
        result.append(checkpoint)
    return tuple(result)


def choose(
    checkpoints: Sequence[Checkpoint], which: str, *, label: str = "the series"
) -> tuple[Checkpoint, ...]:
    """Choose from a series.

    Args:
        checkpoints: In order of step.
        which: ``all``; ``log`` (each at least twice the step of the one before, and the last); a
            number (that many, evenly spaced in log(1 + step), first and last included); or names
            and steps, separated by commas.
        label: What to call the series in an error.

    Returns:
        The chosen ones in order. A name that does not exist comes back with a `problem`, so that it
        is reported.

    Raises:
        ReplayError: If nothing that was asked for exists.

    Example:
        >>> steps = (0, 1, 2, 3, 4, 8, 9, 10)
        >>> series = [Checkpoint(name=f"step{s}", step=s, where="") for s in steps]
        >>> [c.step for c in choose(series, "log")]
        [0, 1, 2, 4, 8, 10]
        >>> [c.step for c in choose(series, "3")], [c.step for c in choose(series, "step2,8")]
        ([0, 2, 10], [2, 8])
    """
    if not checkpoints:
        raise ReplayError(f"{label} holds no checkpoint whose name has a step.")
    which = which.strip()
    if which == "all":
        return tuple(checkpoints)
    if which == "log":
        chosen = [checkpoints[0]]
        for checkpoint in checkpoints[1:-1]:
            if checkpoint.step >= max(1, 2 * chosen[-1].step):
                chosen.append(checkpoint)
        return in_order({*chosen, checkpoints[-1]})
    by_name = {c.name: c for c in checkpoints}
    if which.isdigit() and which not in by_name:
        return _spaced(checkpoints, int(which), label)
    return _by_name(checkpoints, which, label)


def _spaced(checkpoints: Sequence[Checkpoint], count: int, label: str) -> tuple[Checkpoint, ...]:
    if count < 1:
        raise ReplayError(f"`--revisions` must be at least 1, got {count}.")
    if count >= len(checkpoints):
        return tuple(checkpoints)
    low, high = log1p(checkpoints[0].step), log1p(checkpoints[-1].step)
    targets = [high] if count == 1 else [low + (high - low) * k / (count - 1) for k in range(count)]
    free = list(checkpoints)
    chosen = []
    for target in (targets[0], targets[-1], *targets[1:-1])[:count]:
        best = min(free, key=lambda c: (abs(log1p(c.step) - target), c.step))
        free.remove(best)
        chosen.append(best)
    return in_order(chosen)


def _by_name(checkpoints: Sequence[Checkpoint], which: str, label: str) -> tuple[Checkpoint, ...]:
    wanted = [w.strip() for w in which.split(",") if w.strip()]
    by_name = {c.name: c for c in checkpoints}
    by_step = {str(c.step): c for c in reversed(checkpoints) if c.problem is None}
    chosen: list[Checkpoint] = []
    for name in wanted:
        found = by_name.get(name) or by_step.get(name)
        if found is None:
            step = parse_step(name)
            found = Checkpoint(
                name=name, step=-1 if step is None else step, where=name, problem="no such revision"
            )
        if found not in chosen:
            chosen.append(found)
    if all(c.problem == "no such revision" for c in chosen):
        first, last = checkpoints[0].name, checkpoints[-1].name
        raise ReplayError(
            f"{label} has no revision {', '.join(wanted) or which!r}; it has {len(checkpoints)}, "
            f"from {first} to {last}."
        )
    return in_order(chosen)
