"""Padding, packing, windows, short sequences: rows of each kind are counted right."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from entropy_monitor.calls import RowKind
from tests.capture.helpers import Measured, assert_weights, capture
from tests.models import tiny, tokens

pytest.importorskip("transformers")

WAYS = ["eager", "sdpa"]
T = 8


def counts(measured: Measured, layer: int) -> list[Counter[RowKind]]:
    """Rows of each kind per sequence, in head 0; heads agree."""
    kind = list(measured.stats.values())[layer].kind
    assert (kind == kind[:, :1]).all()
    return [Counter(RowKind(int(k)) for k in row) for row in kind[:, 0]]


def run(
    name: str, way: str, sink: Any = "first", dtype: torch.dtype = torch.float64, **inputs: Any
) -> Measured:
    model = tiny(name, way, dtype).eval()
    measured, report, _ = capture(model, lambda: model(**inputs), sink=sink)
    assert report.complete
    return measured


def weights(name: str, measured: Measured, **inputs: Any) -> dict[str, Tensor]:
    model = tiny(name, "eager", torch.float64).eval()
    attentions = model(**inputs, output_attentions=True).attentions
    return dict(zip(measured.stats, attentions, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_without_padding(name: str, way: str) -> None:
    measured = run(name, way, input_ids=tokens(length=T))
    causal = {RowKind.NO_CONTENT: 1, RowKind.TRIVIAL: 1, RowKind.VALID: T - 2}
    assert counts(measured, 0) == [Counter(causal if name == "llama" else {RowKind.VALID: T})] * 2
    assert_weights(measured, weights(name, measured, input_ids=tokens(length=T)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_rows_are_empty_and_the_others_are_those_of_the_sequence_alone(
    name: str, side: str, way: str
) -> None:
    pad = 3
    ids = tokens(length=T)
    mask = torch.ones(2, T, dtype=torch.long)
    if side == "left":
        mask[1, :pad] = 0
    else:
        mask[1, T - pad :] = 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": position}
    # In float64 eager attention of transformers makes NaN of rows that see nothing.
    measured = run(name, way, dtype=torch.float32, **given)
    n = T - pad
    if name == "llama":
        want = {RowKind.EMPTY: pad, RowKind.NO_CONTENT: 1, RowKind.TRIVIAL: 1, RowKind.VALID: n - 2}
    else:
        want = {RowKind.EMPTY: pad, RowKind.VALID: n}
    assert counts(measured, 0)[1] == Counter(want)  # left padding is not "no sink"
    kept = slice(pad, T) if side == "left" else slice(0, n)
    alone = run(name, way, dtype=torch.float32, input_ids=ids[1:, kept])
    for layer, stats in alone.stats.items():
        for field in ("sink_mass", "content_entropy", "evenness", "kind"):
            got = getattr(measured.stats[layer], field)[1:, :, kept]
            torch.testing.assert_close(got, getattr(stats, field), atol=1e-4, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_sequence(way: str) -> None:
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1] = 0
    measured = run("llama", way, input_ids=tokens(length=T), attention_mask=mask)
    assert counts(measured, 0)[1] == Counter({RowKind.EMPTY: T})
    stats = next(iter(measured.stats.values()))
    assert stats.total_entropy.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_one_and_two_tokens(name: str, length: int, way: str) -> None:
    measured = run(name, way, input_ids=tokens(length=length))
    if name == "llama":
        want = [RowKind.NO_CONTENT, RowKind.TRIVIAL][:length]
    else:
        want = [RowKind.NO_CONTENT] if length == 1 else [RowKind.TRIVIAL] * 2
    assert counts(measured, 0) == [Counter(want)] * 2


def documents(*lengths: int) -> tuple[Tensor, Tensor]:
    """Position ids and the block-diagonal causal mask of documents in one sequence."""
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    mask = (document[:, None] == document) & torch.ones(sum(lengths), sum(lengths)).tril().bool()
    return position, mask[None, None]


@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_each_have_their_own_first_token(way: str) -> None:
    position, mask = documents(5, 4)
    ids = tokens(batch=1, length=9)
    additive = torch.zeros(1, 1, 9, 9, dtype=torch.float64).masked_fill(
        ~mask, torch.finfo(torch.float64).min
    )
    measured = run("llama", way, input_ids=ids, attention_mask=additive, position_ids=position)
    assert counts(measured, 0) == [
        Counter({RowKind.NO_CONTENT: 2, RowKind.TRIVIAL: 2, RowKind.VALID: 5})
    ]
    for kept in (slice(0, 5), slice(5, 9)):
        alone = run("llama", way, input_ids=ids[:, kept])
        for layer, stats in alone.stats.items():
            got = measured.stats[layer].sink_mass[:, :, kept]
            torch.testing.assert_close(got, stats.sink_mass, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_the_actual_mask_is_measured_not_the_position_ids(way: str) -> None:
    """With an all-ones mask and a batch of two, positions alone do not separate documents."""
    position, _ = documents(5, 4)
    given = {
        "input_ids": tokens(length=9),
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
        "position_ids": position.expand(2, -1),
    }
    measured = run("llama", way, **given)
    assert_weights(measured, weights("llama", measured, **given))


@pytest.mark.parametrize("way", WAYS)
def test_a_window_that_no_longer_reaches_the_first_key_has_no_sink(way: str) -> None:
    measured = run("mistral", way, input_ids=tokens(length=T))
    # A window of four keys: rows 4 and later do not see key 0.
    want = {RowKind.NO_CONTENT: 1, RowKind.TRIVIAL: 1, RowKind.VALID: 2, RowKind.NO_SINK: T - 4}
    assert counts(measured, 0) == [Counter(want)] * 2
    assert_weights(measured, weights("mistral", measured, input_ids=tokens(length=T)))


@pytest.mark.parametrize("way", WAYS)
def test_left_padding_and_a_window_together(way: str) -> None:
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, :2] = 0
    measured = run("mistral", way, input_ids=tokens(length=T), attention_mask=mask)
    want = {
        RowKind.EMPTY: 2, RowKind.NO_CONTENT: 1, RowKind.TRIVIAL: 1, RowKind.VALID: 2,
        RowKind.NO_SINK: T - 6,
    }  # fmt: skip
    assert counts(measured, 0)[1] == Counter(want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("decoder_length", [5, T])
def test_padded_memory_does_not_empty_the_rows_of_cross_attention(
    way: str, decoder_length: int
) -> None:
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, T - 3 :] = 0
    measured = run(
        "bart", way, input_ids=tokens(length=T), attention_mask=mask,
        decoder_input_ids=tokens(1, length=decoder_length),
    )  # fmt: skip
    cross = [n for n, name in enumerate(measured.stats) if "encoder_attn" in name]
    assert len(cross) == 2
    for layer in cross:
        assert counts(measured, layer) == [Counter({RowKind.VALID: decoder_length})] * 2
        support = list(measured.stats.values())[layer].support
        assert (support[1] == T - 3 - 1).all()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # 5.24 has a new name for the cache
@pytest.mark.parametrize("way", WAYS)
def test_more_keys_than_queries_with_a_cache(way: str) -> None:
    model = tiny("llama", way, torch.float64).eval()
    ids = tokens(length=T)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :5], use_cache=True).past_key_values
        measured, report, _ = capture(
            model, lambda: model(input_ids=ids[:, 5:], past_key_values=cache)
        )
    assert report.complete
    assert set(measured.shapes.values()) == {(2, 4, 3, T)}
    whole = run("llama", way, input_ids=ids)
    for layer, stats in whole.stats.items():
        for field in ("sink_mass", "content_entropy"):
            want = getattr(stats, field)[:, :, 5:]
            torch.testing.assert_close(
                getattr(measured.stats[layer], field), want, atol=1e-5, rtol=0
            )


SINKS = {
    "positions": [0, 1],
    "last": -1,
    "none": "none",
    "tokens": torch.tensor([[True, False, False, True] + [False] * 4] * 2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sink", SINKS)
def test_other_sinks(sink: str, way: str) -> None:
    measured = run("bert", way, sink=SINKS[sink], input_ids=tokens(length=T))
    w = weights("bert", measured, input_ids=tokens(length=T))
    assert_weights(measured, w)
    if sink == "positions":
        for layer, stats in measured.stats.items():
            want = w[layer][..., :2].sum(-1)
            torch.testing.assert_close(stats.sink_mass.double(), want.double(), atol=1e-5, rtol=0)


def test_learned_sinks_are_kept_in_the_mass() -> None:
    measured = run("gpt_oss", "eager", sink="learned", input_ids=tokens(length=T))
    w = weights("gpt_oss", measured, input_ids=tokens(length=T))
    for layer, stats in measured.stats.items():
        counted = stats.kind != RowKind.TRIVIAL
        missing = 1 - w[layer].double().sum(-1)
        assert missing.max() > 0.1
        got = stats.sink_mass.double()[counted]
        torch.testing.assert_close(got, missing[counted], atol=1e-5, rtol=0)


def test_nan_and_infinity_are_counted_not_spread() -> None:
    model = tiny("llama", "sdpa").eval()
    healthy, *_ = capture(model, lambda: model(input_ids=tokens(length=T)))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0] = float("nan")
    measured, *_ = capture(model, lambda: model(input_ids=tokens(length=T)))
    kind = measured.stats["model.layers.1.self_attn"].kind
    assert (kind[:, 0] == RowKind.NONFINITE).all()
    assert (kind[:, 1] == healthy.stats["model.layers.1.self_attn"].kind[:, 1]).all()
    for name in measured.stats:
        assert measured.stats[name].total_entropy.isfinite().all()
