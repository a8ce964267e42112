"""The kinds of runs. A kind is a configuration; its twin is the same without the fault."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Group = Literal["collapse", "healthy", "sink", "dilution", "elsewhere"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong at ``step``.

    ``what`` is one of

    - ``qk_growth``: q and k weights times 1 + ``size`` per step
    - ``value_growth``: the same for v and output weights
    - ``scale``: attention logits times ``size``, reached over ``steps``
    - ``rate``: learning rate times ``size`` for ``steps``
    - ``second_moment``: Adam's second moment is lost, the first kept
    - ``labels``: wrong targets for ``steps``
    - ``garbage``: random tokens for ``steps``
    - ``one_key``: a bias of ``size`` on one content key, reached over ``steps``
    - ``sink_bias``: the same on the first key
    """

    what: str
    step: int
    size: float = 0.0
    steps: int = 1
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: model, data, optimiser, fault, cadence."""

    group: Group = "healthy"
    steps: int = 500
    every: int = 10
    batch: int = 12
    length: int = 64
    layers: int = 2
    heads: int = 4
    groups: int = 0  # key/value heads, 0: as many as heads
    width: int = 64
    norm: str = "pre"
    position: str = "learned"
    qk_norm: bool = False
    dropout: float = 0.0
    window: int = 0
    causal: bool = True
    init: float = 1.0  # q/k initialisation is multiplied by this
    data: str = "text"
    optimiser: str = "adamw"
    rate: float = 2e-3
    warmup: int = 60
    schedule: str = "cosine"
    decay: float = 0.1
    beta2: float = 0.99
    clip: float = 1.0
    lengths: Sequence[int] = field(
        default_factory=tuple
    )  # the length changes to these, in equal parts
    fault: Fault | None = None
    fix: dict[str, Any] = field(
        default_factory=dict
    )  # what the twin has otherwise; the fault is always taken out
    note: str = ""

    def twin(self) -> "Run":
        """The same run without what goes wrong."""
        return replace(self, fault=None, group="healthy", fix={}, **self.fix)


def _run(**options: Any) -> Run:
    return Run(**options)


NORMED = {"qk_norm": True}


def _faulty(**options: Any) -> Run:
    """With rotary positions attention earns its keep within 250 steps, so that losing it shows."""
    return Run(**{"position": "rope", "rate": 3e-3, "steps": 700, **options})


KINDS: dict[str, Run] = {
    # Collapse, as in the field's reports.
    "qk_growth": _faulty(group="collapse", fault=Fault(what="qk_growth", step=300, size=0.01)),
    "qk_growth_layer": _faulty(
        group="collapse", layers=3, fault=Fault(what="qk_growth", step=300, size=0.012, layers=[1])
    ),
    "qk_growth_head": _faulty(
        group="collapse",
        layers=2,
        fault=Fault(what="qk_growth", step=300, size=0.015, layers=[0], heads=[1]),
    ),
    "rate_high": _faulty(group="collapse", rate=1.5e-2, warmup=0, schedule="constant", fix=NORMED),
    "rate_spike": _faulty(
        group="collapse", fault=Fault(what="rate", step=300, size=20.0, steps=40)
    ),
    "no_scale": _faulty(group="collapse", init=5.0, fix={"init": 1.0}),
    "scale_bug": _faulty(group="collapse", fault=Fault(what="scale", step=300, size=8.0)),
    "bad_resume": _faulty(group="collapse", rate=4e-3, fault=Fault(what="second_moment", step=300)),
    # Our own. The expectation stands in `note`.
    "one_key": _faulty(
        group="collapse",
        fault=Fault(what="one_key", step=300, size=16.0, steps=150),
        note="every row turns to one content key; should be found",
    ),
    "many_heads_one": _faulty(
        group="collapse",
        layers=4,
        heads=8,
        fault=Fault(what="qk_growth", step=300, size=0.015, layers=[2], heads=[5]),
        note="1 of 32 heads: damage is doubtful; a head-level warning at most",
    ),
    "late_slow": _faulty(
        group="collapse",
        steps=900,
        fault=Fault(what="qk_growth", step=300, size=0.004),
        note="0.4 % per step, slower than the memory of 150 steps: the level rule is late",
    ),
    "sawtooth": _faulty(
        group="collapse",
        schedule="sawtooth",
        rate=6e-3,
        fix={"schedule": "cosine", "rate": 2e-3},
        note="the learning rate jumps by 10 every 100 steps; we expect to fail or be late",
    ),
    "cross_cadence": _faulty(
        group="collapse",
        every=50,
        fault=Fault(what="qk_growth", step=300, size=0.01),
        note="one record in 50 steps",
    ),
    "low_beta2_rate": _faulty(
        group="collapse",
        rate=8e-3,
        warmup=10,
        beta2=0.999,
        fix={"rate": 2e-3, "warmup": 60, "beta2": 0.99},
        note="damage without clear concentration; we expect to fail",
    ),
    # Damage that does not come from attention, sink growth, dilution: an alarm is false.
    "labels": _faulty(group="elsewhere", fault=Fault(what="labels", step=300, steps=100)),
    "value_growth": _faulty(
        group="elsewhere",
        fault=Fault(what="value_growth", step=300, size=0.01),
        note="values and outputs blow up; attention reacts, we may alarm",
    ),
    "garbage": _faulty(group="elsewhere", fault=Fault(what="garbage", step=300, steps=40)),
    "bag": _run(group="sink", layers=1, heads=2, data="bag", steps=600),
    "bag_deep": _run(group="sink", layers=2, heads=4, data="bag", steps=600),
    "sink_bias": _faulty(
        group="sink", fault=Fault(what="sink_bias", step=300, size=6.0, steps=100)
    ),
    "cooling": _faulty(group="dilution", fault=Fault(what="scale", step=300, size=0.03, steps=150)),
    "qk_decay": _faulty(group="dilution", fault=Fault(what="qk_growth", step=300, size=-0.01)),
    # Healthy, in shapes that the thresholds were not tuned on.
    "h_deep": _run(layers=6, heads=2, width=32, batch=8, steps=400),
    "h_wide": _run(layers=2, heads=8, width=128, batch=8, steps=350),
    "h_many_heads": _run(layers=2, heads=16, width=64),
    "h_one_layer": _run(layers=1, heads=8),
    "h_short": _run(length=24, batch=32),
    "h_long": _run(length=160, batch=6, steps=400),
    "h_sgd": _run(optimiser="sgd", rate=0.3, warmup=30),
    "h_lion": _run(optimiser="lion", rate=4e-4),
    "h_every5": _run(every=5, steps=400),
    "h_every50": _run(every=50),
    "h_log": _run(every=0, steps=600, note="log-spaced records"),
    "h_copy": _run(data="copy", rate=3e-3, steps=600),
    "h_copy_rope": _run(data="copy", position="rope", rate=4e-3, steps=600),
    "h_copy_late": _run(data="copy", position="rope", rate=1e-3, warmup=200, steps=800),
    "h_copy_deep": _run(data="copy", position="rope", layers=4, heads=8, rate=2e-3, steps=500),
    "h_copy_post": _run(data="copy", position="rope", norm="post", rate=2e-3, batch=24, steps=500),
    "h_copy_short": _run(data="copy", position="rope", length=24, batch=48, rate=3e-3, steps=500),
    "h_code": _run(data="code", layers=3),
    "h_gqa": _run(heads=8, groups=2),
    "h_window": _run(window=16, position="rope"),
    "h_bidirectional": _run(causal=False, data="masked"),
    "h_qk_norm_fast": _run(qk_norm=True, rate=2e-2, warmup=20),
    "h_restarts": _run(schedule="restarts", steps=600),
    "h_dropout": _run(dropout=0.2, layers=3),
    "h_post": _run(norm="post", rate=1e-3, warmup=120),
    "h_lengths": _run(lengths=(32, 96, 48), batch=10),
    "h_mixed": _run(data="mixed", rate=4e-3, position="rope"),
    "h_no_decay": _run(decay=0.0, schedule="constant", rate=3e-3),
}
