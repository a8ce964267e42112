"""Which keys a row sees, which of them is the sink, and what kind of row that makes.

By hand, and random calls of every kind against the plain reference in float64.
"""

import math
import random

import jaxtyping
import pytest
import torch

from entropy_monitor.calls import AttentionCall, RowKind
from entropy_monitor.statistics import measure_call, row_statistics
from entropy_monitor.testing import assert_matches_reference, reference_row_statistics

VALID, NO_SINK, TRIVIAL, NO_CONTENT, EMPTY, NONFINITE = RowKind


def qk(t_q: int, t_k: int | None = None, b: int = 1, h: int = 1, d: int = 4):
    generator = torch.Generator().manual_seed(t_q)
    q = torch.randn(b, h, t_q, d, generator=generator)
    return q, torch.randn(b, h, t_k or t_q, d, generator=generator)


def kinds(stats, b: int = 0, h: int = 0) -> list[int]:
    return stats.kind[b, h].tolist()


def support(stats, b: int = 0, h: int = 0) -> list[int]:
    return stats.support[b, h].tolist()


def uniform(t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of mass 1/n to each of n visible keys."""
    return torch.zeros(1, 1, t, 4), torch.zeros(1, 1, t, 4)


# Supports, kinds and the sink `first`, by hand ---------------------------------------------------


def test_plain_causal():
    stats = row_statistics(*qk(6), is_causal=True)
    assert kinds(stats) == [NO_CONTENT, TRIVIAL, VALID, VALID, VALID, VALID]
    assert support(stats) == [0, 1, 2, 3, 4, 5]
    assert stats.sink_mass[0, 0, 0].item() == 1.0
    assert stats.total_entropy[0, 0, 0].item() == 0.0
    trivial = stats.sink_mass[0, 0, 1].item()
    assert 0 < trivial < 1
    assert stats.total_entropy[0, 0, 1].item() == pytest.approx(
        stats.binary_entropy[0, 0, 1].item()
    )
    assert stats.content_entropy[0, 0, 1].item() == stats.evenness[0, 0, 1].item() == 0.0


def test_full_attention():
    stats = row_statistics(*qk(4))
    assert kinds(stats) == [VALID] * 4
    assert support(stats) == [3] * 4


def test_left_padding():
    # Two padding tokens: their own keys are masked, and the first real token is the sink.
    mask = torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.bool)[None, None, None]
    stats = row_statistics(*uniform(6), mask=mask, is_causal=True)
    assert kinds(stats) == [EMPTY, EMPTY, NO_CONTENT, TRIVIAL, VALID, VALID]
    assert support(stats) == [0, 0, 0, 1, 2, 3]
    assert stats.sink_mass[0, 0].tolist() == pytest.approx([0, 0, 1, 1 / 2, 1 / 3, 1 / 4])
    assert stats.best_column.item() == 2
    assert stats.best_column_is_sink.item()


def test_left_padding_with_rows_made_visible_to_themselves():
    # Hugging Face lets padded queries see something, so that the softmax is not NaN: here all keys.
    visible = torch.ones(6, 6, dtype=torch.bool).tril() & (torch.arange(6) >= 2)
    visible[:2] = True
    visible[torch.arange(2), torch.arange(2)] = False
    stats = row_statistics(*uniform(6), mask=visible)
    assert kinds(stats) == [EMPTY, EMPTY, NO_CONTENT, TRIVIAL, VALID, VALID]


def test_right_padding_of_a_bidirectional_model():
    mask = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool)[None, None, None]
    stats = row_statistics(*uniform(6), mask=mask)
    assert kinds(stats) == [VALID] * 4 + [EMPTY] * 2
    assert support(stats) == [3] * 4 + [0] * 2


def test_right_padding_of_a_causal_model():
    # Rows of padding see the real tokens; the key of the query says that it is padding.
    mask = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool)[None, None, None]
    stats = row_statistics(*uniform(6), mask=mask, is_causal=True)
    assert kinds(stats) == [NO_CONTENT, TRIVIAL, VALID, VALID, EMPTY, EMPTY]


def test_packed_documents():
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    visible = (documents[:, None] == documents) & torch.ones(7, 7, dtype=torch.bool).tril()
    stats = row_statistics(*uniform(7), mask=visible)
    assert kinds(stats) == [NO_CONTENT, TRIVIAL, VALID, NO_CONTENT, TRIVIAL, VALID, VALID]
    assert stats.sink_mass[0, 0].tolist() == pytest.approx(
        [1, 1 / 2, 1 / 3, 1, 1 / 2, 1 / 3, 1 / 4]
    )


@pytest.mark.parametrize("as_mask", [False, True])
def test_sliding_window(as_mask):
    q, k = uniform(8)
    if as_mask:
        distance = torch.arange(8)[:, None] - torch.arange(8)
        stats = row_statistics(q, k, mask=(distance >= 0) & (distance < 3))
    else:
        stats = row_statistics(q, k, is_causal=True, window=3)
    assert kinds(stats) == [NO_CONTENT, TRIVIAL, VALID] + [NO_SINK] * 5
    assert support(stats) == [0, 1, 2, 3, 3, 3, 3, 3]
    assert stats.sink_mass[0, 0, 3:].tolist() == [0.0] * 5
    assert stats.content_mass[0, 0, 3:].tolist() == [1.0] * 5
    assert torch.equal(stats.total_entropy[0, 0, 3:], stats.content_entropy[0, 0, 3:])
    assert stats.total_entropy[0, 0, 7].item() == pytest.approx(math.log(3))


def test_window_of_a_packed_and_left_padded_batch():
    documents = torch.tensor([-1, 0, 0, 0, 0, 1, 1, 1, 1])
    same = (documents[:, None] == documents) & (documents >= 0)
    stats = row_statistics(*uniform(9), mask=same, is_causal=True, window=3)
    expected = [EMPTY, NO_CONTENT, TRIVIAL, VALID, NO_SINK, NO_CONTENT, TRIVIAL, VALID, NO_SINK]
    assert kinds(stats) == expected


def test_window_without_a_causal_rule_is_two_sided():
    stats = row_statistics(*uniform(7), window=2)
    assert support(stats) == [1, 2, 3, 3, 3, 3, 2]
    assert kinds(stats) == [TRIVIAL, VALID, NO_SINK, NO_SINK, NO_SINK, NO_SINK, NO_SINK]


@pytest.mark.parametrize(
    ("t_q", "t_k", "counts"),
    [(2, 5, [4, 5]), (1, 4, [4]), (4, 2, [0, 0, 1, 2])],
    ids=["prefix in a cache", "one new token", "more queries than keys"],
)
def test_causal_rule_is_aligned_bottom_right(t_q, t_k, counts):
    stats = row_statistics(torch.zeros(1, 1, t_q, 4), torch.zeros(1, 1, t_k, 4), is_causal=True)
    assert support(stats) == [max(n - 1, 0) for n in counts]
    assert [n == 0 for n in counts] == [x == EMPTY for x in kinds(stats)]
    for i, n in enumerate(counts):
        assert stats.total_entropy[0, 0, i].item() == pytest.approx(
            math.log(n) if n else 0.0, abs=1e-6
        )


def test_cached_window_reaches_the_sink_or_not():
    # Positions 4 and 5 of six keys: a window of 5 reaches key 0 from position 4 alone.
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 6, 4)
    stats = row_statistics(q, k, is_causal=True, window=5)
    assert kinds(stats) == [VALID, NO_SINK]
    padded = torch.tensor([False] + [True] * 5)  # with padding the first real key is 1
    stats = row_statistics(q, k, is_causal=True, window=5, mask=padded)
    assert kinds(stats) == [VALID, VALID]
    assert support(stats) == [3, 4]


def test_cross_attention():
    mask = torch.tensor([0, 1, 1, 1, 0], dtype=torch.bool)[None, None, None]
    stats = row_statistics(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4), mask=mask)
    assert kinds(stats) == [VALID] * 3
    assert stats.best_column.item() == 1


def test_square_cross_attention_has_no_diagonal():
    q, k = uniform(4)
    mask = torch.tensor([1, 1, 1, 0], dtype=torch.bool)[None, None, None]
    as_self = measure_call(AttentionCall(query=q, key=k, mask=mask))
    as_cross = measure_call(AttentionCall(query=q, key=k, mask=mask, cross=True))
    assert kinds(as_self) == [VALID] * 3 + [EMPTY]
    assert kinds(as_cross) == [VALID] * 4


def test_mask_that_hides_its_whole_diagonal():
    # Tokens that may look at all others but not at themselves are no padding.
    visible = ~torch.eye(5, dtype=torch.bool)
    stats = row_statistics(*uniform(5), mask=visible)
    assert EMPTY not in kinds(stats)
    # The sign is read for each slice of its own.
    both = torch.stack([visible, torch.arange(5) < 3 * torch.ones(5, 1).long()])[None]
    stats = row_statistics(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), mask=both)
    assert EMPTY not in kinds(stats, h=0)
    assert kinds(stats, h=1)[3:] == [EMPTY, EMPTY]


def test_nothing_visible():
    stats = row_statistics(*qk(3), mask=torch.zeros(3, 3, dtype=torch.bool))
    assert kinds(stats) == [EMPTY] * 3
    for name in (
        "sink_mass",
        "content_mass",
        "total_entropy",
        "max_logit",
        "logit_spread",
        "log_odds",
    ):
        assert getattr(stats, name).abs().max().item() == 0.0, name
    assert stats.best_column_mass.item() == 0.0
    assert not stats.best_column_is_sink.item()


# Masks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [-math.inf, "min", "half", -1e9, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_negative_biases_are_masks(fill, dtype):
    # Hugging Face masks with finfo.min, hand-written models with -1e9.
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    fill = {"min": torch.finfo(dtype).min, "half": torch.finfo(dtype).min / 2}.get(fill, fill)
    bias = torch.where(visible, 0.0, torch.tensor(fill)).to(dtype)
    q, k = (x.to(dtype) for x in qk(6))
    masked, causal = row_statistics(q, k, mask=bias), row_statistics(q, k, is_causal=True)
    assert torch.equal(masked.support, causal.support)
    assert torch.equal(masked.kind, causal.kind)
    torch.testing.assert_close(masked.total_entropy, causal.total_entropy)


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min, -1e9])
def test_masked_logits(fill):
    logits = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    stats = measure_call(AttentionCall(logits=logits.masked_fill(~visible, fill)))
    assert_matches_reference(stats, reference_row_statistics(logits=logits, mask=visible))


def test_a_bias_of_a_model_is_no_mask():
    slopes = -0.5 * (torch.arange(8)[:, None] - torch.arange(8)).abs()  # ALiBi
    q, k = qk(8)
    stats = row_statistics(q, k, mask=slopes, is_causal=True)
    assert support(stats) == list(range(8))
    assert_matches_reference(stats, reference_row_statistics(q, k, mask=slopes, is_causal=True))


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (7,),
        (7, 1),
        (7, 7),
        (1, 7, 7),
        (4, 1, 1),
        (4, 7, 7),
        (2, 1, 1, 7),
        (2, 1, 7, 7),
        (2, 4, 7, 7),
    ],
)
@pytest.mark.parametrize("additive", [False, True])
def test_masks_of_any_broadcastable_shape(shape, additive):
    generator = torch.Generator().manual_seed(len(shape))
    mask = torch.rand(shape, generator=generator) < 0.8
    if additive:
        mask = torch.where(mask, torch.randn(shape, generator=generator), -torch.inf)
    q, k = qk(7, b=2, h=4)
    stats = row_statistics(q, k, mask=mask)
    assert_matches_reference(stats, reference_row_statistics(q, k, mask=mask))
    expanded = row_statistics(q, k, mask=mask.expand(2, 4, 7, 7))  # stride 0
    assert torch.equal(stats.total_entropy, expanded.total_entropy)


# Sinks -------------------------------------------------------------------------------------------


def test_several_sinks_form_one_set():
    logits = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.5])
    q, k = torch.ones(1, 1, 1, 1), logits.view(1, 1, 5, 1)
    stats = row_statistics(q, k, scale=1.0, sink=[0, -1])
    p = torch.softmax(logits, 0)
    sigma = p[[0, 4]] / p[[0, 4]].sum()
    assert stats.sink_mass.item() == pytest.approx((p[0] + p[4]).item())
    assert stats.sink_entropy.item() == pytest.approx(torch.special.entr(sigma).sum().item())
    assert stats.total_entropy.item() == pytest.approx(torch.special.entr(p).sum().item())
    assert stats.support.item() == 3


def test_only_visible_sinks_count():
    stats = row_statistics(*uniform(5), is_causal=True, sink=[0, 3])
    assert support(stats) == [0, 1, 2, 2, 3]
    assert stats.sink_mass[0, 0].tolist() == pytest.approx([1, 1 / 2, 1 / 3, 2 / 4, 2 / 5])
    late = row_statistics(*uniform(5), is_causal=True, sink=[3])
    assert kinds(late) == [TRIVIAL, NO_SINK, NO_SINK, VALID, VALID]


def test_sinks_of_each_sequence():
    table = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)
    q = torch.zeros(2, 1, 3, 4)
    stats = row_statistics(q, torch.zeros(2, 1, 4, 4), sink=table)
    assert stats.sink_mass[:, 0, 0].tolist() == pytest.approx([1 / 4, 2 / 4])
    assert stats.support[:, 0, 0].tolist() == [3, 2]
    assert (
        row_statistics(q, torch.zeros(2, 1, 4, 4), sink=torch.zeros_like(table))
        .kind.unique()
        .item()
        == NO_SINK
    )


def test_no_sink_at_all():
    stats = row_statistics(*qk(5), sink="none")
    assert kinds(stats) == [NO_SINK] * 5
    assert torch.equal(stats.total_entropy, stats.content_entropy)


@pytest.mark.parametrize("form", ["per_head", "per_row", "columns"])
@pytest.mark.parametrize("sink", ["first", "learned"])
def test_learned_sinks_are_a_virtual_key(form, sink):
    # gpt-oss: one more column in the softmax; the weights that are returned sum to less than 1.
    q, k = qk(6, b=2, h=3)
    learned = torch.randn(3) if form == "per_head" else torch.randn(2, 3, 6)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    logits = (q @ k.transpose(-1, -2) / 2).masked_fill(hidden, -torch.inf)
    column = learned[None, :, None].expand(2, 3, 6) if form == "per_head" else learned
    whole = torch.cat([logits, column[..., None]], -1)
    if form == "columns":
        stats = measure_call(AttentionCall(logits=whole, virtual_columns=1), sink=sink)
    else:
        stats = row_statistics(q, k, is_causal=True, sink_logits=learned, sink=sink)
    p = torch.softmax(whole, -1)
    mass = p[..., -1] + (p[..., 0] if sink == "first" else 0)
    torch.testing.assert_close(stats.sink_mass, mass)
    torch.testing.assert_close(stats.total_entropy, torch.special.entr(p).sum(-1))
    assert (stats.kind != NO_SINK).all()
    assert stats.support[0, 0].tolist() == [i + (sink == "learned") for i in range(6)]
    # The best column is a key, and its mass is not renormalised.
    counted = (stats.kind == VALID)[0, 0]
    expected = p[0, 0, counted, :-1].mean(0).max().item()
    assert stats.best_column_mass[0, 0].item() == pytest.approx(expected, abs=1e-6)


def test_learned_sink_that_is_switched_off():
    stats = row_statistics(*qk(5), sink="learned", sink_logits=torch.tensor([-math.inf]))
    assert kinds(stats) == [NO_SINK] * 5


def test_best_column():
    # Row i attends to key 2 with nearly all its mass; the sink is key 0.
    logits = torch.zeros(1, 1, 5, 5)
    logits[..., 2] = 9.0
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    stats = measure_call(AttentionCall(logits=logits.masked_fill(hidden, -torch.inf)))
    p = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)[0, 0, 2:].mean(0)
    assert stats.best_column.item() == 2
    assert not stats.best_column_is_sink.item()
    assert stats.best_column_mass.item() == pytest.approx(p[2].item(), abs=1e-6)
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0, 3.0])
    weighted = measure_call(
        AttentionCall(logits=logits.masked_fill(hidden, -torch.inf)), weights=weights
    )
    assert weighted.best_column_mass.item() == pytest.approx(p[2].item(), abs=1e-3)


# Non-finite logits -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_not_taken_for_masked(bad):
    # A NaN logit is not > -inf and would slip through as masked.
    logits = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    logits[0, 0, 4, 2] = bad
    logits[0, 0, 3, 5] = bad  # hidden below
    stats = measure_call(AttentionCall(logits=logits, mask=~hidden))
    assert kinds(stats) == [NO_CONTENT, TRIVIAL, VALID, VALID, NONFINITE, VALID]
    assert_matches_reference(stats, reference_row_statistics(logits=logits, mask=~hidden))
    assert all(
        torch.isfinite(getattr(stats, n)).all()
        for n in ("total_entropy", "max_logit", "best_column_mass")
    )


def test_nan_in_the_sink():
    q, k = qk(5)
    k[0, 0, 0] = math.nan
    stats = row_statistics(q, k, is_causal=True)
    assert kinds(stats) == [NONFINITE] * 5
    k[0, 0, 0] = -math.inf
    assert NONFINITE in kinds(row_statistics(q.abs(), k, is_causal=True))


def test_nan_in_one_query_stays_there():
    q, k = qk(5)
    clean = row_statistics(q, k, is_causal=True)
    q[0, 0, 3] = math.nan
    stats = row_statistics(q, k, is_causal=True)
    assert kinds(stats) == [NO_CONTENT, TRIVIAL, VALID, NONFINITE, VALID]
    assert torch.equal(
        stats.total_entropy[0, 0, [0, 1, 2, 4]], clean.total_entropy[0, 0, [0, 1, 2, 4]]
    )


def test_padding_comes_before_nan():
    q, k = qk(4)
    q[0, 0, 0] = math.nan
    mask = torch.tensor([False, True, True, True])
    assert kinds(row_statistics(q, k, mask=mask))[0] == EMPTY


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sink": "last"}, "`sink` must be one of"),
        ({"sink": [9]}, r"key positions in \[-4, 4\), got 9"),
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "`mask` must be broadcastable"),
        ({"rows": [0, 4]}, r"`rows` must be query indices in \[0, 4\), got 4"),
        ({"rows": [-1]}, "got -1"),
        ({"rows": torch.zeros(3, 2).long()}, r"shape \(rows,\) or \(1, rows\), got \(3, 2\)"),
        ({"rows": torch.zeros(1, 2)}, "query indices, got torch.float32"),
        ({"window": -3}, "`window` must be at least 1"),
        ({"sink_logits": torch.zeros(2)}, "`sink_logits` must have shape"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match=message):
            row_statistics(*qk(4), **arguments)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_weights_of_the_wrong_shape():
    q, k = qk(4)
    with pytest.raises(
        ValueError, match=r"`weights` must have shape \(4,\) or \(1, 4\), got \(3,\)"
    ):
        measure_call(AttentionCall(query=q, key=k), weights=torch.ones(3))


@pytest.mark.parametrize("shape", [(0, 1, 4, 4), (1, 1, 4, 0), (1, 1, 0, 4)])
def test_a_call_of_nothing(shape):
    with pytest.raises(
        ValueError, match="`call` must have at least one sequence, head, query and key"
    ):
        measure_call(AttentionCall(logits=torch.zeros(shape)))


# Random calls ------------------------------------------------------------------------------------


def random_mask(r: random.Random, g: torch.Generator, b: int, h: int, t_q: int, t_k: int):
    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g)

    form = r.choice(["none", "none", "bool", "added", "right", "left", "packed", "heads", "min"])
    lengths = torch.randint(0, t_k + 1, (b, 1), generator=g)
    if form == "bool":
        return rand(b, 1, t_q, t_k) < 0.6
    if form == "added":
        bias = torch.randn(1, 1, t_q, t_k, generator=g)
        return bias.masked_fill(rand(1, 1, t_q, t_k) < 0.4, -torch.inf)
    if form == "right":
        return (torch.arange(t_k) < lengths)[:, None, None]
    if form == "left":
        return (torch.arange(t_k) >= lengths)[:, None, None].expand(b, 1, t_q, t_k)
    if form == "packed" and t_q == t_k:
        documents = (rand(b, t_k) < 0.2).cumsum(1)
        return (documents[:, None, :, None] == documents[:, None, None]).tril(r.choice([0, t_k]))
    if form == "heads":
        return rand(b, h, t_q, t_k) < 0.5
    if form == "min":
        return torch.where(rand(b, 1, t_q, t_k) < 0.5, 0.0, torch.finfo(torch.float32).min)
    return None


def random_call(seed: int) -> tuple[dict, dict]:
    """Arguments of an `AttentionCall`, and of `measure_call`."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    b, kv, stacked = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice([1, 1, 3])
    h, d = kv * stacked, r.choice([4, 8])
    t_q = r.choice([1, 3, 7, 16, 33])
    t_k = r.choice([t_q, t_q, t_q, r.choice([1, 2, 9, 40])])
    dtype = r.choice([torch.float32, torch.float64, torch.bfloat16])
    q = (torch.randn(b, h, t_q, d, generator=g) * r.choice([0.1, 1, 5])).to(dtype)
    k = torch.randn(b, kv, t_k, d, generator=g).to(dtype)
    call: dict = {"is_causal": r.random() < 0.5, "cross": r.choice([None, None, True, False])}
    call["mask"] = random_mask(r, g, b, h, t_q, t_k)
    if r.random() < 0.3:
        call["window"] = r.choice([1, 2, 5, 17])
    if r.random() < 0.25:
        call["sink_logits"] = torch.randn(r.choice([(h,), (b, h, t_q)]), generator=g)
    spoil = r.random()
    if spoil < 0.1:
        k[0, 0, r.randrange(t_k)] = math.nan
    elif spoil < 0.2:
        q[0, 0, r.randrange(t_q), 0] = math.inf
    if r.random() < 0.35:
        logits = q.double() @ k.double().repeat_interleave(stacked, 1).transpose(-1, -2)
        hidden = torch.rand(b, h, t_q, t_k, generator=g) < r.choice([0.0, 0.4])
        logits = logits.masked_fill(
            hidden, r.choice([-math.inf, -1e9, torch.finfo(torch.float32).min])
        )
        call["virtual_columns"] = r.choice([0, 0, 1, 2])
        learned = torch.randn(b, h, t_q, call["virtual_columns"], generator=g)
        logits = torch.cat([logits, learned], -1)
        call["logits"] = logits.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    else:
        call |= {"query": q, "key": k, "softcap": r.choice([None, None, 3.0])}
    sink = r.choice(["first", "first", "first", "none", "learned", [0], [0, -1], [-1], "table"])
    measure: dict = {"sink": torch.rand(b, t_k, generator=g) < 0.2 if sink == "table" else sink}
    if r.random() < 0.4:
        few = max(1, t_q // 2)
        measure["rows"] = torch.stack([torch.randperm(t_q, generator=g)[:few] for _ in range(b)])
        measure["weights"] = torch.rand(b, few, generator=g, dtype=torch.float64)
    return call, measure


def check_random_call(seed: int) -> None:
    call, measure = random_call(seed)
    stats = measure_call(AttentionCall(**call), **measure)
    reference = reference_row_statistics(**call, **measure)
    double = stats.total_entropy.dtype == torch.float64
    assert_matches_reference(stats, reference, atol=1e-11 if double else 2e-5)


@pytest.mark.parametrize("seed", range(120))
def test_random_calls_against_the_reference(seed):
    check_random_call(seed)


@pytest.mark.slow
def test_many_random_calls_against_the_reference():
    for seed in range(1000, 4000):
        check_random_call(seed)
