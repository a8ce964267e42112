"""Operations that are attention by their name, and that nothing else can read."""

from collections.abc import Callable
from typing import Any

from entropy_monitor.capture.seen import Found, Lost

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Found | None]

_ATTENTION_NAMES = ("attention", "attn", "mha_", "multi_head")


class OpaqueWay:
    """Reports such operations; comes after every way that can read one."""

    def handler(self, op: Any) -> Handler | None:
        """What to call after this operation; None if its name says nothing of attention."""
        name = str(op).lower()
        if "backward" in name or not any(part in name for part in _ATTENTION_NAMES):
            return None
        reason = f"operation {op} computes attention in a way that is not known"
        return lambda op, args, kwargs, out: Lost(reason, opaque=True)

    def forget(self) -> None:
        """Nothing to drop."""
