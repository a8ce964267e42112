"""Row statistics: precision, identity, and the properties that must hold for every call.

Supports, sinks and kinds of rows are in test_statistics_support.py.
"""

import math

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from entropy_monitor import _sweep
from entropy_monitor.calls import AttentionCall, RowKind, select_rows
from entropy_monitor.statistics import RowStatistics, measure_call, row_statistics
from entropy_monitor.testing import assert_matches_reference, reference_row_statistics

FLOAT_FIELDS = (
    "sink_mass", "content_mass", "log_odds", "binary_entropy", "content_entropy", "total_entropy",
    "sink_entropy", "evenness", "concentration", "max_logit", "logit_spread", "logit_range",
    "best_column_mass",
)  # fmt: skip


def of_logits(logits: torch.Tensor, **arguments) -> RowStatistics:
    """Statistics of rows of logits (rows, keys), each a head of its own, through query and key."""
    query = torch.ones(1, len(logits), 1, 1, dtype=logits.dtype)
    return row_statistics(query, logits[None, :, :, None], scale=1.0, **arguments)


def random_qk(
    seed: int,
    b: int = 2,
    h: int = 4,
    t: int = 40,
    d: int = 8,
    kv: int | None = None,
    size: float = 1.0,
):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(b, h, t, d, generator=generator) * size
    return q, torch.randn(b, kv or h, t, d, generator=generator)


# Precision -------------------------------------------------------------------------------------

MASSES = (1e-12, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1 - 1e-6, 1 - 1e-9, 1 - 1e-12)
CONTENTS = ("uniform", "random", "steep", "one_hot", "two")


