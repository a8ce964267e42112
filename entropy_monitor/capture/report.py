"""`CaptureReport`: what one window saw, what it could not see, and why."""

from collections.abc import Iterable
from dataclasses import dataclass, field

LOOKED_FOR = (
    "fused attention kernels (F.scaled_dot_product_attention), every softmax over q.k scores whose "
    "result multiplies values, flex attention and flash-attention called through transformers"
)
"""What a window looks for, named wherever nothing was found."""


@dataclass(kw_only=True)
class CaptureReport:
    """What one window saw. Names are those of `AttentionCall.name`.

    Attributes:
        seen: Calls handed over, per name.
        unseen: Attention modules that ran without a call that could be read, with the reason.
        opaque: What computed attention where it cannot be looked into, with the reason.
        lost: Attention that was noticed but not handed over, with the reason.
        errors: Exceptions of the receiver or of the capture itself; the model never saw them.
        way: How each name was seen: `"sdpa"`, `"softmax"`, `"flex"`, `"interface"` or `"native"`.
        idle: Attention modules that did not run.
        skipped: Calls left out on purpose, per name: single queries of a decoding loop.
        foreign: Calls of modules that are not part of the model (an EMA copy, a teacher), per
            class.
        reliable: False if names of calls inside compiled code could not be told apart, so that the
            numbers of this window must not be used.
        notes: What the session decided for the windows to come.
        candidates: How many modules of the model look like attention.
    """

    seen: dict[str, int] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    way: dict[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    foreign: dict[str, int] = field(default_factory=dict)
    reliable: bool = True
    notes: list[str] = field(default_factory=list)
    candidates: int = 0

    @property
    def complete(self) -> bool:
        """All attention that ran was seen and nothing went wrong."""
        return (
            bool(self.seen)
            and self.reliable
            and not (self.unseen or self.opaque or self.lost or self.errors)
        )

    def describe(self) -> str:
        """Say in a few sentences what was seen, what was not and why, and what was looked for.

        Examples:
            >>> CaptureReport().describe().startswith("No attention was computed by this model")
            True
            >>> CaptureReport(seen={"layers.0.attn": 1}, way={"layers.0.attn": "sdpa"}).describe()
            'Seen: 1 attention layer (sdpa).'
        """
        parts = []
        if self.seen:
            ways = ", ".join(sorted(set(self.way.values())))
            parts.append(f"Seen: {_count(len(self.seen), 'attention layer')} ({ways}).")
        elif not (self.unseen or self.opaque or self.lost):
            parts.append(
                "No attention was computed by this model while it was observed, or none that can "
                f"be recognised. Looked for: {LOOKED_FOR}."
            )
        else:
            parts.append(f"No attention could be read. Looked for: {LOOKED_FOR}.")
        if not self.seen:
            parts.append(self._candidates())
        for title, reasons in (
            ("Not seen", self.unseen),
            ("Opaque", self.opaque),
            ("Lost", self.lost),
        ):
            parts.extend(f"{title}: {names}: {reason}." for reason, names in _by_reason(reasons))
        if self.skipped:
            parts.append(
                f"Left out: {sum(self.skipped.values())} single-query calls of a decoding loop."
            )
        if self.foreign:
            parts.append(f"Not part of the model, left out: {_some(self.foreign)}.")
        if not self.reliable:
            parts.append(
                "Calls inside compiled code could not be told apart: this window does not count."
            )
        parts.extend(self.notes)
        parts.extend(f"Error: {type(error).__name__}: {error}." for error in self.errors[:3])
        return " ".join(part for part in parts if part)

    def _candidates(self) -> str:
        if not self.candidates:
            return (
                "No module of the model has a class name that looks like attention; if it has "
                "attention modules, name their class in `attention_modules`."
            )
        if self.idle and not self.unseen:
            looks = _count(self.candidates, "module")
            return f"{looks} look like attention, but none of them ran: {_some(self.idle)}."
        return ""


def _by_reason(reasons: dict[str, str]) -> list[tuple[str, str]]:
    grouped: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        grouped.setdefault(reason, []).append(name)
    return [(reason, _some(names)) for reason, names in grouped.items()]


def _some(names: Iterable[str], most: int = 4) -> str:
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
