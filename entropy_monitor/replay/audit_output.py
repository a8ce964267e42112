"""An audit as text, JSON, CSV and a picture."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from entropy_monitor.replay.audit import AuditResult
from entropy_monitor.replay.distances import CONVENTIONS, METRICS

LABELS = {
    "cosine": "cosine",
    "jensen_shannon": "Jensen-Shannon",
    "euclid": "Euclid",
    "aitchison_content": "Aitchison, content",
}


def to_dict(result: AuditResult) -> dict[str, Any]:
    """Return plain types for JSON."""
    return {
        "heads": len(result.heads),
        "rows": result.rows,
        "mean_sink_mass": float(result.sink_mass.mean()),
        "flips": result.flips,
        "row_flips": result.row_flips,
        "cluster_agreement": result.agreement,
        "collapse": result.collapse,
        "observed": result.observed,
    }


def describe(result: AuditResult) -> list[str]:
    """Return the tables a person reads."""
    lines = [
        f"{len(result.heads)} heads, {result.rows} rows, mean sink mass "
        f"{result.sink_mass.mean():.3f}",
        "",
        "nearer-head verdicts that flip when the sink is dropped, and clusterings with and without "
        "it",
        f"{'distance':<20}{'flips':>8}{'single rows':>13}{'adjusted Rand':>15}",
    ]
    lines += [
        f"{LABELS[m]:<20}{result.flips[m]:>8.1%}{result.row_flips[m]:>13.1%}{result.agreement[m]:>15.2f}"
        for m in METRICS
    ]
    lines += [
        "",
        "the same contents, every head's sink mass set to s: mean distance between heads, sink "
        "kept",
    ]
    lines += _table(result.collapse)
    lines += [
        "",
        "pairs of heads as they are, in quarters by their mean sink mass s: mean distance, sink "
        "kept",
    ]
    lines += _table(result.observed)
    return lines


def _table(lines: list[dict[str, float]]) -> list[str]:
    head = f"{'s':>8}" + "".join(f"{LABELS[m]:>20}" for m in METRICS)
    return [
        head,
        *(
            f"{line['sink_mass']:>8.3f}" + "".join(f"{line[m]:>20.4g}" for m in METRICS)
            for line in lines
        ),
    ]


def write(result: AuditResult, folder: Path, *, title: str) -> list[Path]:
    """Write ``audit.json``, ``audit.csv``, ``heads.csv`` and, with matplotlib, ``audit.png``.

    Args:
        result: What was found.
        folder: Made when missing.
        title: Of the picture.

    Returns:
        What was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_dict(result), indent=1, allow_nan=False)
    (folder / "audit.json").write_text(text + "\n", encoding="utf-8")
    with (folder / "audit.csv").open("w", newline="", encoding="utf-8") as handle:
        out = csv.writer(handle, lineterminator="\n")
        out.writerow(["distance", "flips", "row_flips", "cluster_agreement"])
        out.writerows(
            [m, result.flips[m], result.row_flips[m], result.agreement[m]] for m in METRICS
        )
    with (folder / "heads.csv").open("w", newline="", encoding="utf-8") as handle:
        out = csv.writer(handle, lineterminator="\n")
        keys = [(m, c) for m in METRICS for c in CONVENTIONS]
        out.writerow(["layer", "head", "sink_mass", *(f"cluster_{m}_{c}" for m, c in keys)])
        for i, (layer, head) in enumerate(result.heads):
            out.writerow(
                [
                    layer,
                    head,
                    f"{result.sink_mass[i]:.9g}",
                    *(result.clusters[key][i] for key in keys),
                ]
            )
    written = [folder / name for name in ("audit.json", "audit.csv", "heads.csv")]
    try:
        _draw(result, folder / "audit.png", title)
    except ImportError:
        return written
    return [*written, folder / "audit.png"]


def _draw(result: AuditResult, path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    flips, curve, taxonomy = figure.subplots(1, 3)
    position = np.arange(len(METRICS))
    names = [LABELS[m].replace(", ", "\n").replace("-", "-\n") for m in METRICS]
    flips.bar(position, [100 * result.flips[m] for m in METRICS], color="#dd7a00")
    flips.set_xticks(position, names, fontsize=8)
    flips.set_ylabel("verdicts that flip, %")
    flips.set_title("is b or c nearer to a?", fontsize=10)
    x = [max(1 - line["sink_mass"], 1e-12) for line in result.collapse]
    for metric, style in zip(METRICS, ("-", "--", "-.", ":"), strict=True):
        first = result.collapse[0][metric] or 1.0
        curve.plot(
            x,
            [line[metric] / first for line in result.collapse],
            style,
            marker="o",
            label=LABELS[metric],
        )
    curve.set_xscale("log")
    curve.set_yscale("log")
    curve.invert_xaxis()
    curve.set_xlabel("1 - s, set in every head")
    curve.set_ylabel("mean distance / at s = 0")
    curve.legend(fontsize=7)
    curve.set_title("full rows collapse, content stays", fontsize=10)
    taxonomy.bar(position, [result.agreement[m] for m in METRICS], color="#003f88")
    taxonomy.set_xticks(position, names, fontsize=8)
    taxonomy.axhline(0, color="black", linewidth=0.8)
    taxonomy.set_ylabel("adjusted Rand index")
    taxonomy.set_title("head clusters, sink kept and dropped", fontsize=10)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