def make_row(content: str, s: float, n: int, offset: float, dtype: torch.dtype) -> torch.Tensor:
    """Logits of a row of n keys, sink first, of about the given sink mass."""
    generator = torch.Generator().manual_seed(n)
    m = n - 1
    logits = torch.zeros(m, dtype=torch.float64)
    if content == "random":
        logits = torch.randn(m, generator=generator, dtype=torch.float64)
    elif content == "steep":
        logits = torch.randn(m, generator=generator, dtype=torch.float64) * 10
    elif content == "one_hot":
        logits[m // 2] = 30.0
    elif content == "two":
        logits[: (m + 1) // 2] -= 50.0
    sink = torch.logsumexp(logits, 0) + math.log(s) - math.log1p(-s)
    return (torch.cat([sink[None], logits]) + offset).to(dtype)


def exactly(row: torch.Tensor) -> dict[str, float]:
    """The numbers of a row of logits, sink first, with 50 digits."""
    with mpmath.workdps(50):
        sink, *content = [mpmath.mpf(x) for x in row.double().tolist()]
        top = max(content)
        parts = [mpmath.exp(x - top) for x in content]
        mass = mpmath.fsum(parts)
        entropy = (
            mpmath.log(mass)
            - mpmath.fsum(p * (x - top) for p, x in zip(parts, content, strict=True)) / mass
        )
        z = sink - top - mpmath.log(mass)
        s, c = 1 / (1 + mpmath.exp(-z)), 1 / (1 + mpmath.exp(z))
        binary = -s * mpmath.log(s) - c * mpmath.log(c)
        return {
            "sink_mass": float(s),
            "content_mass": float(c),
            "log_odds": float(z),
            "binary_entropy": float(binary),
            "content_entropy": float(entropy),
            "total_entropy": float(binary + c * entropy),
            "concentration": float(mpmath.log(len(content)) - entropy),
        }


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["float32", "float64"]
)
def test_precision_against_mpmath(content, offset, dtype, atol):
    for n in (2, 3, 17, 200):
        rows = torch.stack([make_row(content, s, n, offset, dtype) for s in MASSES])
        stats = of_logits(rows)
        assert stats.total_entropy.dtype == dtype
        for i, row in enumerate(rows):
            for name, value in exactly(row).items():
                got = getattr(stats, name)[0, i, 0].item()
                # A mass of 1e-12 must have digits of its own; log-odds and offsets are relative.
                allowed = atol * max(1.0, abs(value)) if name == "log_odds" else atol
                if name in ("sink_mass", "content_mass", "binary_entropy"):
                    allowed = min(allowed, atol * 10 * value)
                assert abs(got - value) <= allowed, (n, MASSES[i], name, got, value)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["float32", "float64"]
)
def test_precision_of_long_rows(content, offset, dtype, atol):
    n = 32768
    rows = torch.stack([make_row(content, s, n, offset, dtype) for s in (1e-12, 0.5, 1 - 1e-12)])
    stats = of_logits(rows)
    for i, row in enumerate(rows.double().numpy()):
        gap = row[1:] - row[1:].max()  # exact: the logits are close to each other
        parts = np.exp(gap)
        mass = math.fsum(parts)
        entropy = math.log(mass) - math.fsum(parts * gap) / mass
        z = row[0] - row[1:].max() - math.log(mass)
        assert abs(stats.content_entropy[0, i, 0].item() - entropy) <= atol
        assert abs(stats.log_odds[0, i, 0].item() - z) <= atol * max(1.0, abs(z))
        assert stats.logit_spread[0, i, 0].item() == pytest.approx(
            row[1:].std(), rel=1e-4, abs=1e-6
        )
        assert stats.logit_range[0, i, 0].item() == pytest.approx(
            row[1:].max() - row[1:].mean(), rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_first(dtype):
    q, k = (x.to(dtype) for x in random_qk(0))
    stats, wide = (
        row_statistics(a, b, is_causal=True) for a, b in ((q, k), (q.float(), k.float()))
    )
    for name in FLOAT_FIELDS:
        assert getattr(stats, name).dtype == torch.float32
        assert torch.equal(getattr(stats, name), getattr(wide, name)), name


def test_float16_logits_beyond_its_range():
    # q.k = 90000 does not exist in float16; the entropies of the same row in float32 do.
    q, k = torch.full((1, 1, 1, 4), 150.0).half(), torch.full((1, 1, 3, 4), 150.0).half()
    stats = row_statistics(q, k, scale=1.0)
    assert stats.kind.item() == RowKind.VALID
    assert stats.max_logit.item() == 90000.0
    assert stats.content_entropy.item() == pytest.approx(math.log(2))


def test_all_mass_on_the_sink():
    # Of 548,640 rows of a real model 730 have s = 1 in float32; dividing by 1 - s gave -7e293.
    rows = torch.tensor([[26.0, 0.0, 0.0], [200.0, 1.0, 0.0]])
    stats = of_logits(rows)
    assert stats.sink_mass[0, :, 0].tolist() == [1.0, 1.0]
    assert stats.content_mass[0, 0, 0].item() == pytest.approx(2 * math.exp(-26), rel=1e-5)
    assert stats.content_entropy[0, 0, 0].item() == pytest.approx(math.log(2), abs=1e-6)
    assert torch.isfinite(stats.total_entropy).all()


# The identity and known values -------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([0.1, 1.0, 10.0]),
    causal=st.booleans(),
    sink=st.sampled_from(["first", [0, 2], "none", [-1]]),
)
@settings(deadline=None, max_examples=25)
def test_identity(seed, size, causal, sink):
    q, k = random_qk(seed, b=1, h=2, t=12, size=size)
    stats = row_statistics(q.double(), k.double(), is_causal=causal, sink=sink)
    logits = (q.double() @ k.double().transpose(-1, -2)) / math.sqrt(8)
    if causal:
        logits = logits.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
    p = torch.softmax(logits, -1)
    torch.testing.assert_close(
        stats.total_entropy, torch.special.entr(p).sum(-1), atol=1e-12, rtol=0
    )
    parts = stats.binary_entropy + stats.sink_mass * stats.sink_entropy
    parts = parts + stats.content_mass * stats.content_entropy
    torch.testing.assert_close(parts, stats.total_entropy, atol=1e-14, rtol=0)


