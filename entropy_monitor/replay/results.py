"""From parts to what a person reads: the record and TensorBoard's files, CSV, parquet, a summary.

Always made from the parts, in order of step, without a clock: the same parts give the same bytes
(TensorBoard's own event files carry a time, and are the exception). Files are made aside and moved
into place.
"""

import csv
import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entropy_monitor.names import CHANGE_NAMES, CHANGE_STAT_NAMES, STAT_NAMES, STAT_PREFIX
from entropy_monitor.notebook import change_sentence
from entropy_monitor.pipeline import Pipeline
from entropy_monitor.replay.errors import ReplayError
from entropy_monitor.replay.rows import Outcome, PartStore
from entropy_monitor.writers import Emission, MemoryWriter, RecordWriter, TensorBoardWriter, Writer

FORMED_ABOVE = 0.3
"""A head has a sink once it keeps more than this of its attention there (Gu et al., arXiv
2410.10781)."""

_EVENTS = "events.json"


def write_results(
    folder: Path,
    plan: Mapping[str, Any],
    store: PartStore,
    outcomes: Sequence[Outcome],
    *,
    sink: Any,
    baseline: str | None = None,
    skip_duplicates: bool = False,
    parquet: bool = False,
    tensorboard: bool = True,
) -> dict[str, Any]:
    """Write the results of a finished replay.

    Args:
        folder: The run's folder.
        plan: The plan of the replay.
        store: Where the parts are.
        outcomes: What became of every checkpoint, in order.
        sink: The sink that was measured with.
        baseline: Name or step of the checkpoint that changes are counted from; None: the first that
            was measured.
        skip_duplicates: Leave all but the last of several checkpoints with identical weights out of
            the curves.
        parquet: Also write ``heads.parquet``.
        tensorboard: Also write TensorBoard's event files, if it is installed.

    Returns:
        The summary, as stored in ``replay.json``.

    Raises:
        ReplayError: If the baseline was not measured, or parquet cannot be written.
    """
    twins = identical_weights(outcomes)
    skipped = set(_all_but_last(outcomes, twins)) if skip_duplicates else set()
    measured = [i for i, o in enumerate(outcomes) if o.status == "measured" and i not in skipped]
    base = _baseline(outcomes, measured, baseline)
    staging = store.folder.parent / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    record = RecordWriter(staging, header=_header(plan, sink), timestamps=False)
    memory = MemoryWriter()
    writers: list[Writer] = [record, memory, *_tensorboard(staging, enabled=tensorboard)]
    # An error must not leave a result without its last steps: unlike training, a replay can simply
    # be run again
    pipeline = Pipeline(writers=writers, on_error="raise")
    pipeline.baseline = store.snapshot(base)
    for index in measured:
        pipeline.emit(store.snapshot(index))
    lines = [_line(i, o, outcomes, twins, i in skipped) for i, o in enumerate(outcomes)]
    for line in lines:
        more = {k: v for k, v in line.items() if k not in ("step", "status", "detail")}
        record.checkpoint(line["step"], line["status"], line["detail"], **more)
    pipeline.close()
    emissions = memory.emissions
    formed = sink_formed(emissions)
    _write_csv(staging / "heads.csv", emissions, formed)
    _write_formed(staging / "sinks.csv", emissions, formed)
    if parquet:
        _write_parquet(staging / "heads.csv", staging / "heads.parquet")
    summary = _summary(emissions, lines, formed)
    text = json.dumps(summary, indent=1, sort_keys=True, allow_nan=False)
    (staging / "replay.json").write_text(text + "\n", encoding="utf-8")
    _move(staging, folder)
    return summary


def identical_weights(outcomes: Sequence[Outcome]) -> dict[int, int]:
    """Return, for every checkpoint whose weights occurred before, the first that had them.

    Example:
        >>> same = {"status": "measured", "weights_sha256": "x"}
        >>> identical_weights([Outcome(name=name, step=0, **same) for name in ("a", "b")])
        {1: 0}
    """
    first: dict[str, int] = {}
    twins: dict[int, int] = {}
    for index, outcome in enumerate(outcomes):
        if outcome.status == "measured" and outcome.weights_sha256 is not None:
            owner = first.setdefault(outcome.weights_sha256, index)
            if owner != index:
                twins[index] = owner
    return twins


