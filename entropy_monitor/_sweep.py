"""Walk over a call by tiles and collect the sums of every row and the mass of every key.

The rows are cut into blocks and the (sequence, head) pairs into groups, so that a tile has about
`TILE` logits. Key heads are never repeated: the query heads of one key head are stacked as rows.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from entropy_monitor._support import HIDDEN, Block, Pairs, Rows, SinkKeys, Support
from entropy_monitor._tiles import TILE, RowSums, TileSums, add_block, overwrite_hidden, reduce_tile
from entropy_monitor.calls import AttentionCall

_KEY_ELEMENTS = 2**20
"""Elements of key converted at a time (4 MiB in float32), where a conversion is needed at all."""

_BLOCK_ROWS = 128
"""Rows of a block: enough for an efficient matrix product, few enough to waste little of the causal
triangle."""


class Sweep:
    """Sums of the rows of one call, and the mass of every key.

    Args:
        call: What was computed.
        support: Its support and sink.
        rows: (batch, rows) on the CPU, ascending for speed; None for all.
        weights: (batch or 1, rows) in the dtype of the computation, on the call's device.

    Attributes:
        sums: One entry per row.
        columns: (batch, heads, keys): sum of weight * p over the counted rows.
        is_sink: Bool, the same shape: the key was the sink of a counted row.
    """

    def __init__(
        self, call: AttentionCall, support: Support, rows: Tensor | None, weights: Tensor
    ) -> None:
        self.call = call
        self.support = support
        self.rows = rows
        self.weights = weights
        batch, heads, t_q, t_k = call.shape
        self.device = call.device
        self.dtype = support.dtype
        self.rows_on_device = None if rows is None else rows.to(self.device, non_blocking=True)
        self.n_rows = t_q if rows is None else rows.shape[1]
        self.kv_heads = heads if call.key is None else call.key.shape[1]
        self.stacked = heads // self.kv_heads
        self.padding = support.padding()
        self.sums = RowSums.empty((batch, heads, self.n_rows), self.dtype, self.device)
        self.columns = torch.zeros((batch, heads, t_k), dtype=self.dtype, device=self.device)
        self.is_sink = torch.zeros((batch, heads, t_k), dtype=torch.bool, device=self.device)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def run(self) -> None:
        """Fill `sums`, `columns` and `is_sink`."""
        for chunk, key in self._key_chunks():
            for slots in self._blocks():
                rows = self._bounds(chunk, slots)
                start, _, stop = self.support.span(rows)
                per_pair = (slots.stop - slots.start) * (stop - start) * self.stacked
                for kv in _groups(chunk, per_pair):
                    self._tile(kv, slots, key, chunk)

    # Cutting ---------------------------------------------------------------------------------

    def _key_chunks(self) -> Iterator[tuple[Pairs, Tensor | None]]:
        """Rectangles of (sequence, key head) pairs with their keys (b, h, keys, width)."""
        batch = self.call.shape[0]
        everything = Pairs(b0=0, b1=batch, h0=0, h1=self.kv_heads)
        key = self.call.key
        if key is None:
            yield everything, None
        elif key.dtype == self.dtype and key.is_contiguous():
            yield everything, key
        else:
            for pairs in _groups(everything, key.shape[2] * key.shape[3], _KEY_ELEMENTS):
                yield pairs, pairs.narrow(key).to(self.dtype).contiguous()

    def _blocks(self) -> Iterator[slice]:
        """Slots of rows that are computed together."""
        if self.rows is None:
            size = min(_BLOCK_ROWS, max(16, self.n_rows // 8))
        else:
            size = 16
        for a in range(0, self.n_rows, size):
            yield slice(a, min(a + size, self.n_rows))

    def _bounds(self, pairs: Pairs, slots: slice) -> Rows:
        if self.rows is None:
            index = torch.arange(slots.start, slots.stop, device=self.device)
            return Rows(index=index, low=slots.start, high=slots.stop - 1, contiguous=True)
        part = self.rows[pairs.b0 : pairs.b1, slots]
        assert self.rows_on_device is not None
        index = self.rows_on_device[pairs.b0 : pairs.b1, slots]
        return Rows(index=index, low=int(part.min()), high=int(part.max()), contiguous=False)

    # One tile ----------------------------------------------------------------------------------

    def _tile(self, kv: Pairs, slots: slice, key: Tensor | None, chunk: Pairs) -> None:
        g = self.stacked
        pairs = Pairs(b0=kv.b0, b1=kv.b1, h0=kv.h0 * g, h1=kv.h1 * g)
        rows = self._bounds(pairs, slots)
        start, _, stop = self.support.span(rows)
        shape = (pairs.b1 - pairs.b0, pairs.h1 - pairs.h0, slots.stop - slots.start, stop - start)
        x, e = self._buffer(shape)
        logits = None
        if self.call.logits is not None:
            logits = rows.take(pairs.narrow(self.call.logits))
        real = None if logits is None else logits[..., start:stop]
        block = self.support.block(pairs, rows, real)
        sinks = self.support.sinks(pairs, rows, block, real)
        virtual = self._virtual(pairs, rows, logits)

        def fill() -> None:
            if real is not None:
                x.copy_(real).clamp_(min=HIDDEN)
            else:
                assert key is not None
                self._dot(x, kv, pairs, rows, key, chunk, start, stop)
            add_block(x, block)

        fill()
        careful = x.is_cuda and block.visible is not None  # there, one more pass is cheaper than asking
        if careful:
            overwrite_hidden(x, block)
        sums = reduce_tile(x, e, block, sinks, virtual)
        if block.visible is not None and not careful and bool(sums.suspicious().any()):
            fill()
            overwrite_hidden(x, block)
            sums = reduce_tile(x, e, block, sinks, virtual)
        self._keep(pairs, rows, slots, block, sinks, sums, e)

    def _buffer(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        size = math.prod(shape)
        if self._buffers is None or self._buffers[0].numel() < size:
            self._buffers = None  # let go of the smaller ones first
            new = torch.empty((2, max(size, TILE)), dtype=self.dtype, device=self.device)
            self._buffers = (new[0], new[1])
        x, e = self._buffers
        return x[:size].view(shape), e[:size].view(shape)

    def _dot(
        self, x: Tensor, kv: Pairs, pairs: Pairs, rows: Rows, key: Tensor, chunk: Pairs, start: int, stop: int
    ) -> None:
        """Logits q.k * scale, soft-capped, of a tile."""
        call = self.call
        assert call.query is not None
        b, h, r, n = x.shape
        width = key.shape[-1]
        scale = 1 / math.sqrt(width) if call.scale is None else call.scale
        cap = call.softcap
        q = rows.take(pairs.narrow(call.query)).to(self.dtype) * (scale / (cap or 1.0))
        q = q.reshape(b * h // self.stacked, self.stacked * r, width)
        k = key[kv.b0 - chunk.b0 : kv.b1 - chunk.b0, kv.h0 - chunk.h0 : kv.h1 - chunk.h0]
        k = k.reshape(-1, key.shape[2], width)[:, start:stop]
        torch.bmm(q, k.transpose(1, 2), out=x.view(q.shape[0], q.shape[1], n))
        if cap is not None:
            x.tanh_().mul_(cap)

    def _virtual(self, pairs: Pairs, rows: Rows, logits: Tensor | None) -> Tensor | None:
        """Logits of the learned sinks (b, h, rows, sinks)."""
        b, h, r = pairs.b1 - pairs.b0, pairs.h1 - pairs.h0, rows.index.shape[-1]
        found = []
        if logits is not None and self.call.virtual_columns:
            found.append(logits[..., -self.call.virtual_columns :].to(self.dtype))
        if self.call.sink_logits is not None:
            given = self.call.sink_logits
            given = given.view(1, -1, 1, 1) if given.ndim == 1 else given[..., None]
            given = rows.take(pairs.narrow(given)).to(self.dtype)
            found.append(given.expand(b, h, r, 1))
        return torch.cat(found, -1) if found else None

    def _keep(
        self,
        pairs: Pairs,
        rows: Rows,
        slots: slice,
        block: Block,
        sinks: SinkKeys | None,
        sums: TileSums,
        e: Tensor,
    ) -> None:
        """Write the sums of a tile to its place, and add what its rows give to each key."""
        b, h = slice(pairs.b0, pairs.b1), slice(pairs.h0, pairs.h1)
        sink_top, log_odds, sink_entropy = sums.sink()
        visible = block.count
        if self.padding is not None:
            padded = rows.take(pairs.narrow(self.padding)[..., None])[..., 0]
            visible = torch.where(padded, 0, visible)
        content = block.count if sinks is None else block.count - sinks.valid.sum(-1)
        finite = sums.finite()
        out = self.sums
        for target, value in (
            (out.top, sums.top),
            (out.mass, sums.mass),
            (out.drop, sums.drop),
            (out.first, sums.first),
            (out.second, sums.second),
            (out.sink_top, sink_top),
            (out.log_odds, log_odds),
            (out.sink_entropy, sink_entropy),
            (out.content, content),
            (out.visible, visible),
            (out.finite, finite),
        ):
            target[b, h, slots] = value

        counted = finite & (content >= 2) & (visible > 0)
        weight = self.weights if self.weights.shape[0] == 1 else self.weights[b]
        weight = weight[:, None, slots] * counted
        share = weight * torch.sigmoid(-log_odds) / sums.mass
        share = torch.where(counted, share, 0.0)
        # 0 * NaN is NaN: rows that hold one must not reach the sums over rows.
        if e.is_cuda or not bool(finite.all()):
            e.masked_fill_(~finite[..., None], 0.0)
        n_pairs, r, n = e.shape[0] * e.shape[1], e.shape[2], e.shape[3]
        added = torch.bmm(share.reshape(n_pairs, 1, r), e.view(n_pairs, r, n))
        columns = self.columns[b, h]
        columns[..., block.start : block.stop] += added.view(e.shape[0], e.shape[1], n)
        if sinks is not None:
            self._keep_sinks(b, h, sinks, sums, log_odds, weight, counted)

    def _keep_sinks(
        self,
        b: slice,
        h: slice,
        sinks: SinkKeys,
        sums: TileSums,
        log_odds: Tensor,
        weight: Tensor,
        counted: Tensor,
    ) -> None:
        """The mass that goes to the sink keys themselves (virtual ones are no keys)."""
        assert sums.sink_logits is not None
        n_sinks = sinks.columns.shape[-1]
        mass = weight * torch.sigmoid(log_odds)
        if sums.sink_logits.shape[-1] == 1:
            each = mass[..., None]
        else:
            each = mass[..., None] * torch.softmax(sums.sink_logits, -1)[..., :n_sinks]
        valid = sinks.valid & counted[..., None]
        each = torch.where(valid, each, 0.0)
        columns, is_sink = self.columns[b, h], self.is_sink[b, h]
        if sinks.static is not None:
            for i, j in enumerate(sinks.static):
                columns[..., j] += each[..., i].sum(-1)
                is_sink[..., j] |= valid[..., i].any(-1)
            return
        index = sinks.columns.expand(each.shape).flatten(2)
        columns.scatter_add_(-1, index, each.flatten(2))
        hits = torch.zeros_like(columns).scatter_add_(-1, index, valid.to(columns.dtype).flatten(2))
        is_sink |= hits > 0


def _groups(pairs: Pairs, per_pair: int, budget: int = TILE) -> Iterator[Pairs]:
    """Cut a rectangle of pairs so that each part has at most `budget`, or is one pair."""
    heads = pairs.h1 - pairs.h0
    if heads * per_pair <= budget:
        step = max(1, budget // max(heads * per_pair, 1))
        for b in range(pairs.b0, pairs.b1, step):
            yield Pairs(b0=b, b1=min(b + step, pairs.b1), h0=pairs.h0, h1=pairs.h1)
        return
    step = max(1, budget // per_pair)
    for b in range(pairs.b0, pairs.b1):
        for h in range(pairs.h0, pairs.h1, step):
            yield Pairs(b0=b, b1=b + 1, h0=h, h1=min(h + step, pairs.h1))