def test_the_papers_example():
    # p = (.90, .08, .02) and q = (.70, .24, .06): the same content, another sink.
    p, q = torch.tensor([[0.90, 0.08, 0.02], [0.70, 0.24, 0.06]], dtype=torch.float64).log()
    stats = of_logits(torch.stack([p, q]))
    assert stats.sink_mass[0, :, 0].tolist() == pytest.approx([0.9, 0.7])
    expected = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert stats.content_entropy[0, :, 0].tolist() == pytest.approx([expected] * 2)
    assert stats.total_entropy[0, 0, 0].item() == pytest.approx(
        -sum(x * math.log(x) for x in (0.90, 0.08, 0.02))
    )


def test_content_stays_while_the_sink_grows():
    content = torch.randn(1, 63, generator=torch.Generator().manual_seed(0))
    first = None
    for s in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        sink = torch.logsumexp(content, 1) + (math.log(s / (1 - s)) if s else -50.0)
        stats = of_logits(torch.cat([sink[:, None], content], 1))
        first = stats if first is None else first
        assert stats.sink_mass.item() == pytest.approx(s, abs=1e-6)
        assert stats.content_entropy.item() == pytest.approx(first.content_entropy.item(), abs=1e-5)
    assert stats.total_entropy.item() < first.total_entropy.item() - 2


def sigma_reparam_bound(t: int, sigma: float) -> float:
    """Lower bound of the entropy of T logits with spectral norm sigma (arXiv 2303.06296)."""
    beta = math.exp(-sigma * math.sqrt(t / (t - 1)))
    return math.log1p((t - 1) * beta) + sigma * math.sqrt(t * (t - 1)) * beta / (1 + (t - 1) * beta)


@pytest.mark.parametrize(
    ("t", "sigma", "expected"),
    [(16, 1, 2.716801), (16, 4, 1.018040), (16, 8, 0.035721), (128, 10, 0.060876)],
)
def test_sigma_reparam_bound_is_attained(t, sigma, expected):
    # One high logit and the others equal, of norm sigma after centring.
    assert sigma_reparam_bound(t, sigma) == pytest.approx(expected, abs=5e-7)
    logits = torch.zeros(1, t)
    logits[0, 3] = sigma * math.sqrt(t / (t - 1))
    assert of_logits(logits, sink="none").total_entropy.item() == pytest.approx(expected, abs=2e-6)


@given(seed=st.integers(0, 10_000), sigma=st.floats(0.1, 12.0))
@settings(deadline=None, max_examples=25)
def test_sigma_reparam_bound_holds(seed, sigma):
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) ** 3
    logits = F.normalize(logits - logits.mean(1, keepdim=True), dim=1) * sigma
    stats = of_logits(logits, sink="none")
    assert (stats.total_entropy >= sigma_reparam_bound(16, sigma) - 1e-5).all()


@pytest.mark.parametrize("t", [8, 64, 300])
def test_uniform_causal_attention(t):
    zeros = torch.zeros(1, 2, t, 8)
    stats = row_statistics(zeros, zeros, is_causal=True)
    harmonic = sum(1 / i for i in range(1, t + 1))
    assert stats.sink_mass[0, 0].mean().item() == pytest.approx(harmonic / t, rel=1e-6)
    assert stats.evenness[0, 0, 2:].tolist() == pytest.approx([1.0] * (t - 2), abs=1e-6)
    assert stats.concentration[0, 0, 2:].tolist() == pytest.approx([0.0] * (t - 2), abs=1e-5)
    assert stats.logit_spread.abs().max().item() == 0.0
    assert stats.support[0, 0].tolist() == list(range(t))
    if t == 64:
        assert stats.sink_mass.mean().item() == pytest.approx(0.074, abs=5e-4)


def test_sampled_rows_keep_their_positions():
    # A public monitor masks sampled queries as if they were the first ones: 4.87 for 4.04 nats.
    zeros = torch.zeros(2, 1, 512, 8)
    rows, weights = select_rows(512, 64, batch=2)
    stats = measure_call(
        AttentionCall(query=zeros, key=zeros, is_causal=True), rows=rows, weights=weights
    )
    assert torch.equal(stats.rows, rows)
    assert torch.equal(stats.support[:, 0], rows.int())
    torch.testing.assert_close(stats.total_entropy[:, 0], (rows + 1.0).log())


