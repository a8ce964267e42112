"""For your own tests: a slow, plain reference of the row statistics in float64.

Written from the definitions, row by row, with no tiles, no tricks and no shared code with
`statistics.py`, so that the two can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entropy_monitor.calls import RowKind, SinkSpec, masked_below

_FLOATS = (
    "sink_mass", "content_mass", "log_odds", "binary_entropy", "content_entropy", "total_entropy",
    "sink_entropy", "evenness", "concentration", "max_logit", "logit_spread", "logit_range",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReferenceStatistics:
    """The fields of `RowStatistics` as numpy arrays in float64, (batch, heads, rows)."""

    sink_mass: NDArray[Any]
    content_mass: NDArray[Any]
    log_odds: NDArray[Any]
    binary_entropy: NDArray[Any]
    content_entropy: NDArray[Any]
    total_entropy: NDArray[Any]
    sink_entropy: NDArray[Any]
    evenness: NDArray[Any]
    concentration: NDArray[Any]
    max_logit: NDArray[Any]
    logit_spread: NDArray[Any]
    logit_range: NDArray[Any]
    support: NDArray[Any]
    kind: NDArray[Any]
    rows: NDArray[Any]
    best_column_mass: NDArray[Any]
    """(batch, heads)."""
    column_mass: NDArray[Any]
    """(batch, heads, keys): weighted mean of p over the rows that count."""


def reference_row_statistics(
    query: Tensor | None = None,
    key: Tensor | None = None,
    *,
    logits: Tensor | None = None,
    virtual_columns: int = 0,
    scale: float | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    sink: SinkSpec = "first",
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    window: int | None = None,
    rows: Tensor | Sequence[int] | None = None,
    weights: Tensor | None = None,
    cross: bool | None = None,
) -> ReferenceStatistics:
    """Row statistics in float64, from the whole matrix of logits. Takes what `AttentionCall` takes.

    Examples:
        >>> logits = torch.tensor([[[[0.0, 0.0, 0.0]]]])
        >>> stats = reference_row_statistics(logits=logits)
        >>> round(float(stats.total_entropy[0, 0, 0]), 6), round(float(np.log(3)), 6)
        (1.098612, 1.098612)
    """
    full, visible = _logits(query, key, logits, virtual_columns, scale, softcap)
    b, h, t_q, t_k = full.shape
    virtual = _virtual(logits, virtual_columns, sink_logits, (b, h, t_q))
    visible, full = _apply_mask(full, visible, mask)
    square = t_q == t_k and cross is not True
    unwindowed = _apply_structure(visible, is_causal, None)
    visible = _apply_structure(visible, is_causal, window)
    padded = np.zeros((b, h, t_q), dtype=bool)
    if square:
        diagonal = np.einsum("bhii->bhi", visible)
        padded = ~diagonal & diagonal.any(-1, keepdims=True)

    chosen = np.arange(t_q) if rows is None else _numpy(rows)
    chosen = np.broadcast_to(chosen, (b, chosen.shape[-1]))
    weight = np.ones(()) if weights is None else _numpy(weights).astype(float)
    weight = np.broadcast_to(weight, chosen.shape)
    out = {name: np.zeros((b, h, chosen.shape[1])) for name in (*_FLOATS, "support", "kind")}
    columns, totals = np.zeros((b, h, t_k)), np.zeros((b, h))
    for i in range(b):
        for j in range(h):
            for slot, row in enumerate(chosen[i].tolist()):
                in_sink = _sink_of_row(sink, i, row, visible[i, j], unwindowed[i, j], square)
                values, p = _one_row(
                    full[i, j, row],
                    visible[i, j, row],
                    in_sink,
                    virtual[i, j, row],
                    bool(padded[i, j, row]),
                )
                for name, value in values.items():
                    out[name][i, j, slot] = value
                if p is not None:
                    columns[i, j] += weight[i, slot] * p
                    totals[i, j] += weight[i, slot]
    mean = np.divide(
        columns, totals[..., None], out=np.zeros_like(columns), where=totals[..., None] > 0
    )
    return ReferenceStatistics(
        **{name: out[name] for name in _FLOATS},
        support=out["support"].astype(int),
        kind=out["kind"].astype(int),
        rows=chosen,
        column_mass=mean,
        best_column_mass=mean.max(-1),
    )


def assert_matches_reference(
    stats: object, reference: ReferenceStatistics, *, atol: float = 1e-5, rtol: float = 0.0
) -> None:
    """Compare `RowStatistics` with the reference: kinds exactly, numbers to a tolerance.

    Logit values, which have no scale of their own, may differ by `atol` times their size.

    Raises:
        AssertionError: Naming the field, the largest difference and where it is.
    """
    for field in fields(reference):
        if field.name == "column_mass":
            continue
        want = getattr(reference, field.name)
        got = np.asarray(getattr(stats, field.name).cpu().double())
        if got.shape != want.shape:
            raise AssertionError(f"{field.name}: shape {got.shape}, expected {want.shape}")
        exact = field.name in ("support", "kind", "rows")
        logit = field.name in ("max_logit", "logit_spread", "logit_range", "log_odds")
        allowed = 0.0 if exact else atol * np.maximum(1.0, np.abs(want) if logit else 0.0)
        difference = np.abs(got - want)
        beyond = ~(difference <= allowed + rtol * np.abs(want))
        if beyond.any():
            worst = np.unravel_index(np.argmax(np.where(beyond, difference, -1)), got.shape)
            raise AssertionError(
                f"{field.name}{[int(x) for x in worst]}: got {got[worst]}, expected {want[worst]} "
                f"({int(beyond.sum())} of {got.size} differ)"
            )


def _numpy(values: Tensor | Sequence[int]) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.array(values)


def _logits(
    query: Tensor | None,
    key: Tensor | None,
    logits: Tensor | None,
    virtual_columns: int,
    scale: float | None,
    softcap: float | None,
) -> tuple[Any, Any]:
    if logits is not None:
        full = logits.detach().double().cpu().numpy()
        full = full[..., : full.shape[-1] - virtual_columns]
        return full, ~(full <= masked_below(logits.dtype))
    assert query is not None
    assert key is not None
    q, k = query.detach().double().cpu().numpy(), key.detach().double().cpu().numpy()
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    with np.errstate(all="ignore"):
        full = (q @ k.swapaxes(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            full = softcap * np.tanh(full / softcap)
    return full, np.ones(full.shape, dtype=bool)


def _virtual(
    logits: Tensor | None,
    virtual_columns: int,
    sink_logits: Tensor | None,
    shape: tuple[int, int, int],
) -> Any:
    parts = []
    if logits is not None and virtual_columns:
        parts.append(logits[..., -virtual_columns:].detach().double().cpu().numpy())
    if sink_logits is not None:
        given = sink_logits.detach().double().cpu().numpy()
        given = given[None, :, None] if given.ndim == 1 else given
        parts.append(np.broadcast_to(given, shape)[..., None])
    return np.concatenate(parts, -1) if parts else np.zeros((*shape, 0))


def _apply_mask(full: Any, visible: Any, mask: Tensor | None) -> tuple[Any, Any]:
    if mask is None:
        return visible, full
    if mask.dtype == torch.bool:
        return visible & np.broadcast_to(mask.cpu().numpy(), full.shape), full
    added = np.broadcast_to(mask.detach().double().cpu().numpy(), full.shape)
    with np.errstate(all="ignore"):
        return visible & ~(added <= masked_below(mask.dtype)), full + added


def _apply_structure(visible: Any, is_causal: bool, window: int | None) -> Any:
    t_q, t_k = visible.shape[-2:]
    position = np.arange(t_q)[:, None] + t_k - t_q
    keys = np.arange(t_k)[None]
    allowed = np.ones((t_q, t_k), dtype=bool)
    if is_causal:
        allowed &= keys <= position
    if window is not None:
        allowed &= keys > position - window
        if not is_causal:
            allowed &= keys < position + window
    return visible & allowed


def _sink_of_row(
    sink: SinkSpec, i: int, row: int, visible: Any, unwindowed: Any, square: bool
) -> Any:
    """Bool over the keys: the sinks row `row` may have, before looking at its support."""
    chosen = np.zeros(visible.shape[-1], dtype=bool)
    if isinstance(sink, str):
        if sink == "first" and square and visible[row].any():
            f = int(np.argmax(visible[row]))
            chosen[f] = visible[f].any() and int(np.argmax(visible[f])) == f
        elif sink == "first" and unwindowed[row].any():
            chosen[int(np.argmax(unwindowed[row]))] = True
    elif isinstance(sink, Tensor) and sink.dtype == torch.bool:
        chosen |= sink[i].cpu().numpy()
    else:
        chosen[np.array(sink, dtype=int)] = True
    return chosen


def _lse(values: Any) -> float:
    top = values.max()
    return float(top + np.log(np.exp(values - top).sum()))


def _entropy(values: Any) -> float:
    """Entropy of softmax(values)."""
    gap = values - values.max()
    weight = np.exp(gap)
    return float(np.log(weight.sum()) - (weight * gap).sum() / weight.sum())


def _one_row(
    logits: Any, visible: Any, in_sink: Any, virtual: Any, padded: bool
) -> tuple[dict[str, Any], Any]:
    """Values of one row, and p over the keys if the row counts."""
    if padded or not visible.any():
        return {"kind": RowKind.EMPTY}, None
    virtual = virtual[~(virtual == -np.inf)]
    in_sink = in_sink & visible
    content, sinks = logits[visible & ~in_sink], np.concatenate([logits[in_sink], virtual])
    m = len(content)
    if not np.isfinite(np.concatenate([content, sinks])).all():
        return {"kind": RowKind.NONFINITE, "support": m}, None
    out: dict[str, Any] = {
        "support": m,
        "max_logit": float(np.concatenate([content, sinks]).max()),
        "sink_entropy": _entropy(sinks) if len(sinks) else 0.0,
    }
    if m == 0:
        return out | {
            "kind": RowKind.NO_CONTENT,
            "sink_mass": 1.0,
            "total_entropy": out["sink_entropy"],
        }, None
    s, c, binary = 0.0, 1.0, 0.0
    if len(sinks):
        z = _lse(sinks) - _lse(content)
        s, c = float(np.exp(-np.logaddexp(0, -z))), float(np.exp(-np.logaddexp(0, z)))
        binary = s * float(np.logaddexp(0, -z)) + c * float(np.logaddexp(0, z))
        out["log_odds"] = z
    entropy = _entropy(content) if m > 1 else 0.0
    out |= {
        "kind": RowKind.TRIVIAL if m == 1 else RowKind.VALID if len(sinks) else RowKind.NO_SINK,
        "sink_mass": s,
        "content_mass": c,
        "binary_entropy": binary,
        "content_entropy": entropy,
        "total_entropy": binary + s * out["sink_entropy"] + c * entropy,
    }
    if m == 1:
        return out, None
    out |= {
        "evenness": entropy / np.log(m),
        "concentration": np.log(m) - entropy,
        "logit_spread": float(content.std()),
        "logit_range": float(content.max() - content.mean()),
    }
    every = _lse(np.concatenate([content, sinks]))
    p = np.where(visible, np.exp(np.where(visible, logits, -np.inf) - every), 0.0)
    return out, p
