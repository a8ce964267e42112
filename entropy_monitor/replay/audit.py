"""The audit: how many nearer-head verdicts hang on keeping or dropping the sink.

For random triples of heads (a, b, c): is b or c nearer to a? The verdict is taken with the sink
column kept and with it dropped and the row renormalised; a *flip* is a verdict that changes.
Distances are averaged over rows, on the support that all heads share, from logits. One sequence is
in memory at a time, and of it only the rows that are compared.

Source: Papamichalis and Ruane, arXiv 2608.14712, who find 17-47 % over ten models.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from entropy_monitor.calls import AttentionCall, masked_below
from entropy_monitor.capture import CaptureSession
from entropy_monitor.replay.distances import (
    CONVENTIONS,
    METRICS,
    Rows,
    adjusted_rand,
    average_linkage,
    common_rows,
    draw_triples,
    pairwise,
    verdicts,
)
from entropy_monitor.replay.errors import ReplayError
from entropy_monitor.replay.models import LoadedModel
from entropy_monitor.replay.tokens import Tokens

SINK_MASSES = (0.0, 0.5, 0.9, 0.99, 0.999)
"""Sink masses every head is set to, its content unchanged, to show what full-row distances do."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What to compare.

    Attributes:
        sink: ``first`` or key positions (negative ones count from the end).
        rows: Rows compared per sequence, evenly spaced from an eighth of the length on.
        triples: Random triples of heads.
        clusters: Clusters of heads.
        heads: Most heads that are compared; a random choice of more.
        seed: Of the triples and of that choice.
    """

    sink: str | tuple[int, ...] = "first"
    rows: int = 16
    triples: int = 2000
    clusters: int = 8
    heads: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("triples", 1), ("clusters", 2), ("heads", 3)):
            if getattr(self, name) < least:
                raise ReplayError(
                    f"`--{name}` must be at least {least}, got {getattr(self, name)}."
                )
        if isinstance(self.sink, str) and self.sink != "first":
            raise ReplayError(
                f"`--sink` must be first or key positions for an audit; got {self.sink!r}."
            )


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What an audit found.

    Attributes:
        heads: ``(layer, head)`` of every head compared.
        rows: Rows compared.
        sink_mass: Mean sink mass of every head.
        flips: Metric to the share of verdicts that flip, distances averaged over rows.
        row_flips: The same for verdicts on single rows.
        agreement: Metric to the adjusted Rand index between the clusterings with the sink kept and
            dropped.
        clusters: ``(metric, convention)`` to the cluster of every head.
        collapse: One line per sink mass that every head was set to: mean distance per metric with
            the sink kept.
        observed: One line per quarter of the pairs of heads by their mean sink mass: mean
            distances.
    """

    heads: tuple[tuple[str, int], ...]
    rows: int
    sink_mass: npt.NDArray[np.float64]
    flips: dict[str, float]
    row_flips: dict[str, float]
    agreement: dict[str, float]
    clusters: dict[tuple[str, str], npt.NDArray[np.int64]]
    collapse: list[dict[str, float]]
    observed: list[dict[str, float]]


