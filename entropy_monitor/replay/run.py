"""Replay: state the cost, agree on a plan, measure, write the results.

Every checkpoint of a series sees the same sequences, and leaves one part file. A killed run goes on
where it stopped; several workers (``torchrun``, or array jobs with ``--shard i/n``) share one
folder. Whoever finds all parts there writes the results, always from the parts and always in order,
so that they are the same bytes however the work was cut.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from entropy_monitor.monitor import AttentionMonitor
from entropy_monitor.replay.checkpoints import Checkpoint, Source, choose
from entropy_monitor.replay.errors import CheckpointError, ReplayError
from entropy_monitor.replay.hub import HubSource
from entropy_monitor.replay.local import LocalSource
from entropy_monitor.replay.models import load_model, read_config
from entropy_monitor.replay.plan import batch_for, estimate_cost, share_plan, tokens_sha256
from entropy_monitor.replay.results import write_results
from entropy_monitor.replay.rows import PartStore
from entropy_monitor.replay.settings import FOLDER, ReplayResult, ReplaySettings, Say, Track
from entropy_monitor.replay.tokens import (
    Tokens,
    check_text,
    cut_text,
    load_token_file,
    load_tokenizer,
    longest_sequence,
)
from entropy_monitor.replay.weights import find_weights
from entropy_monitor.replay.worker import Worker, unseen_is_reported


def open_source(settings: ReplaySettings) -> Source:
    """Return the local folder or the hub model that is meant.

    Raises:
        ReplayError: If it is neither.
    """
    if Path(settings.model).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", settings.model):
        return LocalSource(settings.model)
    try:
        return HubSource(settings.model, settings.folder / FOLDER / "downloads", keep=settings.keep)
    except ImportError as error:
        raise ReplayError(
            "hub models need huggingface_hub: pip install 'entropy-monitor[replay]'."
        ) from error


def replay(
    settings: ReplaySettings,
    *,
    say: Say = lambda line: None,
    track: Track = lambda done, total: None,
) -> ReplayResult:
    """Replay a series.

    Args:
        settings: What and how.
        say: Called with every line meant for a person.
        track: Called as checkpoints get done.

    Returns:
        How it ended. Results are in the run's folder.

    Raises:
        ReplayError: If the request cannot be carried out.
    """
    folder = settings.folder
    work = folder / FOLDER
    if (folder / "entropy_monitor").exists() and not work.exists():
        raise ReplayError(f"{folder} holds the record of a training run: choose another --logdir.")
    if settings.restart:
        shutil.rmtree(work, ignore_errors=True)
    source = open_source(settings)
    chosen = choose(source.checkpoints, settings.revisions, label=source.label)
    config = _shared_config(source, settings, chosen)
    tokens = sequences_for(source, settings, config)
    _check_vocabulary(config, tokens)
    batch = settings.batch or batch_for(config, tokens, settings.rows)
    fits = _say_cost(source, settings, chosen, config, tokens, batch, say)
    if settings.dry_run:
        return ReplayResult(folder=folder, outcomes=(), finished=False)
    if not fits and not settings.yes:
        raise ReplayError("stopped before anything was fetched: --yes goes on all the same.")
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads or _cores())
    try:
        plan = _agree(source, settings, chosen, tokens, batch, config)
        worker = Worker(
            source=source,
            settings=settings,
            plan=plan,
            chosen=chosen,
            tokens=tokens,
            config=config,
            sink=plan_sink(plan, work),
            say=say,
            track=track,
        )
        worker.run()
    finally:
        torch.set_num_threads(threads)
    return _finish(settings, plan, chosen, worker.store, say)


def _shared_config(source: Source, settings: ReplaySettings, chosen: tuple[Checkpoint, ...]) -> Any:
    """Return the configuration of the series, None where there is none beforehand."""
    if settings.spec.build is not None:
        return None
    if not source.remote:
        found = find_weights(Path(chosen[-1].where))
        if found is not None and found.suffix == ".gguf":
            return None
    shared = source.shared_file("config.json")
    return read_config(Path(chosen[-1].where if not source.remote else "."), settings.spec, shared)


def sequences_for(source: Source, settings: ReplaySettings, config: Any) -> Tokens:
    """Return the token ids every checkpoint sees, ``(sequences, length)``."""
    spec = settings.tokens
    if spec.tokens is not None:
        return load_token_file(spec)
    check_text(spec)
    where: str | Path
    if spec.tokenizer is not None:
        where = spec.tokenizer
    elif isinstance(source, HubSource):
        where = source.tokenizer_folder() or source.label
    else:
        found = next(
            (
                f
                for n in ("tokenizer.json", "tokenizer_config.json")
                if (f := source.shared_file(n))
            ),
            None,
        )
        last = Path(source.checkpoints[-1].where)
        weights = find_weights(last)
        gguf = weights if weights is not None and weights.suffix == ".gguf" else None
        where = (
            found.parent if found is not None else gguf or (last if last.is_dir() else last.parent)
        )
    tokenizer = load_tokenizer(where, trust_remote_code=settings.spec.trust_remote_code)
    return cut_text(spec, tokenizer, longest_sequence(config))


def _check_vocabulary(config: Any, tokens: Tokens) -> None:
    size = getattr(config, "vocab_size", None)
    if isinstance(size, int) and tokens.max() >= size:
        raise ReplayError(
            f"token id {int(tokens.max())} is not in the model's vocabulary of {size}."
        )


def _say_cost(
    source: Source,
    settings: ReplaySettings,
    chosen: tuple[Checkpoint, ...],
    config: Any,
    tokens: Tokens,
    batch: int,
    say: Say,
) -> bool:
    wanted = [c for c in chosen if c.problem is None]
    sizes = [size for c in (wanted[-1:] + wanted[:1]) if (size := source.size(c))]
    dtype_bytes = {"float32": 4, "float64": 8, "auto": 0}.get(settings.spec.dtype, 2)
    cost = estimate_cost(
        checkpoints=wanted,
        weight_bytes=max(sizes, default=None),
        remote=source.remote,
        keep=settings.keep,
        config=config,
        tokens=tokens,
        batch=batch,
        rows=settings.rows,
        dtype_bytes=dtype_bytes,
        folder=settings.folder,
        budget=settings.max_download_gb * 1e9,
    )
    say(
        f"{source.label}: {tokens.shape[0]} sequences of {tokens.shape[1]} tokens, {batch} at a "
        f"time"
    )
    for line in cost.describe():
        say(line)
    problems = cost.problems()
    for problem in problems:
        say(f"does not fit: {problem}")
    return not problems


def _agree(
    source: Source,
    settings: ReplaySettings,
    chosen: tuple[Checkpoint, ...],
    tokens: Tokens,
    batch: int,
    config: Any,
) -> dict[str, Any]:
    """Store the plan, or take the stored one; the first worker finds an automatic sink."""
    from entropy_monitor import __version__

    work = settings.folder / FOLDER
    spec = settings.spec
    plan: dict[str, Any] = {
        "series": source.label if source.remote else Path(source.label).resolve().name,
        "checkpoints": [[c.name, c.step] for c in chosen],
        "tokens_sha256": tokens_sha256(tokens),
        "sequences": tokens.shape[0],
        "length": tokens.shape[1],
        "rows": "all" if settings.rows is None else settings.rows,
        "sink": list(settings.sink) if isinstance(settings.sink, tuple) else settings.sink,
        "batch": batch,
        "dtype": spec.dtype,
        "device": torch.device(spec.device).type,
        "attention": spec.attention,
        "threads": settings.threads or _cores(),
        "torch": torch.__version__,
        "entropy_monitor": __version__,
    }
    with locked(work):
        found = list(plan["sink"]) if isinstance(plan["sink"], list) else plan["sink"]
        if found == "auto":
            stored = work / "sink.json"
            if not stored.is_file():
                positions = _find_sink(source, settings, chosen, tokens, batch, config)
                stored.write_text(json.dumps(positions) + "\n", encoding="utf-8")
        return share_plan(work / "plan.json", plan)


def _find_sink(
    source: Source,
    settings: ReplaySettings,
    chosen: tuple[Checkpoint, ...],
    tokens: Tokens,
    batch: int,
    config: Any,
) -> list[int]:
    """Find the sink positions on the last checkpoint that can be read; empty if none stands out."""
    for checkpoint in reversed(chosen):
        try:
            loaded = load_model(source.fetch(checkpoint), settings.spec, config=config)
        except CheckpointError:
            continue
        monitor = AttentionMonitor(loaded.model, sink="auto", rows=settings.rows, on_error="raise")
        with torch.no_grad(), unseen_is_reported():
            for step in range(5):  # as many windows as the monitor wants to see before it settles
                with monitor.observe(step=step):
                    loaded.forward(torch.from_numpy(tokens[:batch]))
        return list(monitor.proposed_sink or ())
    raise ReplayError("no checkpoint can be read, so the sink cannot be found.")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """One worker at a time; released when its process ends, however it ends."""
    from filelock import FileLock

    work.mkdir(parents=True, exist_ok=True)
    with FileLock(work / ".lock"):
        yield


def plan_sink(plan: dict[str, Any], work: Path) -> Any:
    """Return the sink to measure with; an automatic one as it was found and frozen."""
    sink = plan["sink"]
    if sink == "auto":
        return tuple(json.loads((work / "sink.json").read_text(encoding="utf-8"))) or "first"
    return tuple(sink) if isinstance(sink, list) else sink


def _finish(
    settings: ReplaySettings,
    plan: dict[str, Any],
    chosen: tuple[Checkpoint, ...],
    store: PartStore,
    say: Say,
) -> ReplayResult:
    with locked(settings.folder / FOLDER):
        outcomes = [store.outcome(i) for i in range(len(chosen))]
        there = tuple(o for o in outcomes if o is not None)
        if len(there) < len(chosen):
            say(
                f"{len(there)} of {len(chosen)} checkpoints are done; the last worker to finish "
                f"writes the results"
            )
            return ReplayResult(folder=settings.folder, outcomes=there, finished=False)
        store.clean()
        if not any(o.status == "measured" for o in there):
            return ReplayResult(folder=settings.folder, outcomes=there, finished=True)
        summary = write_results(
            settings.folder,
            plan,
            store,
            there,
            sink=plan_sink(plan, settings.folder / FOLDER),
            baseline=settings.baseline,
            skip_duplicates=settings.skip_duplicates,
            parquet=settings.parquet,
        )
    return ReplayResult(folder=settings.folder, outcomes=there, finished=True, summary=summary)