def _all_but_last(outcomes: Sequence[Outcome], twins: Mapping[int, int]) -> Iterable[int]:
    for owner in set(twins.values()):
        group = [owner, *(i for i, first in twins.items() if first == owner)]
        yield from sorted(group)[:-1]


def _baseline(outcomes: Sequence[Outcome], measured: Sequence[int], wanted: str | None) -> int:
    if wanted is None:
        return measured[0]
    for index in measured:
        if wanted in (outcomes[index].name, str(outcomes[index].step)):
            return index
    names = ", ".join(outcomes[i].name for i in measured[:4])
    raise ReplayError(
        f"`--baseline {wanted}` must be a checkpoint that was measured ({names}, ...)."
    )


def _header(plan: Mapping[str, Any], sink: Any) -> dict[str, Any]:
    keys = ("series", "rows", "sequences", "length", "dtype", "tokens_sha256")
    return {
        "replay": {key: plan[key] for key in keys},
        "sink": sink,
        "rows": plan["rows"],
        "paired": True,
    }


def _line(
    index: int,
    outcome: Outcome,
    outcomes: Sequence[Outcome],
    twins: Mapping[int, int],
    skipped: bool,
) -> dict[str, Any]:
    status, detail = outcome.status, outcome.reason
    line: dict[str, Any] = {
        "name": outcome.name,
        "step": outcome.step,
        "weights_sha256": outcome.weights_sha256,
    }
    if index in twins:
        same = outcomes[twins[index]].name
        status, detail = "duplicate", f"weights identical to {same}"
        line["same_as"] = same
    if skipped:
        status, detail = "skipped", detail or "its weights come again under a later name"
    if outcome.unseen:
        line["unseen"] = dict(outcome.unseen)
    return {**line, "status": status, "detail": detail}


def _tensorboard(staging: Path, *, enabled: bool) -> list[Writer]:
    if not enabled:
        return []
    try:
        return [TensorBoardWriter(staging / "events")]
    except ImportError:
        return []


def sink_formed(emissions: Sequence[Emission]) -> npt.NDArray[np.float64]:
    """Return for every head the step from which on its sink mass stays above 0.3; NaN for none."""
    if not emissions:
        return np.zeros(0)
    mass = np.stack([emission.stat("sink_mass") for emission in emissions])  # (steps, heads)
    steps = np.array([emission.step for emission in emissions], dtype=np.float64)
    above = np.nan_to_num(mass) > FORMED_ABOVE
    # the first step after the last one below: everything from there to the end is above
    stays = np.flip(np.cumprod(np.flip(above, 0), axis=0), 0).astype(bool)
    first = stays.argmax(0)
    return np.where(stays.any(0), steps[first], np.nan)


def _heads(emission: Emission) -> list[tuple[str, int]]:
    return [(layer, head) for layer, count in emission.layers for head in range(count)]


def _write_csv(path: Path, emissions: Sequence[Emission], formed: npt.NDArray[np.float64]) -> None:
    with path.open("w", newline="", encoding="utf-8") as handle:
        out = csv.writer(handle, lineterminator="\n")
        errors = [f"{name}_se" for name in CHANGE_STAT_NAMES]
        out.writerow(["step", "layer", "head", *STAT_NAMES, *CHANGE_STAT_NAMES, *errors])
        for emission in emissions:
            blocks = [emission.stats, emission.change, emission.change_se]
            table = np.concatenate([np.asarray(block) for block in blocks if block is not None])
            for column, (layer, head) in enumerate(_heads(emission)):
                values = ["" if np.isnan(v) else f"{v:.9g}" for v in table[:, column]]
                out.writerow([emission.step, layer, head, *values])


def _write_formed(
    path: Path, emissions: Sequence[Emission], formed: npt.NDArray[np.float64]
) -> None:
    with path.open("w", newline="", encoding="utf-8") as handle:
        out = csv.writer(handle, lineterminator="\n")
        out.writerow(["layer", "head", "last_sink_mass", "formed_step"])
        last = emissions[-1]
        for column, (layer, head) in enumerate(_heads(last)):
            step = formed[column]
            mass = f"{last.stat('sink_mass')[column]:.9g}"
            out.writerow([layer, head, mass, "" if np.isnan(step) else int(step)])


