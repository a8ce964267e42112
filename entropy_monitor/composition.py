"""The maths of attention rows as compositions: closure, log-ratios, entropies, distances.

A row is a composition: positive parts, known up to a factor, so rows need not sum to 1. Every
function takes *weights* (default) or, with `from_logits=True`, the *logits* the weights are the
softmax of; logits are better, since they know no zeros. `support` is boolean, True = the key may be
attended to; without it every key is in. `sink` says which keys are the attention sink: an index,
several, or a bool tensor that broadcasts against the rows; the other keys of the support are the
content. Entropies are in nats, masses in [0, 1]. Half precision is widened to float32, float64
stays.

Conventions of the field: a weight of 0 has no logarithm. Entropies take it as a key that is not
there; `clr`, `ilr`, balances and distances refuse it.

Source: M. Papamichalis and R. Ruane, arXiv 2608.14712 (2026); J. Aitchison, The Statistical
Analysis of Compositional Data (1986); J. Egozcue et al., Isometric logratio transformations (2003).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = [
    "RowSplit",
    "aitchison_distance",
    "binary_entropy",
    "closure",
    "clr",
    "content_distance",
    "content_entropy",
    "ilr",
    "row_entropy",
    "sink_balance",
    "sink_mass",
    "split_rows",
]

_Support = Bool[Tensor, "*#rows keys"]
_Sink = int | Sequence[int] | Bool[Tensor, "*#rows keys"]


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """A row taken apart: how much goes to the sink, and how the rest is spread."""

    sink_mass: Float[Tensor, "*rows"]
    """s; 0 where the sink is not in the support."""
    content_mass: Float[Tensor, "*rows"]
    """1 - s, accurate where s rounds to 1; 0 where there is no content."""
    log_odds: Float[Tensor, "*rows"]
    """log s/(1-s); 0 where one side is empty."""
    sink: Float[Tensor, "*rows keys"]
    """sigma, the composition inside the sink; 0 elsewhere."""
    content: Float[Tensor, "*rows keys"]
    """pi, the composition of the content; 0 elsewhere."""


def closure(
    rows: Float[Tensor, "*rows keys"], *, support: _Support | None = None, from_logits: bool = False
) -> Float[Tensor, "*rows keys"]:
    """Parts divided by their sum, C(x) = x / sum(x), over the support; softmax for logits.

    A row with an empty support gives zeros.

    Raises:
        ValueError: If shapes do not fit or a weight is negative.

    Examples:
        >>> closure(torch.tensor([4.0, 3.0, 1.0]), support=torch.tensor([True, False, True]))
        tensor([0.8000, 0.0000, 0.2000])
    """
    logs = _logs(rows, support, from_logits)
    top = logs.amax(-1, keepdim=True)
    parts = (logs - top.masked_fill(top == -torch.inf, 0.0)).exp()
    return parts / parts.sum(-1, keepdim=True).clamp(min=torch.finfo(parts.dtype).tiny)


def clr(
    rows: Float[Tensor, "*rows keys"], *, support: _Support | None = None, from_logits: bool = False
) -> Float[Tensor, "*rows keys"]:
    """Centred log-ratios: log p_j minus the mean of log p over the support; 0 outside of it.

    For logits it is l - mean(l): softmax only adds a constant.

    Raises:
        ValueError: If shapes do not fit, or a weight in the support is 0.

    Examples:
        >>> clr(torch.tensor([0.5, 0.25, 0.25]))
        tensor([ 0.4621, -0.2310, -0.2310])
    """
    logs = _positive_logs(rows, support, from_logits)
    inside = logs > -torch.inf
    size = inside.sum(-1, keepdim=True).clamp(min=1)
    logs = torch.where(inside, logs, 0.0)
    # Twice: the second pass takes away what rounding left of a large common offset.
    for _ in range(2):
        logs = torch.where(inside, logs - logs.sum(-1, keepdim=True) / size, 0.0)
    return logs


def ilr(
    rows: Float[Tensor, "*rows keys"], *, from_logits: bool = False
) -> Float[Tensor, "*rows coordinates"]:
    """Isometric log-ratios: clr in an orthonormal basis of D - 1 contrasts.

    Coordinate i (from 1) sets the first i parts against part i + 1: sqrt(i / (i + 1)) * (mean(log
    p_1..p_i) - log p_(i+1)). Euclidean distance between ilr vectors is the Aitchison distance.

    Raises:
        ValueError: If a weight is 0.

    Examples:
        >>> ilr(torch.tensor([0.5, 0.25, 0.25]))
        tensor([0.4901, 0.2830])
    """
    logs = clr(rows, from_logits=from_logits)
    i = torch.arange(1, logs.shape[-1], device=logs.device, dtype=logs.dtype)
    means = logs.cumsum(-1)[..., :-1] / i
    return (i / (i + 1)).sqrt() * (means - logs[..., 1:])


def split_rows(
    rows: Float[Tensor, "*rows keys"],
    sink: _Sink = 0,
    *,
    support: _Support | None = None,
    from_logits: bool = False,
) -> RowSplit:
    """Take rows apart into sink mass, composition of the sink, and composition of the content.

    The log-odds are LSE over the sink minus LSE over the content. The content is closed on its own
    and never divided by 1 - s, which loses all digits where s is near 1.

    Raises:
        ValueError: If shapes do not fit, `sink` is outside the keys, or a weight is negative.

    Examples:
        >>> row = split_rows(torch.tensor([0.90, 0.08, 0.02]))
        >>> row.sink_mass, row.content
        (tensor(0.9000), tensor([0.0000, 0.8000, 0.2000]))
    """
    logs = _logs(rows, support, from_logits)
    in_sink = _sink_keys(sink, logs)
    sink_logs, content_logs = (
        logs.masked_fill(~in_sink, -torch.inf),
        logs.masked_fill(in_sink, -torch.inf),
    )
    lse_sink, lse_content = sink_logs.logsumexp(-1), content_logs.logsumexp(-1)
    has_sink, has_content = lse_sink > -torch.inf, lse_content > -torch.inf
    log_odds = torch.where(has_sink & has_content, lse_sink - lse_content, 0.0)
    both = has_sink & has_content
    return RowSplit(
        sink_mass=torch.where(both, torch.sigmoid(log_odds), has_sink.to(logs.dtype)),
        content_mass=torch.where(both, torch.sigmoid(-log_odds), has_content.to(logs.dtype)),
        log_odds=log_odds,
        sink=closure(sink_logs, from_logits=True),
        content=closure(content_logs, from_logits=True),
    )


def binary_entropy(
    s: Float[Tensor, "*rows"], *, from_log_odds: bool = False
) -> Float[Tensor, "*rows"]:
    """Entropy of a choice of two, Hb(s) = -s log s - (1-s) log(1-s).

    From log-odds z it is s softplus(-z) + (1-s) softplus(z), which keeps its digits where s rounds
    to 1.

    Raises:
        ValueError: If a mass is outside [0, 1].

    Examples:
        >>> binary_entropy(torch.tensor([0.0, 0.5, 1.0]))
        tensor([0.0000, 0.6931, 0.0000])
        >>> binary_entropy(torch.tensor([30.0]), from_log_odds=True)
        tensor([2.9009e-12])
    """
    s = _wide(s)
    if from_log_odds:
        # Not F.softplus, which returns its argument above 20.
        log_s, log_c = torch.nn.functional.logsigmoid(s), torch.nn.functional.logsigmoid(-s)
        return -torch.sigmoid(s) * log_s - torch.sigmoid(-s) * log_c
    if bool(((s < 0) | (s > 1)).any()):
        raise ValueError("`s` must hold masses in [0, 1]; use `from_log_odds=True` for log-odds.")
    return torch.special.entr(s) - (1 - s) * torch.log1p(-s.clamp(max=1 - torch.finfo(s.dtype).eps))


def sink_mass(
    rows: Float[Tensor, "*rows keys"],
    sink: _Sink = 0,
    *,
    support: _Support | None = None,
    from_logits: bool = False,
) -> Float[Tensor, "*rows"]:
    """Share of the row that goes to the sink, s; 0 where the sink is not in the support.

    Raises:
        ValueError: As `split_rows`.

    Examples:
        >>> sink_mass(torch.zeros(4), from_logits=True)
        tensor(0.2500)
    """
    return split_rows(rows, sink, support=support, from_logits=from_logits).sink_mass


def content_entropy(
    rows: Float[Tensor, "*rows keys"],
    sink: _Sink = 0,
    *,
    support: _Support | None = None,
    from_logits: bool = False,
) -> Float[Tensor, "*rows"]:
    """H(pi), the entropy of the row without the sink; 0 where fewer than two content keys are left.

    Raises:
        ValueError: As `split_rows`.

    Examples:
        >>> content_entropy(torch.tensor([[0.90, 0.05, 0.05], [0.10, 0.45, 0.45]]))
        tensor([0.6931, 0.6931])
    """
    logs = _logs(rows, support, from_logits)
    return _entropy(logs.masked_fill(_sink_keys(sink, logs), -torch.inf))


def row_entropy(
    rows: Float[Tensor, "*rows keys"], *, support: _Support | None = None, from_logits: bool = False
) -> Float[Tensor, "*rows"]:
    """H(p), the entropy of the whole row; equal to Hb(s) + s H(sigma) + (1-s) H(pi).

    Raises:
        ValueError: As `closure`.

    Examples:
        >>> row_entropy(torch.tensor([0.25, 0.25, 0.5]))
        tensor(1.0397)
    """
    return _entropy(_logs(rows, support, from_logits))


def sink_balance(
    rows: Float[Tensor, "*rows keys"],
    sink: _Sink = 0,
    *,
    support: _Support | None = None,
    from_logits: bool = False,
) -> Float[Tensor, "*rows"]:
    """The log-ratio coordinate of sink against content.

    sqrt(k m / (k + m)) * (mean log p over the k sink keys - mean log p over the m content keys).
    With one sink key the Aitchison distance splits into it and the content: d_A^2 = (difference of
    balances)^2 + (content distance)^2. Rows without sink or content give 0.

    Raises:
        ValueError: As `split_rows`, or if a weight in the support is 0.

    Examples:
        >>> sink_balance(torch.tensor([0.5, 0.25, 0.25]))
        tensor(0.5660)
    """
    # Differences of clr are differences of log p, with any common offset gone.
    logs = clr(rows, support=support, from_logits=from_logits)
    in_support = torch.ones_like(logs, dtype=torch.bool) if support is None else support
    in_sink = _sink_keys(sink, logs) & in_support
    in_content = in_support & ~in_sink
    k, m = in_sink.sum(-1).to(logs.dtype), in_content.sum(-1).to(logs.dtype)
    sinks = (logs * in_sink).sum(-1) / k.clamp(min=1)
    contents = (logs * in_content).sum(-1) / m.clamp(min=1)
    return torch.sqrt(k * m / (k + m).clamp(min=1)) * (sinks - contents)


def aitchison_distance(
    rows: Float[Tensor, "*#rows keys"],
    others: Float[Tensor, "*#rows keys"],
    *,
    support: _Support | None = None,
    from_logits: bool = False,
) -> Float[Tensor, "*rows"]:
    """d_A(p, q) = |clr(p) - clr(q)|, over a support that both rows share.

    Raises:
        ValueError: If a weight in the support is 0.

    Examples:
        >>> p, q = torch.tensor([0.90, 0.08, 0.02]), torch.tensor([0.70, 0.24, 0.06])
        >>> aitchison_distance(p, q)
        tensor(1.1022)
    """
    first = clr(rows, support=support, from_logits=from_logits)
    second = clr(others, support=support, from_logits=from_logits)
    return torch.linalg.vector_norm(first - second, dim=-1)


def content_distance(
    rows: Float[Tensor, "*#rows keys"],
    others: Float[Tensor, "*#rows keys"],
    sink: _Sink = 0,
    *,
    support: _Support | None = None,
    from_logits: bool = False,
) -> Float[Tensor, "*rows"]:
    """Aitchison distance between the contents of two rows; the sink does not enter.

    Raises:
        ValueError: As `sink_balance`.

    Examples:
        >>> p, q = torch.tensor([0.90, 0.08, 0.02]), torch.tensor([0.90, 0.02, 0.08])
        >>> content_distance(p, q)
        tensor(1.9605)
    """
    in_sink = _sink_keys(sink, rows)
    content = ~in_sink if support is None else support & ~in_sink
    return aitchison_distance(rows, others, support=content, from_logits=from_logits)


# Private: from what was given to logarithms -----------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _logs(rows: Tensor, support: Tensor | None, from_logits: bool) -> Tensor:
    """Return log p up to a constant, -inf where there is no weight."""
    rows = _wide(rows)
    if not from_logits:
        if bool((rows < 0).any()):
            raise ValueError("`rows` must be weights >= 0; use `from_logits=True` for logits.")
        rows = rows.log()
    return (
        rows
        if support is None
        else rows.masked_fill(~_fitting("support", support, rows), -torch.inf)
    )


def _positive_logs(rows: Tensor, support: Tensor | None, from_logits: bool) -> Tensor:
    logs = _logs(rows, support, from_logits)
    absent = logs == -torch.inf
    if support is not None:
        absent = absent & support
    if bool(absent.any()):
        raise ValueError(
            "`rows` must be positive inside `support`: a weight of 0 has no logarithm. Pass logits "
            "(`from_logits=True`), or leave the key out of `support`."
        )
    return logs


def _sink_keys(sink: int | Sequence[int] | Tensor, rows: Tensor) -> Tensor:
    """Bool tensor that broadcasts against the rows."""
    keys = rows.shape[-1]
    if isinstance(sink, Tensor):
        if sink.dtype != torch.bool:
            raise ValueError(f"`sink` as a tensor must be bool, got {sink.dtype}.")
        return _fitting("sink", sink, rows)
    chosen = torch.zeros(keys, dtype=torch.bool, device=rows.device)
    for j in [sink] if isinstance(sink, int) else sink:
        if not -keys <= j < keys:
            raise ValueError(f"`sink` must be a key index in [{-keys}, {keys}), got {j}.")
        chosen[j] = True
    return chosen


def _fitting(name: str, mask: Tensor, rows: Tensor) -> Tensor:
    try:
        mask.expand(rows.shape)
    except RuntimeError:
        raise ValueError(
            f"`{name}` must broadcast against rows of shape {tuple(rows.shape)}, "
            f"got {tuple(mask.shape)}."
        ) from None
    return mask


def _entropy(logs: Tensor) -> Tensor:
    """Entropy as log L + sum p (max - l), L = sum exp(l - max): two terms >= 0, nothing cancels."""
    top = logs.amax(-1, keepdim=True)
    gap = logs - top.masked_fill(top == -torch.inf, 0.0)
    parts = gap.exp()
    mass = parts.sum(-1)
    drop = (parts * gap.masked_fill(gap == -torch.inf, 0.0)).sum(-1)
    return torch.where(mass > 0, mass.log() - drop / mass, 0.0)
