"""The audit against the paper's example, scipy, and brute force through eager weights."""

import json

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist, jensenshannon, squareform
from transformers import (
    BertConfig,
    BertModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralModel,
)

from entropy_monitor.calls import AttentionCall
from entropy_monitor.composition import content_distance
from entropy_monitor.replay import AuditSettings, ReplayError, audit_model
from entropy_monitor.replay.audit import row_logits
from entropy_monitor.replay.audit_output import describe, to_dict, write
from entropy_monitor.replay.distances import (
    CONVENTIONS,
    METRICS,
    Rows,
    adjusted_rand,
    average_linkage,
    common_rows,
    draw_triples,
    pairwise,
    verdicts,
)
from entropy_monitor.replay.models import LoadedModel


def loaded(model):
    model.eval()
    return LoadedModel(
        model=model, forward=lambda ids: model(input_ids=ids), weights_sha256="", parameters=0
    )


@pytest.fixture
def gpt():
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.6,
    )
    return GPTNeoXForCausalLM(config)


def random_rows(heads=5, keys=9, seed=0, dtype=torch.float64):
    x = torch.randn(heads, keys, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2
    return Rows(content=x[:, 1:], sink=x[:, 0])


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_distances_are_those_of_scipy(convention):
    rows = random_rows()
    p = torch.cat([rows.sink[:, None], rows.content], dim=1).softmax(-1).numpy()
    if convention == "dropped":
        p = p[:, 1:] / p[:, 1:].sum(1, keepdims=True)
    found = pairwise(rows, convention)
    assert np.allclose(found["cosine"], cdist(p, p, "cosine"), atol=1e-12)
    assert np.allclose(found["euclid"], cdist(p, p), atol=1e-12)
    js = [[jensenshannon(a, b) ** 2 for b in p] for a in p]
    assert np.allclose(found["jensen_shannon"], js, atol=1e-12)
    # against the public function, on the whole row whose key 0 is the sink
    whole = torch.cat([rows.sink[:, None], rows.content], dim=1)
    sink = torch.zeros(whole.shape[1], dtype=torch.bool)
    sink[0] = True
    expected = content_distance(whole[:, None], whole[None], sink, from_logits=True)
    assert torch.allclose(found["aitchison_content"], expected, atol=1e-10)


def test_near_equal_rows_keep_their_order_when_the_sink_holds_nearly_all():
    rows = random_rows(heads=4).with_sink_mass(1 - 1e-9)
    assert float(rows.sink_mass.min()) == pytest.approx(1 - 1e-9, abs=1e-15)
    found, plain = pairwise(rows, "kept"), pairwise(rows, "dropped")
    # theorem 3: Euclid and JS shrink with 1 - s, and keep their proportions
    for name in ("euclid", "jensen_shannon"):
        ratio = found[name] / plain[name].clamp(min=1e-300)
        off = ~torch.eye(4, dtype=torch.bool)
        assert torch.allclose(ratio[off], torch.full_like(ratio[off], 1e-9), rtol=1e-4)
    assert torch.allclose(found["aitchison_content"], plain["aitchison_content"], rtol=1e-9)


def test_the_papers_example_flips():
    p = torch.tensor([[0.9, 0.08, 0.02], [0.7, 0.24, 0.06], [0.9, 0.02, 0.08]], dtype=torch.float64)
    rows = Rows(content=p[:, 1:].log(), sink=p[:, 0].log())
    triple = np.array([[0, 1, 2]])
    kept, dropped = (pairwise(rows, c) for c in CONVENTIONS)
    for metric in ("cosine", "jensen_shannon", "euclid"):
        assert verdicts(kept[metric], triple)[0] == 1  # r is nearer
        assert verdicts(dropped[metric], triple)[0] == -1  # q is nearer
    for found in (kept, dropped):
        assert verdicts(found["aitchison_content"], triple)[0] == -1


def test_common_support():
    x = torch.zeros(2, 6)
    x[0, 0], x[1, 5] = -torch.inf, -torch.inf
    sink = torch.zeros(6, dtype=torch.bool)
    sink[0] = True
    assert common_rows(x, sink) is None  # one head does not see the sink
    sink[:] = False
    sink[1] = True
    rows = common_rows(x, sink)
    assert rows.content.shape == (2, 3)
    assert common_rows(x, sink, least=4) is None


@pytest.mark.parametrize("clusters", [2, 4, 7])
def test_clusters_are_those_of_scipy(clusters):
    points = np.random.default_rng(clusters).normal(size=(20, 3))
    distance = cdist(points, points)
    ours = average_linkage(distance, clusters)
    theirs = fcluster(linkage(squareform(distance, checks=False), "average"), clusters, "maxclust")
    assert len(set(ours.tolist())) == clusters
    assert adjusted_rand(ours, theirs) == 1.0


def test_adjusted_rand_by_hand():
    # table [[2, 1], [0, 3]]: sum C2 = 4, rows 3 + 3, columns 1 + 6, all 15
    a, b = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1])
    expected = 6 * 7 / 15
    assert adjusted_rand(a, b) == pytest.approx((4 - expected) / (6.5 - expected))
    assert adjusted_rand(a, a + 5) == 1.0


