"""The numbers of a block of rows, from logits, in few passes and without cancellation.

Exponentials are taken of l - max over the content keys only; the sink is compared with them through
log-odds. So a content composition that holds 1e-12 of the mass is as exact as one that holds all of it.
Everything stays in reach of the cache: a tile has at most `TILE` logits.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from entropy_monitor._support import HIDDEN, Block, SinkKeys

TILE = 2**18
"""Logits of a tile: 1 MiB in float32; two tiles are alive at a time."""

_GARBAGE = 1e15
"""A content maximum above this came from a hidden key (`HIDDEN` added to something as large) or from
an overflow: the tile is then computed again with the hidden keys overwritten."""

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """What is kept of every row: all (batch, heads, rows). Undefined entries hold anything finite or not."""

    top: Tensor
    """max of l over the content keys."""
    mass: Tensor
    """L = sum of exp(l - top) over the content."""
    drop: Tensor
    """sum of (l - top) * exp(l - top) over the content, <= 0."""
    first: Tensor
    """sum of l - top over the content."""
    second: Tensor
    """sum of (l - top)^2 over the content."""
    sink_top: Tensor
    """max of l over the sink, -inf without one."""
    log_odds: Tensor
    """LSE of the sink minus LSE of the content, -inf without a sink."""
    sink_entropy: Tensor
    """H(sigma)."""
    content: Tensor
    """m, number of content keys (int32)."""
    visible: Tensor
    """Number of visible keys, virtual ones left out (int32)."""
    finite: Tensor
    """Bool: the logits of all visible keys are finite."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> "RowSums":
        """Unfilled tensors."""
        kinds = {"content": torch.int32, "visible": torch.int32, "finite": torch.bool}
        return cls(
            **{
                f.name: torch.empty(shape, dtype=kinds.get(f.name, dtype), device=device)
                for f in fields(cls)
            }
        )


def add_block(x: Tensor, block: Block) -> None:
    """Add a block's bias to its logits x (b, h, rows, stop - start), in place."""
    if block.bias is not None:
        x[..., block.split - block.start :].add_(block.bias)


def overwrite_hidden(x: Tensor, block: Block) -> None:
    """Set hidden logits to `HIDDEN`, whatever they held (a NaN survives an addition)."""
    if block.visible is not None:
        x[..., block.split - block.start :].masked_fill_(block.visible == 0, HIDDEN)


def take_sinks(x: Tensor, sinks: SinkKeys | None, block: Block) -> Tensor | None:
    """Logits of the sink keys (b, h, rows, sinks), -inf where a row has none; taken out of x."""
    if sinks is None:
        return None
    if sinks.static is not None and len(sinks.static) == 1:
        j = sinks.static[0] - block.start
        if not 0 <= j < x.shape[-1]:
            return x.new_full((*x.shape[:3], 1), -torch.inf)
        logits = torch.where(sinks.valid, _mark(x[..., j : j + 1]), -torch.inf)
        x[..., j : j + 1].masked_fill_(sinks.valid, HIDDEN)
        return logits
    index, valid = _inside(sinks, block, x)
    found = x.gather(-1, index)
    # Where a column is no sink of the row it is written back; a clamped index may repeat, so scatter the minimum.
    x.scatter_reduce_(-1, index, found.masked_fill(valid, HIDDEN), "amin")
    return torch.where(valid, _mark(found), -torch.inf)


def _mark(logits: Tensor) -> Tensor:
    """-inf -> NaN: a visible sink whose product overflowed is not an absent one."""
    return logits.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.nan)


def zero_hidden(x: Tensor, sinks: SinkKeys | None, block: Block) -> None:
    """Set x to 0 at hidden keys and at the row's sinks, so that sums over x are sums over the content."""
    if block.visible is not None:
        x[..., block.split - block.start :].mul_(block.visible)
    if sinks is None:
        return
    if sinks.static is not None and len(sinks.static) == 1:
        j = sinks.static[0] - block.start
        if 0 <= j < x.shape[-1]:
            x[..., j : j + 1].masked_fill_(sinks.valid, 0.0)
        return
    # x <= 0 here, so the larger of x and 0 is 0.
    index, valid = _inside(sinks, block, x)
    found = x.gather(-1, index)
    x.scatter_reduce_(-1, index, found.masked_fill(valid, 0.0), "amax")


