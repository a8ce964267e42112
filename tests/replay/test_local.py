"""Every layout a series can have on disk gives the same checkpoints and the same weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from entropy_monitor.replay import CheckpointError, ReplayError
from entropy_monitor.replay.local import LocalSource
from entropy_monitor.replay.weights import hash_weights, read_weights, weight_files


@pytest.fixture
def states(few):
    return {step: load_file(few / f"step{step}" / "model.safetensors") for step in (0, 64, 320)}


def sharded(folder, state, suffix):
    names = sorted(state)
    parts = {f"model-0000{k + 1}-of-00002.{suffix}": names[k::2] for k in range(2)}
    folder.mkdir(parents=True)
    for file, keys in parts.items():
        part = {key: state[key] for key in keys}
        if suffix == "safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    name = (
        "model.safetensors.index.json"
        if suffix == "safetensors"
        else "pytorch_model.bin.index.json"
    )
    (folder / name).write_text(json.dumps(index))


def step_folders(root, states):
    for step, state in states.items():
        (root / f"step{step}").mkdir(parents=True)
        save_file(state, root / f"step{step}" / "model.safetensors")


def trainer_folders(root, states):
    for step, state in states.items():
        (root / f"checkpoint-{step}").mkdir(parents=True)
        torch.save(state, root / f"checkpoint-{step}" / "pytorch_model.bin")
        torch.save({"x": 1}, root / f"checkpoint-{step}" / "optimizer.pt")
    save_file(
        states[320], root / "model.safetensors"
    )  # the Trainer leaves the final model at the top


def shards(root, states):
    for k, (step, state) in enumerate(states.items()):
        sharded(root / f"step{step}", state, ("safetensors", "bin")[k % 2])


def lightning(root, states):
    folder = root / "lightning_logs" / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    for k, (step, state) in enumerate(states.items()):
        content = {"state_dict": state, "global_step": step, "optimizer_states": [{"state": {}}]}
        torch.save(content, folder / (f"epoch={k}-step={step}.ckpt" if k else "first.ckpt"))


def flat_files(root, states):
    root.mkdir()
    for step, state in states.items():
        save_file(state, root / f"model_{step:06d}.safetensors")


def hub_cache(root, states):
    (root / "refs").mkdir(parents=True)
    for step, state in states.items():
        commit = f"{step:040x}"
        (root / "refs" / f"step{step}").write_text(commit)
        (root / "snapshots" / commit).mkdir(parents=True)
        save_file(state, root / "snapshots" / commit / "model.safetensors")


LAYOUTS = [step_folders, trainer_folders, shards, lightning, flat_files, hub_cache]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(layout, states, tmp_path):
    root = tmp_path / "run"
    layout(root, states)
    source = LocalSource(root)
    assert [c.step for c in source.checkpoints] == [0, 64, 320]
    for checkpoint, state in zip(source.checkpoints, states.values(), strict=True):
        assert hash_weights(read_weights(source.fetch(checkpoint))) == hash_weights(state)
        assert checkpoint.size is not None


def test_one_file_and_one_folder(few):
    for path in (few / "step64" / "model.safetensors", few / "step64"):
        (checkpoint,) = LocalSource(path).checkpoints
        assert checkpoint.problem is None
    assert LocalSource(few / "step64").checkpoints[0].step == 64


def test_trainer_state_tells_the_step_of_one_model(few):
    shutil.copytree(few / "step64", few.parent / "llama-7")
    assert LocalSource(few.parent / "llama-7").checkpoints[0].step == 0
    (few.parent / "llama-7" / "trainer_state.json").write_text('{"global_step": 900}')
    assert LocalSource(few.parent / "llama-7").checkpoints[0].step == 900


def test_empty_step_folder_is_kept_to_be_reported(few):
    (few / "step128" / "model.safetensors").unlink()
    source = LocalSource(few)
    assert [c.name for c in source.checkpoints] == ["step0", "step64", "step128", "step320"]
    with pytest.raises(CheckpointError, match="no weights"):
        read_weights(source.fetch(source.checkpoints[2]))


def test_shared_config_is_found_at_the_top_and_in_the_last_checkpoint(few):
    assert LocalSource(few).shared_file("config.json") == few / "config.json"
    (few / "config.json").rename(few / "step320" / "config.json")
    assert LocalSource(few).shared_file("config.json") == few / "step320" / "config.json"
    assert LocalSource(few).shared_file("nothing.json") is None


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_wrong_folder_is_one_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReplayError, match=r"neither a path|holds no checkpoints"):
        LocalSource(tmp_path / name)


def test_missing_shard_is_named(states, tmp_path):
    sharded(tmp_path / "step1", states[0], "safetensors")
    (tmp_path / "step1" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 2 shards, first model-00002") as caught:
        weight_files(tmp_path / "step1")
    assert caught.value.status == "missing"
