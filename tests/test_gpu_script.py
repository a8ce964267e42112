"""The script for machines with a GPU: it runs, and without one it says so."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "gpu" / "check.py"


def check(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so():
    assert "skipped: no GPU is visible" in check()


@pytest.mark.parametrize(
    "name", ["kernels", "bf16", "cost", pytest.param("flex", marks=pytest.mark.slow)]
)
def test_the_same_code_on_a_cpu(name):
    lines = check("--cpu", name).splitlines()
    assert lines[-1].startswith(f"{name}: ok")
    assert len(lines) > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")
@pytest.mark.timeout(600)
def test_on_a_gpu():
    assert "FAILED" not in check()
