"""What discovery learned: the calls of a model, their order, and their names in compiled code.

Inside a compiled graph there is no module on the stack. A call is named by its shape (heads, width)
and its place in the order that discovery found below the compiled module. If calls of the same
shape belong to different parts of a model (two towers, encoder and decoder), inductor may order
them freely, and no name is given.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_NEW_SHAPE = "compiled code computed attention of a shape that was not seen before"
_SEVERAL_KINDS = "compiled code computes several kinds of attention of the same shape"
_TOO_MANY = "compiled code computed more attention than was seen before"
COMPILED_UNSURE = frozenset((_NEW_SHAPE, _SEVERAL_KINDS, _TOO_MANY))
"""Reasons why a call inside compiled code gets no name."""

Signature = tuple[int, int]
"""Query heads and head width (0 where only logits were seen)."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One call of one forward."""

    owner: str
    index: int
    signature: Signature


@dataclass(slots=True)
class Plan:
    """Calls that discovery saw, in order.

    Attributes:
        calls: Every (owner, index) once.
        heads: Query heads per owner.
        unseen: Modules that ran without a readable call, with the reason.
        idle: Modules that look like attention and did not run.
    """

    calls: list[Planned] = field(default_factory=list)
    heads: dict[str, int] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Names of all calls, as in `AttentionCall.name`."""
        return {_name(call) for call in self.calls}

    def learn(self, calls: Iterable[Planned]) -> None:
        """Add what a discovery window saw."""
        known = {(call.owner, call.index) for call in self.calls}
        self.calls.extend(call for call in calls if (call.owner, call.index) not in known)

    def below(self, unit: str, root: str, signature: Signature) -> list[Planned]:
        """Calls of this shape whose owner is `unit` or below it."""
        return [
            call
            for call in self.calls
            if call.signature == signature
            and (unit in (root, call.owner) or call.owner.startswith(f"{unit}."))
        ]


class Naming:
    """Names for calls inside compiled code, for one forward."""

    def __init__(self, plan: Plan, root: str) -> None:
        self._plan = plan
        self._root = root
        self._taken: set[tuple[str, int]] = set()
        self._units: set[tuple[str, Signature]] = set()

    def take(self, unit: str, signature: Signature) -> Planned | str:
        """The next call of this shape below `unit`, or why it cannot be named."""
        group = self._plan.below(unit, self._root, signature)
        if not group:
            return _NEW_SHAPE
        if len({re.sub(r"\d+", "*", call.owner) for call in group}) > 1:
            return _SEVERAL_KINDS
        self._units.add((unit, signature))
        for call in group:
            if (call.owner, call.index) not in self._taken:
                self._taken.add((call.owner, call.index))
                return call
        return _TOO_MANY

    @property
    def complete(self) -> bool:
        """Every call that was expected below the compiled modules that ran has been named."""
        return all(
            (call.owner, call.index) in self._taken
            for unit, signature in self._units
            for call in self._plan.below(unit, self._root, signature)
        )


def _name(call: Planned) -> str:
    return call.owner if call.index == 0 else f"{call.owner}#{call.index}"