def audit_model(
    loaded: LoadedModel,
    tokens: Tokens,
    settings: AuditSettings | None = None,
    *,
    track: Callable[[int, int], None] = lambda done, total: None,
) -> AuditResult:
    """Audit a model.

    Args:
        loaded: The model (`entropy_monitor.replay.models.load_model`).
        tokens: ``(sequences, length)``.
        settings: What to compare.
        track: Called as sequences get done.

    Raises:
        ReplayError: If there are fewer than three heads, or no row in which all heads see the sink.
    """
    settings = settings or AuditSettings()
    state = _Sums(settings=settings)
    session = CaptureSession(loaded.model, on_error="raise")
    length = tokens.shape[1]
    chosen = np.unique(np.linspace(max(4, length // 8), length - 1, settings.rows).astype(np.int64))
    for number, sequence in enumerate(tokens):
        collected: dict[str, Tensor] = {}

        def keep(call: AttentionCall, into: dict[str, Tensor] = collected) -> None:
            if call.is_square_self and call.shape[2] == length:
                into[call.name] = row_logits(call, torch.from_numpy(chosen))[0].float().cpu()

        with torch.no_grad(), session.window(keep) as report:
            loaded.forward(torch.from_numpy(sequence[None]))
        if not collected:
            raise ReplayError(f"no self-attention was seen in this model. {report.describe()}")
        state.add(collected)
        track(number + 1, len(tokens))
    return state.result()


def row_logits(call: AttentionCall, rows: Tensor) -> Float[Tensor, "batch heads rows keys"]:
    """Return the logits of some rows of a call, without learned sinks; -inf where hidden.

    Args:
        call: What the layer was asked.
        rows: Query positions.
    """
    _, heads, t_q, t_k = call.shape
    rows = rows.to(call.device)
    if call.logits is not None:
        x = call.logits[..., :t_k].index_select(2, rows).to(call.compute_dtype)
        x = x.masked_fill(x <= masked_below(call.logits.dtype), -torch.inf)
    else:
        assert call.query is not None
        assert call.key is not None
        q = call.query.index_select(2, rows).to(call.compute_dtype)
        k = call.key.to(call.compute_dtype).repeat_interleave(heads // call.key.shape[1], dim=1)
        x = (
            q
            @ k.transpose(-1, -2)
            * (call.scale if call.scale is not None else q.shape[-1] ** -0.5)
        )
        if call.softcap is not None:
            x = call.softcap * torch.tanh(x / call.softcap)
    position = rows[:, None] + (t_k - t_q)
    key = torch.arange(t_k, device=x.device)[None]
    visible = torch.ones(len(rows), t_k, dtype=torch.bool, device=x.device)
    if call.is_causal:
        visible &= key <= position
    if call.window is not None:
        visible &= key > position - call.window
        visible &= key < position + call.window
    if call.mask is not None:
        mask = call.mask.reshape((1,) * (4 - call.mask.ndim) + tuple(call.mask.shape))
        if mask.shape[2] != 1:
            mask = mask.index_select(2, rows)
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            visible = visible & (mask > masked_below(mask.dtype))
            x = x + mask.to(x.dtype)
    return x.masked_fill(~visible, -torch.inf)


@dataclass(kw_only=True)
class _Sums:
    """Sums over rows; everything is a matrix over heads, whatever the length."""

    settings: AuditSettings
    names: list[tuple[str, int]] = field(default_factory=list)
    chosen: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    triples: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    rows: int = 0

    def add(self, collected: dict[str, Tensor]) -> None:
        """Add the rows of one sequence: layer name to ``(heads, rows, keys)``."""
        if not self.names:
            self._start(collected)
        logits = torch.cat(list(collected.values()))[torch.from_numpy(self.chosen)]
        for slot in range(logits.shape[1]):
            row = logits[:, slot]
            if torch.isnan(row).any():
                raise ReplayError("the model computes NaN logits on this text.")
            compared = common_rows(row, self._sink(row))
            if compared is not None:
                self._add_row(compared)

    def _start(self, collected: dict[str, Tensor]) -> None:
        names = [(name, head) for name, x in collected.items() for head in range(x.shape[0])]
        if len(names) < 3:
            raise ReplayError(f"an audit compares triples of heads; this model has {len(names)}.")
        generator = np.random.default_rng(self.settings.seed)
        few = min(len(names), self.settings.heads)
        self.chosen = np.sort(generator.choice(len(names), few, replace=False)).astype(np.int64)
        self.names = [names[i] for i in self.chosen]
        self.triples = draw_triples(few, self.settings.triples, seed=self.settings.seed)
        zeros = {m: torch.zeros(few, few, dtype=torch.float64) for m in METRICS}
        self.sums = {c: {m: z.clone() for m, z in zeros.items()} for c in CONVENTIONS}
        self.set_to = {s: dict.fromkeys(METRICS, 0.0) for s in SINK_MASSES}
        self.flipped = dict.fromkeys(METRICS, 0)
        self.mass = torch.zeros(few, dtype=torch.float64)

    def _sink(self, row: Tensor) -> Tensor:
        keys = row.shape[1]
        sink = torch.zeros(keys, dtype=torch.bool)
        if self.settings.sink == "first":
            common = torch.isfinite(row).all(0)
            sink[0] = bool(common[0])
            return sink
        for position in self.settings.sink:
            assert isinstance(position, int)
            if not -keys <= position < keys:
                raise ReplayError(
                    f"`--sink` must be positions in [{-keys}, {keys}); got {position}."
                )
            sink[position] = True
        return sink

    def _add_row(self, rows: Rows) -> None:
        self.rows += 1
        self.mass += rows.sink_mass
        found = {convention: pairwise(rows, convention) for convention in CONVENTIONS}
        for metric in METRICS:
            kept, dropped = (found[c][metric] for c in CONVENTIONS)
            self.sums["kept"][metric] += kept
            self.sums["dropped"][metric] += dropped
            self.flipped[metric] += int(
                (verdicts(kept, self.triples) != verdicts(dropped, self.triples)).sum()
            )
        if self.rows % 8 == 1:  # a curve needs fewer rows than a verdict
            for mass, sums in self.set_to.items():
                distances = pairwise(rows.with_sink_mass(mass), "kept")
                for metric in METRICS:
                    sums[metric] += _mean_pair(distances[metric])

    def result(self) -> AuditResult:
        """Turn sums into shares and means."""
        if not self.rows:
            raise ReplayError(
                "no row in which every head sees the sink and three content keys: nothing to "
                "compare."
            )
        mean = {c: {m: x / self.rows for m, x in by.items()} for c, by in self.sums.items()}
        flips = {
            m: float(
                (
                    verdicts(mean["kept"][m], self.triples)
                    != verdicts(mean["dropped"][m], self.triples)
                ).mean()
            )
            for m in METRICS
        }
        count = min(self.settings.clusters, len(self.names))
        clusters = {
            (m, c): average_linkage(mean[c][m].numpy(), count) for m in METRICS for c in CONVENTIONS
        }
        curve_rows = (self.rows + 7) // 8
        return AuditResult(
            heads=tuple(self.names),
            rows=self.rows,
            sink_mass=(self.mass / self.rows).numpy(),
            flips=flips,
            row_flips={m: n / (self.rows * len(self.triples)) for m, n in self.flipped.items()},
            agreement={
                m: adjusted_rand(clusters[m, "kept"], clusters[m, "dropped"]) for m in METRICS
            },
            clusters=clusters,
            collapse=[
                {"sink_mass": s, **{m: v / curve_rows for m, v in sums.items()}}
                for s, sums in self.set_to.items()
            ],
            observed=self._observed(mean["kept"]),
        )

    def _observed(self, kept: dict[str, Any]) -> list[dict[str, float]]:
        """Mean distances of pairs of heads in quarters of their mean sink mass."""
        first, second = np.triu_indices(len(self.names), 1)
        mass = (self.mass / self.rows).numpy()
        pair_mass = 0.5 * (mass[first] + mass[second])
        lines = []
        for part in np.array_split(np.argsort(pair_mass, kind="stable"), min(4, len(first))):
            line = {"sink_mass": float(pair_mass[part].mean()), "pairs": float(len(part))}
            lines.append(
                line
                | {m: float(kept[m].numpy()[first[part], second[part]].mean()) for m in METRICS}
            )
        return lines


def _mean_pair(distance: Tensor) -> float:
    heads = distance.shape[0]
    return float(distance.sum()) / (heads * (heads - 1))
