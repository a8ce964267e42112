"""Walk over a call by tiles and collect the sums of every row and the mass of every content key.

The rows are cut into blocks and the (sequence, head) pairs into groups, so that a tile has about
`TILE` logits. Key heads are never repeated: the query heads of one key head are stacked as rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from entropy_monitor._sinks import SinkKeys, SinkRule
from entropy_monitor._support import HIDDEN, Block, Pairs, Rows, Support
from entropy_monitor._tiles import TILE, overwrite_hidden, reduce_tile
from entropy_monitor.calls import AttentionCall

_KEY_ELEMENTS = 2**19
"""Elements of key converted at a time (2 MiB in float32), where a conversion is needed at all."""

_BLOCK_ROWS = 3.25
"""Rows of a block, in square roots of T. A block wastes half its rows of the causal triangle, and
many blocks cost overhead; the best balance grows as sqrt(T) (measured: 96 at T = 1024, 256 at
4096)."""

_FIRST_ROWS = 16
"""Rows of the first block of sampled rows, which `select_rows` takes from the start."""


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """What is kept of every row, in the letters of `TileSums`: (batch, heads, rows)."""

    top: Tensor
    mass: Tensor
    drop: Tensor
    first: Tensor
    norm: Tensor
    centre: Tensor
    visible: Tensor
    """Number of visible keys, 0 for padding; learned sinks are no keys."""
    content: Tensor
    """m, number of content keys."""
    sink_logits: Tensor | None
    """(sinks, batch, heads, rows): of the sink keys, then of the learned sinks; -inf for none."""
    sink_columns: Tensor | None
    """(sink keys, batch, heads, rows): which keys they are, where rows differ in them."""


_NAMES = ("top", "mass", "drop", "first", "norm", "centre", "visible", "content")
_FIXED = len(_NAMES)


class _Parts:
    """What the tiles of a block or chunk give, to be put together: (numbers, pairs, rows) each."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.sink_columns: list[Tensor] = []

    def add(self, sums: Tensor, sink_columns: Tensor | None) -> None:
        self.sums.append(sums)
        if sink_columns is not None:
            self.sink_columns.append(sink_columns)

    def join(self, axis: int) -> tuple[Tensor, Tensor | None]:
        columns = self.sink_columns
        return _cat(self.sums, axis), _cat(columns, axis) if columns else None