def _write_parquet(source: Path, target: Path) -> None:
    try:
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet
    except ImportError as error:
        raise ReplayError(
            "`--parquet` needs pyarrow: pip install 'entropy-monitor[parquet]'."
        ) from error
    parquet.write_table(arrow_csv.read_csv(source), target)


def _summary(
    emissions: Sequence[Emission],
    lines: Sequence[Mapping[str, Any]],
    formed: npt.NDArray[np.float64],
) -> dict[str, Any]:
    steps = formed[~np.isnan(formed)]
    means = ("sink_mass", "total_entropy", "content_entropy", "content_evenness", "max_logit")
    return {
        **emissions[-1].summary,
        "last": {name: emissions[-1].model.get(f"{STAT_PREFIX}/{name}") for name in means},
        "alerts": [alert.to_dict() for emission in emissions for alert in emission.alerts],
        "checkpoints": [dict(line) for line in lines],
        "sinks": {
            "heads": int(formed.size),
            "formed": int(steps.size),
            "first_step": int(steps.min()) if steps.size else None,
            "median_step": int(np.quantile(steps, 0.5, method="lower")) if steps.size else None,
        },
    }


def describe(summary: Mapping[str, Any]) -> list[str]:
    """Return what a replay found, in a few lines for a person."""
    last = {k: math.nan if v is None else v for k, v in summary["last"].items()}
    lines = [
        f"at step {summary['last_step']}: sink mass {last['sink_mass']:.3f}, "
        f"entropy {last['total_entropy']:.3f} nat, of the content {last['content_entropy']:.3f}, "
        f"evenness {last['content_evenness']:.3f}, largest logit {last['max_logit']:.1f}"
    ]
    changed = summary["last_step"] != summary["baseline_step"]
    if changed:
        lines += _describe_change(summary)
    sinks = summary["sinks"]
    what = f"end with more than {FORMED_ABOVE} of their attention on the sink"
    lines.append(f"{sinks['formed']} of {sinks['heads']} heads {what}")
    if sinks["formed"] and changed:
        when = f"the first from step {sinks['first_step']} on"
        lines[-1] += f": {when}"
        if sinks["formed"] > 1:
            lines[-1] += f", half of them from step {sinks['median_step']} on"
    by_status: dict[str, list[str]] = {}
    for line in summary["checkpoints"]:
        if line["status"] != "measured":
            by_status.setdefault(line["status"], []).append(f"{line['name']} ({line['detail']})")
    for status, names in by_status.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        lines.append(f"{status}: {'; '.join(names[:8])}{more}")
    return lines


def _describe_change(summary: Mapping[str, Any]) -> list[str]:
    change = summary["change"]
    error = change["se"]["total"]
    lines = [
        change_sentence(
            **{name: change[name] for name in CHANGE_NAMES},
            before=str(summary["baseline_step"]),
            after=str(summary["last_step"]),
            noise=3 * error if error is not None else math.inf,
        )
    ]
    errors = {name: value for name, value in change["se"].items() if value}
    if errors:
        shown = ", ".join(f"{name} {value:.3f}" for name, value in errors.items())
        lines.append(f"standard errors: {shown}")
    shown = "; ".join(
        f"{name.replace('_', ' ')} {split['sink']:+.3f} {split['content']:+.3f}"
        for name, split in summary["ordered"].items()
    )
    lines.append(f"ordered splits (sink, content): {shown}")
    return lines


def _move(staging: Path, folder: Path) -> None:
    """Put what was made in place of what an earlier replay made."""
    ledger = staging.parent / _EVENTS
    old = json.loads(ledger.read_text(encoding="utf-8")) if ledger.is_file() else []
    for name in old:
        (folder / name).unlink(missing_ok=True)
    events = sorted((staging / "events").glob("events.out.tfevents.*"))
    ledger.write_text(json.dumps([e.name for e in events]) + "\n", encoding="utf-8")
    for event in events:
        event.replace(folder / event.name)
    shutil.rmtree(staging / "events", ignore_errors=True)
    for made in sorted(staging.iterdir()):
        target = folder / made.name
        if target.is_dir():
            shutil.rmtree(target)
        made.replace(target)
    staging.rmdir()