# Properties of every call ------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_sampled_rows_are_the_exact_rows_picked(causal, kv):
    q, k = random_qk(1, t=130, kv=kv)
    exact = row_statistics(q, k, is_causal=causal)
    rows, weights = select_rows(130, 20, batch=2)
    call = AttentionCall(query=q, key=k, is_causal=causal)
    sampled = measure_call(call, rows=rows, weights=weights)
    for name in FLOAT_FIELDS[:-1]:
        want = getattr(exact, name).take_along_dim(rows[:, None], 2)
        torch.testing.assert_close(getattr(sampled, name), want, atol=2e-6, rtol=2e-6)
    assert torch.equal(sampled.kind, exact.kind.take_along_dim(rows[:, None], 2))


def test_rows_in_any_order_and_for_all_sequences():
    q, k = random_qk(2)
    exact = row_statistics(q, k, is_causal=True)
    for rows in ([5, 3, 39], torch.tensor([5, 3, 39])):
        stats = row_statistics(q, k, is_causal=True, rows=rows)
        assert stats.rows.tolist() == [[5, 3, 39]] * 2
        torch.testing.assert_close(stats.total_entropy, exact.total_entropy[:, :, [5, 3, 39]])


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=15)
def test_permuting_content_keys_changes_nothing(seed):
    q, k = random_qk(seed, b=1, h=2, t=20)
    q = q[:, :, :19]  # not square: there the diagonal says which queries are padding
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.zeros(1).long(), 1 + torch.randperm(19, generator=generator)])
    mask = torch.rand(19, 20, generator=generator) < 0.8
    first = row_statistics(q, k, mask=mask, sink=[0])
    second = row_statistics(q, k[:, :, order], mask=mask[:, order], sink=[0])
    assert torch.equal(first.support, second.support)
    assert torch.equal(first.kind, second.kind)
    for name in FLOAT_FIELDS:
        a, b = getattr(first, name), getattr(second, name)
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e30, 1e4])
@pytest.mark.parametrize("form", ["bool", "additive", "causal", "causal_bool", "window"])
@pytest.mark.parametrize("rows", [None, [3, 17, 29]])
def test_masked_keys_change_nothing(garbage, form, rows):
    q, k = random_qk(3, t=30)
    generator = torch.Generator().manual_seed(1)
    visible = torch.rand(2, 1, 30, 30, generator=generator) < 0.7
    visible |= torch.eye(30, dtype=torch.bool)
    visible[0, ..., 11] = False  # two keys nobody sees
    visible[1, ..., 20] = False
    arguments = {"mask": visible}
    if form == "additive":
        arguments = {"mask": torch.where(visible, torch.randn(30, generator=generator), -torch.inf)}
    elif form == "causal_bool":
        arguments["is_causal"] = True
    elif form == "window":
        arguments |= {"is_causal": True, "window": 9}
    elif form == "causal":
        arguments = {"is_causal": True}
    spoilt = k.clone()
    if form == "causal":
        spoilt[:, :, 22] = garbage  # seen by rows 22 and later only
    else:
        spoilt[0, :, 11] = garbage
        spoilt[1, :, 20] = garbage
    clean, dirty = (row_statistics(q, x, sink=[0], rows=rows, **arguments) for x in (k, spoilt))
    early = clean.rows[0] < 22 if form == "causal" else slice(None)
    assert torch.equal(clean.kind[:, :, early], dirty.kind[:, :, early])
    for name in FLOAT_FIELDS[:-1]:
        a, b = getattr(clean, name)[:, :, early], getattr(dirty, name)[:, :, early]
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6, msg=name)
    if form == "causal" and not math.isfinite(garbage):
        assert (dirty.kind[:, :, ~early] == RowKind.NONFINITE).all()
        assert torch.isfinite(dirty.best_column_mass).all()