def _cat(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


class Sweep:
    """One walk over a call.

    Args:
        call: What was computed.
        support: Its support.
        rule: Its sink.
        rows: (batch, rows) on the CPU, ascending for speed; None for all.
        weights: (batch or 1, rows) in the dtype of the computation, on the call's device.
    """

    def __init__(
        self,
        call: AttentionCall,
        support: Support,
        rule: SinkRule,
        rows: Tensor | None,
        weights: Tensor,
    ) -> None:
        self.call = call
        self.support = support
        self.rule = rule
        self.rows = rows
        self.weights = weights[:, None]
        self.device = call.device
        self.dtype = support.dtype
        self.batch, self.heads, t_q, self.t_k = call.shape
        self.n_rows = t_q if rows is None else rows.shape[1]
        self.kv_heads = self.heads if call.key is None else call.key.shape[1]
        self.stacked = self.heads // self.kv_heads
        self.padding = support.padding()
        self.rows_on_device = None if rows is None else rows.to(self.device, non_blocking=True)
        self.query = call.query
        if rows is not None and call.query is not None:
            everything = Pairs(b0=0, b1=self.batch, h0=0, h1=self.heads)
            self.query = self._rows(everything, slice(0, self.n_rows)).take(call.query)
        self.scale = 1.0 if call.scale is None else call.scale
        if call.scale is None and call.key is not None:
            self.scale = 1 / math.sqrt(call.key.shape[-1])
        self.columns = torch.zeros(
            (self.batch * self.heads, 1, self.t_k), dtype=self.dtype, device=self.device
        )
        """(pairs, 1, keys): sum of weight * p over the counted rows, content keys alone."""
        self._buffers = self.columns.new_empty((2, 0))
        self._key_buffer = self.columns.new_empty(0)

    def run(self) -> RowSums:
        """Compute the sums of all rows, and fill `columns`."""
        chunks = _Parts()
        for chunk in self._chunks():
            key = self._keys(chunk)
            pairs = chunk.times(self.stacked)
            blocks = _Parts()
            for slots in self._blocks():
                groups = _Parts()
                start, _, stop = self.support.span(self._rows(pairs, slots))
                # Where positions alone decide, one plan of the block serves all pairs.
                plan = None if self.support.masked else self._plan(pairs, slots)
                per_pair = (slots.stop - slots.start) * (stop - start) * self.stacked
                for kv in _groups(chunk, per_pair, TILE):
                    local = plan
                    if plan is None:
                        local = self._plan(kv.times(self.stacked), slots)
                    elif kv != chunk and not plan.is_shared:
                        local = plan.narrow(kv.times(self.stacked).within(pairs))
                    assert local is not None
                    self._tile(kv, chunk, slots, key, local, groups)
                blocks.add(*groups.join(1))
            chunks.add(*blocks.join(2))
        self._buffers, self._key_buffer = self.columns.new_empty((2, 0)), self.columns.new_empty(0)
        sums, columns = chunks.join(1)
        sums = sums.view(-1, self.batch, self.heads, self.n_rows)
        if columns is not None:
            columns = columns.view(-1, self.batch, self.heads, self.n_rows)
        sinks = sums[_FIXED:] if len(sums) > _FIXED else None
        return RowSums(
            **dict(zip(_NAMES, sums, strict=False)), sink_logits=sinks, sink_columns=columns
        )

    # Cutting -----------------------------------------------------------------------------------

    def _chunks(self) -> Iterator[Pairs]:
        """Rectangles of (sequence, key head) pairs whose keys are at hand together."""
        everything = Pairs(b0=0, b1=self.batch, h0=0, h1=self.kv_heads)
        key = self.call.key
        if key is None or (key.dtype == self.dtype and key.is_contiguous()):
            yield everything
        else:
            yield from _groups(everything, self.t_k * key.shape[-1], _KEY_ELEMENTS)

    def _keys(self, pairs: Pairs) -> Tensor | None:
        """Keys of a chunk (pairs, keys, width), in the dtype of the computation."""
        if self.call.key is None:
            return None
        key = pairs.narrow(self.call.key)
        if key.dtype != self.dtype or not key.is_contiguous():
            if self._key_buffer.numel() < key.numel():  # the first chunk is the largest
                self._key_buffer = self.columns.new_empty(key.numel())
            key = self._key_buffer[: key.numel()].view(key.shape).copy_(key)
        return key.view(-1, self.t_k, key.shape[-1])

    def _blocks(self) -> Iterator[slice]:
        """Slots of rows that are computed together."""
        first, size = 0, max(16, int(_BLOCK_ROWS * math.sqrt(self.n_rows)) // 16 * 16)
        if self.rows is not None:
            pairs = self.batch * self.heads
            size = min(max(32, TILE // max(1, pairs * self.t_k)), self.n_rows)
            if self.n_rows > _FIRST_ROWS:
                yield slice(0, _FIRST_ROWS)
                first = _FIRST_ROWS
        for a in range(first, self.n_rows, size):
            yield slice(a, min(a + size, self.n_rows))

    def _rows(self, pairs: Pairs, slots: slice) -> Rows:
        if self.rows is None:
            index = torch.arange(slots.start, slots.stop, device=self.device)[None]
            return Rows(index=index, low=slots.start, high=slots.stop - 1, contiguous=True)
        low, high = torch.aminmax(self.rows[pairs.b0 : pairs.b1, slots])
        assert self.rows_on_device is not None
        index = self.rows_on_device[pairs.b0 : pairs.b1, slots]
        return Rows(index=index, low=int(low), high=int(high), contiguous=False)

    def _plan(self, pairs: Pairs, slots: slice) -> "_Plan":
        """What the rows of a block see, and how much they count."""
        rows = self._rows(pairs, slots)
        logits = real = None
        if self.call.logits is not None:
            start, _, stop = self.support.span(rows)
            logits = rows.take(pairs.narrow(self.call.logits))
            real = logits[..., start:stop]
        block = self.support.block(pairs, rows, real)
        sinks = self.rule.keys(pairs, rows, block, real)
        content = block.count if sinks is None else block.count - sinks.count()
        visible, weight = block.count, pairs.narrow(self.weights)[..., slots]
        if self.padding is not None:
            padded = rows.take(pairs.narrow(self.padding)[..., None])[..., 0]
            visible = torch.where(padded, 0.0, visible)
            weight = weight * ~padded
        shape = [max(a, c) for a, c in zip(visible.shape, content.shape, strict=True)]
        size = content.clamp(min=1).expand(shape)
        return _Plan(
            block=block,
            sinks=sinks,
            size=size,
            root=(0.99 * size).sqrt(),
            counts=torch.stack([x.expand(size.shape) for x in (size * 0, visible, content)]),
            weight=weight * (content >= 2),
            logits=None if logits is None else logits[..., block.start : block.stop],
            virtual=self._virtual(pairs, rows, logits),
        )

    def _virtual(self, pairs: Pairs, rows: Rows, logits: Tensor | None) -> Tensor | None:
        """Logits of the learned sinks (b, h, rows, learned sinks)."""
        found = []
        if logits is not None and self.call.virtual_columns:
            found.append(logits[..., -self.call.virtual_columns :].to(self.dtype))
        if self.call.sink_logits is not None:
            given = self.call.sink_logits
            given = given.view(1, -1, 1, 1) if given.ndim == 1 else given[..., None]
            given = rows.take(pairs.narrow(given)).to(self.dtype)
            found.append(given.expand(pairs.batch, pairs.heads, rows.index.shape[1], 1))
        return torch.cat(found, -1) if found else None

    # One tile ----------------------------------------------------------------------------------

    def _tile(
        self, kv: Pairs, chunk: Pairs, slots: slice, key: Tensor | None, plan: "_Plan", out: _Parts
    ) -> None:
        """Compute a tile: hand on its sums, and add what its rows give to each content key."""
        pairs = kv.times(self.stacked)
        block = plan.block
        b, h, r, n = pairs.batch, pairs.heads, slots.stop - slots.start, block.stop - block.start
        x, e = self._buffer((b, h, r, n))
        # A GPU is not asked: there one more pass is cheaper than waiting for the answer.
        careful, sums = x.is_cuda, None
        while sums is None:
            self._fill(x, kv, chunk, slots, key, plan)
            if careful:
                overwrite_hidden(x, block)
            sums = reduce_tile(
                x, e, block, plan.sinks, plan.virtual, plan.size, plan.root, careful=careful
            )
            careful = careful or sums is None
        share = sums.share(plan.weight)
        if careful:
            # 0 * NaN is NaN: rows that hold one must not reach the sums over rows.
            finite = sums.finite()
            share = torch.where(finite, share, 0.0)
            e.masked_fill_(~finite[..., None], 0.0)
        place = pairs.b0 * self.heads + pairs.h0
        columns = self.columns[place : place + b * h, :, block.start : block.stop]
        columns.baddbmm_(share.reshape(b * h, 1, r), e.view(b * h, r, n))

        numbers = [sums.top, sums.mass, sums.drop, sums.first, sums.norm]
        centre, visible, content = plan.counts.expand(3, b, h, r).unbind(0)
        numbers += [centre if sums.centre is None else sums.centre, visible, content]
        if sums.sink_logits is not None:
            numbers += sums.sink_logits.unbind(-1)
        keys = None
        if plan.sinks is not None and plan.sinks.static is None:
            keys = plan.sinks.columns.expand(b, h, r, -1).permute(3, 0, 1, 2).reshape(-1, b * h, r)
        out.add(torch.stack(numbers).view(-1, b * h, r), keys)

    def _buffer(self, shape: tuple[int, int, int, int]) -> Tensor:
        size = math.prod(shape)
        if self._buffers.shape[1] < size:
            self._buffers = self._buffers.new_empty(0)  # let go of the smaller ones first
            self._buffers = self._buffers.new_empty((2, max(size, self._largest())))
        return self._buffers[:, :size].view(2, *shape)

    def _largest(self) -> int:
        """Logits of the largest tile to come, if it stays below `TILE`."""
        return min(TILE, self.batch * self.heads * self.n_rows * self.t_k)

    def _fill(
        self, x: Tensor, kv: Pairs, chunk: Pairs, slots: slice, key: Tensor | None, plan: "_Plan"
    ) -> None:
        """Logits of a tile, with the bias of its support."""
        block = plan.block
        if plan.logits is not None:
            x.copy_(plan.logits).clamp_(min=HIDDEN)
        else:
            assert key is not None
            assert self.query is not None
            b, h, r, n = x.shape
            width = key.shape[-1]
            q = kv.times(self.stacked).narrow(self.query)[:, :, slots].to(self.dtype)
            q = q.reshape(b * h // self.stacked, self.stacked * r, width)
            place = (kv.b0 - chunk.b0) * chunk.heads + kv.h0 - chunk.h0
            k = key[place : place + kv.batch * kv.heads, block.start : block.stop]
            flat = x.view(q.shape[0], q.shape[1], n)
            scale, cap = self.scale, self.call.softcap
            torch.baddbmm(flat, q, k.transpose(1, 2), beta=0, alpha=scale / (cap or 1.0), out=flat)
            if cap is not None:
                x.tanh_().mul_(cap)
        if block.bias is not None:
            x[..., block.split - block.start :].add_(block.bias)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the rows of a block see, for some pairs."""

    block: Block
    sinks: SinkKeys | None
    counts: Tensor
    """(3, b or 1, h or 1, rows): zeros, number of visible keys (0 for padding), of content keys."""
    size: Tensor
    """(b or 1, h or 1, rows): number of content keys, at least 1."""
    root: Tensor
    """sqrt(0.99 size)."""
    weight: Tensor
    """Weight of the row, 0 if it does not count."""
    logits: Tensor | None
    """(b, h, rows, keys) of a call made of logits."""
    virtual: Tensor | None
    """(b, h, rows, learned sinks)."""

    def narrow(self, pairs: Pairs) -> "_Plan":
        """The part that belongs to some of the pairs, counted from the corner of this plan's."""
        return replace(
            self,
            block=self.block.narrow(pairs),
            sinks=None if self.sinks is None else self.sinks.narrow(pairs),
            counts=torch.stack([pairs.narrow(x) for x in self.counts]),
            size=pairs.narrow(self.size),
            root=pairs.narrow(self.root),
            weight=pairs.narrow(self.weight),
            virtual=None if self.virtual is None else pairs.narrow(self.virtual),
        )

    @property
    def is_shared(self) -> bool:
        """Nothing in it differs between sequences or heads."""
        shared = self.weight.shape[:2] == (1, 1) and self.block.count.shape[:2] == (1, 1)
        sinks = self.sinks is None or self.sinks.columns.shape[:2] == (1, 1)
        return shared and sinks and self.virtual is None and self.logits is None


def _groups(pairs: Pairs, per_pair: int, budget: int) -> Iterator[Pairs]:
    """Cut a rectangle of pairs so that each part has at most `budget`, or is one pair.

    Parts are whole sequences, or heads of one sequence, in the order of the flattened pairs.
    """
    if pairs.batch * pairs.heads * per_pair <= budget:
        yield pairs
    elif pairs.heads * per_pair <= budget:
        step = budget // (pairs.heads * per_pair)
        for b in range(pairs.b0, pairs.b1, step):
            yield Pairs(b0=b, b1=min(b + step, pairs.b1), h0=pairs.h0, h1=pairs.h1)
    else:
        step = max(1, budget // per_pair)
        for b in range(pairs.b0, pairs.b1):
            for h in range(pairs.h0, pairs.h1, step):
                yield Pairs(b0=b, b1=b + 1, h0=h, h1=min(h + step, pairs.h1))
