"""The dashboard as one file that opens from disk: the tab's front-end with its answers inside.

No network: the page's own policy forbids every request, and scripts other than the one whose hash
it names. Data lie in elements that the browser does not run, with every ``<`` written as an escape,
so that no run name, layer or message can end them. Where a run has more values than the file should
hold, statistics travel in 16 bits, then fewer steps are shown, and the page says so.
"""

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from entropy_monitor.names import CHANGE_STAT_NAMES
from entropy_monitor.tensorboard_plugin.answers import (
    alerts_answer,
    attribution_answer,
    describe_run,
    frames_answer,
)
from entropy_monitor.tensorboard_plugin.history import History
from entropy_monitor.tensorboard_plugin.layout import Layer, Layout
from entropy_monitor.tensorboard_plugin.packing import thin
from entropy_monitor.writers.record_reader import Run

MAX_BYTES = 10 << 20
"""Size a report may have before statistics are stored more coarsely."""

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|const|class) )", re.MULTILINE)
_BASE64_GROWTH = 4 / 3
_COARSE_BYTES = 2
_MIN_STEPS = 2


def write_html(
    runs: Run | Sequence[Run],
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Write the dashboard of one run, or of several to compare, as one HTML file.

    Args:
        runs: Runs from `entropy_monitor.writers.record_reader.read_run`.
        path: The file to write.
        names: A name per run; by default the run's folder.
        max_bytes: Size from which on statistics are stored in 16 bits, then fewer steps.

    Returns:
        The file written.

    Raises:
        ValueError: If there is no run, a run has no steps, or `names` does not fit.
    """
    chosen = [runs] if isinstance(runs, Run) else list(runs)
    if not chosen:
        raise ValueError("`runs` must hold at least one run.")
    for run in chosen:
        if not len(run):
            raise ValueError(f"{run.path} has no steps yet, so there is nothing to report.")
    labels = _unique(
        names if names is not None else [run.path.resolve().parent.name for run in chosen]
    )
    if len(labels) != len(chosen):
        raise ValueError(f"`names` must hold {len(chosen)} names, got {len(labels)}.")
    histories = [
        history_of(run, name, max_bytes // len(chosen))
        for run, name in zip(chosen, labels, strict=True)
    ]
    target = Path(path)
    target.write_text(render_html(histories, max_bytes=max_bytes), encoding="utf-8")
    return target


def history_of(run: Run, name: str, max_bytes: int = MAX_BYTES) -> History:
    """Return a record as the history the dashboard reads, with fewer steps if it is very large."""
    stats = (*run.stat_names, *CHANGE_STAT_NAMES)
    per_step = len(stats) * run.heads * _COARSE_BYTES * _BASE64_GROWTH
    steps = thin(len(run), max(_MIN_STEPS, int(max_bytes / max(1.0, per_step))))
    notices = list(run.problems)
    if len(steps) < len(run):
        notices.append(f"This file shows {len(steps)} of {len(run)} recorded steps.")
    frames = np.concatenate(
        [np.stack([run.stat(stat)[steps] for stat in run.stat_names], axis=1), run.change[steps]],
        axis=1,
    )
    layers = tuple(Layer(name=layer, heads=heads) for layer, heads in run.layers)
    return History(
        name=name,
        layout=Layout(stats=stats, layers=layers),
        steps=np.asarray(run.steps[steps], np.int64),
        frames=frames,
        alerts=tuple(alert.to_dict() for alert in run.alerts),
        alerts_total=len(run.alerts),
        notices=tuple(notices),
        baseline_step=run.baseline_step(),
    )


def render_html(histories: Sequence[History], *, max_bytes: int = MAX_BYTES) -> str:
    """Return the page as text.

    Args:
        histories: One per run, with different names.
        max_bytes: Size from which on statistics are stored in 16 bits.
    """
    values = sum(history.frames.size for history in histories)
    per_value = 4 if values * 4 * _BASE64_GROWTH <= max_bytes else _COARSE_BYTES
    blobs: dict[str, bytes] = {}
    described = []
    for i, history in enumerate(histories):
        layers = [(layer.name, layer.heads) for layer in history.layout.layers]
        described.append(
            {
                **describe_run(history.name, layers, history.layout.stats),
                "problem": None,
                "version": [0],
            }
        )
        # A budget that float32 does not fit makes an answer coarse but keeps every step.
        size = len(history.steps) * history.layout.heads
        budget = per_value * size + 4 * len(history.steps) + (64 << 10)
        for stat in history.layout.stats:
            blobs[f"em-frames-{i}-{stat}"] = frames_answer(history, stat, budget=budget)
        blobs[f"em-attribution-{i}"] = attribution_answer(history)
    data = {
        "runs": described,
        "alerts": [
            {**alerts_answer(history), "notices": list(history.notices)} for history in histories
        ],
    }
    title = ", ".join(["Attention entropy", *(history.name for history in histories)])
    return _page(title, data, blobs)


def bundle() -> str:
    """Return the front-end as one script.

    Modules are put one after another, those that are needed first; imports and the word ``export``
    go. That is sound because they import plain names from each other, no two files use the same
    name at their top level, and there are no cycles; the tests check all three.
    """
    folder = resources.files("entropy_monitor.tensorboard_plugin") / "static"
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = (folder / name).read_text(encoding="utf-8")
        done[name] = ""  # a cycle would come by here again
        for _, needed in _IMPORT.findall(text):
            add(needed)
        del done[name]
        done[name] = f"// {name}\n{_EXPORT.sub('', _IMPORT.sub('', text))}"

    add("report.js")
    return "\n".join(done.values()) + "\nopenReport();\n"


def _page(title: str, data: Mapping[str, Any], blobs: Mapping[str, bytes]) -> str:
    folder = resources.files("entropy_monitor.tensorboard_plugin") / "static"
    style = (folder / "style.css").read_text(encoding="utf-8")
    script = bundle()
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; "
        f"style-src 'sha256-{_digest(style)}'; base-uri 'none'; form-action 'none'"
    )
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n",
        '<div id="em-root"><noscript>This report needs JavaScript.</noscript></div>\n',
        f'<script type="application/json" id="em-data">{_json(data)}</script>\n',
    ]
    for name, blob in blobs.items():
        # Names are ours or a statistic's, which may come out of a stranger's record.
        text = base64.b64encode(blob).decode("ascii")
        parts.append(f'<script type="text/plain" id="{html.escape(name)}">{text}</script>\n')
    parts.append(f'<script type="module">{script}</script>\n</body>\n</html>\n')
    return "".join(parts)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _json(value: object) -> str:
    text = json.dumps(value, allow_nan=False)
    # Inside <script> only "<" can end the element or open a comment.
    return text.replace("<", "\\u003c")


def _unique(names: Sequence[str]) -> list[str]:
    """Number names that occur twice, since the page finds runs by name."""
    unique: list[str] = []
    for name in names:
        label, copy = name, 2
        while label in unique:
            label, copy = f"{name} ({copy})", copy + 1
        unique.append(label)
    return unique
