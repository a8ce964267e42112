"""Kernels behind transformers' attention interface that show nothing of themselves.

Compiled flex attention and some builds of flash-attn are single kernels. Models of transformers
call them through a table, `ALL_ATTENTION_FUNCTIONS`; while a window is open its entries are
wrapped, and what was asked of them is read from the arguments. Whatever the hub saw during the call
itself (a kernel of torch) comes first: it is what was computed. Imported only if transformers is
loaded.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from entropy_monitor.capture.flex import dense_mask
from entropy_monitor.capture.quiet import quiet, recording
from entropy_monitor.capture.seen import RECORDED, Found, Lost, Seen

_SEEN_BELOW = ("sdpa", "eager", "paged|eager", "sdpa_paged", "eager_paged")
"""Entries that only call operations which the dispatch mode sees."""


class InterfaceTap:
    """Wraps the table while at least one window of any thread wants it."""

    def __init__(self, watch: Callable[[], Any]) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._holders: list[object] = []
        self._originals: dict[str, Any] = {}
        self._table: dict[str, Any] | None = None

    def enter(self, window: object) -> None:
        """Wrap the entries; nothing happens if transformers is not loaded."""
        table = _table()
        if table is None:
            return
        with self._lock:
            if not self._holders:
                self._table = table
                for name, function in list(table.items()):
                    if name not in _SEEN_BELOW and callable(function):
                        self._originals[name] = function
                        table[name] = self._wrapped(name, function)
            self._holders.append(window)

    def leave(self, window: object) -> None:
        """Undo `enter`; harmless without it."""
        with self._lock:
            if window not in self._holders:
                return
            self._holders.remove(window)
            if self._holders or self._table is None:
                return
            for name, function in self._originals.items():
                # An entry that was registered anew meanwhile is somebody else's.
                if getattr(self._table.get(name), "_entropy_monitor", False):
                    self._table[name] = function
            self._originals.clear()
            self._table = None

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            watching = self._watch()
            if watching is None:
                return function(*args, **kwargs)
            before = watching.told
            with _compiled_again(name):
                out = function(*args, **kwargs)
            if watching.told == before:
                try:
                    found = RECORDED if recording() else read_call(name, *args, **kwargs)
                    watching.tell(found, sys._getframe(1))
                except Exception as error:
                    watching.failed(error)
            return out

        wrapper._entropy_monitor = True  # type: ignore[attr-defined]
        return wrapper


@contextmanager
def _compiled_again(name: str) -> Iterator[None]:
    """Flex attention that steps aside with the rest of compiled code would run unfused."""
    if "flex" in name and "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("default"):
            yield
    else:
        yield


def read_call(
    name: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Found:
    """Turn a call of the attention interface into `Seen`.

    Args:
        name: Entry of the table.
        module: The attention module.
        query: (batch, heads, queries, width); key and value alike.
        key: See query.
        value: See query.
        attention_mask: Whatever the mask function of this entry made.
        *args: Not known to be used.
        **kwargs: What the module passed on; see transformers' documentation.
    """
    if "flex" not in name and "flash" not in name:
        return Lost(
            f"attention function {name!r} computes it in a way that is not known", opaque=True
        )
    seen = functools.partial(
        Seen,
        way="flex" if "flex" in name else "interface",
        interface=True,
        query=query,
        key=key,
        scale=kwargs.get("scaling"),
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
    )
    if "flex" in name:
        return seen(mask=_flex_mask(attention_mask, kwargs.get("position_bias"), query, key))
    if kwargs.get("cu_seq_lens_q") is not None:
        return Lost("sequences are packed by their lengths, which this flash kernel does not show")
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    mask = attention_mask
    if mask is not None:
        mask = mask.bool()[:, None, None, -key.shape[2] :]
    elif query.shape[0] == 1 and kwargs.get("position_ids") is not None:
        mask = _same_document(kwargs["position_ids"], query, key)
    return seen(
        mask=mask,
        is_causal=bool(causal) and query.shape[2] > 1,
        window=kwargs.get("sliding_window"),
    )


def _flex_mask(mask: Any, bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    visible: Tensor | None
    if mask is None or isinstance(mask, Tensor):
        visible = None if mask is None else mask[..., : key.shape[2]]
    else:
        visible = dense_mask(mask, query, key)
    if bias is None:
        return visible
    with quiet(query.device.type):
        if visible is None:
            return bias
        if visible.dtype == torch.bool:
            return bias.masked_fill(~visible, -torch.inf)
        return bias + visible


def _same_document(positions: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Flash attention of transformers splits a batch of one where positions start again."""
    with quiet(query.device.type):
        if positions.shape[-1] != key.shape[2] or query.shape[2] != key.shape[2]:
            return None
        document = (positions.reshape(-1) == positions.min()).cumsum(0)
        same: Tensor = document[:, None] == document[None, :]
        return same[None, None]


def _table() -> dict[str, Any] | None:
    models = sys.modules.get("transformers.modeling_utils")
    functions = getattr(models, "ALL_ATTENTION_FUNCTIONS", None)
    table = getattr(functions, "_global_mapping", None)
    return table if isinstance(table, dict) else None
