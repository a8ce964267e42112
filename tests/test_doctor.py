"""The doctor: right table, right words, one clear line on bad input."""

import json

import pytest
import torch
from torch import nn

from entropy_monitor.cli import main
from entropy_monitor.doctor import _shorten, diagnose
from tests.versions import TRANSFORMERS_5

pytest.importorskip("transformers")


@pytest.fixture
def llama(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=50,
    ).save_pretrained(tmp_path)
    return tmp_path


def report(capsys, *arguments):
    code = main(["doctor", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_folder_with_a_configuration(llama, capsys):
    code, found = report(capsys, llama)
    assert code == 0
    assert found["model"] == "LlamaForCausalLM"
    assert [layer["name"] for layer in found["layers"]] == [
        f"model.layers.{i}.self_attn" for i in range(3)
    ]
    first = found["layers"][0]
    assert (first["heads"], first["key_heads"], first["queries"], first["keys"]) == (4, 2, 32, 32)
    assert first["way"] == "sdpa"
    assert first["mask"] == "causal"
    # per head: 2 sequences x (30 valid, 1 trivial, 1 without content)
    assert first["rows"] == {
        "valid": 240,
        "no_sink": 0,
        "trivial": 8,
        "no_content": 8,
        "empty": 0,
        "nonfinite": 0,
    }


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_shows_as_empty_rows(llama, capsys, side):
    code, found = report(capsys, llama / "config.json", "--padding", side, "--layers", "1")
    assert code == 0
    assert len(found["layers"]) == 1
    assert found["layers"][0]["rows"]["empty"] == 8 * 4


def test_eager_is_seen_as_softmax(llama, capsys):
    code, found = report(capsys, llama, "--attention", "eager")
    assert code == 0
    assert {layer["way"] for layer in found["layers"]} == {"softmax"}


def test_a_model_type_by_name(capsys):
    code, found = report(capsys, "gpt2", "--layers", "1", "--length", "8")
    assert code == 0
    assert len(found["layers"]) == 1


@pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 has no such configuration")
def test_a_configuration_that_makes_its_layer_types_from_its_depth():
    from transformers import MambaConfig

    config = MambaConfig(num_hidden_layers=3)
    _shorten(config, 2)
    assert config.num_hidden_layers == 2
    assert len(config.layer_types) == 2


@pytest.mark.parametrize("kind", ["bert", "t5", "vit", "clip"])
def test_other_kinds_of_models(tmp_path, capsys, kind):
    from transformers import AutoConfig

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    options = {
        "bert": {**small, "vocab_size": 50},
        "t5": {
            "d_model": 32,
            "d_kv": 16,
            "num_layers": 1,
            "num_heads": 2,
            "d_ff": 32,
            "vocab_size": 50,
        },
        "vit": {**small, "image_size": 8, "patch_size": 4},
        "clip": {
            "text_config": {**small, "vocab_size": 50},
            "vision_config": {**small, "image_size": 8, "patch_size": 4},
        },
    }[kind]
    AutoConfig.for_model(kind, **options).save_pretrained(tmp_path)
    code, found = report(capsys, tmp_path)
    assert code == 0
    assert len(found["layers"]) == {"bert": 1, "vit": 1, "clip": 2, "t5": 3}[kind]


def test_text_names_what_was_not_seen(capsys):
    class LinearAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(4, 4)

        def forward(self, x):
            q = self.q(x)
            return q @ (q.transpose(-1, -2) @ x)

    found = diagnose(LinearAttention(), lambda model: model(torch.zeros(1, 3, 4)))
    assert not found.healthy
    assert "Not seen" in found.to_text()


def test_a_function_that_builds_model_and_inputs(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def build():\n"
        "    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)\n"
        "    return layer, (torch.zeros(1, 4, 8),) * 3\n"
        "def alone():\n"
        "    return torch.nn.Linear(2, 2)\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "my_models:build"]) == 0
    assert "heads" in capsys.readouterr().out
    for name, message in {
        "alone": "must return the model and its inputs",
        "wrong": "must return a torch.nn.Module; got int",
        "missing": "cannot be loaded",
    }.items():
        assert main(["doctor", f"my_models:{name}"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "there is no such thing"),
        (["."], "has no config.json"),
        (["gpt2", "--layers", "0"], "--layers must be at least 1; got 0"),
        (["gpt2", "--layers", "1", "--sink", "99"], "`sink` must hold key positions"),
        (["gpt2", "--layers", "1", "--batch", "0"], "--batch and --length must be at least 1"),
        (["gpt2", "--layers", "1", "--attention", "flash_attention_9"], "cannot build the model"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
