"""The Lightning callback on several processes, whichever way they are started."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy

from entropy_monitor.writers import read_run
from tests.distributed.lightning_runs import Heard, Last, fit, free_port, ranked_fit
from tests.distributed.ranks import run_ranks
from tests.runs import bits, watch

pytestmark = pytest.mark.distributed


def assert_one_run(folder):
    """Both ranks said the same, and one of them wrote it down once."""
    first, second = (json.loads((folder / f"last{rank}.json").read_text()) for rank in (0, 1))
    assert first.pop("writers") == 1
    assert second.pop("writers") == 0
    assert first == second
    assert first["step"] == 5
    assert "attention/sink_mass" in first["metrics"]
    heard = [(folder / f"heard{rank}.jsonl").read_text() for rank in (0, 1)]
    assert heard[0] == heard[1]
    assert "nonfinite" in heard[0]
    (lines,) = folder.glob("**/record.jsonl")
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["step"] for line in written if line["type"] == "step"] == list(range(6))
    record = read_run(folder)
    assert [a.to_dict() for a in record.alerts] == [json.loads(x) for x in heard[0].splitlines()]
    # 2 ranks x 4 sequences x 7 counted rows x 4 heads
    assert np.nansum(record.stat("rows_valid")[0]) == 2 * 4 * 7 * 4


def test_ddp(tmp_path):
    watched, plain = tmp_path / "watched", tmp_path / "plain"
    watched.mkdir(), plain.mkdir()
    first, second = run_ranks(ranked_fit, 2, watched, free_port(), True)
    assert first == second == run_ranks(ranked_fit, 2, plain, free_port(), False)[0]
    assert_one_run(watched)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "fork", "forkserver"])
def test_launchers_of_lightning(tmp_path, start):
    """`ddp_spawn` pickles the callback, `ddp_fork` and notebooks inherit it."""
    results = {}
    for who in ("plain", "watched"):
        folder = tmp_path / who
        folder.mkdir()
        callback = watch(on_alert=[Heard(folder)])
        callbacks = [callback, Last(folder, callback)] if who == "watched" else []
        strategy = DDPStrategy(start_method=start, process_group_backend="gloo")
        model, _ = fit(folder, strategy, *callbacks)
        results[who] = bits(model)
    assert results["plain"] == results["watched"]
    assert_one_run(tmp_path / "watched")


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.distributed.lightning_runs import Heard, Last, fit
from tests.runs import bits, watch
folder, watched = Path(sys.argv[1]), sys.argv[2] == "watched"
callback = watch(on_alert=[Heard(folder)], on_error="raise")
model, run = fit(folder, "ddp", *([callback, Last(folder, callback)] if watched else []))
torch.save(bits(model), folder / f"bits{run.global_rank}.pt")
"""


def torchrun(folder, *arguments, script=SCRIPT):
    folder.mkdir()
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"),
            *(str(folder / "script.py"), str(folder), *arguments),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"bits{rank}.pt") for rank in (0, 1)]


def test_torchrun(tmp_path):
    first, second = torchrun(tmp_path / "watched", "watched")
    assert first == second
    assert_one_run(tmp_path / "watched")


@pytest.mark.slow
def test_torchrun_ends_with_the_same_weights(tmp_path):
    assert torchrun(tmp_path / "watched", "watched") == torchrun(tmp_path / "plain", "plain")
