"""Axes of scores through views, and batch and heads among them; doubt is said, not guessed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropy_monitor.capture.layout import arranged, expanded, inserted, misread, removed, reshaped

UNCLEAR = "batch and heads share an axis of the scores and cannot be told apart"


@pytest.mark.parametrize(
    ("axes", "old", "new", "want"),
    [
        ("gqk", (6, 5, 7), (2, 3, 5, 7), "ggqk"),
        ("ggqk", (2, 3, 5, 7), (6, 5, 7), "gqk"),
        ("gqk", (2, 15, 7), (2, 3, 5, 7), "gqqk"),
        ("gqqk", (2, 3, 5, 7), (2, 15, 7), "gqk"),
        ("gqk", (6, 5, 7), (6, 1, 5, 7), "g1qk"),
        ("g1qk", (6, 1, 5, 7), (6, 5, 7), "gqk"),
        ("gqk", (1, 5, 7), (1, 1, 5, 7), "g1qk"),
        ("gqk", (6, 5, 7), (30, 7), None),  # groups and queries in one axis
        ("gqk", (6, 5, 7), (6, 35), None),  # queries and keys in one axis
    ],
)
def test_letters_after_a_reshape(
    axes: str, old: tuple[int, ...], new: tuple[int, ...], want: str | None
) -> None:
    got = reshaped(tuple(axes), old, new)
    assert got == (None if want is None else tuple(want))


def test_letters_after_other_views() -> None:
    assert inserted(("g", "q", "k"), -1) == ("g", "q", "k", "1")
    assert removed(("g", "1", "q", "k"), 1) == ("g", "q", "k")
    assert expanded(("1", "q", "k"), (4, 3, 5, 7)) == ("g", "g", "q", "k")


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(2, 5),
    st.integers(2, 5),
    st.permutations(range(4)),
)
def test_logits_come_back_from_any_order_of_their_axes(
    b: int, h: int, q: int, k: int, order: list[int]
) -> None:
    logits = torch.arange(b * h * q * k).view(b, h, q, k)
    moved = logits.permute(order)
    axes = tuple("ggqk"[n] for n in order)
    found = arranged(axes, moved.shape, heads=h, batch=b)
    if isinstance(found, str):
        assert found == UNCLEAR
        return
    back = moved.permute(found.order).reshape(found.batch, found.heads, q, k)
    in_order = order.index(0) < order.index(1)
    if b != h or in_order:
        assert torch.equal(back, logits)
    else:  # nothing tells them apart: the usual order is taken
        assert torch.equal(back, logits.transpose(0, 1))


@pytest.mark.parametrize(
    ("axes", "sizes", "heads", "batch", "want"),
    [
        ("gqk", (6, 5, 5), 3, 2, (2, 3)),
        ("gqk", (6, 5, 5), None, 2, (2, 3)),
        ("gqk", (6, 5, 5), 3, None, (2, 3)),
        ("gqk", (6, 5, 5), None, None, (6, 1)),
        ("gqk", (6, 5, 5), 3, 6, (6, 1)),  # one head, whatever the module is called
        ("qk", (5, 5), 3, None, (1, 1)),
        ("ggqk", (8, 2, 5, 5), 2, 2, (8, 2)),  # windows and batch in the first axis (Swin)
        ("ggqk", (8, 6, 5, 5), 4, 2, (12, 4)),  # batch and heads folded, windows beside them
        ("ggqk", (8, 4, 5, 5), 4, 2, UNCLEAR),  # either of the two
        ("ggqk", (8, 6, 5, 5), 3, 5, UNCLEAR),
        ("gggqk", (2, 3, 4, 5, 5), 12, 2, (2, 12)),
        ("gqqk", (2, 4, 9, 9), 4, 2, (2, 4)),
        ("gqqk", (2, 4, 5, 9), 4, 2, (2, 4)),
    ],
)
def test_batch_and_heads(
    axes: str, sizes: tuple[int, ...], heads: int | None, batch: int | None, want: object
) -> None:
    found = arranged(tuple(axes), sizes, heads, batch)
    assert (found if isinstance(found, str) else (found.batch, found.heads)) == want


def test_queries_and_heads_that_cannot_be_told_apart() -> None:
    found = arranged(("g", "q", "q", "k"), (2, 4, 4, 4), 4, 2)
    assert found == "queries and heads share an axis of the scores and cannot be told apart"


def test_no_queries_are_no_blocks() -> None:
    assert misread((2, 3, 0, 5), heads=3, batch=2, lengths=[4]) is None


@pytest.mark.parametrize(
    ("sizes", "lost"),
    [
        ((2, 4, 8, 8), False),  # whole sequences
        ((2, 4, 2, 8), True),  # four blocks that look back, or four heads: either of the two
        ((2, 4, 1, 8), False),  # one query of the module's own
        ((10, 4, 8, 8), False),  # no input is longer
        ((16, 4, 1, 1), False),  # eight blocks of two sequences, beside four heads
        ((4, 4, 4, 4), True),  # the heads may be in either axis
        ((8, 2, 4, 4), True),  # batch and heads in the axis of the sequences
    ],
)
def test_fused_calls_that_may_be_misread(sizes: tuple[int, ...], lost: bool) -> None:
    assert (misread(sizes, heads=4, batch=2, lengths=[8]) is not None) is lost
