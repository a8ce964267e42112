"""`Seen`: one attention as a kernel shows it, without an owner; `Lost`: one that cannot be read."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Raw material of one `AttentionCall`.

    Attributes:
        way: How it was seen, e.g. `"sdpa"`.
        query: (batch, heads, queries, width).
        key: (batch, kv_heads, keys, width).
        logits: Softmax input instead of query and key, any layout described by `axes`.
        axes: One letter per axis of `logits`: g (batch or heads), q (queries), k (keys).
        part: Child of the owner whose attention it is, where the owner ran it as one operation.
        interface: It was read from a call of transformers' attention interface.
        virtual_columns: Trailing key columns of `logits` that are learned sinks.
    """

    way: str
    query: Tensor | None = None
    key: Tensor | None = None
    logits: Tensor | None = None
    axes: tuple[str, ...] = ()
    scale: float | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    softcap: float | None = None
    sink_logits: Tensor | None = None
    virtual_columns: int = 0
    interface: bool = False
    window: int | None = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """Attention was computed and cannot be handed over; `opaque`: nobody can look into it."""

    reason: str
    opaque: bool = False


Found = Seen | Lost

RECORDED = Lost(
    "it was recorded into a CUDA graph, where whatever is computed or waited for would be recorded "
    "too or break the recording"
)
