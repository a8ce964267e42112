"""A replay against a float64 reference; resumed, shared and damaged replays against a plain one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GPTNeoXForCausalLM

from entropy_monitor.replay import ModelSpec, ReplayError, ReplaySettings, TokenSpec, replay
from entropy_monitor.replay.results import sink_formed
from entropy_monitor.replay.rows import PartStore
from entropy_monitor.writers import Emission, read_run
from tests.versions import HEAD

ROOT = Path(__file__).parents[2]


def settings(series, logdir, **options):
    tokens = options.pop("tokens", None) or TokenSpec(tokens=str(series / "tokens.npy"))
    options.setdefault("threads", 1)
    return ReplaySettings(model=str(series), logdir=str(logdir), tokens=tokens, **options)


def results(folder):
    """Every byte that must be the same (TensorBoard's own files carry a time)."""
    files = [f for f in Path(folder).iterdir() if f.is_file() and "tfevents" not in f.name]
    files += (Path(folder) / "entropy_monitor").iterdir()
    assert {f.name for f in files} >= {
        "record.jsonl",
        "heads.bin",
        "heads.csv",
        "sinks.csv",
        "replay.json",
    }
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}


def eager_rows(series, name):
    """Hb, 1-s, H(pi), H per row from the model's own eager weights in float64; rows with m >= 2."""
    config = AutoConfig.from_pretrained(series)
    model = GPTNeoXForCausalLM(config).double().eval()
    state = load_file(series / name / "model.safetensors")
    state[HEAD] = state.pop("lm_head.weight")
    model.load_state_dict(state)
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(np.load(series / "tokens.npy").astype(np.int64))
    with torch.no_grad():
        p = torch.cat(model(input_ids=ids, output_attentions=True).attentions, dim=1)[:, :, 2:]
    s = p[..., 0]
    c = p[..., 1:].sum(-1)
    pi = p[..., 1:] / c[..., None]
    hb = -torch.xlogy(s, s) - torch.xlogy(c, c)
    return {
        "s": s,
        "hb": hb,
        "c": c,
        "h": -torch.xlogy(pi, pi).sum(-1),
        "total": -torch.xlogy(p, p).sum(-1),
    }


def test_both_series_against_eager_weights(twin, tmp_path):
    result = replay(settings(twin, tmp_path / "run", rows=None))
    assert result.exit_code == 0
    before, after = eager_rows(twin, "step0"), eager_rows(twin, "step320")
    dc, middle = after["c"] - before["c"], 0.5 * (after["h"] + before["h"])
    sink = float((after["hb"] - before["hb"] + dc * middle).mean())
    total = float((after["total"] - before["total"]).mean())
    change = result.summary["change"]
    assert change["total"] == pytest.approx(total, abs=1e-4)
    assert change["sink"] == pytest.approx(sink, abs=1e-4)
    assert result.summary["sink_share"] == pytest.approx(sink / total, abs=1e-4)
    assert (result.summary["sink_share"] > 0.5) == (twin.name == "with-bos")
    first = result.summary["ordered"]["sink_first"]["sink"]
    assert first == pytest.approx(
        float((after["hb"] - before["hb"] + dc * before["h"]).mean()), abs=1e-4
    )
    run = read_run(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320]
    assert len(run.checkpoints) == 15
    assert run.stat("sink_mass")[-1] == pytest.approx(after["s"].mean((0, 2)).numpy(), abs=1e-5)
    errors = change["se"]
    assert 0 < errors["total"] < 0.1


def test_a_sink_has_formed_when_it_stays():
    def emission(step, mass):
        stats = np.array([mass], dtype=np.float32)
        return Emission(step=step, layers=(("a", 4),), stats=stats, stat_names=("sink_mass",))

    series = [[0.5, 0.1, 0.4, np.nan], [0.1, 0.1, 0.4, 0.9], [0.9, 0.2, 0.4, 0.9]]
    formed = sink_formed([emission(10 * k, mass) for k, mass in enumerate(series)])
    assert formed.tolist()[0] == 20  # a sink at step 0 that went away does not count
    assert np.isnan(formed[1])
    assert formed.tolist()[2:] == [0, 10]


def test_formed_sinks_and_tables(tmp_path, few):
    pytest.importorskip("pyarrow")
    import pandas as pd

    replay(settings(few, tmp_path / "run", parquet=True))
    heads = pd.read_csv(tmp_path / "run" / "heads.csv")
    assert heads.step.tolist() == [0, 64, 128, 320]
    assert np.allclose(heads.change_total, heads.change_sink + heads.change_content, atol=1e-5)
    formed = pd.read_csv(tmp_path / "run" / "sinks.csv")
    above = heads.sink_mass > 0.3
    assert formed.formed_step.tolist() == [heads.step[above].min()]
    parquet = pd.read_parquet(tmp_path / "run" / "heads.parquet")
    assert np.allclose(parquet.total_entropy, heads.total_entropy)


