"""Faults put into the monitor's own code, one stage at a time or everywhere at random."""

import importlib
import random
from typing import Any

import pytest

STAGES = {
    "start": "entropy_monitor.lightning.AttentionMonitor",
    "arm": "entropy_monitor.lightning.arm",
    "window": "entropy_monitor.capture.session.CaptureSession.begin",
    "window end": "entropy_monitor.capture.session.CaptureSession.end",
    "tap": "entropy_monitor.capture.hub.Hub.tell",
    "tap operations": "entropy_monitor.capture.tap.recording",
    "owner": "entropy_monitor.capture.owners.Owners.find",
    "call": "entropy_monitor.capture.window.AttentionCall",
    "head part": "entropy_monitor.monitor.head_part",
    "select_rows": "entropy_monitor.monitor.select_rows",
    "measure_call": "entropy_monitor.monitor.measure_call",
    "HeadSums": "entropy_monitor.monitor.HeadSums",
    "HeadSums.update": "entropy_monitor.snapshot.HeadSums.update",
    "collect": "entropy_monitor.monitor.collect",
    "reduce": "entropy_monitor.distributed.Ranks.reduce",
    "baseline": "entropy_monitor.pipeline.Pipeline._update_baseline",
    "attribution": "entropy_monitor.pipeline.attribute_change",
    "alerts": "entropy_monitor.alerts.engine.AlertEngine.update",
    "scalars": "entropy_monitor.pipeline.Pipeline._scalars",
    "emission": "entropy_monitor.pipeline.Emission",
    "MemoryWriter.write": "entropy_monitor.writers.memory.MemoryWriter.write",
    "RecordWriter": "entropy_monitor.lightning.RecordWriter",
    "RecordWriter.write": "entropy_monitor.writers.record.RecordWriter.write",
    "RecordWriter.close": "entropy_monitor.writers.record.RecordWriter.close",
    "metrics": "pytorch_lightning.LightningModule.log_dict",
    "step": "entropy_monitor.lightning._step",
    "stepped": "entropy_monitor.lightning._stepped",
    "state_dict": "entropy_monitor.snapshot.HeadSums.state_dict",
}
"""Where a fault can be put: a name, and what is replaced."""

KINDS = (RuntimeError, ZeroDivisionError, MemoryError, StopIteration, OSError, RecursionError)


class Fault:
    """Makes one stage raise at its call number `nth` (from 0) and at every one after it.

    Attributes:
        raised: How often it raised.
        kind: What it raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: str, *, nth: int = 0) -> None:
        self.kind = RuntimeError
        self.raised = self._calls = 0
        self._nth = nth
        _replace(monkeypatch, STAGES[stage], self._before)

    def _before(self) -> None:
        self._calls += 1
        if self._calls > self._nth:
            self.raised += 1
            raise self.kind("ours, on purpose")


class Faults:
    """Makes every stage raise now and then, errors of all kinds, from a seed of its own.

    Attributes:
        raised: How often, by stage.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        seed: int,
        probability: float,
        without: tuple[str, ...] = (),
    ) -> None:
        self.raised: dict[str, int] = {}
        self._random = random.Random(seed)
        for stage, target in STAGES.items():
            if stage in without:
                continue

            def before(stage: str = stage) -> None:
                if self._random.random() < probability:
                    self.raised[stage] = self.raised.get(stage, 0) + 1
                    raise self._random.choice(KINDS)(f"ours, on purpose: {stage}")

            _replace(monkeypatch, target, before)


def _replace(monkeypatch: pytest.MonkeyPatch, target: str, before: Any) -> None:
    """Puts `before()` in front of a function, a method or a class."""
    holder, name = _find(target)
    original = vars(holder)[name] if isinstance(holder, type) else getattr(holder, name)
    if isinstance(original, type):

        class Replaced(original):  # type: ignore[valid-type,misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                before()
                super().__init__(*args, **kwargs)

        Replaced.__name__ = original.__name__
        monkeypatch.setattr(holder, name, Replaced)
    else:

        def replaced(*args: Any, **kwargs: Any) -> Any:
            before()
            return original(*args, **kwargs)

        monkeypatch.setattr(holder, name, replaced)


def _find(target: str) -> tuple[Any, str]:
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        holder: Any = module
        for part in parts[cut:-1]:
            holder = getattr(holder, part)
        return holder, parts[-1]
    raise ModuleNotFoundError(target)
