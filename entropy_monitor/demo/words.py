"""What the demo says. Every word is chosen by the numbers of the run, so that it is true for any seed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from entropy_monitor.notebook import MINUS, round_sum, signed

if TYPE_CHECKING:
    from entropy_monitor.demo.train import Twin

_MOSTLY = 2 / 3
"""A cause with more than this share of a change made it *mostly*."""

_NEARLY_EQUAL = 0.15
"""Two changes whose difference is below this part of the larger one are *nearly equal*."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A change of entropy, rounded so that the printed numbers add up.

    Attributes:
        before: Entropy at the baseline, nats.
        after: Entropy at the end, nats.
        total: Change, nats; `sink` + `content` as printed.
        sink: What the sink explains, nats.
        content: What the content explains (with `support`, 0 here since lengths do not change), nats.
        share: Percentage of the sink, or None where a share means nothing.
        error: Standard error of the total, nats, or None.
    """

    before: float
    after: float
    total: float
    sink: float
    content: float
    share: int | None
    error: float | None


def split_of(twin: "Twin") -> Split:
    """The attribution of one training, as it is printed."""
    change: Mapping[str, Any] = twin.summary["change"]
    total, (sink, content) = round_sum(change["total"], [change["sink"], change["content"] + change["support"]], 2)
    share = twin.summary["sink_share"]
    entropy = twin.curves["total_entropy"]
    return Split(
        before=entropy[0],
        after=entropy[-1],
        total=total,
        sink=sink,
        content=content,
        share=None if share is None else round(100 * share),
        error=change["se"]["total"],
    )


def cause(split: Split) -> str:
    """Why the entropy of one training changed, in a few words.

    Example:
        >>> cause(Split(before=3.0, after=1.0, total=-2.0, sink=-1.8, content=-0.2, share=90, error=0.02))
        'mostly because a sink grew'
    """
    if abs(split.total) <= 3 * (split.error or 0.0) or split.total == 0:
        return "not beyond the noise"
    if split.share is None:
        sink = "raised" if split.sink > 0 else "lowered"
        content = "raised" if split.content > 0 else "lowered"
        return f"by two opposite forces: the sink {sink} it, the content {content} it"
    part = split.share / 100
    falls = split.total < 0
    by_sink = "a sink grew" if falls else "a sink took mass, which at first spreads a row"
    by_content = "attention to the content narrowed" if falls else "attention to the content widened"
    if part >= _MOSTLY:
        return f"mostly because {by_sink}"
    if part <= 1 - _MOSTLY:
        return f"mostly because {by_content}"
    more, less = (by_sink, by_content) if part >= 0.5 else (by_content, by_sink)
    return f"for two reasons: above all {more}, and {less}" if part != 0.5 else f"equally: {more}, and {less}"


def percent(mass: float) -> str:
    """A mass as a percentage that is never rounded to nothing or to everything.

    Example:
        >>> percent(0.004), percent(0.51), percent(0.9999), percent(0.0)
        ('< 1 %', '51 %', '> 99 %', '0 %')
    """
    if 0 < mass < 0.005:
        return "< 1 %"
    if 0.995 <= mass < 1:
        return "> 99 %"
    return f"{100 * mass:.0f} %"


def nats(value: float) -> str:
    """A number of nats with two digits."""
    return f"{value:.2f}".replace("-", MINUS)


def verdict(with_bos: "Twin", without: "Twin") -> list[str]:
    """What the two trainings say together, in sentences for a newcomer."""
    one, other = split_of(with_bos), split_of(without)
    return [_first(one, other), _second(one, other), *_third(with_bos, without)]


def _first(one: Split, other: Split) -> str:
    both_fell = one.total < 0 and other.total < 0
    larger = max(abs(one.total), abs(other.total))
    equal = both_fell and abs(one.total - other.total) <= _NEARLY_EQUAL * larger
    if equal:
        return (
            f"Attention entropy fell by nearly the same in both trainings: {signed(one.total, 2)} and "
            f"{signed(other.total, 2)} nats. A plot of entropy alone cannot tell them apart."
        )
    if both_fell:
        return f"Attention entropy fell in both trainings, by {signed(one.total, 2)} and {signed(other.total, 2)} nats."
    return f"Attention entropy changed by {signed(one.total, 2)} nats with <bos> and {signed(other.total, 2)} without."


def _second(one: Split, other: Split) -> str:
    def told(split: Split) -> str:
        parts = f"sink {signed(split.sink, 2)}, content {signed(split.content, 2)}"
        return parts if split.share is None else f"{parts}: {split.share} % sink"

    lead = "The causes differ." if _differ(one, other) else "What it is made of:"
    return f"{lead} With <bos> it changed {cause(one)} ({told(one)}); without, {cause(other)} ({told(other)})."


def _differ(one: Split, other: Split) -> bool:
    if one.share is None or other.share is None:
        return False
    return (one.share > 50) != (other.share > 50)


def _third(with_bos: "Twin", without: "Twin") -> list[str]:
    sentences = []
    if math.isfinite(with_bos.other_sink) and with_bos.other_sink > 2 * max(with_bos.trigger_sink, 0.01):
        sentences.append(
            f"The head with <bos> rests on it: {percent(with_bos.other_sink)} of its attention where there is nothing "
            f"to copy, {percent(with_bos.trigger_sink)} right after which a copy is due. It has not collapsed, it is "
            f"off duty."
        )
    low = min(with_bos.copies, without.copies)
    if low > 0.9:
        sentences.append(f"Both models do their task: they predict at least {percent(low)} of the copies.")
    else:
        sentences.append(
            f"Copies predicted right: {percent(with_bos.copies)} with <bos>, {percent(without.copies)} without."
        )
    return sentences
