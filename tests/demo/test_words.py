"""The demo's sentences are true for whatever the numbers are."""

from pathlib import Path

import numpy as np
import pytest

from entropy_monitor.attribution import sink_share
from entropy_monitor.demo.words import Split, cause, nats, percent, split_of, verdict


def twin(sink, content, *, bos=True, se=0.02, trigger=0.0, other=0.6, copies=0.99):
    from entropy_monitor.demo.train import Twin

    total = sink + content
    return Twin(
        bos=bos,
        logdir=Path("run"),
        steps=[0, 10],
        curves={"total_entropy": [3.0, 3.0 + total], "sink_mass": [0.05, 0.5]},
        changes={name: [0.0, 1.0] for name in ("total", "sink", "content", "support")},
        summary={
            "change": {
                "total": total,
                "sink": sink,
                "content": content,
                "support": 0.0,
                "se": {"total": se, "sink": se, "content": se, "support": 0.0},
            },
            "sink_share": sink_share(
                total=total, sink=sink, content=content, support=0.0, se_total=se
            ),
        },
        trigger_sink=trigger,
        other_sink=other,
        copies=copies,
        loss=1.8,
        tokens=["a", "b"],
        weights=np.eye(2),
    )


def split(sink, content, **options):
    return split_of(twin(sink, content, **options))


@pytest.mark.parametrize("seed", range(50))
def test_printed_numbers_add_up(seed):
    generator = np.random.default_rng(seed)
    shown = split(*generator.normal(0, 2, 2))
    assert shown.total == pytest.approx(shown.sink + shown.content, abs=1e-9)


@pytest.mark.parametrize(
    ("sink", "content", "words"),
    [
        (-1.8, -0.2, "mostly because a sink grew"),
        (-0.1, -1.9, "mostly because attention to the content narrowed"),
        (
            -1.1,
            -0.9,
            "more because a sink grew, and less because attention to the content narrowed",
        ),
        (
            -0.9,
            -1.1,
            "more because attention to the content narrowed, and less because a sink grew",
        ),
        (-1.0, -1.0, "half because a sink grew, half because attention to the content narrowed"),
        (0.5, -2.0, "two opposite forces: sink up, content down"),
        (-1.0, 0.2, "two opposite forces: sink down, content up"),
        (0.1, 1.0, "mostly because attention to the content widened"),
        (-0.01, -0.01, "no more than noise"),
        (0.0, 0.0, "no more than noise"),
    ],
)
def test_a_cause_is_what_the_numbers_say(sink, content, words):
    assert cause(split(sink, content)) == words


def test_a_share_is_given_only_where_it_means_something():
    assert split(-1.5, -0.5).share == 75
    assert split(0.5, -2.0).share is None
    assert split(-0.02, -0.02).share is None
    text = " ".join(verdict(twin(0.5, -2.0), twin(-0.1, -1.9, bos=False)))
    assert text.count("%, content") == 1


def test_nearly_the_same_is_said_only_then():
    near = verdict(twin(-1.2, -0.9), twin(-0.1, -1.9, bos=False))[0]
    far = verdict(twin(-1.2, -1.9), twin(-0.1, -1.9, bos=False))[0]
    rose = verdict(twin(0.2, 0.9), twin(0.1, 1.0, bos=False))[0]
    assert "nearly the same, 2.10 nats with <bos> and 2.00 without" in near
    assert "fell in both, by 3.10 nats with <bos> and 2.00 without" in far
    assert rose == "Attention entropy changed by +1.10 nats with <bos>, +1.10 without."


def test_a_resting_head_is_told_only_if_there_is_one():
    def told(**options):
        return "\n".join(verdict(twin(-1.2, -0.9, **options), twin(-0.1, -1.9, bos=False)))

    assert "67 % of its attention where" in told(other=0.67, trigger=0.001)
    assert "rests" not in told(other=0.1, trigger=0.0)
    assert "rests" not in told(other=0.67, trigger=0.6)


def test_copies_are_told_as_they_are():
    assert (
        "at least 95 % of the copies right"
        in verdict(twin(-1.0, -1.0), twin(-1.0, -1.0, copies=0.95))[-1]
    )
    assert (
        "99 % with <bos>, 40 % without"
        in verdict(twin(-1.0, -1.0), twin(-1.0, -1.0, copies=0.4))[-1]
    )


def test_numbers_are_never_rounded_to_nothing():
    assert [percent(x) for x in (0.0, 1e-9, 0.004, 0.3, 0.996, 1.0)] == [
        "0 %",
        "< 1 %",
        "< 1 %",
        "30 %",
        "> 99 %",
        "100 %",
    ]
    assert nats(-2.0) == "−2.00"


def test_a_split_keeps_the_entropies():
    assert split(-1.0, -0.5) == Split(
        before=3.0, after=1.5, total=-1.5, sink=-1.0, content=-0.5, share=67, error=0.02
    )