def _inside(sinks: SinkKeys, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """Index into x and validity (b, h, rows, sinks) of sink columns; columns outside are clamped."""
    b, h, r, n = x.shape
    index = sinks.columns - block.start
    inside = (index >= 0) & (index < n)
    shape = (b, h, r, index.shape[-1])
    return index.clamp(0, n - 1).expand(shape), (sinks.valid & inside).expand(shape)


def reduce_tile(
    x: Tensor, e: Tensor, block: Block, sinks: SinkKeys | None, virtual: Tensor | None
) -> "TileSums":
    """Sums over the content keys of a tile of logits.

    Args:
        x: Logits (b, h, rows, keys) with hidden keys at about `HIDDEN`; overwritten.
        e: Buffer of the same shape; holds exp(l - top) afterwards, 0 at hidden keys and sinks.
        block: The support.
        sinks: The sink keys.
        virtual: Logits of learned sinks (b, h, rows, virtual sinks).
    """
    sink_logits = take_sinks(x, sinks, block)
    if virtual is not None:
        sink_logits = virtual if sink_logits is None else torch.cat([sink_logits, virtual], -1)
    top = x.amax(-1, keepdim=True)
    x.sub_(top)
    # On a CPU exp2 takes half the time of exp; the product is rounded after the subtraction, where it is harmless.
    if x.is_cuda:
        torch.exp(x, out=e)
    else:
        torch.mul(x, _LOG2_E, out=e).exp2_()
    zero_hidden(x, sinks, block)
    first = x.sum(-1)
    second = torch.linalg.vector_norm(x, dim=-1).square_()
    mass = e.sum(-1)
    drop = x.mul_(e).sum(-1)
    return TileSums(
        top=top[..., 0], mass=mass, drop=drop, first=first, second=second, sink_logits=sink_logits
    )


@dataclass(frozen=True, kw_only=True)
class TileSums:
    """Sums over the content of each row of a tile, in the letters of `RowSums`; all (b, h, rows)."""

    top: Tensor
    mass: Tensor
    drop: Tensor
    first: Tensor
    second: Tensor
    sink_logits: Tensor | None
    """(b, h, rows, sinks), -inf where there is none."""

    def suspicious(self) -> Tensor:
        """Bool: NaN, infinite or absurd; a hidden key may be the reason."""
        return ~(torch.isfinite(self.second) & (self.top < _GARBAGE))

    def finite(self) -> Tensor:
        """Bool: all logits of content and sink are finite (a sink of -inf is an absent one)."""
        good = torch.isfinite(self.second) & torch.isfinite(self.top)
        if self.sink_logits is not None:
            good &= (self.sink_logits < torch.inf).all(-1)
        return good

    def sink(self) -> tuple[Tensor, Tensor, Tensor]:
        """(max of the sink logits, log-odds, H(sigma)); -inf, -inf, 0 without a sink."""
        log_mass = self.mass.log()
        if self.sink_logits is None:
            none = torch.full_like(self.top, -torch.inf)
            return none, none, torch.zeros_like(self.top)
        if self.sink_logits.shape[-1] == 1:
            top = self.sink_logits[..., 0]
            return top, (top - self.top) - log_mass, torch.zeros_like(top)
        top = self.sink_logits.amax(-1)
        gap = (self.sink_logits - top.clamp(min=HIDDEN)[..., None]).clamp(min=HIDDEN)
        weight = gap.exp()
        total = weight.sum(-1)
        entropy = total.log() - (weight * gap).sum(-1) / total
        log_odds = (top - self.top) + total.log() - log_mass
        absent = top == -torch.inf
        return top, log_odds.masked_fill(absent, -torch.inf), entropy.masked_fill(absent, 0.0)