def test_triples_are_of_different_heads():
    for heads in (3, 50, 100):
        triples = draw_triples(heads, 200, seed=1)
        assert triples.max() < heads
        assert all(len(set(t)) == 3 for t in triples.tolist())
        assert np.array_equal(triples, draw_triples(heads, 200, seed=1))


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_whole_audit_against_eager_weights(gpt, way, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50, (2, 24))
    gpt.set_attn_implementation(way)
    settings = AuditSettings(rows=8, triples=300, clusters=3)
    result = audit_model(loaded(gpt), tokens, settings)
    gpt.set_attn_implementation("eager")
    with torch.no_grad():
        weights = gpt.double()(
            input_ids=torch.from_numpy(tokens), output_attentions=True
        ).attentions
    p = torch.cat(weights, dim=1)  # (sequences, heads, rows, keys)
    chosen = np.unique(np.linspace(4, 23, 8).astype(int))
    triples = draw_triples(12, 300, seed=0)
    mean = {(m, c): 0 for m in METRICS for c in CONVENTIONS}
    mass = []
    for sequence in p:
        for row in chosen:
            x = sequence[:, row, : row + 1].log()
            rows = Rows(content=x[:, 1:], sink=x[:, 0])
            mass.append(rows.sink_mass)
            for c in CONVENTIONS:
                for m, d in pairwise(rows, c).items():
                    mean[m, c] = mean[m, c] + d
    for m in METRICS:
        kept, dropped = (verdicts(mean[m, c], triples) for c in CONVENTIONS)
        assert result.flips[m] == pytest.approx((kept != dropped).mean(), abs=2 / 300), m
    assert result.rows == 2 * len(chosen)
    assert result.sink_mass == pytest.approx(torch.stack(mass).mean(0).numpy(), abs=1e-5)
    assert result.flips["aitchison_content"] == result.row_flips["aitchison_content"] == 0
    assert result.agreement["aitchison_content"] == 1
    assert result.flips["cosine"] > 0
    written = write(result, tmp_path, title="a model")
    assert [f.name for f in written] == ["audit.json", "audit.csv", "heads.csv", "audit.png"]
    assert json.loads((tmp_path / "audit.json").read_text()) == json.loads(
        json.dumps(to_dict(result))
    )
    assert any("Jensen-Shannon" in line for line in describe(result))


def test_bidirectional_model_with_two_sinks():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    tokens = np.random.default_rng(0).integers(0, 50, (1, 20))
    result = audit_model(loaded(BertModel(config)), tokens, AuditSettings(sink=(0, -1), clusters=2))
    assert result.sink_mass == pytest.approx(np.full(4, 0.1), abs=0.05)
    with pytest.raises(ReplayError, match=r"positions in \[-20, 20\); got 20"):
        audit_model(loaded(BertModel(config)), tokens, AuditSettings(sink=(20,)))


def test_window_hides_the_sink():
    config = MistralConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        sliding_window=6,
    )
    model = loaded(MistralModel(config))
    tokens = np.random.default_rng(0).integers(0, 50, (1, 20))
    seen = audit_model(model, tokens, AuditSettings(rows=50, clusters=2))
    assert seen.rows == 2  # rows 4 and 5 of 4..19 still see key 0
    longer = np.random.default_rng(0).integers(0, 50, (1, 64))
    with pytest.raises(ReplayError, match="nothing to compare"):
        audit_model(model, longer, AuditSettings(rows=4))  # from row 8 on


def test_more_heads_than_wanted_are_drawn(gpt):
    tokens = np.random.default_rng(0).integers(0, 50, (1, 12))
    result = audit_model(loaded(gpt), tokens, AuditSettings(heads=5, clusters=2))
    assert len(result.heads) == len(set(result.heads)) == 5


@pytest.mark.parametrize(
    "call",
    [
        {"is_causal": True},
        {"is_causal": True, "window": 3},
        {"is_causal": True, "softcap": 2.0, "scale": 0.7},
        {"mask": torch.ones(5, 5, dtype=torch.bool).tril()},
        {"mask": torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -1e30)},
        {"mask": torch.tensor([True, False, True, True, True])[None, None, None]},
    ],
)
def test_row_logits_are_those_of_the_kernel(call):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 8, generator=g)
    k = torch.randn(2, 2, 5, 8, generator=g)
    rows = torch.tensor([1, 4])
    x = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * call.get("scale", 8**-0.5)
    if "softcap" in call:
        x = 2.0 * torch.tanh(x / 2.0)
    distance = torch.arange(5)[:, None] - torch.arange(5)[None]
    visible = torch.ones(5, 5, dtype=torch.bool)
    if call.get("is_causal"):
        visible &= distance >= 0
    if "window" in call:
        visible &= distance < 3
    if "mask" in call:
        mask = call["mask"]
        visible = visible & (mask if mask.dtype == torch.bool else mask > -1e8)
    expected = x.masked_fill(~visible, -torch.inf)[:, :, rows]
    assert torch.allclose(
        row_logits(AttentionCall(query=q, key=k, **call), rows), expected, atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [({"rows": 0}, "--rows"), ({"clusters": 1}, "--clusters"), ({"sink": "auto"}, "--sink")],
)
def test_bad_settings(options, words):
    with pytest.raises(ReplayError, match=words):
        AuditSettings(**options)


def test_model_with_one_head_has_no_triples(few):
    from transformers import AutoConfig

    model = GPTNeoXForCausalLM(AutoConfig.from_pretrained(few))
    with pytest.raises(ReplayError, match="this model has 1"):
        audit_model(loaded(model), np.zeros((1, 12), dtype=np.int64))
