"""The answers the front-end asks for, computed from a `History`: plain functions, no web.

The same functions serve TensorBoard's routes and fill the one-file report, so both show the same
numbers. Every answer keeps to the byte budget of `packing`: float32 where it fits, then 16 bits,
then fewer steps, and the answer says so.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from entropy_monitor.names import CHANGE_NAMES, CHANGE_STAT_NAMES, STATISTICS
from entropy_monitor.tensorboard_plugin.history import History, HistoryError
from entropy_monitor.tensorboard_plugin.packing import BUDGET, pack, quantise, thin
from entropy_monitor.writers.tensorboard import SINCE_NAME

MAX_ALERTS = 5000
MAX_MESSAGE = 2000
_HEADER_ROOM = 64 << 10

_CHANGE_DOCS = {
    "change_total": ("dH", "Change of the entropy H(p): sink part + content part + support part."),
    "change_sink": (
        "dHb + dc mid(H(pi))",
        "Part of the change that comes from mass moving between the sink and the content.",
    ),
    "change_content": (
        "mid(c) dH(pi)",
        "Part of the change that comes from the content attention itself.",
    ),
    "change_support": (
        "mid(c) d(log m)",
        "Part of the change that comes from rows seeing more or fewer keys.",
    ),
}


def describe_stats(names: Sequence[str]) -> list[dict[str, str]]:
    """Return name, formula, unit and meaning of each statistic; unknown names stay as they are."""
    known = {
        stat.name: {"formula": stat.formula, "unit": stat.unit, "doc": stat.doc}
        for stat in STATISTICS
    }
    for name, (formula, doc) in _CHANGE_DOCS.items():
        known[name] = {"formula": formula, "unit": "nat", "doc": doc}
    blank = {"formula": "", "unit": "1", "doc": ""}
    return [{"name": name, **known.get(name, blank)} for name in names]


def describe_run(
    name: str, layers: Sequence[tuple[str, int]], stats: Sequence[str]
) -> dict[str, Any]:
    """Return what a reader needs to choose and lay out a run."""
    return {
        "name": name,
        "layers": [{"name": layer, "heads": heads} for layer, heads in layers],
        "stats": describe_stats([name for name in stats if name != SINCE_NAME]),
    }


def runs_answer(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return runs with what many of them share told once.

    A folder of a thousand runs of one model would otherwise repeat its layers a thousand times,
    every few seconds.

    Args:
        runs: From `describe_run`, with whatever else is known about them.

    Returns:
        ``layouts``, each ``{"layers", "stats"}``, and ``runs`` with the number of their layout.

    Example:
        >>> runs_answer([{"name": n, "layers": [], "stats": []} for n in "ab"])["runs"]
        [{'name': 'a', 'layout': 0}, {'name': 'b', 'layout': 0}]
    """
    layouts: dict[str, int] = {}
    listed = []
    for run in runs:
        layout = {"layers": run["layers"], "stats": run["stats"]}
        number = layouts.setdefault(json.dumps(layout), len(layouts))
        rest = {key: value for key, value in run.items() if key not in layout}
        listed.append({**rest, "layout": number})
    return {"layouts": [json.loads(layout) for layout in layouts], "runs": listed}


