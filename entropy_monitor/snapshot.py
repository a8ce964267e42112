"""Sums over calls, micro-batches, steps and ranks, and the frozen line per head made from them.

State is always sums and counts, never means, so that parts merge exactly in any order. Sequences
are also summed in `GROUPS` groups (sequence slot modulo `GROUPS`): leaving out one group at a time
gives standard errors that respect that rows of one sequence, and heads that saw the same sequence,
are not independent.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from entropy_monitor.calls import RowKind
from entropy_monitor.names import (
    ATTRIBUTION_NAMES,
    COVARIANCE_PAIRS,
    ROW_KINDS,
    STAT_NAMES,
    STATISTICS,
    check_statistics,
)
from entropy_monitor.notebook import snapshot_html
from entropy_monitor.statistics import RowStatistics

if TYPE_CHECKING:
    import pandas as pd

GROUPS = 32
"""Groups of sequences kept for standard errors; with fewer sequences each is a group of its own."""

_COUNTED = (
    "content_mass",
    "binary_entropy",
    "content_entropy",
    "content_mass_entropy",
    "content_evenness",
    "content_concentration",
    "total_entropy",
    "sink_entropy",
    "dormant_rows",
    "one_hot_rows",
    "logit_spread",
    "logit_range",
    "logit_spread_scaled",
    "support",
    "log_support",
    "content_mass_log_support",
)
"""Means over every row that counts."""

_SEEING = ("sink_mass", "log_odds")
"""Means over the rows that can see a sink."""

_PER_SEQUENCE = ("best_column_mass", "best_column_is_sink")
"""Means over sequences."""

# One row of sums per head, in this order.
_COLUMNS = (
    "rows",
    *_COUNTED,
    "sink_rows",
    *_SEEING,
    "sequences",
    *_PER_SEQUENCE,
    *(f"rows_{kind}" for kind in ROW_KINDS),
)
_INDEX = {name: i for i, name in enumerate(_COLUMNS)}
_DENOMINATOR = {
    **dict.fromkeys(_COUNTED, "rows"),
    **dict.fromkeys(_SEEING, "sink_rows"),
    **dict.fromkeys(_PER_SEQUENCE, "sequences"),
}
_GROUP_WIDTH = 2 + len(ATTRIBUTION_NAMES)  # rows, the four means of an attribution, log m


def _sum_dtype(device: torch.device) -> torch.dtype:
    # Apple's GPUs have no float64.
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, kw_only=True)
class RowValues:
    """What a paired attribution needs of every row, float64 unless said.

    All arrays are ``(batch, heads, rows)``; ``query`` is ``(batch, rows)``.

    Attributes:
        sink_term: Hb(s) + s H(sigma), nats.
        content_mass: 1 - s.
        content_entropy: H(pi), nats.
        log_support: log m, nats.
        weight: How many rows this one stands for; the sampling weight, ``(batch, 1, rows)``.
        counted: bool, whether the row counts.
        query: Positions of the queries, int64.
    """

    sink_term: npt.NDArray[Any]
    content_mass: npt.NDArray[Any]
    content_entropy: npt.NDArray[Any]
    log_support: npt.NDArray[Any]
    weight: npt.NDArray[Any]
    counted: npt.NDArray[np.bool_]
    query: npt.NDArray[np.int64]


class HeadSums:
    """Running sums of one layer, one line per head.

    Attributes:
        sums: ``(heads, columns)`` weighted sums and counts.
        groups: ``(GROUPS, heads, 6)`` sums per group of sequences.
        largest: ``(heads,)`` largest logit, -inf before the first row.
        slots: Sequences seen so far; the next call's first sequence gets this slot.
    """

    def __init__(self, heads: int, *, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        dtype = _sum_dtype(device)
        self.sums: Float[Tensor, "heads columns"] = torch.zeros(
            heads, len(_COLUMNS), dtype=dtype, device=device
        )
        self.groups: Float[Tensor, "groups heads 6"] = torch.zeros(
            GROUPS, heads, _GROUP_WIDTH, dtype=dtype, device=device
        )
        self.largest: Float[Tensor, " heads"] = torch.full(
            (heads,), -math.inf, dtype=dtype, device=device
        )
        self.slots = 0

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.sums.shape[0]

    def update(
        self,
        rows: RowStatistics,
        weights: Float[Tensor, "#batch rows"],
        *,
        slot: Callable[[int], int] = lambda sequence: sequence,
    ) -> None:
        """Add the rows of one call.

        Args:
            rows: Statistics of the rows, ``(batch, heads, rows)``.
            weights: How many rows of the call each one stands for.
            slot: Maps the running number of a sequence on this process to its number over all
                processes.

        Raises:
            ValueError: If the number of heads differs from earlier calls.
        """
        batch, heads, _ = rows.kind.shape
        if heads != self.heads:
            raise ValueError(f"`rows` must have {self.heads} heads as before; got {heads}.")
        dtype = self.sums.dtype
        kind = rows.kind
        weight = weights.to(device=kind.device, dtype=dtype)[:, None]  # (#batch, 1, rows)
        # Undefined values are 0, so uncounted rows need no mask of their own except where they are
        # defined.
        counted = (kind <= RowKind.NO_SINK).to(dtype) * weight
        seeing = (kind == RowKind.VALID).to(dtype) * weight
        columns = self._columns(rows)
        means = torch.stack(
            [torch.ones_like(columns["content_mass"]), *(columns[name] for name in _COUNTED)]
        )
        means = means.to(dtype)
        seen = torch.stack([torch.ones_like(rows.sink_mass), rows.sink_mass, rows.log_odds]).to(
            dtype
        )
        per_sequence = (means * counted).sum(-1)  # (1 + counted columns, batch, heads)
        present = (per_sequence[0] > 0).to(dtype)
        best = torch.stack(
            [
                present,
                rows.best_column_mass.to(dtype) * present,
                rows.best_column_is_sink.to(dtype) * present,
            ]
        )
        kinds = torch.stack([(kind == k).to(dtype) * weight for k in range(len(ROW_KINDS))]).sum(
            (1, -1)
        )
        self.sums += torch.cat(
            [per_sequence.sum(1), (seen * seeing).sum((1, -1)), best.sum(1), kinds]
        ).T
        logits = rows.max_logit.masked_fill(kind >= RowKind.EMPTY, -math.inf)
        self.largest = torch.maximum(self.largest, logits.amax((0, 2)).to(dtype))
        self._update_groups(per_sequence, batch, slot)

    def _update_groups(self, per_sequence: Tensor, batch: int, slot: Callable[[int], int]) -> None:
        position = {name: i for i, name in enumerate(("rows", *_COUNTED))}
        values = torch.stack(
            [
                per_sequence[position["rows"]],
                per_sequence[position["binary_entropy"]] + per_sequence[position["sink_entropy"]],
                *(per_sequence[position[name]] for name in (*ATTRIBUTION_NAMES[1:], "log_support")),
            ],
            dim=-1,
        )  # (batch, heads, 6)
        groups = [slot(self.slots + i) % GROUPS for i in range(batch)]
        self.groups.index_add_(0, torch.tensor(groups, device=values.device), values)
        self.slots += batch

    @staticmethod
    def _columns(rows: RowStatistics) -> dict[str, Tensor]:
        support = rows.support.to(rows.content_mass.dtype)
        log_support = support.clamp(min=1).log()
        return {
            "content_mass": rows.content_mass,
            "binary_entropy": rows.binary_entropy,
            "content_entropy": rows.content_entropy,
            "content_mass_entropy": rows.content_mass * rows.content_entropy,
            "content_evenness": rows.evenness,
            "content_concentration": rows.concentration,
            "total_entropy": rows.total_entropy,
            "sink_entropy": rows.sink_mass * rows.sink_entropy,
            "dormant_rows": (rows.sink_mass > 0.5).to(support.dtype),
            "one_hot_rows": (rows.evenness < 0.1).to(support.dtype),
            "logit_spread": rows.logit_spread,
            "logit_range": rows.logit_range,
            "logit_spread_scaled": rows.logit_spread
            / (2 * log_support.clamp(min=math.log(2))).sqrt(),
            "support": support,
            "log_support": log_support,
            "content_mass_log_support": rows.content_mass * log_support,
        }

    def merge(self, other: "HeadSums") -> None:
        """Add the sums of another part of the same layer.

        Raises:
            ValueError: If the number of heads differs.
        """
        if other.heads != self.heads:
            raise ValueError(f"`other` must have {self.heads} heads; got {other.heads}.")
        self.sums += other.sums.to(self.sums)
        self.groups += other.groups.to(self.groups)
        self.largest = torch.maximum(self.largest, other.largest.to(self.largest))
        self.slots += other.slots

    def packed(self) -> Float[Tensor, "heads width"]:
        """Everything of a head in one line, so that a flush is one transfer from the device."""
        groups = self.groups.permute(1, 0, 2).flatten(1)
        return torch.cat([self.sums, groups, self.largest[:, None]], dim=1)

    @classmethod
    def unpack(cls, packed: Float[Tensor, "heads width"], slots: int) -> "HeadSums":
        """Undo `packed`."""
        made = cls(packed.shape[0], device=packed.device)
        width = len(_COLUMNS)
        made.sums = packed[:, :width].clone()
        made.groups = packed[:, width:-1].reshape(-1, GROUPS, _GROUP_WIDTH).permute(1, 0, 2).clone()
        made.largest = packed[:, -1].clone()
        made.slots = slots
        return made

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types, loadable with ``weights_only=True``."""
        return {"packed": self.packed().cpu(), "slots": self.slots}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "HeadSums":
        """Undo `state_dict`.

        Raises:
            ValueError: If it is not what `state_dict` gives, or that of another version.
        """
        if not {"packed", "slots"} <= set(state):
            raise ValueError(
                "`state` must come from `HeadSums.state_dict`, with `packed` and `slots`; got "
                f"{', '.join(map(repr, state)) or 'nothing'}."
            )
        packed = state["packed"]
        width = len(_COLUMNS) + GROUPS * _GROUP_WIDTH + 1
        if packed.ndim != 2 or packed.shape[1] != width:
            raise ValueError(
                f"`state` must hold lines of {width} numbers; got shape {tuple(packed.shape)}."
            )
        return cls.unpack(packed, int(state["slots"]))


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was measured at one step: sums, and the means they stand for, per layer and head.

    A head without a row that counts has value 0 in `values` and `to_dict` (its ``rows_*`` counts
    say so), NaN in `array`; averages over heads leave it out.

    Attributes:
        step: Optimiser step, or None.
        sums: Layer name to the layer's sums, in the order of the forward pass.
        rows: Layer name to per-row values, where rows were kept for a paired attribution.
    """

    step: int | None = None
    sums: Mapping[str, HeadSums] = field(default_factory=dict)
    rows: Mapping[str, RowValues] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[str, ...]:
        """Qualified names of the modules that own the attention; ``name#1`` is a second call."""
        return tuple(self.sums)

    def heads(self, layer: str) -> int:
        """Number of heads of a layer.

        Raises:
            ValueError: If there is no such layer.
        """
        return self._layer(layer).heads

    def values(self, stat: str) -> dict[str, Float[Tensor, " heads"]]:
        """One float64 value per head, by layer; 0 where no row counted.

        Raises:
            ValueError: If the statistic does not exist.
        """
        check_statistics(stat, argument="stat")
        return {name: _values(sums, stat)[0] for name, sums in self.sums.items()}

    def array(self, stat: str) -> npt.NDArray[np.float64]:
        """One value per head, heads of all layers in a row; NaN where no row counted."""
        check_statistics(stat, argument="stat")
        parts = []
        for sums in self.sums.values():
            values, defined = _values(sums, stat)
            parts.append(torch.where(defined, values, math.nan).double().numpy())
        return np.concatenate(parts) if parts else np.zeros(0)

    def layer_mean(self, stat: str, layer: str) -> float:
        """Mean of a statistic over a layer's heads; the maximum of a maximum, the sum of a count.

        Raises:
            ValueError: If the statistic or the layer does not exist.
        """
        check_statistics(stat, argument="stat")
        values, defined = _values(self._layer(layer), stat)
        return _reduce(stat, values[defined])

    def mean(self, stat: str) -> float:
        """Mean of a statistic over all heads; the maximum of a maximum, the sum of a count.

        Raises:
            ValueError: If the statistic does not exist.
        """
        array = self.array(stat)
        return _reduce(stat, torch.from_numpy(array[~np.isnan(array)]))

    def quantiles(self, stat: str, q: Iterable[float] = (0.0, 0.1, 0.5, 0.9)) -> dict[str, float]:
        """Quantiles over heads: ``min``, ``p10``, ``p50``, ...; empty without a counted row."""
        array = self.array(stat)
        array = array[~np.isnan(array)]
        if not array.size:
            return {}
        return {"min" if p == 0 else f"p{round(100 * p)}": float(np.quantile(array, p)) for p in q}

    def to_dict(self) -> dict[str, dict[str, list[float]]]:
        """``{layer: {statistic: [value per head]}}``."""
        made: dict[str, dict[str, list[float]]] = {name: {} for name in self.layers}
        for stat in STAT_NAMES:
            for name, values in self.values(stat).items():
                made[name][stat] = values.tolist()
        return made

    def to_pandas(self) -> "pd.DataFrame":
        """A table with one line per head: ``step``, ``layer``, ``head`` and every statistic."""
        import pandas as pd

        lines = []
        for name, stats in self.to_dict().items():
            for head in range(self.heads(name)):
                line = {"step": self.step, "layer": name, "head": head}
                lines.append({**line, **{stat: values[head] for stat, values in stats.items()}})
        return pd.DataFrame(lines, columns=["step", "layer", "head", *STAT_NAMES])

    def group_sums(self, layer: str) -> npt.NDArray[np.float64]:
        """``(GROUPS, heads, 6)``: rows and the sums an attribution needs, per group."""
        return self._layer(layer).groups.double().numpy()

    def covariance(self) -> npt.NDArray[np.float64]:
        """``(10, heads)`` covariances between sequences of the means of `ATTRIBUTION_NAMES`.

        By deleting one group of sequences at a time; NaN below two groups. Order:
        `COVARIANCE_PAIRS`.
        """
        parts = [_covariance(self.group_sums(name)) for name in self.layers]
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(COVARIANCE_PAIRS), 0))

    def row_values(self, layer: str) -> RowValues:
        """Per-row values of a layer.

        Raises:
            ValueError: If rows were not kept.
        """
        if layer not in self.rows:
            raise ValueError(f"`layer` must be one whose rows were kept; got {layer!r}.")
        return self.rows[layer]

    def pairs_with(self, other: "Snapshot", layer: str) -> bool:
        """Whether both snapshots kept the same rows of a layer."""
        mine, others = self.rows.get(layer), other.rows.get(layer)
        if mine is None or others is None:
            return False
        return (
            mine.content_mass.shape == others.content_mass.shape
            and np.array_equal(mine.query, others.query)
            and np.array_equal(mine.weight, others.weight)
        )

    def merge(self, other: "Snapshot") -> "Snapshot":
        """The snapshot of both parts together; keeps this one's step and no per-row values.

        Raises:
            ValueError: If a layer has another number of heads in the other snapshot.
        """
        merged: dict[str, HeadSums] = {}
        for part in (self, other):
            for name, sums in part.sums.items():
                if name not in merged:
                    merged[name] = HeadSums(sums.heads)
                merged[name].merge(sums)
        return Snapshot(step=self.step, sums=merged)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types, loadable with ``weights_only=True``."""
        return {
            "step": self.step,
            "sums": {name: sums.state_dict() for name, sums in self.sums.items()},
            "rows": {
                name: {
                    key: torch.from_numpy(np.ascontiguousarray(value))
                    for key, value in vars(rows).items()
                }
                for name, rows in self.rows.items()
            },
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Snapshot":
        """Undo `state_dict`.

        Raises:
            ValueError: If it is not what `state_dict` gives.
        """
        missing = [name for name in ("step", "sums", "rows") if name not in state]
        if missing:
            raise ValueError(
                "`state` must come from `Snapshot.state_dict`, with `step`, `sums` and `rows`; "
                f"{', '.join(missing)} missing, got {', '.join(map(repr, state)) or 'nothing'}."
            )
        return cls(
            step=state["step"],
            sums={name: HeadSums.from_state_dict(sums) for name, sums in state["sums"].items()},
            rows={
                name: RowValues(**{key: value.numpy() for key, value in rows.items()})
                for name, rows in state["rows"].items()
            },
        )

    def __str__(self) -> str:
        heads = sum(self.heads(name) for name in self.layers)
        if not heads:
            return "Snapshot: no attention was measured"
        at = "" if self.step is None else f" at step {self.step}"
        plural = "" if len(self.layers) == 1 else "s"
        entropy, evenness = self.mean("total_entropy"), self.mean("content_evenness")
        sink, content = self.mean("sink_mass"), self.mean("content_entropy")
        return (
            f"Snapshot{at}: {len(self.layers)} layer{plural}, {heads} heads, entropy {entropy:.3f} "
            f"nat, sink {sink:.3f}, content entropy {content:.3f} nat (J {evenness:.3f})"
        )

    def _repr_html_(self) -> str:
        return snapshot_html(
            step=self.step,
            heads=sum(self.heads(name) for name in self.layers),
            model={stat: self.mean(stat) for stat in STAT_NAMES},
            layers=[
                (name, self.heads(name), {s: self.layer_mean(s, name) for s in STAT_NAMES})
                for name in self.layers
            ],
        )

    def _layer(self, layer: str) -> HeadSums:
        if layer not in self.sums:
            raise ValueError(
                f"`layer` must be one of {', '.join(self.sums) or 'none'}; got {layer!r}."
            )
        return self.sums[layer]


def _values(sums: HeadSums, stat: str) -> tuple[Tensor, Tensor]:
    """Value per head, and whether it is defined."""
    if stat == "max_logit":
        defined = sums.largest > -math.inf
        return torch.where(defined, sums.largest, 0.0), defined
    total = sums.sums[:, _INDEX[stat]]
    if stat not in _DENOMINATOR:
        return total, torch.ones_like(total, dtype=torch.bool)
    count = sums.sums[:, _INDEX[_DENOMINATOR[stat]]]
    defined = count > 0
    return torch.where(defined, total / count.clamp(min=1e-300), 0.0), defined


_REDUCE = {statistic.name: statistic.reduce for statistic in STATISTICS}


def _reduce(stat: str, values: Tensor) -> float:
    if not values.numel():
        return 0.0
    how = _REDUCE[stat]
    return float(
        values.max() if how == "max" else values.sum() if how == "count" else values.mean()
    )


def _covariance(groups: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    held = groups[(groups[..., 0] > 0).any(-1)]
    number = held.shape[0]
    if number < 2:
        return np.full((len(COVARIANCE_PAIRS), groups.shape[1]), np.nan)
    left = held.sum(0) - held
    means = left[..., 1:5] / np.maximum(left[..., :1], 1e-300)  # (groups, heads, 4)
    centred = means - means.mean(0)
    position = {name: i for i, name in enumerate(ATTRIBUTION_NAMES)}
    return np.stack(
        [
            (number - 1) / number * (centred[..., position[a]] * centred[..., position[b]]).sum(0)
            for a, b in COVARIANCE_PAIRS
        ]
    )


def collect(
    sums: Mapping[str, HeadSums],
    *,
    step: int | None = None,
    rows: Mapping[str, RowValues] | None = None,
) -> Snapshot:
    """Freeze running sums: copies them to the CPU in one transfer.

    Args:
        sums: Running sums by layer; they may go on being updated afterwards.
        step: Optimiser step.
        rows: Per-row values, where they were kept.

    Returns:
        The snapshot.
    """
    frozen: dict[str, HeadSums] = {}
    if sums:
        packed = torch.cat([part.packed() for part in sums.values()]).cpu().double()
        start = 0
        for name, part in sums.items():
            frozen[name] = HeadSums.unpack(packed[start : start + part.heads], part.slots)
            start += part.heads
    return Snapshot(step=step, sums=frozen, rows=dict(rows or {}))


def row_values(rows: RowStatistics, weights: Float[Tensor, "#batch rows"]) -> RowValues:
    """Per-row values of one call, on the CPU.

    Args:
        rows: Statistics of the rows.
        weights: How many rows of the call each one stands for.
    """
    query: Int[Tensor, "batch rows"] = rows.rows

    def cpu(values: Tensor) -> npt.NDArray[Any]:
        return values.detach().to("cpu", torch.float64).numpy()

    return RowValues(
        sink_term=cpu(rows.binary_entropy + rows.sink_mass * rows.sink_entropy),
        content_mass=cpu(rows.content_mass),
        content_entropy=cpu(rows.content_entropy),
        log_support=cpu(rows.support.double().clamp(min=1).log()),
        weight=np.broadcast_to(
            cpu(weights)[:, None], (rows.kind.shape[0], 1, rows.kind.shape[2])
        ).copy(),
        counted=(rows.kind <= RowKind.NO_SINK).cpu().numpy(),
        query=query.cpu().numpy(),
    )
