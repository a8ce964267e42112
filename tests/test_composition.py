"""Compositions: against scipy, numpy and arithmetic by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from entropy_monitor import composition
from entropy_monitor.composition import (
    aitchison_distance,
    binary_entropy,
    closure,
    clr,
    content_distance,
    content_entropy,
    ilr,
    row_entropy,
    sink_balance,
    sink_mass,
    split_rows,
)

P, Q, R = (
    torch.tensor(x, dtype=torch.float64)
    for x in ((0.90, 0.08, 0.02), (0.70, 0.24, 0.06), (0.90, 0.02, 0.08))
)


def random_logits(seed: int, rows: int = 5, keys: int = 9, size: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, keys, generator=generator, dtype=torch.float64) * size


logits_of = st.builds(
    random_logits,
    seed=st.integers(0, 10_000),
    keys=st.integers(2, 40),
    size=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
)


def test_all_is_what_the_module_offers():
    public = {
        n
        for n, x in vars(composition).items()
        if getattr(x, "__module__", "") == composition.__name__
    }
    assert set(composition.__all__) == {n for n in public if not n.startswith("_")}


# The paper's example ---------------------------------------------------------------------------


def test_conventions_disagree_where_aitchison_does_not():
    keep = {"p-q": aitchison_distance(P, Q), "p-r": aitchison_distance(P, R)}
    drop = {"p-q": content_distance(P, Q), "p-r": content_distance(P, R)}
    assert keep["p-q"].item() == pytest.approx(1.102, abs=5e-4)
    assert keep["p-r"].item() == pytest.approx(1.961, abs=5e-4)
    assert drop["p-q"].item() == pytest.approx(0.0, abs=1e-15)
    assert drop["p-r"].item() == pytest.approx(1.961, abs=5e-4)
    # Euclidean distance calls r nearer with the sink kept, and q nearer with it dropped.
    assert torch.dist(P, R) < torch.dist(P, Q)
    content = [split_rows(x).content for x in (P, Q, R)]
    assert torch.dist(content[0], content[1]) < torch.dist(content[0], content[2])


def test_split_of_the_example():
    row = split_rows(P)
    assert row.sink_mass.item() == pytest.approx(0.9)
    assert row.content_mass.item() == pytest.approx(0.1)
    assert row.log_odds.item() == pytest.approx(math.log(9))
    assert row.content.tolist() == pytest.approx([0.0, 0.8, 0.2])
    assert row.sink.tolist() == [1.0, 0.0, 0.0]


# Entropies -------------------------------------------------------------------------------------


@given(logits_of)
@settings(deadline=None, max_examples=40)
def test_row_entropy_is_scipys(logits):
    weights = torch.softmax(logits, -1)
    expected = scipy_stats.entropy(weights.numpy(), axis=-1)
    np.testing.assert_allclose(row_entropy(logits, from_logits=True), expected, atol=1e-12)
    np.testing.assert_allclose(row_entropy(weights), expected, atol=1e-12)


@given(logits_of)
@settings(deadline=None, max_examples=40)
def test_identity(logits):
    row = split_rows(logits, from_logits=True)
    total = binary_entropy(row.log_odds, from_log_odds=True)
    total = total + row.content_mass * content_entropy(logits, from_logits=True)
    torch.testing.assert_close(total, row_entropy(logits, from_logits=True), atol=1e-12, rtol=0)


def test_identity_with_several_sinks():
    logits = random_logits(1)
    row = split_rows(logits, [0, 3, -1], from_logits=True)
    inside = torch.special.entr(row.sink).sum(-1)
    total = binary_entropy(row.log_odds, from_log_odds=True) + row.sink_mass * inside
    total = total + row.content_mass * content_entropy(logits, [0, 3, -1], from_logits=True)
    torch.testing.assert_close(total, row_entropy(logits, from_logits=True), atol=1e-12, rtol=0)


@pytest.mark.parametrize("s", [1e-12, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-12])
def test_content_keeps_its_digits(s):
    content = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log()
    sink = torch.logsumexp(content, 0) + math.log(s) - math.log1p(-s)
    logits = torch.cat([sink[None], content]).float()
    expected = scipy_stats.entropy([1, 2, 3])
    assert content_entropy(logits, from_logits=True).item() == pytest.approx(expected, abs=2e-6)
    row = split_rows(logits, from_logits=True)
    assert row.content_mass.item() == pytest.approx(1 - s, rel=1e-5)
    assert row.sink_mass.item() == pytest.approx(s, rel=1e-5)


@pytest.mark.parametrize("z", [-700.0, -40.0, -21.0, -1.0, 0.0, 1.0, 21.0, 40.0, 700.0])
def test_binary_entropy_from_log_odds(z):
    # softplus of torch returns its argument above 20: at z = 21 that would lose 7.6e-10 of 1.7e-8.
    magnitude = abs(z)
    small = 1 / (1 + math.exp(magnitude)) if magnitude < 700 else 0.0
    expected = (1 - small) * math.log1p(math.exp(-magnitude)) + small * (
        magnitude + math.log1p(math.exp(-magnitude))
    )
    value = binary_entropy(torch.tensor(z, dtype=torch.float64), from_log_odds=True).item()
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-290)


def test_binary_entropy_of_masses():
    s = torch.tensor([0.0, 0.1, 0.5, 1.0], dtype=torch.float64)
    expected = [scipy_stats.entropy([x, 1 - x]) for x in s.tolist()]
    torch.testing.assert_close(binary_entropy(s), torch.tensor(expected, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"`s` must hold masses in \[0, 1\]"):
        binary_entropy(torch.tensor([1.5]))


def test_zero_weights_have_no_entropy():
    assert row_entropy(torch.tensor([0.5, 0.0, 0.5])).item() == pytest.approx(math.log(2))
    assert content_entropy(torch.tensor([0.5, 0.0, 0.5])).item() == 0.0


def test_rows_that_lack_a_side():
    only_sink = split_rows(torch.tensor([1.0, 0.0, 0.0]))
    assert (
        only_sink.sink_mass.item(),
        only_sink.content_mass.item(),
        only_sink.log_odds.item(),
    ) == (1, 0, 0)
    no_sink = split_rows(torch.tensor([0.0, 0.5, 0.5]))
    assert (no_sink.sink_mass.item(), no_sink.content_mass.item()) == (0, 1)
    nothing = split_rows(torch.zeros(3))
    assert (nothing.sink_mass.item(), nothing.content_mass.item()) == (0, 0)
    assert content_entropy(torch.zeros(3)).item() == 0.0


def test_support_takes_keys_out():
    # On the skeleton, a forgotten support went unnoticed until the masked key held mass.
    weights = torch.tensor([0.2, 0.2, 0.1, 0.5])
    support = torch.tensor([True, True, True, False])
    row = split_rows(weights, support=support)
    assert row.sink_mass.item() == pytest.approx(0.4)
    assert row.content.tolist() == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert content_entropy(weights, support=support).item() == pytest.approx(
        scipy_stats.entropy([2, 1])
    )
    assert row_entropy(weights, support=support).item() == pytest.approx(
        scipy_stats.entropy([2, 2, 1])
    )
    outside = split_rows(weights, sink=3, support=support)
    assert outside.sink_mass.item() == 0.0


# Log-ratios ------------------------------------------------------------------------------------


@given(logits_of)
@settings(deadline=None, max_examples=40)
def test_clr_of_logits_is_clr_of_weights(logits):
    expected = logits - logits.mean(-1, keepdim=True)
    torch.testing.assert_close(clr(logits, from_logits=True), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(clr(torch.softmax(logits, -1)), expected, atol=1e-10, rtol=0)


def test_clr_of_large_offset_in_float32():
    logits = torch.tensor([1e4 + 1, 1e4 + 2, 1e4 + 3])
    torch.testing.assert_close(clr(logits, from_logits=True), torch.tensor([-1.0, 0.0, 1.0]))


@given(logits_of)
@settings(deadline=None, max_examples=40)
def test_ilr_is_an_isometry(logits):
    first, second = logits, logits.flip(0)
    coordinates = ilr(first, from_logits=True) - ilr(second, from_logits=True)
    torch.testing.assert_close(
        torch.linalg.vector_norm(coordinates, dim=-1),
        aitchison_distance(first, second, from_logits=True),
        atol=1e-10,
        rtol=1e-10,
    )


@given(logits_of)
@settings(deadline=None, max_examples=40)
def test_distance_splits_into_sink_and_content(logits):
    first, second = logits, logits.flip(0)
    balance = sink_balance(first, from_logits=True) - sink_balance(second, from_logits=True)
    content = content_distance(first, second, from_logits=True)
    whole = aitchison_distance(first, second, from_logits=True)
    torch.testing.assert_close(whole**2, balance**2 + content**2, atol=1e-9, rtol=1e-10)


def test_distance_ignores_a_temperature_free_shift_and_the_sink():
    logits = random_logits(3)
    shifted = logits.clone()
    shifted[:, 0] += 5.0
    distance = content_distance(logits, shifted + 7.0, from_logits=True)
    torch.testing.assert_close(distance, torch.zeros_like(distance), atol=1e-12, rtol=0)


def test_balance_of_several_sinks():
    weights = torch.tensor([0.3, 0.3, 0.1, 0.1, 0.2], dtype=torch.float64)
    logs = weights.log()
    expected = math.sqrt(2 * 3 / 5) * (logs[:2].mean() - logs[2:].mean())
    assert sink_balance(weights, [0, 1]).item() == pytest.approx(expected.item())


# What is refused -------------------------------------------------------------------------------


def test_zero_weight_has_no_logarithm():
    with pytest.raises(ValueError, match="positive inside `support`"):
        clr(torch.tensor([0.5, 0.5, 0.0]))
    support = torch.tensor([True, True, False])
    assert clr(torch.tensor([0.5, 0.5, 0.0]), support=support).tolist() == [0.0, 0.0, 0.0]


def test_negative_weights_look_like_logits():
    with pytest.raises(ValueError, match="use `from_logits=True`"):
        row_entropy(torch.tensor([-1.0, 2.0]))


@pytest.mark.parametrize("sink", [5, -6, [0, 5]])
def test_sink_outside_the_keys(sink):
    with pytest.raises(ValueError, match=r"`sink` must be a key index in \[-5, 5\), got -?[56]\."):
        sink_mass(torch.ones(5), sink)


def test_support_of_the_wrong_shape():
    with pytest.raises(
        ValueError, match=r"`support` must broadcast against rows of shape \(2, 5\)"
    ):
        composition._fitting("support", torch.ones(3, dtype=torch.bool), torch.ones(2, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype):
    logits = random_logits(4).to(dtype)
    value = row_entropy(logits, from_logits=True)
    assert value.dtype == torch.float32
    assert torch.equal(value, row_entropy(logits.float(), from_logits=True))


def test_closure_sums_to_one():
    rows = closure(random_logits(5), from_logits=True)
    torch.testing.assert_close(rows.sum(-1), torch.ones(5, dtype=torch.float64))
    assert closure(torch.zeros(4)).tolist() == [0.0] * 4