def frames_answer(
    history: History, stat: str, since: int | None = None, budget: int = BUDGET
) -> bytes:
    """Return one statistic of all heads at every step.

    Args:
        history: The run.
        stat: A recorded statistic, or one of `CHANGE_STAT_NAMES`.
        since: For a change: the step it is counted from; None for the run's baseline.
        budget: Bytes the answer may have.

    Returns:
        A packed answer with blocks ``steps`` (n,) and ``values`` (n, heads).

    Raises:
        HistoryError: If the statistic or the step was not recorded.
    """
    if stat in CHANGE_STAT_NAMES:
        values = history.changes(since)[:, CHANGE_STAT_NAMES.index(stat)]
    else:
        values = history.stat(stat)
    header: dict[str, Any] = {"stat": stat, "total_steps": len(values), "exact": True}
    chosen = thin(len(values), (budget - _HEADER_ROOM) // max(1, 2 * values.shape[1] + 4))
    values = values[chosen]
    fits = (values.shape[1] * 4 + 4) * len(values) <= budget - _HEADER_ROOM
    header["limits"] = _limits(values)
    if not fits:
        values, limits = quantise(values)
        header["ranges"] = {"values": limits}
        header["exact"] = False
    return _pack_steps(history, chosen, header, {"values": values})


def series_answer(history: History, layer: int, head: int, since: int | None = None) -> bytes:
    """Return every statistic of one head at every step, with its change since a step.

    Returns:
        A packed answer with blocks ``steps`` (n,), ``values`` (stats, n) and ``changes`` (4, n);
        the header names the lines.

    Raises:
        LayoutError: If there is no such head.
        HistoryError: If the step was not recorded.
    """
    at = history.layout.head(layer, head)
    stats = [name for name in history.layout.stats if not name.startswith("change_")]
    lines = [history.layout.stats.index(name) for name in stats]
    count = len(history.steps)
    chosen = thin(count, (BUDGET - _HEADER_ROOM) // (4 * (len(stats) + len(CHANGE_NAMES) + 1)))
    values = history.frames[:, :, at][chosen][:, lines].T
    try:
        changes = history.changes(since)[:, :, at][chosen].T
    except HistoryError:
        # Curves of a run that recorded too little to split a change are still worth seeing.
        changes = np.full((len(CHANGE_NAMES), len(chosen)), np.nan, np.float32)
    header = {"layer": layer, "head": head, "stats": stats, "changes": list(CHANGE_NAMES)}
    return _pack_steps(history, chosen, header, {"values": values, "changes": changes})


def attribution_answer(history: History, since: int | None = None) -> bytes:
    """Return the change since a step at every step, for model and layers, and the model's means.

    Returns:
        A packed answer with blocks ``steps`` (n,), ``model`` (4, n), ``layers`` (4, n, layers),
        ``means`` (stats, n): means over heads; ``terms`` (2, n, layers): sink term and content term
        of H; ``highest`` (n,): largest logit of the model. The header tells where the change is
        counted from.

    Raises:
        HistoryError: If the step was not recorded.
    """
    return history.cached(("attribution", since), lambda: _attribution(history, since))


def _attribution(history: History, since: int | None) -> bytes:
    count = len(history.steps)
    stats = [name for name in history.layout.stats if not name.startswith(("rows_", "change_"))]
    per_step = 4 * ((len(CHANGE_NAMES) + 2) * (1 + len(history.layout.layers)) + len(stats))
    chosen = thin(count, (BUDGET - _HEADER_ROOM) // per_step)
    header: dict[str, Any] = {"stats": stats, "changes": list(CHANGE_NAMES), "problem": None}
    header["since"] = _since(history, since)
    try:
        changes = history.changes(since)[chosen]
    except HistoryError as error:
        if since is not None and since not in history.steps:
            raise
        header["problem"] = str(error)
        changes = np.full((len(chosen), len(CHANGE_NAMES), history.layout.heads), np.nan)
    arrays = {
        "model": _mean(changes).T,
        "layers": np.moveaxis(history.layout.layer_means(changes), 0, 1),
        "means": np.stack([_mean(history.stat(name)[chosen]) for name in stats])
        if stats
        else np.zeros((0, len(chosen))),
    }
    if {"total_entropy", "content_mass_entropy"} <= set(stats):
        total, content = (
            history.layout.layer_means(history.stat(name)[chosen])
            for name in ("total_entropy", "content_mass_entropy")
        )
        arrays["terms"] = np.stack([total - content, content])
    if "max_logit" in stats:
        logits = history.stat("max_logit")[chosen]
        arrays["highest"] = np.max(logits, axis=1, where=np.isfinite(logits), initial=-np.inf)
    return _pack_steps(history, chosen, header, arrays)


def split_answer(history: History, since: int | None, to: int) -> dict[str, Any]:
    """Return the change between two steps for model, layers and heads, as plain types.

    Returns:
        ``from``, ``to``, ``total``, ``sink``, ``content``, ``support``; ``layers`` with the same
        per layer and ``heads`` as lists; None where nothing is known.

    Raises:
        HistoryError: If a step was not recorded or a change cannot be split.
    """
    changes = history.changes(since)[history.position(to)]
    by_layer = history.layout.layer_means(changes)
    starts = history.layout.starts
    return {
        "from": _since(history, since),
        "to": to,
        **dict(zip(CHANGE_NAMES, map(_plain, _mean(changes)), strict=True)),
        "layers": [
            {
                "name": layer.name,
                **{name: _plain(by_layer[k, i]) for k, name in enumerate(CHANGE_NAMES)},
                "heads": {
                    name: [_plain(value) for value in changes[k, starts[i] : starts[i + 1]]]
                    for k, name in enumerate(CHANGE_NAMES)
                },
            }
            for i, layer in enumerate(history.layout.layers)
        ],
    }


def alerts_answer(history: History) -> dict[str, Any]:
    """Return the run's alerts, the latest `MAX_ALERTS` of them, and where their layers stand."""
    places = {layer.name: i for i, layer in enumerate(history.layout.layers)}
    shown = []
    for alert in history.alerts[-MAX_ALERTS:]:
        layer, head = alert.get("layer"), alert.get("head")
        place = places.get(layer) if isinstance(layer, str) else None
        heads = 0 if place is None else history.layout.layers[place].heads
        shown.append(
            {
                "kind": _text(alert.get("kind"), 64),
                "severity": _text(alert.get("severity"), 16),
                "level": _text(alert.get("level"), 16),
                "step": _whole(alert.get("step")),
                "layer": None if layer is None else _text(layer, 512),
                "layer_index": place,
                "head": head if isinstance(head, int) and 0 <= head < heads else None,
                "message": _text(alert.get("message"), MAX_MESSAGE),
            }
        )
    return {"alerts": shown, "total": history.alerts_total}


def _pack_steps(
    history: History,
    chosen: npt.NDArray[np.int64],
    header: Mapping[str, Any],
    arrays: Mapping[str, npt.NDArray[Any]],
) -> bytes:
    # Steps go in the header: float32 would round them from 2**24 on.
    steps = [int(step) for step in history.steps[chosen]]
    return pack({**header, "steps": steps}, arrays)


def _since(history: History, since: int | None) -> dict[str, Any]:
    if since is not None:
        return {"kind": "step", "step": since}
    if history.baseline is not None:
        return {"kind": "baseline", "step": history.baseline}
    return {"kind": "first", "step": int(history.steps[0]) if len(history.steps) else None}


def _mean(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Average over the last axis, over the heads that have a value; NaN where none has."""
    finite = np.isfinite(values)
    sums = np.sum(values, axis=-1, where=finite, dtype=np.float64)
    counts = finite.sum(axis=-1)
    means: npt.NDArray[np.float64] = np.divide(
        sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0
    )
    return means


def _limits(values: npt.NDArray[Any]) -> list[float]:
    finite = np.isfinite(values)
    if not finite.any():
        return [0.0, 0.0]
    return [
        float(np.min(values, where=finite, initial=np.inf)),
        float(np.max(values, where=finite, initial=-np.inf)),
    ]


def _plain(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _whole(value: object) -> int | None:
    # Beyond 2**53 a number means something else in JavaScript.
    return value if isinstance(value, int) and abs(value) < 2**53 else None


def _text(value: object, longest: int) -> str:
    text = value if isinstance(value, str) else ""
    return text[:longest].encode("utf-8", "replace").decode("utf-8")
