"""Flex attention: the operation itself where it runs uncompiled, and how to read its masks.

The higher-order operation is visible while compiled code steps aside (discovery, or windows that
run uncompiled). Its score function may be anything, so scores are computed with it, unless it is
the identity. Compiled flex attention is one kernel that shows nothing; through transformers it is
seen by `interface`, elsewhere it is reported as hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from entropy_monitor.capture.quiet import quiet
from entropy_monitor.capture.seen import Found, Seen

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Found | None]


class FlexWay:
    """Reads the higher-order operation `flex_attention`."""

    def handler(self, op: Any) -> Handler | None:
        """What to call after this operation; None if it is another one."""
        return self._read if str(op) == "flex_attention" else None

    def forget(self) -> None:
        """Nothing to drop."""

    def _read(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Found:
        query, key, _, score_mod, block_mask, scale, _, *buffers = args
        score_buffers, mask_buffers = (*buffers, (), ())[:2]
        b, h, t_q, _ = query.shape
        t_k = key.shape[2]
        with quiet(query.device.type, function_modes=True):
            visible = _over_positions(block_mask[-1], mask_buffers, (b, h, t_q, t_k), query.device)
            if _is_identity(score_mod):
                return Seen(way="flex", query=query, key=key, scale=scale, mask=visible)
            key = key.repeat_interleave(h // key.shape[1], dim=1)
            wide = torch.promote_types(query.dtype, torch.float32)
            scores = query.to(wide) @ key.to(wide).mT * scale
            scored = _scored(score_mod, score_buffers, scores)
            return Seen(
                way="flex",
                logits=scored.masked_fill(~visible, -torch.inf),
                axes=("g", "g", "q", "k"),
            )


def dense_mask(block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """A BlockMask as a bool tensor (batch or 1, heads or 1, queries, keys), True = visible."""
    b, h = (int(n) for n in block_mask.shape[:2])
    with quiet(query.device.type, function_modes=True):
        return _over_positions(
            block_mask.mask_mod, (), (b, h, query.shape[2], key.shape[2]), query.device
        )


def _over_positions(
    mask_mod: Any, buffers: tuple[Any, ...], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Evaluate a mask function at every position; one head or sequence if all are alike."""
    with _plain_indexing():
        function = _mapped(mask_mod, 0, len(buffers))
        visible: Tensor = function(*_positions(shape, device), *buffers)
    return visible.expand(shape)


def _scored(score_mod: Any, buffers: tuple[Any, ...], scores: Tensor) -> Tensor:
    with _plain_indexing():
        function = _mapped(score_mod, 1, len(buffers))
        scored: Tensor = function(scores, *_positions(scores.shape, scores.device), *buffers)
    return scored


def _positions(shape: Any, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.arange(n, device=device) for n in shape)


def _mapped(function: Any, scores: int, buffers: int) -> Any:
    """Apply a function of (score?, batch, head, query, key, *buffers) to all positions."""
    for axis in (3, 2, 1, 0):
        given = [None] * 4
        given[axis] = 0  # type: ignore[call-overload]
        score: tuple[Any, ...] = (0,) * scores
        function = torch.vmap(function, in_dims=(*score, *given, *(None,) * buffers), out_dims=0)
    return function


@contextmanager
def _plain_indexing() -> Iterator[None]:
    """Let `table[position]` work on mapped positions, as flex attention does."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        yield


def _is_identity(score_mod: Any) -> bool:
    if isinstance(score_mod, torch.fx.GraphModule):
        nodes = list(score_mod.graph.nodes)
        return nodes[-1].args[0] is nodes[0]
    return getattr(score_mod, "__name__", "") == "_identity"