@pytest.mark.parametrize("tile", [64, 1000])
@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_do_not_show(monkeypatch, tile, kv, masked):
    q, k = random_qk(4, t=70, kv=kv)
    mask = (
        torch.rand(2, 1, 70, 70, generator=torch.Generator().manual_seed(0)) < 0.9
        if masked
        else None
    )
    whole = row_statistics(q, k, mask=mask, is_causal=True)
    monkeypatch.setattr(_sweep, "TILE", tile)
    monkeypatch.setattr(_sweep, "_KEY_ELEMENTS", 70 * 8)
    pieces = row_statistics(
        q, k.transpose(1, 2).contiguous().transpose(1, 2), mask=mask, is_causal=True
    )
    assert torch.equal(whole.kind, pieces.kind)
    for name in FLOAT_FIELDS:
        torch.testing.assert_close(
            getattr(whole, name), getattr(pieces, name), atol=2e-6, rtol=2e-6
        )


def test_query_and_logits_agree():
    q, k = random_qk(5)
    logits = (q.double() @ k.double().transpose(-1, -2) / math.sqrt(8)).float()
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    from_logits = measure_call(AttentionCall(logits=logits.masked_fill(hidden, -torch.inf)))
    from_qk = row_statistics(q, k, is_causal=True)
    assert torch.equal(from_logits.kind, from_qk.kind)
    for name in FLOAT_FIELDS:
        torch.testing.assert_close(
            getattr(from_logits, name), getattr(from_qk, name), atol=1e-5, rtol=1e-5
        )


# Nothing else is touched -------------------------------------------------------------------------


def test_inputs_gradients_and_random_state_are_left_alone():
    q, k = (x.requires_grad_() for x in random_qk(6))
    logits = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = [x.detach().clone() for x in (q, k, logits)]
    state = torch.get_rng_state()
    stats = row_statistics(q, k, is_causal=True)
    measure_call(AttentionCall(logits=logits, is_causal=True))
    assert not any(getattr(stats, name).requires_grad for name in FLOAT_FIELDS)
    assert torch.equal(torch.get_rng_state(), state)
    for x, y in zip((q, k, logits), before, strict=True):
        assert x.grad is None
        assert torch.equal(x.detach(), y)


def test_autocast_and_inference_mode_do_not_change_a_number():
    q, k = random_qk(7)
    plain = row_statistics(q, k, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = row_statistics(q, k, is_causal=True)
    with torch.inference_mode():
        inferred = row_statistics(q, k, is_causal=True)
    for name in FLOAT_FIELDS:
        assert torch.equal(getattr(plain, name), getattr(cast, name))
        assert torch.equal(getattr(plain, name), getattr(inferred, name))


def test_layout_in_memory_does_not_matter():
    q, k = random_qk(8)
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    plain, other = row_statistics(q, k, is_causal=True), row_statistics(*strided, is_causal=True)
    torch.testing.assert_close(plain.total_entropy, other.total_entropy, atol=1e-6, rtol=1e-6)


def test_no_matrix_of_all_heads():
    """Nothing of the size of the logits is allocated: peak memory does not grow with the heads."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor) and x._base is None:
                    self.size = max(self.size, x.untyped_storage().nbytes())
            return out

    sizes = []
    for heads in (4, 16):
        q, k = random_qk(9, b=1, h=heads, t=1024, d=8)
        mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool).tril()
        with Largest() as largest:
            row_statistics(q, k, is_causal=True)
            row_statistics(q, k, mask=mask)
        sizes.append(largest.size)
    assert sizes[0] == sizes[1] <= 2 * 4 * _sweep.TILE


@pytest.mark.parametrize("seed", range(4))
def test_everything_against_the_reference(seed):
    q, k = random_qk(seed, t=33, kv=2, size=3.0)
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(2, 4, 33, 33, generator=generator)
    bias = bias.masked_fill(torch.rand(2, 1, 33, 33, generator=generator) < 0.3, -torch.inf)
    arguments = {
        "mask": bias,
        "is_causal": True,
        "softcap": 6.0,
        "sink_logits": torch.randn(4),
        "window": 20,
    }
    rows = torch.stack([torch.randperm(33, generator=generator)[:11] for _ in range(2)])
    weights = torch.rand(2, 11, generator=generator, dtype=torch.float64)
    call = AttentionCall(query=q, key=k, **arguments)
    stats = measure_call(call, rows=rows, weights=weights)
    reference = reference_row_statistics(q, k, rows=rows, weights=weights, **arguments)
    assert_matches_reference(stats, reference, atol=1e-5)
