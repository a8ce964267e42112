"""Models are built from configuration and tensors; names of layers are those of training."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from entropy_monitor import AttentionMonitor
from entropy_monitor.replay import CheckpointError, ModelSpec, ReplayError
from entropy_monitor.replay.models import (
    clean_names,
    load_model,
    model_class,
    nest,
    read_config,
    strip_prefix,
)
from tests.versions import HEAD, TRANSFORMERS_5


@pytest.fixture
def state(few):
    return load_file(few / "step128" / "model.safetensors")


@pytest.fixture
def spec(few):
    return ModelSpec(config=str(few / "config.json"))


def layers(loaded):
    monitor = AttentionMonitor(loaded.model, on_error="raise")
    with monitor.observe(step=0):
        loaded.forward(torch.arange(20)[None])
    return monitor.snapshot().layers


def save(state, path, **more):
    torch.save({"state_dict": state, "global_step": 3, **more}, path)
    return path


@pytest.mark.parametrize("prefix", ["", "model.", "net.gpt.", "module.model._orig_mod."])
def test_prefix_of_a_lightning_module_stays_in_the_names(state, spec, tmp_path, prefix):
    named = {f"{prefix}{name}": value for name, value in state.items()}
    if prefix == "model.":
        named["loss.scale"] = torch.zeros(1)  # something else the module held
    loaded = load_model(save(named, tmp_path / "a.ckpt"), spec)
    kept = prefix.removeprefix("module.").replace("_orig_mod.", "")
    assert layers(loaded) == (f"{kept}gpt_neox.layers.0.attention",)


def test_weights_arrive(state, spec, tmp_path):
    loaded = load_model(save(state, tmp_path / "a.ckpt"), spec)
    expected = {HEAD if name == "lm_head.weight" else name: value for name, value in state.items()}
    for name, value in loaded.model.state_dict().items():
        if name != HEAD or TRANSFORMERS_5:  # version 4 does not find it, and does without it
            assert torch.equal(value, expected[name].float()), name
    assert not loaded.model.training
    assert loaded.parameters == sum(v.numel() for v in state.values())


def test_hash_is_the_same_for_every_format(state, spec, tmp_path):
    save_file(state, tmp_path / "a.safetensors")
    hashes = {
        load_model(path, spec).weights_sha256
        for path in (tmp_path / "a.safetensors", save(state, tmp_path / "b.ckpt"))
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "auto"])
def test_dtype(few, dtype):
    loaded = load_model(few / "step128", ModelSpec(config=str(few), dtype=dtype))
    expected = torch.float16 if dtype == "auto" else getattr(torch, dtype)
    assert {p.dtype for p in loaded.model.parameters()} == {expected}


def test_wrong_shape_and_missing_weights_are_corrupt(state, spec, tmp_path):
    wrong = {**state, "gpt_neox.embed_in.weight": torch.zeros(3, 3)}
    with pytest.raises(CheckpointError, match="does not fit the configuration"):
        load_model(save(wrong, tmp_path / "a.ckpt"), spec)
    state.pop("gpt_neox.layers.0.attention.query_key_value.weight")
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .*query_key_value"):
        load_model(save(state, tmp_path / "b.ckpt"), spec)


def test_a_missing_output_head_does_not_matter(state, spec, tmp_path):
    state.pop("lm_head.weight")
    assert layers(load_model(save(state, tmp_path / "a.ckpt"), spec))


def test_own_model_by_a_factory(tmp_path, monkeypatch):
    (tmp_path / "my_replay_model.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = torch.nn.Embedding(30, 16)\n"
        "        self.block = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)\n"
        "    def forward(self, ids):\n"
        "        return self.block(self.embed(ids))\n"
        "def build():\n"
        "    return Net()\n"
        "number = 3\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_replay_model

    torch.manual_seed(0)
    net = my_replay_model.build()
    named = {f"model.{name}": value for name, value in net.state_dict().items()}
    path = save(named, tmp_path / "step=7.ckpt")
    loaded = load_model(path, ModelSpec(build="my_replay_model:build"))
    assert layers(loaded) == ("model.block.self_attn",)
    for build, words in (
        ("my_replay_model:wrong", "must return a torch.nn.Module; got int"),
        ("my_replay_model:none", "does not work"),
        ("no_such_module:f", "does not work"),
    ):
        with pytest.raises(ReplayError, match=words):
            load_model(path, ModelSpec(build=build))
    del named["model.block.linear1.weight"]
    with pytest.raises(CheckpointError, match="lacks 1 weights"):
        load_model(save(named, path), ModelSpec(build="my_replay_model:build"))
    sys.modules.pop("my_replay_model")


def test_configuration_is_needed_and_must_be_readable(few, tmp_path):
    (few / "config.json").unlink()
    with pytest.raises(ReplayError, match="--model-config, or a function"):
        load_model(few / "step128", ModelSpec())
    with pytest.raises(ReplayError, match="does not exist"):
        load_model(few / "step128", ModelSpec(config=str(tmp_path / "nothing")))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ReplayError, match="transformers cannot read"):
        load_model(few / "step128", ModelSpec(config=str(tmp_path)))


def test_remote_code_is_not_run_unasked(few, tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}'
    )
    (tmp_path / "odd.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ReplayError, match="--trust-remote-code runs the model's own code"):
        load_model(few / "step128", ModelSpec(config=str(tmp_path)))


def test_model_class_is_the_one_of_training(few):
    config = read_config(few / "step128", ModelSpec(), few / "config.json")
    assert model_class(config).__name__ == "GPTNeoXForCausalLM"
    config.architectures = ["BertModel"]
    assert model_class(config).__name__ == "BertModel"
    config.architectures = None
    assert model_class(config).__name__ == "AutoModelForCausalLM"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "--dtype"),
        ({"attention": "flash"}, "--attention"),
        ({"build": "no_colon"}, "--build"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ReplayError, match=words):
        ModelSpec(**options)


def test_unusable_device_is_one_line(few):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ReplayError, match="--device cuda"):
        load_model(few / "step128", ModelSpec(config=str(few), device="cuda"))


def test_names():
    w = torch.zeros(1)
    assert list(clean_names({"a._orig_mod.b": w, "_fsdp_wrapped_module.c": w})) == ["a.b", "c"]
    prefix, kept = strip_prefix({"x.a": w, "x.b": w, "y.a": w}, {"a", "b"})
    assert (prefix, sorted(kept)) == ("x.", ["a", "b"])
    layer = nn.Linear(1, 1)
    assert dict(nest(layer, "a.b.").named_modules())["a.b"] is layer
