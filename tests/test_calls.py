"""What a call may hold, which rows are looked at, and how a sink is specified."""

import jaxtyping
import pytest
import torch

from entropy_monitor.calls import (
    AttentionCall,
    RowKind,
    masked_below,
    select_rows,
    sink_positions,
)


@pytest.fixture
def unchecked():
    """Shapes are checked by the test run before the product sees them; let it see them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


Q, K = zeros(2, 4, 3, 8), zeros(2, 2, 5, 8)


def test_a_call_knows_its_shape():
    call = AttentionCall(query=Q, key=K, owner="layers.0.attn")
    assert call.shape == (2, 4, 3, 5)
    assert call.name == "layers.0.attn"
    assert AttentionCall(query=Q, key=K, owner="attn", index=2).name == "attn#2"
    assert not call.is_square_self


def test_virtual_columns_are_no_keys():
    call = AttentionCall(logits=zeros(1, 2, 4, 5), virtual_columns=1)
    assert call.shape == (1, 2, 4, 4)
    assert call.is_square_self
    assert not AttentionCall(logits=zeros(1, 2, 4, 4), cross=True).is_square_self


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_computation_is_float32_or_better(dtype, expected):
    assert AttentionCall(query=Q.to(dtype), key=K.to(dtype)).compute_dtype == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": Q}, "`query` and `key` must both be given"),
        (
            {"query": Q[0], "key": K},
            r"`query` must be .* 4 axes, got torch.float32 of shape \(4, 3, 8\)",
        ),
        (
            {"query": Q, "key": K[:1]},
            r"`key` must agree with `query` \(2, 4, 3, 8\) .* got \(1, 2, 5, 8\)",
        ),
        ({"query": Q, "key": K[..., :4]}, r"in batch .* and width .* got \(2, 2, 5, 4\)"),
        ({"query": Q, "key": zeros(2, 3, 5, 8)}, "divides the 4 query heads, got 3"),
        ({"query": Q, "key": K, "logits": zeros(2, 4, 3, 5)}, "give one form only"),
        ({"logits": zeros(2, 4, 3, 5), "softcap": 5.0}, "already in `logits`"),
        ({"logits": zeros(2, 4, 3, 5), "virtual_columns": 6}, "between 0 and the 5 columns"),
        ({"query": Q, "key": K, "virtual_columns": 1}, "use `sink_logits`"),
        ({"query": Q, "key": K, "mask": zeros(3, 4)}, r"= \(2, 4, 3, 5\), got \(3, 4\)"),
        ({"query": Q, "key": K, "mask": zeros(1, 2, 4, 3, 5)}, "broadcastable"),
        ({"query": Q, "key": K, "mask": torch.ones(3, 5).long()}, "bool .* or floating point"),
        ({"query": Q, "key": K, "softcap": 0.0}, "`softcap` must be positive or None, got 0.0"),
        ({"query": Q, "key": K, "window": 0}, "`window` must be at least 1 key or None, got 0"),
        (
            {"query": Q, "key": K, "sink_logits": zeros(3)},
            r"shape \(4,\) or \(2, 4, 3\), got \(3,\)",
        ),
    ],
)
def test_what_does_not_fit_is_named(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionCall(**arguments)


def test_masked_below():
    # Hugging Face masks with finfo.min, hand-written models with -1e9; biases of models are above.
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.finfo(dtype).min <= masked_below(dtype)
        assert torch.finfo(dtype).min / 2 <= masked_below(dtype)
        assert masked_below(dtype) < -3e4
    assert masked_below(torch.float32) >= -1e9


def test_row_kinds_are_fixed():
    assert [k.name for k in RowKind] == [
        "VALID",
        "NO_SINK",
        "TRIVIAL",
        "NO_CONTENT",
        "EMPTY",
        "NONFINITE",
    ]
    assert [int(k) for k in RowKind] == list(range(6))


# Rows ------------------------------------------------------------------------------------------


def test_every_row():
    rows, weights = select_rows(7, None, batch=2)
    assert rows.tolist() == [list(range(7))] * 2
    assert weights.tolist() == [[1.0] * 7] * 2


def test_first_rows_exactly_then_one_of_each_stratum():
    rows, weights = select_rows(1000, 64, batch=3)
    assert rows.shape == weights.shape == (3, 80)
    assert rows[:, :16].tolist() == [list(range(16))] * 3
    edges = [16 + 984 * j // 64 for j in range(65)]
    for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
        for j, (i, w) in enumerate(zip(row[16:], weight[16:], strict=True)):
            assert edges[j] <= i < edges[j + 1]
            assert w == edges[j + 1] - edges[j]
    assert weights.sum(1).tolist() == [1000.0] * 3


@pytest.mark.parametrize("t", [1, 15, 16, 17, 80])
def test_few_rows_are_all_taken(t):
    rows, weights = select_rows(t, 64, batch=1)
    assert rows.tolist() == [list(range(t))]
    assert weights.sum().item() == t


def test_slots_differ_and_stay():
    rows, _ = select_rows(500, 32, batch=4)
    assert len({tuple(r) for r in rows.tolist()}) == 4
    again, _ = select_rows(500, 32, batch=2, first_slot=2)
    assert again.tolist() == rows[2:].tolist()


def test_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    select_rows(777, 32, batch=2, first_slot=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_weighted_mean_is_unbiased():
    # A value that grows over the rows; 2000 slots of one stratified sample each.
    values = torch.arange(200, dtype=torch.float64).sqrt() * 3
    rows, weights = select_rows(200, 8, batch=2000)
    estimates = (values[rows] * weights).sum(1) / weights.sum(1)
    error = estimates.std() / 2000**0.5
    assert abs(estimates.mean() - values.mean()) < 4 * error
    assert error < 0.02


@pytest.mark.parametrize(("arguments", "message"), [((0, None), "`t_q`"), ((5, 0), "`count`")])
def test_no_rows_at_all(arguments, message):
    with pytest.raises(ValueError, match=f"{message} must be at least 1"):
        select_rows(*arguments, batch=1)


# Sinks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        ("first", "first"),
        ("none", "none"),
        ("learned", "learned"),
        (0, (0,)),
        (-1, (4,)),
        ([0, -1, 0], (0, 4)),
        (torch.tensor([1, -2]), (1, 3)),
        ([], ()),
    ],
)
def test_sink_positions(sink, expected):
    assert sink_positions(sink, batch=2, keys=5) == expected


def test_sink_as_a_bool_tensor():
    table = torch.eye(2, 5, dtype=torch.bool)
    found = sink_positions(table, batch=2, keys=5)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, table)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ("frist", r"`sink` must be one of \('first', 'none', 'learned'\), .* got 'frist'"),
        (5, r"key positions in \[-5, 5\), got 5"),
        ([0, -6], "got -6"),
        (torch.ones(3, 5, dtype=torch.bool), r"must have shape \(2, 5\), got \(3, 5\)"),
        (torch.ones(2, 5), r"must be bool \(2, 5\) or a list of key positions, got torch.float32"),
    ],
)
def test_unknown_sinks_are_named(sink, message):
    with pytest.raises(ValueError, match=message):
        sink_positions(sink, batch=2, keys=5)
