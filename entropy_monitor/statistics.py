"""Exact statistics of attention rows: `AttentionCall` -> `RowStatistics`.

One attention row is one (batch, head, query). Its sink mass s and its content composition pi are
kept apart from the start, so that both stay exact however little mass one of them holds. Entropies
are in nats, masses in [0, 1]. Computed by tiles in float32 (float64 for float64 inputs); a matrix
of batch x heads x T x T never exists.

Source: M. Papamichalis and R. Ruane, "Which Question Is Your Attention Metric Answering? Attention
Rows as Compositional Data", arXiv 2608.14712 (2026).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from entropy_monitor._sinks import SinkRule
from entropy_monitor._support import HIDDEN, Support
from entropy_monitor._sweep import RowSums, Sweep
from entropy_monitor.calls import AttentionCall, RowKind, SinkSpec

_LOG_2 = math.log(2)

__all__ = ["RowKind", "RowStatistics", "measure_call", "row_statistics"]


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """What was measured of each row. Undefined values are 0, never NaN; `kind` says why.

    l is the logit after scale, bias and soft-cap; S the visible sink keys, C the visible content
    keys, z = LSE_S - LSE_C the log-odds of the sink, sigma and pi the softmax over S and over C
    alone.

    | kind | what is defined |
    |---|---|
    | `VALID` | everything |
    | `NO_SINK` | everything but `log_odds`: s = 0, 1 - s = 1, H(p) = H(pi) |
    | `TRIVIAL` | masses, `log_odds`, entropies (H(pi) = 0), `max_logit` |
    | `NO_CONTENT` | s = 1, `total_entropy` = `sink_entropy`, `max_logit` |
    | `EMPTY`, `NONFINITE` | nothing; `support` is kept for `NONFINITE` |
    """

    sink_mass: Float[Tensor, "batch heads rows"]
    """s = sigmoid(z)."""
    content_mass: Float[Tensor, "batch heads rows"]
    """1 - s = sigmoid(-z), accurate where s rounds to 1."""
    log_odds: Float[Tensor, "batch heads rows"]
    """z."""
    binary_entropy: Float[Tensor, "batch heads rows"]
    """Hb(s) = s softplus(-z) + (1 - s) softplus(z)."""
    content_entropy: Float[Tensor, "batch heads rows"]
    """H(pi) = log L + sum_C pi_j (max_C l - l_j), L = sum_C exp(l_j - max_C l)."""
    total_entropy: Float[Tensor, "batch heads rows"]
    """H(p) = Hb(s) + s H(sigma) + (1 - s) H(pi)."""
    sink_entropy: Float[Tensor, "batch heads rows"]
    """H(sigma), 0 for a single sink key."""
    evenness: Float[Tensor, "batch heads rows"]
    """J = H(pi) / log m."""
    concentration: Float[Tensor, "batch heads rows"]
    """D = log m - H(pi)."""
    max_logit: Float[Tensor, "batch heads rows"]
    """max of l over C and S."""
    logit_spread: Float[Tensor, "batch heads rows"]
    """Standard deviation of l over C."""
    logit_range: Float[Tensor, "batch heads rows"]
    """max minus mean of l over C."""
    support: Int[Tensor, "batch heads rows"]
    """m, the number of content keys."""
    kind: UInt8[Tensor, "batch heads rows"]
    """`RowKind` of the row."""
    rows: Int[Tensor, "batch rows"]
    """Query index of each row."""
    best_column: Int[Tensor, "batch heads"]
    """The key with most mass on average over the rows that count."""
    best_column_mass: Float[Tensor, "batch heads"]
    """That mass: max_j of the weighted mean of p_ij."""
    best_column_is_sink: Bool[Tensor, "batch heads"]
    """That key is the sink of a row that counts."""


@torch.no_grad()
def measure_call(
    call: AttentionCall,
    *,
    sink: SinkSpec = "first",
    rows: Int[Tensor, "batch rows"] | Int[Tensor, " rows"] | None = None,
    weights: Float[Tensor, "batch rows"] | Float[Tensor, " rows"] | None = None,
) -> RowStatistics:
    """Statistics of the rows of one call.

    Without gradient or autocast, and without touching the global random state.

    Args:
        call: What the layer was asked.
        sink: Which keys are the sink; `"learned"` means the virtual key alone. Learned
            sinks belong to S under every rule.
        rows: Query indices to look at, ascending for speed and on the CPU to spare a transfer
            (`select_rows`); None for every row.
        weights: Of the rows, for `best_column_mass`; None for equal ones.

    Raises:
        ValueError: If `sink`, `rows` or `weights` do not fit the call.

    Examples:
        >>> zeros = torch.zeros(1, 1, 3, 8)
        >>> call = AttentionCall(query=zeros, key=zeros, is_causal=True)
        >>> measure_call(call).sink_mass[0, 0]
        tensor([1.0000, 0.5000, 0.3333])
    """
    batch, heads, t_q, t_k = call.shape
    if min(call.shape) < 1:
        raise ValueError(
            "`call` must have at least one sequence, head, query and key, "
            f"got {batch}, {heads}, {t_q} and {t_k}."
        )
    if rows is not None:
        rows = _check_rows(rows, batch, t_q)
    dtype = call.compute_dtype
    n_rows = t_q if rows is None else rows.shape[1]
    if weights is None:
        weights = torch.ones((1, n_rows), dtype=dtype, device=call.device)
    else:
        if weights.shape not in ((n_rows,), (batch, n_rows), (1, n_rows)):
            raise ValueError(
                f"`weights` must have shape ({n_rows},) or ({batch}, {n_rows}), "
                f"got {tuple(weights.shape)}."
            )
        weights = weights.reshape(-1, n_rows).to(device=call.device, dtype=dtype)
    with torch.autocast(call.device.type, enabled=False):
        support = Support(call, dtype)
        sweep = Sweep(call, support, SinkRule(support, sink), rows, weights)
        return _finish(sweep, sweep.run(), rows)


def row_statistics(
    query: Float[Tensor, "batch heads queries width"],
    key: Float[Tensor, "batch kv_heads keys width"],
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    sink: SinkSpec = "first",
    softcap: float | None = None,
    sink_logits: Float[Tensor, " heads"] | Float[Tensor, "batch heads queries"] | None = None,
    window: int | None = None,
    rows: Int[Tensor, "batch rows"] | Int[Tensor, " rows"] | Sequence[int] | None = None,
) -> RowStatistics:
    """Statistics of the attention rows softmax(q.k), without computing attention.

    Args:
        query: Queries.
        key: Keys; heads may be fewer than those of `query` (GQA), they are not repeated.
        scale: Factor on q.k; None means 1/sqrt(width).
        mask: Bool (True = visible) or additive (at most finfo.min / 2 counts as masked);
            broadcastable to (batch, heads, queries, keys).
        is_causal: Row i sees keys up to i + keys - queries.
        sink: `"first"`: the first key f(i) that row i sees, if row f(i) starts there too (in
            cross-attention and where lengths differ: the first visible key). Or key positions, a
            bool tensor (batch, keys), `"none"`, `"learned"`.
        softcap: c in c * tanh(l / c), applied before the mask.
        sink_logits: Logits of a learned sink, a virtual key that always belongs to S.
        window: Sliding window in keys: the row at position p sees p - window + 1 and later keys.
        rows: Query indices, for all sequences alike or one list for each; None for every row.

    Returns:
        One value per (batch, head, row); float32, or float64 for float64 inputs.

    Raises:
        ValueError: If an argument does not fit the others; the message names it, what is
            allowed and what was given.

    Examples:
        A sink that takes 90 % of the mass, and two content keys in the ratio 4:1.

        >>> logits = torch.tensor([0.90, 0.08, 0.02]).log()
        >>> stats = row_statistics(torch.ones(1, 1, 1, 1), logits.view(1, 1, 3, 1), scale=1.0)
        >>> [round(x.item(), 4) for x in (stats.sink_mass, stats.content_entropy)]
        [0.9, 0.5004]
    """
    call = AttentionCall(
        query=query,
        key=key,
        scale=scale,
        mask=mask,
        is_causal=is_causal,
        softcap=softcap,
        sink_logits=sink_logits,
        window=window,
    )
    if rows is not None and not isinstance(rows, Tensor):
        rows = torch.tensor(list(rows), dtype=torch.long)
    return measure_call(call, sink=sink, rows=rows)


def _check_rows(rows: Tensor, batch: int, t_q: int) -> Tensor:
    shape = tuple(rows.shape)
    if rows.ndim not in (1, 2) or rows.shape[-1] < 1 or (rows.ndim == 2 and shape[0] != batch):
        raise ValueError(f"`rows` must have shape (rows,) or ({batch}, rows), got {shape}.")
    if rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(f"`rows` must be query indices, got {rows.dtype}.")
    rows = rows.cpu().long()
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= t_q:
        raise ValueError(
            f"`rows` must be query indices in [0, {t_q}), got {low if low < 0 else high}."
        )
    return rows.expand(batch, -1)


def _finish(sweep: Sweep, sums: RowSums, rows: Tensor | None) -> RowStatistics:
    """Sums -> statistics, for all rows at once."""
    m = sums.content
    zero, one = m.new_zeros(()), m.new_ones(())
    sink_top, sink_lse, sigma, sink_entropy = _sink(sums)
    has_sink = sink_top > -torch.inf
    # NaN and infinities of either sign end up as a failed comparison.
    good = torch.maximum(sums.norm + sums.top.abs(), sink_top) < torch.inf
    kind = _kinds(sums, has_sink, good)
    seen = good & (sums.visible > 0)
    counted = seen & (m >= 2)
    content = seen & (m >= 1)  # a content composition exists
    both = content & has_sink

    # Rows that do not count get sums that make every formula give 0.
    size = torch.where(counted, m, one)
    mass = torch.where(counted, sums.mass, one)
    drop = torch.where(counted, sums.drop, zero) * _LOG_2
    first = torch.where(counted, sums.first, zero) * _LOG_2
    centre = torch.where(counted, sums.centre, zero) * _LOG_2
    norm = torch.where(counted, sums.norm, zero) * _LOG_2
    log_mass, log_size = mass.log(), size.log()
    content_entropy = log_mass - drop / mass
    evenness = (content_entropy / torch.where(counted, log_size, one)).clamp_(max=1.0)
    concentration = (log_size - content_entropy).clamp_(min=0.0)
    mean = first / size  # relative to the top
    variance = norm.square() / size - (mean - centre).square()

    # sink_lse is relative to sink_top: no two large numbers are subtracted after being rounded.
    log_odds = torch.where(both, (sink_top - sums.top) + sink_lse - log_mass, zero)
    only_sink = (seen & has_sink & ~content).to(size.dtype)
    sink_mass = torch.where(both, torch.sigmoid(log_odds), only_sink)
    content_mass = torch.where(both, torch.sigmoid(-log_odds), content.to(size.dtype))
    # logsigmoid, since softplus gives up at 20.
    log_s, log_c = F.logsigmoid(log_odds), F.logsigmoid(-log_odds)
    binary_entropy = torch.where(both, -sink_mass * log_s - content_mass * log_c, zero)
    sink_entropy = torch.where(seen, sink_entropy, zero)
    total_entropy = binary_entropy + sink_mass * sink_entropy + content_mass * content_entropy
    top = torch.where(m >= 1, sums.top, -torch.inf)

    column, column_mass, is_sink = _best_column(sweep, sums, sink_mass, sigma, counted)
    if rows is None:
        index = torch.arange(m.shape[2], device=m.device).expand(m.shape[0], -1)
    else:
        index = rows.to(m.device)
    return RowStatistics(
        sink_mass=sink_mass,
        content_mass=content_mass,
        log_odds=log_odds,
        binary_entropy=binary_entropy,
        content_entropy=content_entropy,
        total_entropy=total_entropy,
        sink_entropy=sink_entropy,
        evenness=evenness,
        concentration=concentration,
        max_logit=torch.where(seen, torch.maximum(top, sink_top), zero),
        logit_spread=variance.clamp_(min=0.0).sqrt_(),
        logit_range=mean.abs(),
        support=torch.where(sums.visible > 0, m, zero).to(torch.int32),
        kind=kind,
        rows=index,
        best_column=column,
        best_column_mass=column_mass,
        best_column_is_sink=is_sink,
    )


def _sink(sums: RowSums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(max over S of l, LSE of S minus that, sigma, H(sigma)); -inf and zeros without a sink.

    sigma has the axis of the sinks in front.
    """
    logits = sums.sink_logits
    zero = torch.zeros_like(sums.top)
    if logits is None:
        return torch.full_like(zero, -torch.inf), zero, zero[None], zero
    if len(logits) == 1:
        return logits[0], zero, torch.ones_like(logits), zero
    top = logits.amax(0)
    gap = (logits - top.clamp(min=HIDDEN)).clamp_(min=HIDDEN)
    weight = gap.exp()
    total = weight.sum(0)
    sigma = weight / total.clamp(min=torch.finfo(total.dtype).tiny)
    lse = total.log()
    entropy = lse - (sigma * gap).sum(0)
    absent = top == -torch.inf
    return top, lse.masked_fill(absent, 0.0), sigma, entropy.masked_fill(absent, 0.0)


