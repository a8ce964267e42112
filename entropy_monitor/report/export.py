"""Tables of a run for other tools: one line per step, layer and head."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from entropy_monitor.names import CHANGE_STAT_NAMES, STATISTICS
from entropy_monitor.report.changes import change_between
from entropy_monitor.writers.base import Array

if TYPE_CHECKING:
    from entropy_monitor.report.build import Report

_ERROR_NAMES = tuple(f"{name}_se" for name in CHANGE_STAT_NAMES)


def write_csv(report: "Report", path: str | os.PathLike[str]) -> None:
    """Write the columns step, layer, head, every statistic, the change since the baseline, errors.

    Empty cells are not defined. Entropies in nats, masses in [0, 1].
    """
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["step", "layer", "head", *columns(report)])
        for step, values in frames(report):
            names = ((name, head) for name, count in report.run.layers for head in range(count))
            for (layer, head), line in zip(names, values.T, strict=True):
                if not np.isnan(line).all():
                    cells = ("" if np.isnan(value) else f"{value:.9g}" for value in line)
                    out.writerow([step, layer, head, *cells])


def write_parquet(report: "Report", path: str | os.PathLike[str]) -> None:
    """Write the same table as parquet, one row group per step, units in the metadata.

    Raises:
        ImportError: If pyarrow is not installed.
    """
    import pyarrow as pa
    from pyarrow import parquet

    layers = [name for name, count in report.run.layers for _ in range(count)]
    heads = [head for _, count in report.run.layers for head in range(count)]
    units = {f"unit.{statistic.name}": statistic.unit for statistic in STATISTICS}
    names = columns(report)
    schema = pa.schema(
        [
            ("step", pa.int64()),
            ("layer", pa.dictionary(pa.int32(), pa.string())),
            ("head", pa.int32()),
            *((name, pa.float32()) for name in names),
        ],
        metadata=units,
    )
    with parquet.ParquetWriter(os.fspath(path), schema) as writer:
        for step, values in frames(report):
            there = ~np.isnan(values).all(0)
            arrays: list[Any] = [
                pa.array([step] * int(there.sum()), pa.int64()),
                pa.array(np.array(layers, dtype=object)[there]).dictionary_encode(),
                pa.array(np.array(heads, dtype=np.int32)[there]),
            ]
            for line in values[:, there].astype(np.float32):
                arrays.append(pa.array(line, from_pandas=True))  # noqa: PERF401
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def columns(report: "Report") -> list[str]:
    """Return the names of the lines of `frames`."""
    return [*report.run.stat_names, *CHANGE_STAT_NAMES, *_ERROR_NAMES]


def frames(report: "Report") -> Iterator[tuple[int, Array]]:
    """Yield every step from the baseline to the last with its (columns, heads)."""
    for step in report.run.steps.tolist():
        if step > report.last_step:
            break
        stats = np.stack([report.heads(name, step) for name in report.run.stat_names])
        if step < report.baseline_step:
            absent = np.full((2 * len(CHANGE_STAT_NAMES), report.run.heads), np.nan)
            yield step, np.concatenate([stats, absent])
            continue
        change = change_between(report.run, report.baseline_step, step)
        yield step, np.concatenate([stats, change.values, change.errors])
