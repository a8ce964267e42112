"""Damage is named, code is never run, and the hash depends on the weights alone."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from entropy_monitor.replay import CheckpointError
from entropy_monitor.replay.weights import hash_weights, peek_step, read_weights


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("/tmp/entropy-monitor-test-evil"),))


def cut(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: cut(f, 0.5), "truncated"),
        (lambda f: cut(f, 0.0), "not a safetensors file"),
        (lambda f: f.write_bytes(b"\xff" * 5000), "not a safetensors file"),
        (lambda f: f.write_bytes(f.read_bytes()[:8] + b"#" + f.read_bytes()[9:]), "broken header"),
        (lambda f: f.write_bytes(f.read_bytes() + b"tail"), "too long"),
    ],
)
def test_damaged_safetensors(few, damage, reason):
    file = few / "step64" / "model.safetensors"
    damage(file)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_weights(few / "step64")
    assert caught.value.status == "corrupt"


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_truncated_pickle(few, tmp_path, keep):
    file = tmp_path / "pytorch_model.bin"
    torch.save(load_file(few / "step64" / "model.safetensors"), file)
    cut(file, keep)
    with pytest.raises(CheckpointError) as caught:
        read_weights(tmp_path)
    assert caught.value.status == "corrupt"


def test_pickled_code_is_not_run(tmp_path):
    marker = Path("/tmp/entropy-monitor-test-evil")
    marker.unlink(missing_ok=True)
    torch.save({"state_dict": {"w": torch.zeros(1)}, "extra": Evil()}, tmp_path / "step1.ckpt")
    (tmp_path / "old.bin").write_bytes(pickle.dumps(Evil()))
    for name in ("step1.ckpt", "old.bin"):
        with pytest.raises(CheckpointError):
            read_weights(tmp_path / name)
    assert not marker.exists()


def test_pickled_code_is_named(tmp_path):
    torch.save({"state_dict": {}, "extra": Evil()}, tmp_path / "step1.ckpt")
    with pytest.raises(CheckpointError, match="needs code to load"):
        read_weights(tmp_path / "step1.ckpt")


def test_not_a_state_dict(tmp_path):
    torch.save([1, 2], tmp_path / "a.bin")
    torch.save({"epoch": 3}, tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_weights(tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        read_weights(tmp_path / "b.bin")


def test_old_format_is_read(few, tmp_path):
    state = load_file(few / "step64" / "model.safetensors")
    torch.save(state, tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    assert hash_weights(read_weights(tmp_path)) == hash_weights(state)


def test_index_outside_its_folder_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "../secret.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_weights(tmp_path)


def test_hash_depends_on_weights_alone(tmp_path):
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(state, tmp_path / "x.safetensors")
    torch.save(state, tmp_path / "y.bin")
    assert hash_weights(read_weights(tmp_path / "x.safetensors")) == hash_weights(
        read_weights(tmp_path / "y.bin")
    )
    changed = [
        {**state, "a": state["a"].T.contiguous()},
        {**state, "a": state["a"].half()},
        {**state, "b": -state["b"]},
        {"c": state["a"], "b": state["b"]},
        {"aa": state["a"], "b": state["b"]},
        {**state, "a": state["a"].reshape(3, 2)},
        {**state, "a": state["a"].view(torch.int32)},
    ]
    assert len({hash_weights(s) for s in (state, *changed)}) == 1 + len(changed)


def test_step_of_a_lightning_checkpoint(tmp_path):
    torch.save({"global_step": 40, "state_dict": {}}, tmp_path / "last.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "none.ckpt")
    assert peek_step(tmp_path / "last.ckpt") == 40
    assert peek_step(tmp_path / "none.ckpt") is None