def _kinds(sums: RowSums, has_sink: Tensor, good: Tensor) -> Tensor:
    """Kind of each row, the kinds of higher priority written last."""
    kind = torch.where(has_sink, int(RowKind.VALID), int(RowKind.NO_SINK)).to(torch.uint8)
    kind.masked_fill_(sums.content == 1, int(RowKind.TRIVIAL))
    kind.masked_fill_(sums.content == 0, int(RowKind.NO_CONTENT))
    kind.masked_fill_(~good, int(RowKind.NONFINITE))
    return kind.masked_fill_(sums.visible == 0, int(RowKind.EMPTY))


def _best_column(
    sweep: Sweep, sums: RowSums, sink_mass: Tensor, sigma: Tensor, counted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(key, its mean mass, whether it is a sink) of each head. Learned sinks are no keys."""
    columns = sweep.columns.view(*sink_mass.shape[:2], -1)
    weight = sweep.weights * counted
    is_sink = None
    n_keys = sweep.rule.width
    if n_keys:
        assert sums.sink_logits is not None
        hit = (sums.sink_logits[:n_keys] > -torch.inf) & counted
        mass = torch.where(hit, weight * sink_mass * sigma[:n_keys], 0.0)
        is_sink = torch.zeros_like(columns)
        static = sweep.rule.static
        if sums.sink_columns is None:
            assert static is not None
            for i, j in enumerate(static):
                columns[..., j] += mass[i].sum(-1)
                is_sink[..., j] = hit[i].any(-1)
        else:
            for index, m, h in zip(sums.sink_columns, mass, hit, strict=True):
                columns.scatter_add_(-1, index, m)
                is_sink.scatter_add_(-1, index, h.to(m.dtype))
    total = weight.sum(-1)
    top, column = columns.max(-1)
    any_counted = total > 0
    top = torch.where(any_counted, top / torch.where(any_counted, total, 1.0), 0.0)
    column = torch.where(any_counted, column, 0)
    if is_sink is None:
        return column, top, torch.zeros_like(any_counted)
    return column, top, (is_sink.gather(-1, column[..., None])[..., 0] > 0) & any_counted