def test_named_baseline_needs_no_new_measurement(few, tmp_path):
    replay(settings(few, tmp_path / "run"))
    parts = {f: f.stat().st_mtime_ns for f in (tmp_path / "run/replay/parts").iterdir()}
    result = replay(settings(few, tmp_path / "run", baseline="step64"))
    assert result.summary["baseline_step"] == 64
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "run/replay/parts").iterdir()} == parts
    run = read_run(tmp_path / "run")
    assert abs(run.change[1]).max() == 0  # step64 against itself; step0 is counted backwards
    assert run.change[0, 0, 0] > 0 > run.change[3, 0, 0]
    with pytest.raises(ReplayError, match="must be a checkpoint that was measured"):
        replay(settings(few, tmp_path / "run", baseline="step7"))


def test_batch_size_and_sampled_rows_agree_with_all_rows(few, tmp_path):
    exact = replay(settings(few, tmp_path / "exact", rows=None)).summary["change"]
    pieces = replay(settings(few, tmp_path / "pieces", rows=None, batch=5)).summary["change"]
    sampled = replay(settings(few, tmp_path / "sampled", rows=16, batch=5)).summary["change"]
    for name in ("total", "sink", "content"):
        assert pieces[name] == pytest.approx(exact[name], abs=1e-6)
        assert sampled[name] == pytest.approx(exact[name], abs=4 * exact["se"][name])


def test_damaged_checkpoints_are_named_and_the_rest_is_measured(few, tmp_path):
    shutil.copytree(few / "step0", few / "step1")  # a duplicate
    shutil.copytree(few / "step64", few / "step2")
    data = (few / "step2" / "model.safetensors").read_bytes()
    (few / "step2" / "model.safetensors").write_bytes(data[:1000])
    (few / "step3").mkdir()  # missing
    state = load_file(few / "step64" / "model.safetensors")
    state.pop("gpt_neox.layers.0.attention.dense.bias")
    (few / "step4").mkdir()
    torch.save(state, few / "step4" / "pytorch_model.bin")  # incomplete
    said = []
    result = replay(settings(few, tmp_path / "run"), say=said.append)
    assert result.exit_code == 1
    lines = {
        line["name"]: (line["status"], line["detail"]) for line in result.summary["checkpoints"]
    }
    assert lines["step1"] == ("duplicate", "weights identical to step0")
    assert lines["step2"][0] == "corrupt"
    assert "truncated: 1000 bytes" in lines["step2"][1]
    assert lines["step3"][0] == "missing"
    assert lines["step4"][0] == "corrupt"
    assert "attention.dense.bias" in lines["step4"][1]
    assert read_run(tmp_path / "run").steps.tolist() == [0, 1, 64, 128, 320]
    assert sum(": corrupt: " in line or ": missing: " in line for line in said) == 3
    # mended, the same command measures what was missing and nothing else
    shutil.copy(few / "step64" / "model.safetensors", few / "step2")
    shutil.rmtree(few / "step3")
    shutil.copytree(few / "step128", few / "step3")
    (few / "step4" / "pytorch_model.bin").unlink()
    shutil.copy(few / "step128" / "model.safetensors", few / "step4")
    assert replay(settings(few, tmp_path / "run")).exit_code == 0
    assert replay(settings(few, tmp_path / "run", skip_duplicates=True)).exit_code == 0
    assert read_run(tmp_path / "run").steps.tolist() == [1, 64, 128, 320]


def test_nothing_can_be_measured(few, tmp_path):
    for file in few.glob("step*/model.safetensors"):
        file.write_bytes(b"nothing")
    result = replay(settings(few, tmp_path / "run"))
    assert result.exit_code == 2
    assert not (tmp_path / "run" / "entropy_monitor").exists()


def test_other_settings_in_the_same_folder_are_refused(few, tmp_path):
    replay(settings(few, tmp_path / "run"))
    with pytest.raises(ReplayError, match=r"other settings \(rows: 64, now 8\)"):
        replay(settings(few, tmp_path / "run", rows=8))
    assert replay(settings(few, tmp_path / "run", rows=8, restart=True)).exit_code == 0


def test_a_training_run_is_not_overwritten(few, tmp_path):
    (tmp_path / "run" / "entropy_monitor").mkdir(parents=True)
    with pytest.raises(ReplayError, match="record of a training run"):
        replay(settings(few, tmp_path / "run"))


def test_dry_run_states_the_cost_and_writes_nothing(few, tmp_path):
    said = []
    result = replay(settings(few, tmp_path / "run", dry_run=True), say=said.append)
    assert not result.finished
    assert not (tmp_path / "run").exists()
    assert "4 checkpoints, nothing to download" in said[1]
    assert "memory about" in said[2]


