"""Which keys a block of rows may see.

A *block* is some rows of a call, for a few sequences and heads. `Support.block` says which span of
keys must be looked at at all, and for the part of it that not all rows see alike it returns a bias
to add to the logits (`HIDDEN` where a key is hidden) and the same as 0/1 floats. Everything is kept
at the size of the mask (heads axis 1 where the mask is shared), never at batch x heads x T x T.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from entropy_monitor.calls import AttentionCall, masked_below

HIDDEN = -1.0723e30
"""Finite stand-in for the logit of a hidden key: exp() of it is 0, and 0 times it is 0.

Not a round number, so that the absurd value of a hidden key is unlikely to cancel it."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A rectangle of (sequence, head) pairs: sequences [b0, b1), heads [h0, h1)."""

    b0: int
    b1: int
    h0: int
    h1: int

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.b1 - self.b0

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.h1 - self.h0

    def narrow(self, tensor: Tensor) -> Tensor:
        """The part of a tensor (batch or 1, heads or 1, ...) that belongs to these pairs.

        An axis of one element is shared by all, or holds the only one: both times it is kept.
        """
        if tensor.shape[0] > self.batch:
            tensor = tensor[self.b0 : self.b1]
        if tensor.shape[1] > self.heads:
            tensor = tensor[:, self.h0 : self.h1]
        return tensor

    def within(self, other: "Pairs") -> "Pairs":
        """The same pairs, counted from the corner of another rectangle."""
        return Pairs(
            b0=self.b0 - other.b0,
            b1=self.b1 - other.b0,
            h0=self.h0 - other.h0,
            h1=self.h1 - other.h0,
        )

    def times(self, stacked: int) -> "Pairs":
        """The query heads that belong to these key heads."""
        if stacked == 1:
            return self
        return Pairs(b0=self.b0, b1=self.b1, h0=self.h0 * stacked, h1=self.h1 * stacked)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A block of rows: query indices, the same for all sequences or one list for each."""

    index: Tensor
    """(1, rows) or (sequences, rows), on the device of the call."""
    low: int
    """The smallest index, known on the host."""
    high: int
    """The largest index."""
    contiguous: bool
    """The indices are low, low + 1, ..., high."""

    def take(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor (sequences or 1, heads or 1, queries or 1, ...)."""
        if tensor.shape[2] == 1:
            return tensor
        if self.contiguous:
            return tensor[:, :, self.low : self.high + 1]
        if self.index.shape[0] == 1:
            return tensor.index_select(2, self.index[0])
        # Sequences and rows side by side: three times as fast as gathering along one axis.
        swapped = tensor.transpose(1, 2)
        if tensor.shape[0] == 1:
            return swapped[0][self.index].transpose(1, 2)
        batch = torch.arange(len(self.index), device=tensor.device)[:, None]
        return swapped[batch, self.index].transpose(1, 2)

    @property
    def column(self) -> Tensor:
        """Indices with axes (sequences or 1, 1, rows, 1)."""
        return self.index[:, None, :, None]


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
    """(b or 1, h or 1, rows or 1): number of visible keys, in floats."""

    def narrow(self, pairs: Pairs) -> "Block":
        """The part of the block that belongs to some of its pairs."""
        return replace(
            self,
            bias=None if self.bias is None else pairs.narrow(self.bias),
            visible=None if self.visible is None else pairs.narrow(self.visible),
            count=pairs.narrow(self.count),
        )


