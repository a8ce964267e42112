"""Every example runs, small, in its own process, as a user would start it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from entropy_monitor.writers.record_reader import read_run

ROOT = Path(__file__).resolve().parents[1]


def start(*words: str, folder: Path) -> str:
    """Run an example in a folder; its output."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_train_gpt(tmp_path, precision):
    pytest.importorskip("pytorch_lightning", reason="the example needs Lightning")
    small = ["--steps", "12", "--layers", "2", "--width", "32", "--length", "32"]
    printed = start(
        str(ROOT / "examples" / "train_gpt.py"), *small, "--precision", precision, folder=tmp_path
    )
    logdir = tmp_path / "runs" / "train_gpt" / "version_0"
    assert f"entropy-monitor report {logdir.relative_to(tmp_path)}" in printed
    run = read_run(logdir)
    assert run.steps.tolist() == [0, 10]
    assert [name for name, _ in run.layers] == ["blocks.0", "blocks.1"]
    assert not run.problems
    # At the start attention is nearly uniform over a causal triangle.
    assert run.stat("content_evenness")[0].min() > 0.9


def test_cli_gpt_accepts_the_configuration(tmp_path):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse[signatures]")
    small = ["--trainer.max_steps", "3", "--model.layers", "1", "--model.width", "16"]
    small += ["--model.heads", "2", "--data.batch", "2"]
    config = str(ROOT / "configs" / "train_gpt.yaml")
    start(str(ROOT / "examples" / "cli_gpt.py"), "fit", "--config", config, *small, folder=tmp_path)
    assert read_run(tmp_path / "runs" / "cli_gpt" / "version_0").steps.tolist() == [0]


def test_plain_loop(tmp_path):
    printed = start(
        str(ROOT / "examples" / "plain_loop.py"),
        "--steps",
        "3",
        "--every",
        "2",
        "--logdir",
        "runs",
        folder=tmp_path,
    )
    assert len(printed.splitlines()) == 2
    assert read_run(tmp_path / "runs").steps.tolist() == [0, 2]