def test_shards_leave_the_results_to_the_last(few, tmp_path):
    replay(settings(few, tmp_path / "one"))
    first = replay(settings(few, tmp_path / "two", shard=(1, 2)))
    assert not first.finished
    assert not (tmp_path / "two" / "entropy_monitor").exists()
    assert replay(settings(few, tmp_path / "two", shard=(0, 2))).finished
    assert results(tmp_path / "one") == results(tmp_path / "two")


def test_stopped_in_the_middle_and_resumed(few, tmp_path):
    replay(settings(few, tmp_path / "calm"))

    def stop(line):
        if "step64" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(settings(few, tmp_path / "stopped"), say=stop)
    assert len(list((tmp_path / "stopped/replay/parts").iterdir())) == 2
    (tmp_path / "stopped/replay/parts/.00002.1.tmp").write_bytes(b"half a part")
    said = []
    replay(settings(few, tmp_path / "stopped"), say=said.append)
    assert "2 checkpoints are measured already" in said
    assert results(tmp_path / "stopped") == results(tmp_path / "calm")


def test_results_are_the_same_bytes_when_made_again(few, tmp_path):
    replay(settings(few, tmp_path / "run"))
    before = results(tmp_path / "run")
    events = [f for f in (tmp_path / "run").iterdir() if "tfevents" in f.name]
    replay(settings(few, tmp_path / "run"))
    assert results(tmp_path / "run") == before
    assert len([f for f in (tmp_path / "run").iterdir() if "tfevents" in f.name]) == len(events)


def test_rows_survive_storage_exactly(few, tmp_path):
    from entropy_monitor.replay.models import load_model
    from entropy_monitor.replay.worker import measure

    config = AutoConfig.from_pretrained(few)
    loaded = load_model(few / "step128", ModelSpec(), config=config)
    tokens = np.load(few / "tokens.npy").astype(np.int64)
    replay(settings(few, tmp_path / "run"))
    snapshot, _ = measure(loaded, tokens, step=128, batch=32, rows=64, sink="first")
    stored = PartStore(tmp_path / "run/replay/parts").snapshot(2)
    (name,) = snapshot.layers
    for key, value in vars(snapshot.rows[name]).items():
        assert np.array_equal(value, vars(stored.rows[name])[key]), key
    assert torch.equal(snapshot.sums[name].packed(), stored.sums[name].packed())


def test_automatic_sink_is_found_on_the_last_checkpoint_and_kept(few, tmp_path):
    replay(settings(few, tmp_path / "auto", sink="auto"))
    assert json.loads((tmp_path / "auto/replay/sink.json").read_text()) == [0]
    replay(settings(few, tmp_path / "first"))
    auto, first = read_run(tmp_path / "auto"), read_run(tmp_path / "first")
    assert np.array_equal(auto.stat("sink_mass"), first.stat("sink_mass"))
    assert auto.header["sink"] == [0]


def command(series, logdir, *more):
    code = (
        "import argparse, sys; from entropy_monitor.replay import cli; "
        "p = argparse.ArgumentParser(); "
        "cli.add_arguments(p); sys.exit(cli.run(p.parse_args()))"
    )
    tokens = str(series / "tokens.npy")
    arguments = ["--tokens", tokens, "--logdir", str(logdir), "--threads", "1", *more]
    return [sys.executable, "-c", code, str(series), *arguments]


def environment(**more):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.slow
def test_killed_five_times_and_resumed(tmp_path):
    series = ROOT / "examples/series/with-bos"
    subprocess.run(command(series, tmp_path / "calm", "--quiet"), check=True, env=environment())
    choose = random.Random(5)
    kills = 0
    while kills < 5:
        parts = tmp_path / "killed/replay/parts"
        aim = min(15, len(list(parts.glob("*.npz"))) + choose.randint(1, 4))
        process = subprocess.Popen(
            command(series, tmp_path / "killed", "--quiet"), env=environment()
        )
        while process.poll() is None and len(list(parts.glob("*.npz"))) < aim:
            time.sleep(0.005)
        time.sleep(choose.random() * 0.3)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        if len(list(parts.glob("*.npz"))) == 15:
            # finished too early to be killed: throw some away, as if it had been killed before them
            for file in sorted(parts.glob("*.npz"))[choose.randint(3, 12) :]:
                file.unlink()
    subprocess.run(command(series, tmp_path / "killed", "--quiet"), check=True, env=environment())
    assert results(tmp_path / "killed") == results(tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.distributed
def test_two_workers_under_torchrun(tmp_path):
    series = ROOT / "examples/series/without-bos"
    subprocess.run(command(series, tmp_path / "one", "--quiet"), check=True, env=environment())
    script = tmp_path / "worker.py"
    script.write_text(command(series, tmp_path / "two")[2])
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    arguments = command(series, tmp_path / "two", "--quiet")[3:]
    subprocess.run([*launch, str(script), *arguments], check=True, env=environment(), timeout=240)
    assert results(tmp_path / "two") == results(tmp_path / "one")