class Support:
    """Support of one call, by blocks of rows.

    Args:
        call: What was computed.
        dtype: Dtype of biases and of 0/1 floats.
    """

    def __init__(self, call: AttentionCall, dtype: torch.dtype) -> None:
        self.call = call
        self.dtype = dtype
        self.device = call.device
        _, _, self.t_q, self.t_k = call.shape
        self.shift = self.t_k - self.t_q
        self.mask = None if call.mask is None else _narrow(call.mask, self.t_k)
        self.from_logits = call.logits is not None
        self.biased = self.mask is not None and self.mask.dtype != torch.bool
        self.structured = call.is_causal or call.window is not None
        self.masked = self.mask is not None or self.from_logits
        """Something but the positions decides: blocks differ between sequences and heads."""
        self._triangles: dict[tuple[int, int, int], tuple[Tensor | None, Tensor, Tensor]] = {}

    def span(self, rows: Rows) -> tuple[int, int, int]:
        """Return (start, split, stop) of a block.

        Keys outside [start, stop) are hidden from every row, keys in [start, split) are visible to
        every row.
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

    def block(self, pairs: Pairs, rows: Rows, logits: Tensor | None = None) -> Block:
        """Describe a block; `logits` is its part of a call made of logits, keys [start, stop)."""
        start, split, stop = self.span(rows)
        # Blocks of consecutive rows under the causal rule alone are one triangle, moved along.
        triangle = (rows.low - split, rows.high - split, stop - split)
        moves = rows.contiguous and not self.masked and self.call.window is None
        if moves and triangle in self._triangles:
            bias, visible, inside = self._triangles[triangle]
            return Block(
                start=start,
                split=split,
                stop=stop,
                bias=bias,
                visible=visible,
                count=inside + (split - start),
            )
        hidden = None
        if split < stop:
            hidden = self.hidden(pairs, rows, logits, split, stop)
            if self.masked and not hidden.is_cuda:
                start, split, stop, hidden = self._trim(hidden, start)
        if hidden is None or split == stop:
            count = torch.full((1, 1, 1), split - start, dtype=self.dtype, device=self.device)
            return Block(start=start, split=split, stop=stop, bias=None, visible=None, count=count)
        visible = (~hidden).to(self.dtype)
        inside = visible.sum(-1)
        if self.biased:
            assert self.mask is not None
            added = rows.take(pairs.narrow(self.mask)[..., split:stop])
            bias = torch.where(hidden, HIDDEN, added.to(self.dtype))
        elif self.mask is None and not self.structured:
            bias = None  # the logits hide their keys themselves
        else:
            bias = (visible - 1).mul_(-HIDDEN)
        if moves:
            self._triangles[triangle] = (bias, visible, inside)
        count = inside + (split - start)
        return Block(start=start, split=split, stop=stop, bias=bias, visible=visible, count=count)

    def _trim(self, hidden: Tensor, start: int) -> tuple[int, int, int, Tensor]:
        """Leave out the keys that no row of the block sees, and find those that all of them see.

        A mask that hides a triangle then costs as little as the causal rule.
        """
        flat = hidden.flatten(0, 2)
        seen = flat.all(0).logical_not_().nonzero()
        first, last = (int(seen[0]), int(seen[-1])) if len(seen) else (0, 0)
        split = first  # a bias must be added where all rows see the key, too
        if not self.biased:
            mixed = flat[:, first : last + 1].any(0).nonzero()
            split = first + int(mixed[0]) if len(mixed) else last + 1
        return start + first, start + split, start + last + 1, hidden[..., split : last + 1]

    def hidden(
        self,
        pairs: Pairs,
        rows: Rows,
        logits: Tensor | None,
        first: int,
        stop: int,
        *,
        windowed: bool = True,
    ) -> Tensor:
        """Which of the keys [first, stop) are hidden: bool (b or 1, h or 1, rows or 1, keys)."""
        parts = []
        if self.mask is not None:
            parts.append(is_hidden(rows.take(pairs.narrow(self.mask)[..., first:stop])))
        if logits is not None:
            parts.append(is_hidden(logits))
        structure = self.outside(rows.column, first, stop, windowed=windowed)
        if structure is not None:
            parts.append(structure)
        if not parts:
            return torch.zeros((1, 1, 1, stop - first), dtype=torch.bool, device=self.device)
        hidden = parts[0]
        for part in parts[1:]:
            hidden = hidden | part
        return hidden

    def outside(
        self, row: Tensor, first: int, stop: int, *, windowed: bool = True
    ) -> Tensor | None:
        """Keys hidden by the causal rule and the window, for row indices (..., 1)."""
        position = row + self.shift
        keys = torch.arange(first, stop, device=self.device)
        outside = keys > position if self.call.is_causal else None
        if self.call.window is not None and windowed:
            beyond = keys <= position - self.call.window
            if not self.call.is_causal:
                beyond = beyond | (keys >= position + self.call.window)
            outside = beyond if outside is None else outside | beyond
        return outside

    def padding(self) -> Tensor | None:
        """Which queries are padding, by their own masked key: bool (batch or 1, heads or 1, T).

        Only in square self-attention; a slice of the mask that hides its whole diagonal is another
        kind of mask and is not read this way. None where no row can be padding.
        """
        if not self.call.is_square_self or not self.masked:
            return None
        hidden = None
        if self.mask is not None:
            square = self.mask.expand(-1, -1, self.t_q, -1)
            hidden = is_hidden(square.diagonal(dim1=-2, dim2=-1))
        if self.call.logits is not None:
            more = is_hidden(self.call.logits.diagonal(dim1=-2, dim2=-1))
            hidden = more if hidden is None else hidden | more
        assert hidden is not None
        return hidden & ~hidden.all(-1, keepdim=True)


def is_hidden(mask_or_logits: Tensor) -> Tensor:
    """Bool mask (True = visible) or biases or logits -> True where the key is hidden."""
    if mask_or_logits.dtype == torch.bool:
        return ~mask_or_logits
    return mask_or_logits <= masked_below(mask_or_logits.dtype)


def _narrow(mask: Tensor, t_k: int) -> Tensor:
    """Mask with four axes; axes that were expanded (stride 0) are narrowed to one element again."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    for axis in range(3):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask.expand(*mask.shape[:3], t_k)
