"""The sums of a tile of logits, in few passes and without cancellation.

Exponentials are taken of l - max over the content keys only; the sink is compared with them through
log-odds. So a content composition that holds 1e-12 of the mass is as exact as one that holds all of
it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from entropy_monitor._sinks import SinkKeys
from entropy_monitor._support import HIDDEN, Block

TILE = 2**20
"""Logits of a tile: 4 MiB in float32; two such buffers are alive at a time. Smaller ones fit the
cache better, but what Python does for each costs more than that gains."""

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class TileSums:
    """Sums over the content keys of each row: (b, h, rows)."""

    top: Tensor
    """max of l."""
    mass: Tensor
    """L = sum of exp(l - top)."""
    drop: Tensor
    """sum of (l - top) exp(l - top), in bits, <= 0."""
    first: Tensor
    """sum of l - top, in bits."""
    centre: Tensor | None
    """c, where deviations are measured from, relative to the top, in bits; None is 0."""
    norm: Tensor
    """Square root of the sum of (l - top - c)^2, in bits."""
    sink_logits: Tensor | None
    """(b, h, rows, sinks): logits of the sink keys, then of the learned sinks; -inf for none."""

    def share(self, weight: Tensor) -> Tensor:
        """Return weight * (1 - s) / L: times exp(l - top), that is weight * p."""
        total = self.mass
        if self.sink_logits is not None:
            sinks = self.sink_logits
            lse = sinks[..., 0] if sinks.shape[-1] == 1 else sinks.logsumexp(-1)
            total = (lse - self.top).exp_().add_(total)
        # A sink that is NaN gives nothing to the keys.
        return (weight / total).nan_to_num_(nan=0.0)

    def finite(self) -> Tensor:
        """Bool: all logits of content and sink are finite (a sink of -inf is an absent one)."""
        good = torch.isfinite(self.norm) & torch.isfinite(self.top)
        if self.sink_logits is not None:
            good &= (self.sink_logits < torch.inf).all(-1)
        return good


def overwrite_hidden(x: Tensor, block: Block) -> None:
    """Set hidden logits to `HIDDEN`, whatever they held (a NaN survives an addition)."""
    if block.visible is not None:
        x[..., block.split - block.start :].masked_fill_(block.visible == 0, HIDDEN)


def reduce_tile(
    x: Tensor,
    e: Tensor,
    block: Block,
    sinks: SinkKeys | None,
    virtual: Tensor | None,
    size: Tensor,
    root: Tensor,
    *,
    careful: bool,
) -> TileSums | None:
    """Sums over the content keys of a tile.

    Args:
        x: Logits (b, h, rows, keys), hidden ones at about `HIDDEN`; overwritten.
        e: Buffer of that shape; holds exp(l - top) afterwards, 0 at hidden keys and sinks.
        block: The support.
        sinks: The sink keys.
        virtual: Logits of learned sinks (b, h, rows, learned sinks).
        size: Number of content keys of each row, at least 1 (b or 1, h or 1, rows or 1).
        root: sqrt(0.99 size).
        careful: The tile has been looked at before: give sums whatever it holds.

    Returns:
        None if a row is spoilt by a NaN, an infinity or the absurd value of a hidden key, and
        `careful` is not set.
    """
    # One sink in one column, seen by all rows, is the usual case: three writes to a view.
    single = None
    if sinks is not None and sinks.valid is None and sinks.static and len(sinks.static) == 1:
        j = sinks.static[0] - block.start
        single = x[..., j : j + 1]
        sink_logits: Tensor | None = _overflow_to_nan(single)
        single.fill_(HIDDEN)
    else:
        sink_logits = _take_sinks(x, sinks, block)
    if virtual is not None:
        sink_logits = virtual if sink_logits is None else torch.cat([sink_logits, virtual], -1)

    top = x.amax(-1, keepdim=True)
    # exp2 takes half the time of exp on a CPU. The factor comes after the subtraction: before it,
    # its rounding would cost 5e-4 nats at logits of 1e4.
    x.sub_(top).mul_(_LOG2_E)
    torch.exp2(x, out=e)
    # From here on x is 0 at hidden keys and sinks, so that plain sums are sums over the content.
    if block.visible is not None:
        x[..., block.split - block.start :].mul_(block.visible)
    if single is not None:
        single.zero_()
    else:
        _zero_sinks(x, sinks, block)
    first = x.sum(-1)
    norm = torch.linalg.vector_norm(x, dim=-1)
    # The sum of squares about the maximum is one pass, and enough while the mean is within ten
    # standard deviations of the maximum. Beyond, as in a row that has collapsed onto one key, the
    # difference from it would be rounding, and the deviations are formed.
    centre = None
    collapsed = careful
    if not careful:
        least, most = torch.aminmax(torch.addcmul(first, norm, root))
        if not math.isfinite(float(most)):
            return None
        collapsed = float(least) < 0
    if collapsed:
        centre = first / size
        deviation = x - centre[..., None]
        # x <= 0 <= e, and both are 0 at hidden keys and sinks alone.
        deviation.mul_((e - x).sign_())
        norm = torch.linalg.vector_norm(deviation, dim=-1)
    mass = e.sum(-1)
    drop = x.mul_(e).sum(-1)
    return TileSums(
        top=top[..., 0],
        mass=mass,
        drop=drop,
        first=first,
        centre=centre,
        norm=norm,
        sink_logits=sink_logits,
    )


def _take_sinks(x: Tensor, sinks: SinkKeys | None, block: Block) -> Tensor | None:
    """Logits of the sink keys, -inf where a row has none; taken out of x."""
    if sinks is None:
        return None
    index, valid = _inside(sinks, block, x)
    found = x.gather(-1, index)
    # Where a column is no sink of the row, its own value is written back. Columns outside the block
    # are clamped and may repeat, hence the minimum.
    x.scatter_reduce_(-1, index, found.masked_fill(valid, HIDDEN), "amin")
    return torch.where(valid, _overflow_to_nan(found), -torch.inf)


def _overflow_to_nan(logits: Tensor) -> Tensor:
    """Copy with NaN for -inf: a visible sink at -inf is an overflow, not an absent sink."""
    return logits.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.nan)


def _zero_sinks(x: Tensor, sinks: SinkKeys | None, block: Block) -> None:
    if sinks is None:
        return
    index, valid = _inside(sinks, block, x)
    found = x.gather(-1, index)
    # x <= 0 here, so that the larger of x and 0 is 0.
    x.scatter_reduce_(-1, index, found.masked_fill(valid, 0.0), "amax")


def _inside(sinks: SinkKeys, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """Index into x and validity (b, h, rows, sinks); columns outside of x are clamped."""
    b, h, r, n = x.shape
    index = sinks.columns - block.start
    inside = (index >= 0) & (index < n)
    if sinks.valid is not None:
        inside = inside & sinks.valid
    shape = (b, h, r, index.shape[-1])
    return index.clamp(0, n - 1).expand(shape), inside.expand(shape)
