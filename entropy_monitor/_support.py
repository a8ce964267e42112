"""Which keys a block of rows may see, and which of them is the sink.

A *block* is some rows of a call for a few sequences and heads. `Support.block` says which span of
keys must be looked at at all, and for the part of it that not all rows see alike it returns a bias
to add to the logits (`HIDDEN` where a key is hidden) and the same as 0/1 floats. Everything is kept at
the size of the mask (heads axis 1 where the mask is shared), never at batch x heads x T x T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from entropy_monitor.calls import AttentionCall, SinkSpec, masked_below, sink_positions

HIDDEN = -1e30
"""Finite stand-in for the logit of a hidden key: exp() of it is 0, and 0 times it is 0."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A rectangle of (sequence, head) pairs: sequences [b0, b1), query heads [h0, h1)."""

    b0: int
    b1: int
    h0: int
    h1: int

    def narrow(self, tensor: Tensor) -> Tensor:
        """The part of a tensor (batch or 1, heads or 1, ...) that belongs to these pairs.

        An axis of one element is shared by all, or holds the only one: both times it is kept.
        """
        if tensor.shape[0] > 1:
            tensor = tensor[self.b0 : self.b1]
        if tensor.shape[1] > 1:
            tensor = tensor[:, self.h0 : self.h1]
        return tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A block of rows: indices of queries, the same for all sequences or one list for each.

    `low` and `high` are the smallest and largest index, known on the host.
    """

    index: Tensor
    """(rows,) or (sequences, rows), on the device of the call."""
    low: int
    high: int
    contiguous: bool

    def take(self, tensor: Tensor) -> Tensor:
        """Rows of a tensor (sequences or 1, heads or 1, queries or 1, ...)."""
        if tensor.shape[2] == 1:
            return tensor
        if self.contiguous:
            return tensor[:, :, self.low : self.high + 1]
        if self.index.ndim == 1:
            return tensor.index_select(2, self.index)
        parts = [
            tensor[b if tensor.shape[0] > 1 else 0].index_select(1, rows)
            for b, rows in enumerate(self.index)
        ]
        return torch.stack(parts)

    @property
    def column(self) -> Tensor:
        """Indices with axes (sequences or 1, 1, rows, 1)."""
        index = self.index if self.index.ndim == 2 else self.index[None]
        return index[:, None, :, None]


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a block of rows sees: keys [start, split) all rows, keys [split, stop) some of them."""

    start: int
    split: int
    stop: int
    bias: Tensor | None
    """(b or 1, h or 1, rows or 1, stop - split): added to the logits, `HIDDEN` where hidden."""
    visible: Tensor | None
    """The same shape, 1.0 where visible and 0.0 where hidden."""
    count: Tensor
    """(b or 1, h or 1, rows or 1): number of visible keys."""


@dataclass(frozen=True, kw_only=True)
class SinkKeys:
    """Sink keys of the rows of a block: columns, and whether the row sees them."""

    columns: Tensor
    """(b or 1, h or 1, rows or 1, sinks): key indices, inside the call's keys."""
    valid: Tensor
    """Bool, broadcastable to columns x rows: the key is a sink of this row and in its support."""
    static: tuple[int, ...] | None
    """The columns as plain numbers, where all rows share them."""


