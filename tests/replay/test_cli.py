"""The command line: one line for what is wrong, tables for what is right, settings from YAML."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from entropy_monitor.cli import main
from entropy_monitor.replay import ReplayError
from entropy_monitor.replay.options import OPTIONS, parse_shard, parse_sink, settings_from

ROOT = Path(__file__).parents[2]
SERIES = ROOT / "examples/series/with-bos"
TOKENS = ["--tokens", str(SERIES / "tokens.npy")]


def test_replay_prints_the_attribution(few, tmp_path, capsys):
    code = main(["replay", str(few), *TOKENS, "--logdir", str(tmp_path / "run"), "--threads", "1"])
    out = capsys.readouterr().out
    assert code == 0
    assert "Steps 0 → 320: mean entropy" in out
    assert "% sink" in out
    assert "[4/4] step320: measured" in out
    assert "ordered splits" in out
    assert "1 of 1 heads end with more than 0.3" in out


def test_problems_are_in_the_summary_and_the_exit_code(few, tmp_path, capsys):
    (few / "step64" / "model.safetensors").write_bytes(b"")
    code = main(["replay", str(few), *TOKENS, "--logdir", str(tmp_path / "run"), "--quiet"])
    assert code == 1
    assert "corrupt: step64 (model.safetensors is not a safetensors file" in capsys.readouterr().out


def test_audit_prints_tables_and_json(tmp_path, capsys, monkeypatch):
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=65,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    more = ["--rows", "4", "--sequences", "2", "--clusters", "2", "--triples", "50"]
    assert main(["audit", "model", *TOKENS, *more]) == 0
    assert "Aitchison, content" in capsys.readouterr().out
    assert (tmp_path / "audit-model" / "audit.png").is_file()
    assert main(["audit", "model", *TOKENS, *more, "--json", "--out", "other"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flips"]["aitchison_content"] == 0
    assert found["rows"] == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay"], "say what to replay"),
        (["replay", "nowhere", *TOKENS], "`nowhere` is neither a path on this machine nor a hub"),
        (["replay", "./a/b", *TOKENS], "neither a path"),
        (["replay", str(ROOT / "tests"), *TOKENS], "holds no checkpoints"),
        (["replay", str(SERIES)], "either --text FILE or --tokens FILE.npy"),
        (["replay", str(SERIES), "--text", "no.txt"], "`--text no.txt` does not exist"),
        (["replay", str(SERIES), "--text", __file__], "no tokenizer in"),
        (
            ["replay", str(SERIES), *TOKENS, "--revisions", "step9"],
            "no revision 'step9'; it has 15",
        ),
        (["replay", str(SERIES), *TOKENS, "--rows", "few"], "`--rows` must be a number or all"),
        (["replay", str(SERIES), *TOKENS, "--rows", "0"], "`--rows` must be at least 1"),
        (["replay", str(SERIES), *TOKENS, "--sink", "last"], "`--sink` must be first, auto"),
        (["replay", str(SERIES), *TOKENS, "--shard", "2/2"], "`--shard` must be i/n"),
        (["replay", str(SERIES), *TOKENS, "--device", "tpu7"], "`--device` must be"),
        (["replay", str(SERIES), *TOKENS, "--length", "99"], "holds 32 sequences of 64"),
        (["replay", str(SERIES), *TOKENS, "--config", "no.yaml"], "cannot be read"),
        (["audit"], "say what to audit"),
        (["audit", str(SERIES), *TOKENS], "compares triples of heads; this model has 1"),
        (["audit", str(SERIES), *TOKENS, "--revision", "step9"], "no checkpoint 'step9'"),
        (["audit", str(SERIES), *TOKENS, "--clusters", "1"], "`--clusters` must be at least 2"),
    ],
)
def test_bad_input_is_one_line(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_token_outside_the_vocabulary(few, tmp_path, capsys):
    import numpy as np

    np.save(tmp_path / "ids.npy", np.full((2, 8), 900))
    code = main(["replay", str(few), "--tokens", str(tmp_path / "ids.npy"), "--logdir", "x"])
    assert code == 2
    assert "token id 900 is not in the model's vocabulary of 65" in capsys.readouterr().err


def test_yaml_and_the_command_line_over_it(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: a/b\ntext: t.txt\nrows: all\nrevisions: [step0, 512]\nlength: 64\n")
    settings = settings_from({"config": str(file), "length": 32, "sink": "0,-1"})
    assert settings.model == "a/b"
    assert settings.rows is None
    assert settings.revisions == "step0,512"
    assert settings.tokens.length == 32
    assert settings.sink == (0, -1)
    file.write_text("modle: a/b\n")
    with pytest.raises(ReplayError, match="no option 'modle'; there are model,"):
        settings_from({"config": str(file)})
    file.write_text("- a\n")
    with pytest.raises(ReplayError, match="options by name; got a list"):
        settings_from({"config": str(file)})


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs/replay").glob("*.yaml")), ids=lambda f: f.stem
)
def test_committed_configurations(file):
    settings = settings_from({"config": str(file), "text": "corpus.txt"})
    assert settings.model == f"EleutherAI/{file.stem}"
    assert settings.tokens.prefix == "none"
    assert set(yaml.safe_load(file.read_text())) <= set(OPTIONS)


def test_parsing():
    assert parse_sink("tokens:0,2") == {"token_ids": [0, 2]}
    assert parse_sink(-1) == (-1,)
    assert parse_shard("3/8") == (3, 8)
    for wrong in ("3", "a/b", "1/"):
        with pytest.raises(ReplayError, match="I/N such as 0/4"):
            parse_shard(wrong)


def test_torchrun_sets_the_shard(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = {"model": "a/b", "text": "t"}
    assert settings_from(given).workers == (1, 4)
    assert settings_from({**given, "shard": "0/2"}).workers == (0, 2)
    with pytest.raises(ReplayError, match="single worker"):
        settings_from({**given, "restart": True})


def test_help_is_complete_and_needs_no_torch():
    code = (
        "import sys; from entropy_monitor.cli import main\n"
        "try:\n    main([sys.argv[1], '--help'])\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    for command, options in (
        ("replay", OPTIONS),
        ("audit", ("revision", "out", "triples", "clusters", "heads", "seed", "rows", "sink")),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, command],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        for option in options:
            shown = option if option == "model" else f"--{option.replace('_', '-')}"
            assert shown in done.stdout, option
