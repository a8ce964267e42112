"""Which keys are the sink of each row of a block.

The rule `first`: let f(i) be the first key row i may see. f(i) is the sink of row i if row f(i)
also starts at f(i); otherwise the row has none. That gives key 0 for plain causal and full
attention, the first real token under left padding, each document's own first token in packed
batches, and no sink where a window no longer reaches the start. Where row f(i) is another token
(cross-attention, or q_len != k_len) it is the first visible key of a row whose window still reaches
it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from entropy_monitor._support import Block, Pairs, Rows, Support, is_hidden
from entropy_monitor.calls import SinkSpec, sink_positions


@dataclass(frozen=True, kw_only=True)
class SinkKeys:
    """Sink keys of the rows of a block."""

    columns: Tensor
    """(b or 1, h or 1, rows or 1, sinks): key indices."""
    valid: Tensor | None
    """Bool, broadcastable to (b, h, rows, sinks): the key is a sink of this row and in its support.
    None where all are."""
    static: tuple[int, ...] | None
    """The columns as plain numbers, where all rows share them."""

    def narrow(self, pairs: Pairs) -> "SinkKeys":
        """The part that belongs to some of the pairs."""
        return replace(
            self,
            columns=pairs.narrow(self.columns),
            valid=None if self.valid is None else pairs.narrow(self.valid),
        )

    def count(self) -> int | Tensor:
        """Number of sinks in the support of each row (b or 1, h or 1, rows or 1)."""
        return self.columns.shape[-1] if self.valid is None else self.valid.sum(-1)


class SinkRule:
    """Reads a sink specification and finds the sink keys of a block.

    Args:
        support: The support of the call.
        sink: The specification.
    """

    def __init__(self, support: Support, sink: SinkSpec) -> None:
        self.support = support
        self.call = support.call
        self.device = support.device
        batch, _, _, t_k = support.call.shape
        self.spec = sink_positions(sink, batch, t_k)
        self.table = _table(self.spec, self.device) if isinstance(self.spec, Tensor) else None
        if isinstance(self.spec, str):
            self.width = int(self.spec == "first")
        else:
            self.width = len(self.spec) if self.table is None else self.table[0].shape[-1]
        """Number of sink columns of every block, 0 where no key can be a sink."""
        self.static: tuple[int, ...] | None = None
        """The columns, where they are the same for all rows of the call."""
        if isinstance(self.spec, tuple):
            self.static = self.spec
        elif (
            self.spec == "first"
            and not support.masked
            and (support.call.window is None or not support.call.is_square_self)
        ):
            self.static = (0,)
        self.columns: Tensor | None = None
        if self.static:
            self.columns = torch.tensor(self.static, device=self.device).view(1, 1, 1, -1)

    def keys(
        self, pairs: Pairs, rows: Rows, block: Block, logits: Tensor | None = None
    ) -> SinkKeys | None:
        """Sink keys of a block; None where no key can be one."""
        if self.width == 0:
            return None
        if isinstance(self.spec, str):
            return self._first(pairs, rows, block, logits)
        if self.table is None:
            return self._static(block)
        columns, real = pairs.narrow(self.table[0]), pairs.narrow(self.table[1])
        return SinkKeys(columns=columns, valid=_sees(block, columns) & real, static=None)

    def _static(self, block: Block) -> SinkKeys:
        assert self.static is not None
        columns = self.columns
        assert columns is not None
        everywhere = all(block.start <= j < block.split for j in self.static)
        valid = None if everywhere else _sees(block, columns)
        return SinkKeys(columns=columns, valid=valid, static=self.static)

    def _first(self, pairs: Pairs, rows: Rows, block: Block, logits: Tensor | None) -> SinkKeys:
        if self.static is not None:
            return self._static(block)
        start, visible = block.start, block.visible
        square = self.call.is_square_self
        if not square and self.call.window is not None:
            if self.call.logits is not None:
                logits = rows.take(pairs.narrow(self.call.logits)[..., : block.stop])
            hidden = self.support.hidden(pairs, rows, logits, 0, block.stop, windowed=False)
            start, visible = 0, (~hidden).to(self.support.dtype)
        if visible is None or (start == block.start < block.split):
            first = torch.full((1, 1, 1, 1), start, device=self.device)  # all rows see it
        else:
            first = start + visible.argmax(-1, keepdim=True)
        valid = _sees(block, first)
        if square:
            valid = valid & self._starts_at(pairs, first)
        return SinkKeys(columns=first, valid=valid, static=None)

    def _starts_at(self, pairs: Pairs, first: Tensor) -> Tensor:
        """Bool, shaped as `first`: row f of the square call sees key f and no key before it."""
        if not self.support.masked:  # row f starts at max(0, f - window + 1)
            return torch.ones_like(first, dtype=torch.bool) if self.call.window == 1 else first == 0
        stop = self.support.t_k if first.is_cuda else int(first.max()) + 1
        hidden = torch.arange(stop, device=self.device) >= first  # only keys before f matter,
        sees_itself = torch.ones_like(first, dtype=torch.bool)  # and f itself
        for source in (self.support.mask, self.call.logits):
            if source is None:
                continue
            part = pairs.narrow(source)[..., :stop]
            if part.shape[2] > 1:
                b, h = max(part.shape[0], first.shape[0]), max(part.shape[1], first.shape[1])
                rows_f = first.expand(b, h, -1, 1)[..., 0]
                ib = torch.arange(b, device=self.device)[:, None, None]
                ih = torch.arange(h, device=self.device)[None, :, None]
                part = part.expand(b, h, -1, -1)[ib, ih, rows_f]
            gone = is_hidden(part)
            itself = _gather(gone, first)
            hidden, sees_itself = hidden | gone, sees_itself & ~itself
        outside = self.support.outside(first, 0, stop)
        if outside is not None:
            hidden = hidden | outside
        return hidden.all(-1, keepdim=True) & sees_itself


def _sees(block: Block, columns: Tensor) -> Tensor:
    """Bool (b or 1, h or 1, rows or 1, sinks): the row sees the key of this column."""
    valid = (columns >= block.start) & (columns < block.split)
    if block.visible is None:
        return valid
    index = columns - block.split
    inside = (index >= 0) & (index < block.stop - block.split)
    seen = _gather(block.visible, index.clamp(0, block.stop - block.split - 1)) > 0
    return valid | (inside & seen)


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """Gather along the last axis with the other axes broadcast against each other."""
    b, h, r = (max(a, c) for a, c in zip(values.shape[:3], index.shape[:3], strict=True))
    return values.expand(b, h, r, -1).gather(-1, index.expand(b, h, r, -1))


def _table(sink: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Columns and validity (batch, 1, 1, sinks) of a bool tensor (batch, keys)."""
    most = int(sink.sum(-1).max())  # one transfer per call, where the tensor is on a GPU
    sink = sink.to(device)
    order = sink.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]
    return order[:, None, None], sink.gather(1, order)[:, None, None]
