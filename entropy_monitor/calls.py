"""What one attention layer was asked: `AttentionCall`, the row kinds, and which rows are looked at.

A *call* is one attention computed in a forward pass. It comes in one of two forms: query and key,
or the logits themselves where only the input of a softmax was seen (eager attention). *Support* is
boolean, True = visible. Nothing is computed here; `statistics.py` does that.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SinkSpec: TypeAlias = str | int | Sequence[int] | Tensor
"""Which keys are the sink: `"first"`, `"none"`, `"learned"`, key positions (negative ones count
from the end), or a bool tensor (batch, keys)."""

SINK_RULES = ("first", "none", "learned")


class RowKind(IntEnum):
    """What an attention row can be counted for. A row is of the first kind below that fits it.

    `EMPTY` > `NONFINITE` > `NO_CONTENT` > `TRIVIAL` > `NO_SINK` > `VALID`, in this order of
    priority. Averages run over `VALID` and `NO_SINK`; the other kinds are counted, never silently
    dropped.
    """

    VALID = 0
    """The row sees a sink and at least two content keys."""
    NO_SINK = 1
    """No sink key is in the support, as in a sliding window: s = 0, H(pi) = H(p)."""
    TRIVIAL = 2
    """One content key: H(pi) = 0 by construction."""
    NO_CONTENT = 3
    """Every visible key is a sink, as in the first causal row."""
    EMPTY = 4
    """Nothing is visible, or the query itself is padding (its own key is masked)."""
    NONFINITE = 5
    """A visible key has a logit that is NaN or infinite, or beyond 1e19, where its square is."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One attention computation, as the layer asked for it. Holds references, copies nothing.

    Args:
        query: Queries, with rotary embedding and normalisation applied.
        key: Keys; the number of query heads is a multiple of the number of key heads (GQA).
        logits: The input of the softmax, instead of query and key: scale, bias and soft-cap are in;
            masked entries are -inf or at most `masked_below(logits.dtype)`.
        scale: Factor on q.k; None means 1/sqrt(width).
        mask: Bool (True = visible) or additive; broadcastable to (batch, heads, queries, keys).
        is_causal: Row i sees keys up to i + keys - queries (bottom-right aligned).
        softcap: c in l = c * tanh(q.k * scale / c), applied before the mask.
        sink_logits: Logits of a learned sink, a virtual key without value: one per head, or one per
            batch, head and query. Always part of the sink.
        virtual_columns: How many trailing columns of `logits` are learned sinks.
        window: A row at position p sees no key before p - window + 1 (and, if not causal, none
            after p + window - 1).
        owner: Qualified name of the module that computed it.
        index: Which call of this module in one forward, from 0.
        cross: True for cross-attention. None: decided by the shapes (square means self-attention).

    Raises:
        ValueError: If shapes do not fit each other; the message names argument, allowed and given.
    """

    query: Float[Tensor, "batch heads queries width"] | None = None
    key: Float[Tensor, "batch kv_heads keys width"] | None = None
    logits: Float[Tensor, "batch heads queries columns"] | None = None
    scale: float | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    softcap: float | None = None
    sink_logits: Tensor | None = None
    virtual_columns: int = 0
    window: int | None = None
    owner: str = ""
    index: int = 0
    cross: bool | None = None

    def __post_init__(self) -> None:
        if self.logits is None:
            self._check_query_key()
        else:
            self._check_logits()
        b, h, t_q, t_k = self.shape
        if self.mask is not None:
            _check_mask(self.mask, (b, h, t_q, t_k))
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"`softcap` must be positive or None, got {self.softcap}.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"`window` must be at least 1 key or None, got {self.window}.")
        if self.sink_logits is not None:
            shape = tuple(self.sink_logits.shape)
            if shape not in ((h,), (b, h, t_q)):
                raise ValueError(
                    f"`sink_logits` must have shape ({h},) or ({b}, {h}, {t_q}), got {shape}."
                )

    def _check_query_key(self) -> None:
        if self.query is None or self.key is None:
            raise ValueError("`query` and `key` must both be given unless `logits` is.")
        for name, tensor in (("query", self.query), ("key", self.key)):
            _check_floating(name, tensor)
        if self.virtual_columns:
            raise ValueError(
                "`virtual_columns` belongs to `logits`; use `sink_logits` with `query`."
            )
        q, k = tuple(self.query.shape), tuple(self.key.shape)
        if q[0] != k[0] or q[3] != k[3]:
            raise ValueError(
                f"`key` must agree with `query` {q} in batch (axis 0) and width (axis 3), got {k}."
            )
        if k[1] == 0 or q[1] % k[1]:
            raise ValueError(
                f"`key` must have a number of heads (axis 1) that divides the {q[1]} query heads, "
                f"got {k[1]}."
            )

    def _check_logits(self) -> None:
        if self.query is not None or self.key is not None:
            raise ValueError("`logits` stand instead of `query` and `key`; give one form only.")
        if self.softcap is not None or self.scale is not None:
            raise ValueError("`scale` and `softcap` are already in `logits`; leave them None.")
        assert self.logits is not None
        _check_floating("logits", self.logits)
        columns = self.logits.shape[-1]
        if not 0 <= self.virtual_columns <= columns:
            raise ValueError(
                f"`virtual_columns` must be between 0 and the {columns} columns of `logits`, "
                f"got {self.virtual_columns}."
            )

    @property
    def name(self) -> str:
        """Name under which the call is kept: the owner, and `#index` from its second call on."""
        return self.owner if self.index == 0 else f"{self.owner}#{self.index}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, query heads, queries, keys); virtual columns are not keys."""
        if self.logits is not None:
            b, h, t_q, t_k = self.logits.shape
            return b, h, t_q, t_k - self.virtual_columns
        assert self.query is not None
        assert self.key is not None
        b, h, t_q, _ = self.query.shape
        return b, h, t_q, self.key.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        source = self.logits if self.logits is not None else self.query
        assert source is not None
        return source.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 if an input is float64, else float32: lower precisions are widened first."""
        tensors = (self.query, self.key, self.logits)
        wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
        return torch.float64 if wide else torch.float32

    @property
    def is_square_self(self) -> bool:
        """Query i and key i are the same token."""
        _, _, t_q, t_k = self.shape
        return t_q == t_k and self.cross is not True


def masked_below(dtype: torch.dtype) -> float:
    """Largest bias of this dtype that counts as masked.

    finfo.min / 2, since Hugging Face masks with finfo.min; and -1e8 where that is smaller, because
    hand-written models fill with -1e9 or -1e30. No bias of a model comes near: at -1e8 a float32
    logit has a step of 8 nats.

    Examples:
        >>> masked_below(torch.float16), masked_below(torch.float32)
        (-32752.0, -100000000.0)
    """
    return max(torch.finfo(dtype).min / 2, -1e8)


def _check_floating(name: str, tensor: Tensor) -> None:
    if tensor.ndim != 4 or not tensor.is_floating_point():
        raise ValueError(
            f"`{name}` must be a floating point tensor of 4 axes, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}."
        )


def _check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> None:
    given = tuple(mask.shape)
    padded = (1,) * (4 - mask.ndim) + given
    if mask.ndim > 4 or any(m not in (1, s) for m, s in zip(padded, shape, strict=True)):
        raise ValueError(
            f"`mask` must be broadcastable to (batch, heads, queries, keys) = {shape}, got {given}."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"`mask` must be bool (True = visible) or floating point (added), got {mask.dtype}."
        )


# Choosing rows ---------------------------------------------------------------------------------

_ROW_CACHE: OrderedDict[tuple[int, int, range, int], tuple[Tensor, Tensor]] = OrderedDict()
_ROW_CACHE_SIZE = 64


def select_rows(
    t_q: int,
    count: int | None,
    *,
    batch: int,
    first_slot: int = 0,
    slot_step: int = 1,
    exact_first: int = 16,
) -> tuple[Int[Tensor, "batch rows"], Float[Tensor, "batch rows"]]:
    """Choose the query rows to measure: the first ones, and one of every stratum of the others.

    The first `exact_first` rows are all taken with weight 1: their supports are short and differ
    most. The rest is cut into `count` equal strata, one uniform draw in each, weighted by the
    length of the stratum, so that a weighted mean over the rows is an unbiased estimate of the mean
    over all rows. Different sequences of a batch get different rows, which the standard errors
    between sequences need, and the same slot gets the same rows at every step. The global random
    state is not touched.

    Args:
        t_q: Number of queries.
        count: Number of strata; None for every row.
        batch: Number of sequences.
        first_slot: Slot of the first sequence, where a batch is handed over in parts.
        slot_step: Distance of the slots, where several processes share a batch.
        exact_first: How many leading rows are taken exactly.

    Returns:
        Row indices, ascending, and their weights (float64); both on the CPU. The same tensors are
        handed out again: do not write into them. If there are no more than `exact_first + count`
        rows, all are returned with weight 1.

    Raises:
        ValueError: If `t_q` or `count` is below 1.

    Examples:
        >>> rows, weights = select_rows(1000, 64, batch=2)
        >>> rows.shape, weights.sum(1).tolist()
        (torch.Size([2, 80]), [1000.0, 1000.0])
    """
    if t_q < 1:
        raise ValueError(f"`t_q` must be at least 1, got {t_q}.")
    if count is not None and count < 1:
        raise ValueError(f"`count` must be at least 1 or None (every row), got {count}.")
    slots = range(first_slot, first_slot + batch * slot_step, slot_step)
    key = (t_q, -1 if count is None else count, slots, exact_first)
    if key not in _ROW_CACHE:
        _ROW_CACHE[key] = _draw_rows(t_q, count, slots, exact_first)
        if len(_ROW_CACHE) > _ROW_CACHE_SIZE:
            _ROW_CACHE.popitem(last=False)
    return _ROW_CACHE[key]


def _draw_rows(
    t_q: int, count: int | None, slots: range, exact_first: int
) -> tuple[Tensor, Tensor]:
    batch = len(slots)
    if count is None or t_q <= exact_first + count:
        rows = torch.arange(t_q, device="cpu").expand(batch, t_q)
        return rows, torch.ones((batch, t_q), dtype=torch.float64, device="cpu")
    edges = [exact_first + (t_q - exact_first) * j // count for j in range(count + 1)]
    low = torch.tensor(edges[:-1], device="cpu")
    length = torch.tensor(edges[1:], device="cpu") - low
    head = torch.arange(exact_first, device="cpu")
    drawn = []
    for slot in slots:
        generator = torch.Generator(device="cpu")
        generator.manual_seed(1_000_003 * slot + t_q)
        uniform = torch.rand(count, dtype=torch.float64, generator=generator, device="cpu")
        drawn.append(torch.cat([head, low + (uniform * length).long()]))
    weights = torch.cat(
        [torch.ones(exact_first, dtype=torch.float64, device="cpu"), length.double()]
    )
    return torch.stack(drawn), weights.expand(batch, -1)


# Reading a sink specification -------------------------------------------------------------------


def sink_positions(
    sink: SinkSpec, batch: int, keys: int
) -> str | tuple[int, ...] | Bool[Tensor, "batch keys"]:
    """Read a sink specification: the name of a rule, sorted positions, or a bool tensor.

    Raises:
        ValueError: If the name is unknown, a position is outside [-keys, keys), or the tensor is
            neither bool (batch, keys) nor a list of positions.

    Examples:
        >>> sink_positions([0, -1], batch=2, keys=5)
        (0, 4)
    """
    if isinstance(sink, str):
        if sink not in SINK_RULES:
            raise ValueError(
                f"`sink` must be one of {SINK_RULES}, key positions, or a bool tensor "
                f"(batch, keys), got {sink!r}."
            )
        return sink
    if isinstance(sink, Tensor):
        if sink.dtype == torch.bool:
            if sink.shape not in ((batch, keys), (1, keys)):
                raise ValueError(
                    f"`sink` as a bool tensor must have shape ({batch}, {keys}), "
                    f"got {tuple(sink.shape)}."
                )
            return sink.expand(batch, keys)
        if sink.is_floating_point() or sink.ndim > 1:
            raise ValueError(
                f"`sink` as a tensor must be bool ({batch}, {keys}) or a list of key positions, "
                f"got {sink.dtype} of shape {tuple(sink.shape)}."
            )
        sink = [int(j) for j in sink.reshape(-1).tolist()]
    listed = [sink] if isinstance(sink, int) else list(sink)
    for j in listed:
        if not -keys <= j < keys:
            raise ValueError(f"`sink` must hold key positions in [{-keys}, {keys}), got {j}.")
    return tuple(sorted({j % keys for j in listed}))
