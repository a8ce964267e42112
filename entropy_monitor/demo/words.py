"""What the demo says: every word is chosen by the numbers of the run, true for any seed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from entropy_monitor.notebook import MINUS, round_sum, signed

if TYPE_CHECKING:
    from entropy_monitor.demo.train import Twin

_MOSTLY = 60
"""A cause with at least this percentage of a change made it *mostly*."""

_NEARLY = 0.15
"""Two changes whose difference is below this part of the larger one are *nearly the same*."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A change of entropy, rounded so that the printed numbers add up.

    Attributes:
        before: Entropy at the baseline, nats.
        after: Entropy at the end, nats.
        total: Change, nats; `sink` + `content` as printed.
        sink: What the sink explains, nats.
        content: What the content explains, nats (all texts have one length, so nothing else does).
        share: Percentage of the sink, or None where a share means nothing.
        error: Standard error of the total, nats, or None where it is not known.
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
    parts = [change["sink"], change["content"] + change["support"]]
    total, (sink, content) = round_sum(change["total"], parts, 2)
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
        >>> parts = {"before": 3.0, "after": 1.0, "total": -2.0, "sink": -1.8, "content": -0.2}
        >>> cause(Split(**parts, share=90, error=0.02))
        'mostly because a sink grew'
    """
    if split.total == 0 or abs(split.total) <= 3 * (split.error or 0.0):
        return "no more than noise"
    if split.share is None:
        sink, content = ("up" if part > 0 else "down" for part in (split.sink, split.content))
        return f"two opposite forces: sink {sink}, content {content}"
    by_sink = "a sink grew" if split.total < 0 else "the sink changed its mass"
    by_content = f"attention to the content {'narrowed' if split.total < 0 else 'widened'}"
    if split.share >= _MOSTLY:
        return f"mostly because {by_sink}"
    if split.share <= 100 - _MOSTLY:
        return f"mostly because {by_content}"
    if split.share == 50:
        return f"half because {by_sink}, half because {by_content}"
    return ", and less because ".join(
        (f"more because {by_sink}", by_content)
        if split.share > 50
        else (f"more because {by_content}", by_sink)
    )


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
    """A number of nats with two digits.

    Example:
        >>> nats(2.128)
        '2.13'
    """
    return f"{value:.2f}".replace("-", MINUS)


def verdict(with_bos: "Twin", without: "Twin") -> list[str]:
    """What the two trainings say together, in sentences for a newcomer.

    Args:
        with_bos: The training whose texts started with ``<bos>``.
        without: The other.

    Returns:
        Sentences, most important first.
    """
    one, other = split_of(with_bos), split_of(without)
    sentences = [
        _amounts(one.total, other.total),
        f"With <bos>: {cause(one)}{_shares(one)}. Without: {cause(other)}{_shares(other)}.",
    ]
    if _head_rests(with_bos):
        sentences.append(
            f"The head with <bos> gives it {percent(with_bos.other_sink)} of its attention where "
            f"nothing is to be copied, {percent(with_bos.trigger_sink)} where a copy is due: it "
            "rests when it is not needed, which total entropy shows as a collapse."
        )
    sentences.append(_copies(with_bos.copies, without.copies))
    return sentences


def _amounts(one: float, other: float) -> str:
    if one < 0 and other < 0 and abs(one - other) <= _NEARLY * max(-one, -other):
        return (
            f"Attention entropy fell by nearly the same, {nats(-one)} nats with <bos> and "
            f"{nats(-other)} without: a plot of it cannot tell the two trainings apart."
        )
    if one < 0 and other < 0:
        return (
            f"Attention entropy fell in both, by {nats(-one)} nats with <bos> and {nats(-other)} "
            "without; a plot of it does not say why."
        )
    changes = f"{signed(one, 2)} nats with <bos>, {signed(other, 2)} without"
    return f"Attention entropy changed by {changes}."


def _shares(split: Split) -> str:
    if split.share is None:
        return ""
    return f" (sink {split.share} %, content {100 - split.share} %)"


def _at_least(share: float) -> str:
    return "all" if share == 1 else f"at least {math.floor(100 * share)} %"


def _head_rests(twin: "Twin") -> bool:
    return twin.other_sink > 0.2 and twin.other_sink > 3 * twin.trigger_sink


def _copies(one: float, other: float) -> str:
    if min(one, other) >= 0.9:
        return f"Both do their task: they predict {_at_least(min(one, other))} of the copies right."
    return f"Copies predicted right: {percent(one)} with <bos>, {percent(other)} without."
