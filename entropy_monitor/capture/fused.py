"""Fused attention kernels of torch, as the dispatcher sees them below autograd and autocast.

`F.scaled_dot_product_attention` becomes one of these operations, in eager mode, in TorchScript and
in inductor's compiled graphs. What differs is where the mask stands, how heads and positions are
laid out, and to which corner a causal mask is aligned when there are more keys than queries.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from entropy_monitor.capture.masks import Masks
from entropy_monitor.capture.seen import Found, Lost, Seen

aten = torch.ops.aten

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Found | None]


@dataclass(frozen=True, slots=True)
class Kernel:
    """How to read one operation.

    Attributes:
        mask: Name of the argument that holds the additive mask.
        bottom_right: A causal mask is aligned to the last key; otherwise to the first.
        heads_first: Tensors are (batch, heads, tokens, width); otherwise (batch, tokens, heads,
            width).
    """

    mask: str | None = "attn_bias"
    bottom_right: bool = False
    heads_first: bool = True


KERNELS: dict[str, Kernel] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": Kernel(mask="attn_mask"),
    "aten::_scaled_dot_product_efficient_attention": Kernel(),
    "aten::_scaled_dot_product_flash_attention": Kernel(mask=None, bottom_right=True),
    "aten::_scaled_dot_product_cudnn_attention": Kernel(),
    "aten::_scaled_dot_product_fused_attention_overrideable": Kernel(),
    "aten::_scaled_dot_product_attention_math_for_mps": Kernel(mask="attn_mask"),
    "aten::_flash_attention_forward": Kernel(mask=None, bottom_right=True, heads_first=False),
    "aten::_efficient_attention_forward": Kernel(mask="bias", heads_first=False),
    # The packages flash-attn and xformers register these; they are read, not imported.
    "flash_attn::_flash_attn_forward": Kernel(mask=None, bottom_right=True, heads_first=False),
    "flash_attn::_flash_attn_varlen_forward": Kernel(
        mask=None, bottom_right=True, heads_first=False
    ),
}

_PACKED = (
    ("cum_seq_q", "cum_seq_k"),
    ("cu_seqlens_q", "cu_seqlens_k"),
)
_UNREAD = ("alibi_slopes", "block_table", "seqused_k", "seqlen_k", "leftpad_k")


class FusedWay:
    """Reads fused kernels."""

    def __init__(self) -> None:
        self._masks = Masks()

    def handler(self, op: Any) -> Handler | None:
        """What to call after this operation; None if it is not a fused attention kernel."""
        return self._read if _name(op) in KERNELS else None

    def forget(self) -> None:
        """Drop what is remembered of masks."""
        self._masks.forget()

    def _read(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Found:
        found = read_kernel(KERNELS[_name(op)], named_arguments(op, args, kwargs))
        if isinstance(found, Seen) and found.mask is not None:
            value = self._masks.hidden_at(found.mask)
            if value is not None:
                mask = found.mask.masked_fill(found.mask <= value / 2, -torch.inf)
                return replace(found, mask=mask)
        return found


def named_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an operation by the names of its schema, defaults filled in."""
    named = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        else:
            named[argument.name] = kwargs.get(argument.name, argument.default_value)
    return named


def read_kernel(kernel: Kernel, given: dict[str, Any]) -> Found:
    """Turn the named arguments of a fused kernel into `Seen`."""
    query, key = given.get("query", given.get("q")), given.get("key", given.get("k"))
    assert query is not None
    assert key is not None
    for name in _UNREAD:
        if given.get(name) is not None:
            return Lost(f"the kernel was called with `{name}`, which is not read")
    mask = given.get(kernel.mask) if kernel.mask else None
    for starts_q, starts_k in _PACKED:
        if given.get(starts_q) is not None:
            query, key, mask = _unpacked(query, key, given[starts_q], given[starts_k])
            break
    else:
        if not kernel.heads_first:
            query, key = query.transpose(1, 2), key.transpose(1, 2)
    causal, bottom_right = _causal(kernel, given)
    window, after = _window(given)
    t_q, t_k = query.shape[-2], key.shape[-2]
    if causal and not bottom_right and t_q != t_k:
        visible = torch.ones(t_q, t_k, dtype=torch.bool, device=query.device).tril()
        mask, causal = _both(mask, visible), False
    if after not in (None, -1, 0) and not causal and after != (window or 0) - 1:
        return Lost("the kernel was called with an unequal window to both sides, which is not read")
    softcap = given.get("softcap") or None
    scale = given.get("scale", given.get("softmax_scale"))
    return Seen(
        way="sdpa",
        query=query,
        key=key,
        scale=scale,
        mask=mask,
        is_causal=causal or after == 0,
        softcap=softcap,
        window=window,
    )


def _causal(kernel: Kernel, given: dict[str, Any]) -> tuple[bool, bool]:
    kind = given.get("custom_mask_type")
    if kind is not None:  # efficient: 0 none, 1 causal from the top left, 2 from the bottom right
        return kind != 0, kind == 2
    return bool(given.get("is_causal", given.get("causal", False))), kernel.bottom_right


def _window(given: dict[str, Any]) -> tuple[int | None, int | None]:
    """Sliding window in keys, this one included, and how many keys after it are visible."""
    left, right = given.get("window_size_left"), given.get("window_size_right")
    if given.get("window_size"):
        return int(given["window_size"]), None
    if left is None or left < 0:
        return None, right
    return int(left) + 1, right


def _both(mask: Tensor | None, visible: Tensor) -> Tensor:
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return mask & visible
    return mask.masked_fill(~visible, -torch.inf)


def _unpacked(
    query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed sequences (tokens, heads, width) as a padded batch and its mask."""
    padded, lengths = [], []
    for packed, starts in ((query, starts_q), (key, starts_k)):
        flat = packed.reshape(-1, *packed.shape[-2:])
        bounds = starts.tolist()
        sizes = [after - start for start, after in pairwise(bounds)]
        batch = flat.new_zeros(len(sizes), max(sizes), *flat.shape[1:])
        for n, (start, size) in enumerate(zip(bounds, sizes, strict=False)):
            batch[n, :size] = flat[start : start + size]
        padded.append(batch.transpose(1, 2))
        lengths.append(torch.tensor(sizes, device=query.device))
    real_q = torch.arange(padded[0].shape[2], device=query.device) < lengths[0][:, None]
    real_k = torch.arange(padded[1].shape[2], device=query.device) < lengths[1][:, None]
    visible = real_q[:, None, :, None] & real_k[:, None, None, :]
    return padded[0], padded[1], visible


def _name(op: Any) -> str:
    schema = getattr(op, "_schema", None)
    return "" if schema is None else schema.name
