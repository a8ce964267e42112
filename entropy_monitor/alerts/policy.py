"""What counts as an event, and how long it must last.

One frozen value that builds itself from TOML, YAML or Python.

Every time constant is in optimiser steps, never in records, so that one policy serves a run
monitored every step and one monitored every hundred. Thresholds are free of scale: evenness J in
[0, 1], and the logit spread as ``kap = std(content logits) / sqrt(2 log m)``, which is 1 where a
row of independent Gaussian logits freezes onto a few keys (the random-energy model).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from entropy_monitor.alerts.alert import SEVERITIES


def _check(owner: object, name: str, low: float, high: float = float("inf")) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        bound = f"at least {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
        raise ValueError(f"`{name}` must be a number {bound}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ConcentrationRule:
    """Attention on the content collapses onto few keys: J low *and* logits spread far, together.

    A group of ``n`` heads (model, layer) is judged by its medians. Few heads make a weak witness
    and a single head may well specialise, so the bounds move with ``n``: spread
    ``max(spread_<level>, spread_head / sqrt(n))``, evenness from ``evenness_head`` at one head to
    ``evenness_<level>`` at ``full_group`` heads and more.

    Attributes:
        enabled: Whether the rule runs.
        evenness_model: J below which the model's median head counts as concentrated.
        evenness_layer: The same for a layer.
        evenness_head: The same for one head.
        spread_model: kap above which the model's median head counts as concentrated.
        spread_layer: The same for a layer.
        spread_head: The same for one head.
        full_group: Heads from which a group's median is trusted as it is.
        drop: Change rule: J fell below this share of its slow average...
        drop_below: ...and lies below this, with kap above ``drop_spread``, in a group of
            ``full_group`` heads.
        drop_spread: See ``drop_below``.
        drop_at_once: ...and below this share of the fast average before the record.
        head_growth: A single head alarms only if its kap also grew by this factor over its slow
            average or the
            baseline: heads that are concentrated and stay so are normal.
        waste_model: Entropy times kap, in nats, of the concentrated heads, below which they are
            taken for heads that have learned what to look for. Gaussian logits: 1.5.
        waste_layer: The same for a layer, in which all heads may well copy or look at positions.
        waste_head: The same for one head.
        error_spread: A warning becomes an error when kap exceeds this many times its bound at
            layer or model level.
        error_after: ...and has done so for this many steps.
        alone: Share of the evenness bound that applies where no logit statistics were recorded.
    """

    enabled: bool = True
    evenness_model: float = 0.40
    evenness_layer: float = 0.25
    evenness_head: float = 0.15
    spread_model: float = 2.5
    spread_layer: float = 4.0
    spread_head: float = 6.0
    full_group: float = 4.0
    drop: float = 0.5
    drop_below: float = 0.40
    drop_spread: float = 0.8
    drop_at_once: float = 0.65
    head_growth: float = 2.0
    waste_model: float = 1.35
    waste_layer: float = 2.2
    waste_head: float = 3.0
    error_spread: float = 2.0
    error_after: float = 30.0
    alone: float = 0.6

    def __post_init__(self) -> None:
        for name in (
            "evenness_model",
            "evenness_layer",
            "evenness_head",
            "drop",
            "drop_below",
            "drop_at_once",
            "alone",
        ):
            _check(self, name, 0.0, 1.0)
        for name in (
            "spread_model",
            "spread_layer",
            "spread_head",
            "drop_spread",
            "waste_model",
            "waste_layer",
            "waste_head",
            "error_after",
        ):
            _check(self, name, 0.0)
        for name in ("head_growth", "error_spread", "full_group"):
            _check(self, name, 1.0)


@dataclass(frozen=True, kw_only=True)
class LogitGrowthRule:
    """Content logits grow fast in a model that had settled: the step before concentration.

    Attributes:
        enabled: Whether the rule runs.
        factor: kap of the median head (of the model, of a layer) grew by this factor over its slow
            average...
        spread_model: ...and has passed this value...
        evenness_model: ...while J has fallen below this.
        spread_layer: The same for a layer.
        evenness_layer: The same for a layer.
        max_logit: A fixed bound on any head's largest logit, as QK-clip uses (100); ``None``: no
            such bound. It depends on the size of the model and misses a bad initialisation, so the
            default is free of scale.
    """

    enabled: bool = True
    factor: float = 2.5
    spread_model: float = 1.5
    evenness_model: float = 0.55
    spread_layer: float = 3.0
    evenness_layer: float = 0.4
    max_logit: float | None = None

    def __post_init__(self) -> None:
        _check(self, "factor", 1.0)
        for name in ("spread_model", "spread_layer"):
            _check(self, name, 0.0)
        for name in ("evenness_model", "evenness_layer"):
            _check(self, name, 0.0, 1.0)
        if self.max_logit is not None:
            _check(self, "max_logit", 0.0)


@dataclass(frozen=True, kw_only=True)
class SinkGrowthRule:
    """The sink holds more attention than at the baseline: a note, since it is no collapse.

    Attributes:
        enabled: Whether the rule runs.
        rise_model: Rise of the mean sink mass over all heads.
        rise_layer: Rise of a layer's mean sink mass.
        content_share: From this share of the fall of entropy on, the content is named as well
            (kind ``both``).
    """

    enabled: bool = True
    rise_model: float = 0.10
    rise_layer: float = 0.15
    content_share: float = 0.25
    content_fall: float = 0.15

    def __post_init__(self) -> None:
        for name in ("rise_model", "rise_layer", "content_share", "content_fall"):
            _check(self, name, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class DilutionRule:
    """Heads that had a pattern go back to uniform attention: a note.

    Attributes:
        enabled: Whether the rule runs.
        structure: A head has a pattern once 1 - J has passed this.
        lost: It is diluted once 1 - J has fallen to this share of its largest slow average.
        heads: Share of a layer's heads (with a pattern) that must be diluted.
    """

    enabled: bool = True
    structure: float = 0.10
    lost: float = 0.35
    heads: float = 0.5

    def __post_init__(self) -> None:
        for name in ("structure", "lost", "heads"):
            _check(self, name, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class DormantRule:
    """Heads put nearly all attention on the sink: a note.

    Attributes:
        enabled: Whether the rule runs.
        sink_mass: A head is dormant above this sink mass.
        heads: Share of a layer's heads that must be dormant.
    """

    enabled: bool = True
    sink_mass: float = 0.97
    heads: float = 0.5

    def __post_init__(self) -> None:
        _check(self, "sink_mass", 0.0, 1.0)
        _check(self, "heads", 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class NonfiniteRule:
    """NaN or +inf reached the attention logits.

    Attributes:
        enabled: Whether the rule runs.
        share: Share of a head's rows that may be non-finite without notice.
    """

    enabled: bool = True
    share: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "share", 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class NoAttentionRule:
    """Nothing was measured at all: the monitor is blind.

    Attributes:
        enabled: Whether the rule runs.
    """

    enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class AlertPolicy:
    """Which rules run, and when an event is one. All time constants are in optimiser steps.

    Attributes:
        warmup: Steps after the first record in which rules that compare with the past stay silent.
        smoothing: Time constant of the fast average that is judged; records further apart are
            judged as they are.
        memory: Time constant of the slow average that is compared with. It stands still during an
            event.
        persist: Steps a condition must last. A record counts for the interval before it, so one
            record is enough when records are this far apart.
        abrupt: The same for a change so large that it needs no smoothing.
        clear: Steps a condition must be gone, by a margin, before the event is over.
        cooldown: Steps after an alert in which the same event in another place, or again, is not
            reported.
        margin: Hysteresis: an event ends only when its quantity is this factor away from the bound.
        confidence: Chance of a false crossing of a bound that is accepted per record over *all*
            heads together; it is split over the heads (Bonferroni), so that 12,800 heads stay as
            quiet as 12.
        min_rows: A head with fewer counted rows in a record is left out of it.
        min_content: A head whose content holds less mass than this is left out of content medians:
            its content is noise.
        report: Alerts below this severity are kept back.
        concentration: See `ConcentrationRule`.
        logit_growth: See `LogitGrowthRule`.
        sink_growth: See `SinkGrowthRule`.
        dilution: See `DilutionRule`.
        dormant: See `DormantRule`.
        nonfinite: See `NonfiniteRule`.
        no_attention: See `NoAttentionRule`.

    Raises:
        ValueError: If a value is out of its range.

    >>> AlertPolicy.from_dict({"concentration": {"spread_model": 3}}).concentration.spread_model
    3.0
    """

    warmup: float = 150.0
    smoothing: float = 15.0
    memory: float = 150.0
    persist: float = 10.0
    abrupt: float = 5.0
    clear: float = 100.0
    cooldown: float = 300.0
    margin: float = 1.25
    confidence: float = 0.02
    min_rows: float = 4.0
    min_content: float = 0.03
    report: str = "info"
    concentration: ConcentrationRule = field(default_factory=ConcentrationRule)
    logit_growth: LogitGrowthRule = field(default_factory=LogitGrowthRule)
    sink_growth: SinkGrowthRule = field(default_factory=SinkGrowthRule)
    dilution: DilutionRule = field(default_factory=DilutionRule)
    dormant: DormantRule = field(default_factory=DormantRule)
    nonfinite: NonfiniteRule = field(default_factory=NonfiniteRule)
    no_attention: NoAttentionRule = field(default_factory=NoAttentionRule)

    def __post_init__(self) -> None:
        for name in ("warmup", "persist", "abrupt", "clear", "cooldown", "min_rows"):
            _check(self, name, 0.0)
        for name in ("smoothing", "memory"):
            _check(self, name, 1e-9)
        _check(self, "margin", 1.0)
        _check(self, "confidence", 1e-12, 0.5)
        _check(self, "min_content", 0.0, 1.0)
        if self.report not in SEVERITIES:
            raise ValueError(
                f"`report` must be one of {', '.join(SEVERITIES)}, got {self.report!r}."
            )

    def to_dict(self) -> dict[str, Any]:
        """The policy as nested plain dictionaries; `from_dict` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AlertPolicy":
        """Builds a policy from nested dictionaries; what is not named keeps its default.

        Raises:
            ValueError: If a name is unknown (the message lists those that exist) or a value does
                not fit.
        """
        policy: AlertPolicy = _build(cls, data, "policy")
        return policy

    @classmethod
    def from_toml(cls, path: str | Path) -> "AlertPolicy":
        """Reads a TOML file.

        Raises:
            ValueError: If the file is no TOML or does not describe a policy.
        """
        return cls.from_dict(_read_toml(Path(path)))

    @classmethod
    def from_yaml(cls, path: str | Path) -> "AlertPolicy":
        """Reads a YAML file; needs PyYAML.

        Raises:
            ValueError: If the file is no YAML or does not describe a policy.
        """
        return cls.from_dict(_read_yaml(Path(path)))

    @classmethod
    def load(cls, path_or_name: "str | Path | AlertPolicy | None") -> "AlertPolicy":
        """A policy by name (``default``, ``strict``, ``quiet``) or from a TOML or YAML file.

        Raises:
            ValueError: If there is no such name or file; the message lists the names.
        """
        from entropy_monitor.alerts.presets import PRESETS

        if path_or_name is None:
            return cls()
        if isinstance(path_or_name, AlertPolicy):
            return path_or_name
        if str(path_or_name) in PRESETS:
            return cls.from_dict(PRESETS[str(path_or_name)])
        path = Path(path_or_name)
        if not path.is_file():
            raise ValueError(
                f"`policy` must be {', '.join(PRESETS)} or a .toml or .yaml file, "
                f"got {str(path_or_name)!r}, which is neither."
            )
        if path.suffix == ".toml":
            return cls.from_toml(path)
        if path.suffix in (".yaml", ".yml"):
            return cls.from_yaml(path)
        raise ValueError(f"a policy file ends in .toml, .yaml or .yml, got {path.name!r}.")


def _build(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"`{where}` must be a table of names and values, got {data!r}.")
    known = {item.name: item for item in fields(kind)}
    unknown = [str(name) for name in data if name not in known]
    if unknown:
        raise ValueError(
            f"`{where}` has no {', '.join(map(repr, unknown))}; it has {', '.join(known)}."
        )
    default = kind()
    values: dict[str, Any] = {}
    for name, value in data.items():
        current = getattr(default, name)
        if is_dataclass(current):
            values[name] = _build(type(current), value, f"{where}.{name}")
        elif isinstance(current, bool):
            if not isinstance(value, bool):
                raise ValueError(f"`{where}.{name}` must be true or false, got {value!r}.")
            values[name] = value
        elif isinstance(current, str):
            values[name] = str(value)
        elif value is None and current is None:
            values[name] = None
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"`{where}.{name}` must be a number, got {value!r}.")
        else:
            values[name] = float(value)
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"in `{where}`: {error}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[import-not-found, no-redef]
        except ModuleNotFoundError:
            raise ValueError(
                "reading TOML on Python 3.10 needs `pip install tomli`; YAML works too."
            ) from None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no valid TOML: {error}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError(
            "reading YAML needs `pip install pyyaml`; TOML works without it."
        ) from None
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from None
