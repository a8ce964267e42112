"""The inference fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer.

In evaluation without gradient torch runs a whole layer as one operation. Its queries and keys are
made again from the input, as the operation makes them. Nested tensors are not read.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from entropy_monitor.capture.fused import named_arguments
from entropy_monitor.capture.quiet import quiet
from entropy_monitor.capture.seen import Found, Lost, Seen

aten = torch.ops.aten

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Found | None]


class NativeWay:
    """Reads the two operations of the fast path."""

    def handler(self, op: Any) -> Handler | None:
        """What to call after this operation; None if it is another one."""
        if op is aten._native_multi_head_attention.default:
            return self._attention
        if op is aten._transformer_encoder_layer_fwd.default:
            return self._layer
        return None

    def forget(self) -> None:
        """Nothing to drop."""

    def _attention(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Found:
        given = named_arguments(op, args, kwargs)
        return _projected(given["query"], given["key"], given["num_head"], given, part="")

    def _layer(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Found:
        given = named_arguments(op, args, kwargs)
        x = given["src"]
        if given["norm_first"] and not x.is_nested:
            with quiet(x.device.type):
                x = F.layer_norm(
                    x,
                    (given["embed_dim"],),
                    given["norm_weight_1"],
                    given["norm_bias_1"],
                    given["eps"],
                )
        return _projected(x, x, given["num_heads"], given, part="self_attn")


def _projected(x: Tensor, y: Tensor, heads: int, given: dict[str, Any], *, part: str) -> Found:
    if x.is_nested or y.is_nested:
        return Lost(
            "torch's inference fast path ran on nested tensors, which are not read", opaque=True
        )
    width = given["embed_dim"]
    weight, bias = given["qkv_weight"], given["qkv_bias"]
    with quiet(x.device.type):
        query = F.linear(x, weight[:width], bias[:width])
        key = F.linear(y, weight[width : 2 * width], bias[width : 2 * width])
        mask = _visible(given["mask"], given["mask_type"])
    return Seen(
        way="native",
        query=_split(query, heads),
        key=_split(key, heads),
        mask=mask,
        part=part,
    )


def _split(x: Tensor, heads: int) -> Tensor:
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def _visible(mask: Tensor | None, kind: int | None) -> Tensor | None:
    """True hides; kind 0: (queries, keys), 1: (batch, keys), 2: all four axes."""
    if mask is None:
        return None
    visible = ~mask.bool()
    return visible[:, None, None, :] if kind == 1 else visible
