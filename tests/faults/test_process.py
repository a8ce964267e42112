"""Signals and limits that end a process or its files: the record stays readable."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entropy_monitor.writers import read_run

HEADER = """
import hashlib, os, sys, time, warnings
import torch
torch.set_num_threads(1)
from tests.runs import Language, bits, loader, train, watch
folder, watched = sys.argv[1], sys.argv[2] == "watched"
callbacks = [watch()] if watched else []
def wait():
    open(folder + "/ready", "w").close()
    end = time.monotonic() + 60
    while not os.path.exists(folder + "/go") and time.monotonic() < end:
        time.sleep(0.05)
"""


def run(code: str, folder: Path, *arguments: str, stop=None) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own; `stop(process)` may act on it while it runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEADER + code, str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        if stop is not None:
            stop(process)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


LIGHTNING = """
class Slow(Language):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            wait()
        return super().training_step(batch, batch_idx)

train(folder, *callbacks, make=Slow)
"""

PLAIN_LOOP = """
from entropy_monitor import AttentionMonitor
from entropy_monitor.pipeline import Pipeline
from entropy_monitor.writers import RecordWriter
model = Language().net
monitor, pipeline = AttentionMonitor(model), Pipeline(writers=[RecordWriter(folder)], on_alert=[])
for step, (ids,) in enumerate(loader()):
    with monitor.observe(step):
        model(ids)
        if step == 3:
            wait()
    pipeline.emit(monitor.snapshot())
"""


def terminate(folder, kind):
    def stop(process):
        end = time.monotonic() + 100
        while not (folder / "ready").exists() and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(kind)
        (folder / "go").touch()

    return stop


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (LIGHTNING, signal.SIGTERM),
        pytest.param(LIGHTNING, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(LIGHTNING, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(PLAIN_LOOP, signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=["lightning-term", "lightning-int", "lightning-kill", "loop-term"],
)
def test_a_signal_in_mid_step(tmp_path, code, kind):
    ends = {}
    for who in ("plain", "watched") if code is LIGHTNING else ("watched",):
        folder = tmp_path / who
        folder.mkdir()
        done = run(code, folder, who, stop=terminate(folder, kind))
        ends[who] = (done.returncode, done.stderr.strip().splitlines()[-1:])
    assert len(set(map(str, ends.values()))) == 1, ends
    assert read_run(tmp_path / "watched").steps.tolist()[:3] == [0, 1, 2]


FULL = """
import resource
if watched:
    # As a full disk: the record's file of heads ends in the middle of a frame.
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, _ = train(folder, *callbacks)
print(hashlib.sha256(repr(bits(model)).encode()).hexdigest())
print(*(w.message for w in caught if "entropy_monitor" in str(w.message)), sep="|")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="file size limits as Linux has them")
def test_files_that_may_not_grow(tmp_path):
    plain = run(FULL, tmp_path, "plain").stdout.splitlines()
    done = run(FULL, tmp_path, "watched")
    watched = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert watched[0] == plain[0]
    messages = watched[1].split("|")
    assert len(messages) == 1
    assert "writer RecordWriter failed" in messages[0]
    record = read_run(tmp_path)
    assert 0 < len(record.steps) < 6
    assert record.stat("rows_valid").sum() > 0