class Support:
    """Support and sink of one call, by blocks of rows."""

    def __init__(self, call: AttentionCall, sink: SinkSpec, dtype: torch.dtype) -> None:
        self.call = call
        self.dtype = dtype
        self.batch, self.heads, self.t_q, self.t_k = call.shape
        self.shift = self.t_k - self.t_q
        self.device = call.device
        self.mask = None if call.mask is None else _narrow(call.mask, self.t_k)
        self.sink = sink_positions(sink, self.batch, self.t_k)
        self.sink_table = (
            self._table(self.sink) if isinstance(self.sink, Tensor) else None
        )
        self.structured = call.is_causal or call.window is not None
        self.masked = self.mask is not None or call.logits is not None
        self._biases: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    # Support -----------------------------------------------------------------------------------

    def span(self, rows: Rows) -> tuple[int, int, int]:
        """(start, split, stop): keys outside [start, stop) are hidden from every row of the block,
        keys in [start, split) are visible to every row.
        """
        start, split, stop = 0, self.t_k, self.t_k
        if self.call.is_causal:
            stop = min(max(rows.high + self.shift + 1, 0), self.t_k)
            split = min(max(rows.low + self.shift + 1, 0), stop)
        if self.call.window is not None:
            start = min(max(rows.low + self.shift - self.call.window + 1, 0), stop)
            if not self.call.is_causal:
                stop = min(max(rows.high + self.shift + self.call.window, start), self.t_k)
            split = start
        if self.masked:
            split = start
        if stop == start:  # nothing visible: keep one key, hidden, so that no tile is empty
            start = split = min(start, self.t_k - 1)
            stop = start + 1
        return start, split, stop

    def block(self, pairs: Pairs, rows: Rows, logits: Tensor | None) -> Block:
        """Describe a block; `logits` is the block's part of a call made of logits, keys [start, stop)."""
        start, split, stop = self.span(rows)
        if split == stop:
            count = torch.full((1, 1, 1), split - start, device=self.device)
            return Block(start=start, split=split, stop=stop, bias=None, visible=None, count=count)
        if not self.masked and rows.contiguous:
            # Exact causal blocks of one size have one shape of triangle: build it once.
            key = (rows.high - rows.low, split - rows.low, stop - rows.low)
            if self.call.window is not None or key not in self._biases:
                self._biases[key] = self._mixed(pairs, rows, None, split, stop)
            bias, visible, inside = self._biases[key]
        else:
            bias, visible, inside = self._mixed(pairs, rows, logits, split, stop)
        return Block(
            start=start, split=split, stop=stop, bias=bias, visible=visible, count=inside + (split - start)
        )

    def _mixed(
        self, pairs: Pairs, rows: Rows, logits: Tensor | None, split: int, stop: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self._hidden(pairs, rows, logits, split, stop)
        visible = (~hidden).to(self.dtype)
        if self.mask is None or self.mask.dtype == torch.bool:
            bias = (visible - 1) * -HIDDEN
        else:
            added = rows.take(pairs.narrow(self.mask)[..., split:stop])
            bias = torch.where(hidden, HIDDEN, added.to(self.dtype))
        return bias, visible, visible.sum(-1).long()

    def _hidden(
        self, pairs: Pairs, rows: Rows, logits: Tensor | None, first: int, stop: int,
        *, windowed: bool = True,
    ) -> Tensor:
        """Bool (b or 1, h or 1, rows or 1, stop - first): which keys are hidden."""
        parts = []
        if self.mask is not None:
            mask = rows.take(pairs.narrow(self.mask)[..., first:stop])
            parts.append(~mask if mask.dtype == torch.bool else mask <= masked_below(mask.dtype))
        if logits is not None:
            parts.append(logits <= masked_below(logits.dtype))
        structure = self._outside(rows.column, first, stop, windowed=windowed)
        if structure is not None:
            parts.append(structure)
        if not parts:
            return torch.zeros((1, 1, 1, stop - first), dtype=torch.bool, device=self.device)
        hidden = parts[0]
        for part in parts[1:]:
            hidden = hidden | part
        return hidden

    def _outside(self, row: Tensor, first: int, stop: int, *, windowed: bool = True) -> Tensor | None:
        """Keys hidden by the causal rule and the window, for row indices (..., 1)."""
        if not self.structured:
            return None
        position = row + self.shift
        keys = torch.arange(first, stop, device=self.device)
        outside = None
        if self.call.is_causal:
            outside = keys > position
        if self.call.window is not None and windowed:
            beyond = keys <= position - self.call.window
            if not self.call.is_causal:
                beyond = beyond | (keys >= position + self.call.window)
            outside = beyond if outside is None else outside | beyond
        return outside

    # Padding -----------------------------------------------------------------------------------

    def padding(self) -> Tensor | None:
        """Bool (batch or 1, heads or 1, queries): the query is padding, by its own masked key.

        Only in square self-attention; a slice of the mask that hides its whole diagonal is another
        kind of mask and is not read this way. None where no row can be padding.
        """
        if not self.call.is_square_self or not self.masked:
            return None
        hidden = None
        if self.mask is not None:
            b, h, _, _ = self.mask.shape
            diagonal = self.mask.expand(b, h, self.t_q, self.t_k).diagonal(dim1=-2, dim2=-1)
            hidden = (
                ~diagonal
                if diagonal.dtype == torch.bool
                else diagonal <= masked_below(diagonal.dtype)
            )
        if self.call.logits is not None:
            diagonal = self.call.logits.diagonal(dim1=-2, dim2=-1)
            more = diagonal <= masked_below(diagonal.dtype)
            hidden = more if hidden is None else hidden | more
        assert hidden is not None
        return hidden & ~hidden.all(-1, keepdim=True)

    # Sink --------------------------------------------------------------------------------------

    def sinks(self, pairs: Pairs, rows: Rows, block: Block, logits: Tensor | None) -> SinkKeys | None:
        """Sink keys of the block's rows; None where no key can be a sink."""
        if isinstance(self.sink, str):
            if self.sink != "first":
                return None
            return self._first(pairs, rows, block, logits)
        if isinstance(self.sink, tuple):
            if not self.sink:
                return None
            columns = torch.tensor(self.sink, device=self.device).view(1, 1, 1, -1)
            return SinkKeys(
                columns=columns, valid=self._sees(block, columns), static=self.sink
            )
        assert self.sink_table is not None
        columns, real = self.sink_table
        if columns.shape[-1] == 0:
            return None
        columns, real = pairs.narrow(columns), pairs.narrow(real)
        return SinkKeys(columns=columns, valid=self._sees(block, columns) & real, static=None)

    def _first(
        self, pairs: Pairs, rows: Rows, block: Block, logits: Tensor | None
    ) -> SinkKeys:
        """f(i) = first key row i sees; the sink of row i if row f(i) also starts at f(i)."""
        if self.call.is_square_self:
            if block.split > block.start:
                first = torch.full((1, 1, 1, 1), block.start, device=self.device)
                static: tuple[int, ...] | None = (block.start,)
            else:
                assert block.visible is not None
                first = block.start + block.visible.argmax(-1, keepdim=True)
                static = None
            own = self._starts_at(pairs, first)
            return SinkKeys(columns=first, valid=self._sees(block, first) & own, static=static)
        # Elsewhere row f(i) is another token: the first visible key, if the window still reaches it.
        if not self.masked:
            first = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=self.device)
            static = (0,)
        else:
            if self.call.window is None:
                hidden_first, visible = block.start, block.visible
            else:
                full = logits
                if self.call.logits is not None:
                    part = pairs.narrow(self.call.logits[..., : self.t_k])
                    full = rows.take(part)[..., : block.stop]
                hidden = self._hidden(pairs, rows, full, 0, block.stop, windowed=False)
                hidden_first, visible = 0, (~hidden).to(self.dtype)
            assert visible is not None
            first = hidden_first + visible.argmax(-1, keepdim=True)
            static = None
        return SinkKeys(columns=first, valid=self._sees(block, first), static=static)

    def _sees(self, block: Block, columns: Tensor) -> Tensor:
        """Bool (b, h, rows, sinks): the row sees the key of this column."""
        valid = (columns >= block.start) & (columns < block.split)
        if block.visible is None:
            return valid
        visible = block.visible
        inside = (columns >= block.split) & (columns < block.stop)
        index = (columns - block.split).clamp(0, max(block.stop - block.split - 1, 0))
        b, h, r, _ = torch.broadcast_shapes(visible.shape[:3] + (1,), index.shape[:3] + (1,))
        index = index.expand(b, h, r, -1)
        seen = visible.expand(b, h, r, -1).gather(-1, index) > 0
        return valid | (inside & seen)

    def _starts_at(self, pairs: Pairs, first: Tensor) -> Tensor:
        """Bool, shaped as `first`: row f of the square call sees key f and no key before it."""
        if not self.masked:
            # Row f starts at 0 without a window, at max(0, f - window + 1) with one.
            return torch.ones_like(first, dtype=torch.bool) if self.call.window == 1 else first == 0
        stop = self.t_k if first.is_cuda else int(first.max()) + 1
        hidden = torch.arange(stop, device=self.device) >= first  # only keys before f matter,
        sees_itself = torch.ones_like(first, dtype=torch.bool)  # and f itself
        for source in (self.mask, self.call.logits):
            if source is None:
                continue
            part = pairs.narrow(source)[..., :stop]
            if part.shape[2] > 1:
                b, h = torch.broadcast_shapes(part.shape[:2], first.shape[:2])
                part = part.expand(b, h, -1, -1)
                rows_f = first.expand(b, h, -1, 1)[..., 0]
                ib = torch.arange(b, device=self.device)[:, None, None]
                ih = torch.arange(h, device=self.device)[None, :, None]
                part = part[ib, ih, rows_f]
            gone = ~part if part.dtype == torch.bool else part <= masked_below(part.dtype)
            shape = torch.broadcast_shapes((*gone.shape[:3], 1), first.shape)
            itself = gone.expand(*shape[:3], stop).gather(-1, first.expand(shape))
            hidden, sees_itself = hidden | gone, sees_itself & ~itself
        outside = self._outside(first, 0, stop)
        if outside is not None:
            hidden = hidden | outside
        return hidden.all(-1, keepdim=True) & sees_itself

    def _table(self, sink: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and validity (batch, 1, 1, sinks) of a bool tensor (batch, keys)."""
        sink = sink.to(self.device)
        most = int(sink.sum(-1).max())  # one transfer per call, where the tensor is on a GPU
        order = sink.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]
        return order[:, None, None], sink.gather(1, order)[:, None, None]


def _narrow(mask: Tensor, t_k: int) -> Tensor:
    """Mask with four axes; axes that were expanded (stride 0) are narrowed to one element again."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    for axis in range(3):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask.expand(*mask.shape[:3], t_k)
