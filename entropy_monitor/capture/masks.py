"""Masks that hide keys by a large negative number instead of -inf.

Minus infinity, the smallest number of a type and anything below -1e8 hide a key wherever logits are
read (`calls.masked_below`). People also add -10000 (BERT of old) or -100 (Swin). Such keys would
count as visible: the weights are right, but the support, the evenness and the spread would not be.
A constant written into scores at hidden places says so itself; an added tensor is a mask if nothing
lies between its lowest value and the rest, as it would with a bias that grows with distance
(ALiBi).
"""

import weakref

import torch
from torch import Tensor

from entropy_monitor.calls import masked_below

FILL_AT_MOST = -50.0
"""A constant written into scores hides them if it is at most this."""

_SURELY_A_MASK = -9000.0
_MAYBE_A_MASK = -99.0


class Masks:
    """Finds the hiding value of added tensors; remembers the last ones, as layers share them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int | None, float | None]] = {}

    def hidden_at(self, added: Tensor) -> float | None:
        """The value at which this added tensor hides keys; None if nothing but -inf does."""
        version = None if added.is_inference() else added._version
        entry = self._known.get(id(added))
        if entry is not None and entry[0]() is added and entry[1] == version:
            return entry[2]
        value = hidden_at(added)
        if len(self._known) > 16:
            self._known.clear()
        self._known[id(added)] = (weakref.ref(added), version, value)
        return value

    def forget(self) -> None:
        """Drop what is remembered."""
        self._known.clear()


@torch.no_grad()
def hidden_at(added: Tensor) -> float | None:
    """The value at which this added tensor hides keys; None if nothing but -inf does.

    Examples:
        >>> hidden_at(torch.tensor([0.0, -10000.0]))
        -10000.0
        >>> hidden_at(torch.arange(0, -20000.0, -1)) is None  # a bias that grows with distance
        True
    """
    if not added.is_floating_point() or added.numel() == 0:
        return None
    floor = masked_below(added.dtype)
    # What hides anyway must not stand for the lowest value.
    lowest = added.masked_fill(added <= floor, 0.0).amin()
    low = float(lowest)
    if not low <= _MAYBE_A_MASK:
        return None
    if low > _SURELY_A_MASK:
        # A moderate value must be the only one besides zero.
        other = (added != 0.0) & (added != lowest) & (added > floor)
    else:
        # Masked entries may carry a bias; nothing may lie between them and the rest.
        other = (added > 0.9 * lowest) & (added < lowest / 10)
    return None if bool(other.any()) else low
