"""Runs made of arithmetic, with every identity of a real one, written as TensorBoard does."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer import event_file_writer

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.attribution import split_means
from entropy_monitor.names import CHANGE_NAMES, STAT_NAMES
from entropy_monitor.writers.base import Emission
from entropy_monitor.writers.tensorboard import (
    _use_fast_checksum,
    alerts_summary,
    heads_summary,
)

# Files are read in the order of their names, which end in a number without leading zeros: 9 comes
# after 10, and a second file of the same second may be missed.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10_000)


def plain_layers(count, heads, pattern="model.layers.{}.self_attn"):
    return tuple((pattern.format(i), heads) for i in range(count))


def binary_entropy(s):
    s = np.clip(s, 1e-12, 1 - 1e-12)
    return -(s * np.log(s) + (1 - s) * np.log1p(-s))


def head_means(layers, progress, seed=0, drift=1.0):
    """Means of all heads at a moment in [0, 1]: sinks grow in the middle, late layers sharpen."""
    rng = np.random.default_rng(seed)
    depth = np.concatenate(
        [np.full(heads, i / max(1, len(layers) - 1)) for i, (_, heads) in enumerate(layers)]
    )
    heads = len(depth)
    middle = np.exp(-(((depth - 0.45) / 0.28) ** 2))
    start, noise = rng.uniform(0.3, 0.6, heads), rng.normal(0, 1, heads)
    rise = 1 / (1 + np.exp(-(progress - start) * 9)) - 1 / (1 + np.exp(start * 9))
    s = np.clip(
        0.04 + 0.01 * noise + drift * rise * middle * rng.uniform(0.4, 0.95, heads), 0.005, 0.985
    )
    fall = drift * progress**1.4 * rng.beta(1.2, 3.0, heads) * (0.25 + 0.75 * depth)
    evenness = np.clip(0.93 - 0.02 * np.abs(noise) - fall, 0.03, 0.99)
    log_m = math.log(48.0)
    content = evenness * log_m
    c = 1 - s
    spread = 0.4 + 2.2 * (1 - evenness) ** 1.5 + 0.1 * np.abs(noise)
    values = {
        "sink_mass": s,
        "content_mass": c,
        "log_odds": np.log(s / c),
        "binary_entropy": binary_entropy(s),
        "content_entropy": content,
        "content_mass_entropy": c * content,
        "content_evenness": evenness,
        "content_concentration": log_m - content,
        "total_entropy": binary_entropy(s) + c * content,
        "dormant_rows": (s > 0.5) * np.clip(s, 0, 1),
        "one_hot_rows": np.clip(0.3 - evenness, 0, 1),
        "max_logit": 2.5 + 9 * (1 - evenness) + 6 * s + 0.3 * np.abs(noise),
        "logit_spread": spread,
        "logit_range": 3 * spread,
        "logit_spread_scaled": spread / math.sqrt(2 * log_m),
        "best_column_mass": np.maximum(s, 0.1),
        "best_column_is_sink": (s > 0.1) * 1.0,
        "support": np.full(heads, 48.0),
        "log_support": np.full(heads, log_m),
        "content_mass_log_support": c * log_m,
        "rows_valid": np.full(heads, 960.0),
    }
    return np.stack([values.get(name, np.zeros(heads)) for name in STAT_NAMES]).astype(np.float32)


def emission(layers, step, last, *, baseline=None, since=0, seed=0, drift=1.0, alerts=()):
    """One emission; `baseline`: the means of the step `since` that recorded changes count from."""
    stats = head_means(layers, step / max(1, last), seed, drift)
    change = None
    if baseline is not None:
        means = {name: stats[i] for i, name in enumerate(STAT_NAMES)}
        before = {name: baseline[i] for i, name in enumerate(STAT_NAMES)}
        split = split_means(before, means)
        change = np.stack([split[name] for name in CHANGE_NAMES]).astype(np.float32)
    summary = {} if baseline is None else {"baseline_step": since}
    return Emission(
        step=step,
        layers=tuple(layers),
        stats=stats,
        change=change,
        summary=summary,
        alerts=tuple(alerts),
    )


def sample_alerts(layers, last):
    names = [name for name, _ in layers]
    late, mid = names[-2 if len(names) > 1 else 0], names[len(names) // 2]
    return [
        Alert(
            kind="sink_growth",
            severity="info",
            level="layer",
            step=int(last * 0.5),
            layer=mid,
            head=None,
            message="Sink mass rose from 0.04 to 0.47; content evenness stayed at 0.86.",
            evidence={"sink_mass": 0.47},
        ),
        Alert(
            kind="concentration",
            severity="warn",
            level="head",
            step=int(last * 0.8),
            layer=late,
            head=1,
            message="Content evenness fell to 0.14, half of its baseline; logits spread (2.9).",
            evidence={"content_evenness": 0.14},
        ),
        Alert(
            kind="logit_growth",
            severity="error",
            level="head",
            step=int(last * 0.9),
            layer=names[-1],
            head=0,
            message="Largest logit reached 61 and doubles every 180 steps.",
            evidence={"max_logit": 61.0},
        ),
        Alert(
            kind="dilution",
            severity="info",
            level="model",
            step=last,
            layer=None,
            head=None,
            message="Mean support grew from 48 to 51 keys.",
            evidence={"support": 51.0},
        ),
    ]


class EventLog:
    """An event file in a run's folder."""

    def __init__(self, folder):
        self._writer = event_file_writer.EventFileWriter(str(folder))
        # TensorBoard's own checksum takes 0.3 s for a large tensor.
        _use_fast_checksum(SimpleNamespace(event_writer=self._writer))
        self._wall = 1_750_000_000.0

    def summary(self, *values, step):
        self._wall += 1.0
        summary = summary_pb2.Summary(value=values)
        self._writer.add_event(event_pb2.Event(step=step, wall_time=self._wall, summary=summary))

    def raw(self, tag, tensor, layout, step):
        """Write any tensor under any metadata, as a stranger might."""
        from tensorboard.util import tensor_util

        content = layout if isinstance(layout, bytes) else json.dumps(layout).encode()
        metadata = summary_pb2.SummaryMetadata(
            plugin_data=summary_pb2.SummaryMetadata.PluginData(
                plugin_name="entropy_monitor", content=content
            ),
            data_class=summary_pb2.DATA_CLASS_TENSOR,
        )
        proto = tensor_util.make_tensor_proto(tensor)
        self.summary(summary_pb2.Summary.Value(tag=tag, tensor=proto, metadata=metadata), step=step)

    def flush(self):
        self._writer.flush()

    def close(self):
        self._writer.close()


def write_run(folder, layers, steps, *, seed=0, drift=1.0, alerts=None, baseline_at=None):
    """Write a run; return its emissions.

    Args:
        baseline_at: Step from which on changes are recorded, against the means of that step.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    log = EventLog(folder)
    last = max(steps)
    alerts = sample_alerts(layers, last) if alerts is None else alerts
    baseline = None if baseline_at is None else head_means(layers, baseline_at / last, seed, drift)
    written = []
    raised = []
    for step in steps:
        due = [alert for alert in alerts if alert.step <= step and alert not in raised]
        one = emission(
            layers,
            step,
            last,
            baseline=baseline if baseline_at is not None and step >= baseline_at else None,
            since=baseline_at,
            seed=seed,
            drift=drift,
            alerts=due,
        )
        values = [heads_summary(one)]
        if due:
            raised += due
            values.append(alerts_summary(raised[-500:], len(raised)))
        log.summary(*values, step=step)
        written.append(one)
    log.close()
    return written
