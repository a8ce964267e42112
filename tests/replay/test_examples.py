"""The examples run, against a hub on this machine and with a short training."""

import runpy
import sys
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from tests.versions import HEAD

ROOT = Path(__file__).parents[2]


def test_pythia_replay(fake_hub, hub_folders, tmp_path, capsys, monkeypatch):
    hub = fake_hub(hub_folders, repo="EleutherAI/pythia-70m")
    tokens = str(ROOT / "examples/series/with-bos/tokens.npy")
    arguments = ["--tokens", tokens, "--length", "64", "--logdir", str(tmp_path), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["pythia_replay.py", *arguments])
    runpy.run_path(str(ROOT / "examples/pythia_replay.py"), run_name="__main__")
    table = capsys.readouterr().out.splitlines()[-1].split()
    assert table[0] == "70m"
    assert table[-1] == "30%"
    total, sink, content = (float(x) for x in table[1:4])
    assert abs(total - sink - content) < 2e-3
    assert hub.downloads() == 4  # step1 has the weights of step0


def test_series_is_what_the_script_makes(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "examples/make_series.py"))
    # the first steps are enough to see that script and files belong together
    script["make"].__globals__["STEPS"] = (0, 1, 2)
    for name, bos in (("with-bos", True), ("without-bos", False)):
        script["make"](tmp_path / name, bos=bos, seed=0)
        committed = ROOT / "examples/series" / name
        assert np.array_equal(
            np.load(tmp_path / name / "tokens.npy"), np.load(committed / "tokens.npy")
        )
        for step in (0, 1, 2):
            made, kept = (
                load_file(folder / f"step{step}/model.safetensors")
                for folder in (tmp_path / name, committed)
            )
            made["lm_head.weight"] = made.pop(HEAD)
            assert made.keys() == kept.keys()
            for key in made:
                assert np.allclose(made[key].float(), kept[key].float(), atol=2e-3), (step, key)
    size = sum(
        file.stat().st_size for file in (ROOT / "examples/series").rglob("*") if file.is_file()
    )
    assert size < 3e6
