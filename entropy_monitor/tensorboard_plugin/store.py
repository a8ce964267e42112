"""Runs out of TensorBoard's data provider, checked and cached.

A provider hands out all steps of a tag or a thinned set, never a range, so what was read is kept
until the run has a newer step. How many steps are asked for follows from a byte budget and the
shape in the metadata: one answer of the default loader is capped at 256 MiB. Of a very large run a
few steps are read at once, so that the page opens as fast as for a small one, and the others in
the background.
"""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorboard.data import provider

from entropy_monitor.tensorboard_plugin import PLUGIN_NAME, SAMPLES
from entropy_monitor.tensorboard_plugin.answers import attribution_answer, describe_run
from entropy_monitor.tensorboard_plugin.history import History, HistoryError, build_history
from entropy_monitor.tensorboard_plugin.layout import Layout, LayoutError, parse_layout

HEADS_TAG = "attention_heads"
ALERTS_TAG = "attention_alerts_json"

FIRST_BUDGET = 24 << 20
"""Bytes of tensors to wait for."""

READ_BUDGET = 192 << 20
"""Bytes of tensors to ask for in the background."""

CACHE_BUDGET = 640 << 20
"""Bytes of histories to keep."""

MAX_ALERT_BYTES = 16 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A cached history and what it was read from."""

    token: tuple[Any, ...]
    history: History
    large: bool


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What to read, and how to tell that it is still the same."""

    ctx: Any
    experiment: str
    run: str
    layout: Layout
    has_alerts: bool
    token: tuple[Any, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.experiment, self.run


class RunStore:
    """Histories by run name.

    Args:
        data_provider: TensorBoard's.
    """

    def __init__(self, data_provider: Any) -> None:
        self._provider = data_provider
        self._cache: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        # One at a time: a page asks for several answers at once, which share one read.
        self._lock = threading.Lock()
        self._threads: dict[tuple[str, str], threading.Thread] = {}
        self._completed: dict[tuple[str, str], int] = {}

    def list_runs(self, ctx: Any, experiment: str) -> list[dict[str, Any]]:
        """Return every run that has our tensor, by name; those that cannot be read say why."""
        runs = []
        for run, tags in sorted(self._list(ctx, experiment).items()):
            series = tags.get(HEADS_TAG)
            if series is None:
                continue
            entry: dict[str, Any]
            try:
                layout = parse_layout(series.plugin_content)
            except LayoutError as error:
                entry = {**describe_run(run, [], []), "problem": str(error)}
            else:
                layers = [(layer.name, layer.heads) for layer in layout.layers]
                entry = {**describe_run(run, layers, layout.stats), "problem": None}
            alerts = tags.get(ALERTS_TAG)
            # Last steps alone would miss a run that was overwritten or resumed from further back.
            entry["version"] = [
                _number(series.max_step),
                _number(series.max_wall_time),
                _number(None if alerts is None else alerts.max_wall_time),
                self._completed.get((experiment, run), 0),
            ]
            entry["loading"] = (experiment, run) in self._threads
            runs.append(entry)
        return runs

    def history(self, ctx: Any, experiment: str, run: str) -> History:
        """Return a run's history, read again only if it has grown.

        Raises:
            HistoryError: If there is no such run, or what it holds cannot be read.
        """
        tags = self._list(ctx, experiment, run).get(run, {})
        series = tags.get(HEADS_TAG)
        if series is None:
            raise HistoryError(f"There is no run {run[:200]!r} with attention data.")
        try:
            layout = parse_layout(series.plugin_content)
        except LayoutError as error:
            raise HistoryError(str(error)) from error
        alerts = tags.get(ALERTS_TAG)
        token = (
            series.max_step,
            series.max_wall_time,
            series.plugin_content,
            alerts and alerts.max_wall_time,
        )
        source = _Source(
            ctx=ctx,
            experiment=experiment,
            run=run,
            layout=layout,
            has_alerts=alerts is not None,
            token=token,
        )
        with self._lock:
            entry = self._cache.get(source.key)
            if entry is None or (entry.token != token and not entry.large):
                history, large = self._read(source, FIRST_BUDGET)
                entry = _Entry(token=token, history=history, large=large)
                self._keep(source.key, entry)
                if large:
                    self._read_in_background(source)
            elif entry.token != token:
                # What is known is shown until the new steps are here.
                self._read_in_background(source)
            return entry.history

    def _read_in_background(self, source: _Source) -> None:
        if source.key in self._threads:
            return

        def work() -> None:
            found = None
            try:
                found, _ = self._read(source, READ_BUDGET)
                # Kept with the history, so that no page has to wait for it.
                attribution_answer(found)
            except HistoryError as error:
                logger.warning("The other steps of a run are left out: %s", error)
            with self._lock:
                del self._threads[source.key]
                if found is not None:
                    self._keep(source.key, _Entry(token=source.token, history=found, large=True))
                    self._completed[source.key] = self._completed.get(source.key, 0) + 1

        thread = threading.Thread(target=work, name="entropy_monitor-read", daemon=True)
        self._threads[source.key] = thread
        thread.start()

    def wait(self) -> None:
        """Wait until nothing is being read in the background."""
        for thread in list(self._threads.values()):
            thread.join()

    def _keep(self, key: tuple[str, str], entry: _Entry) -> None:
        self._cache[key] = entry
        self._cache.move_to_end(key)
        while len(self._cache) > 1 and self._size() > CACHE_BUDGET:
            self._cache.popitem(last=False)

    def _size(self) -> int:
        return sum(entry.history.nbytes for entry in self._cache.values())

    def _list(
        self, ctx: Any, experiment: str, run: str | None = None
    ) -> Mapping[str, Mapping[str, Any]]:
        runs = None if run is None else [run]
        found: Mapping[str, Mapping[str, Any]] = self._provider.list_tensors(
            ctx,
            experiment_id=experiment,
            plugin_name=PLUGIN_NAME,
            run_tag_filter=provider.RunTagFilter(runs=runs, tags=[HEADS_TAG, ALERTS_TAG]),
        )
        return found

    def _read(self, source: _Source, budget: int) -> tuple[History, bool]:
        """Return a run's history, and whether it may have more steps than the budget allows."""
        ctx, experiment, run, layout = source.ctx, source.experiment, source.run, source.layout
        one = 4 * layout.shape[0] * layout.shape[1] * layout.shape[2]
        limit = max(2, min(SAMPLES, budget // one))
        data = self._read_tag(ctx, experiment, run, HEADS_TAG, limit)
        more = len(data) >= limit and limit < SAMPLES
        notices = []
        if more and budget < READ_BUDGET:
            notices.append(f"Showing {limit} of the recorded steps while the others are read.")
        elif more:
            notices.append(
                f"Showing {limit} of the recorded steps: one step of this model has {one:,} bytes. "
                "The record next to the run has them all."
            )
        alerts: tuple[Mapping[str, Any], ...] = ()
        total = 0
        if source.has_alerts:
            alerts, total, problem = self._read_alerts(ctx, experiment, run)
            if problem:
                notices.append(problem)
        history = build_history(
            run,
            layout,
            ((datum.step, datum.numpy) for datum in data),
            alerts=alerts,
            alerts_total=total,
            notices=tuple(notices),
        )
        return history, more

    def _read_tag(self, ctx: Any, experiment: str, run: str, tag: str, limit: int) -> list[Any]:
        try:
            found = self._provider.read_tensors(
                ctx,
                experiment_id=experiment,
                plugin_name=PLUGIN_NAME,
                downsample=limit,
                run_tag_filter=provider.RunTagFilter(runs=[run], tags=[tag]),
            )
        except Exception as error:
            # Whatever a damaged file makes TensorBoard or protobuf raise; the page shows it.
            logger.warning("Tensors %s of a run cannot be read: %s", tag, error)
            raise HistoryError(f"The tensors {tag} of this run cannot be read.") from error
        return list(found.get(run, {}).get(tag, []))

    def _read_alerts(
        self, ctx: Any, experiment: str, run: str
    ) -> tuple[tuple[Mapping[str, Any], ...], int, str | None]:
        """Return the alerts of the last event, which holds all so far, their number, a problem."""
        try:
            data = self._read_tag(ctx, experiment, run, ALERTS_TAG, 1)
            if not data:
                return (), 0, None
            text = max(data, key=lambda datum: (datum.wall_time, datum.step)).numpy.item()
            if not isinstance(text, (bytes, str)) or len(text) > MAX_ALERT_BYTES:
                raise ValueError("not a text, or too long")
            content = json.loads(text)
            alerts = [alert for alert in content["alerts"] if isinstance(alert, dict)]
            count = content.get("count")
            total = count if isinstance(count, int) and 0 <= count < 2**53 else len(alerts)
        except (HistoryError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return (), 0, "The alerts of this run cannot be read."
        return tuple(alerts), max(total, len(alerts)), None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
