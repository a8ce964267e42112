"""huggingface_hub's own client against a hub on this machine."""

import json
from pathlib import Path

import pytest

from entropy_monitor.replay import CheckpointError, ReplayError, ReplaySettings, TokenSpec, replay
from entropy_monitor.replay.checkpoints import Checkpoint
from entropy_monitor.replay.hub import HubSource

TOKENS = str(Path(__file__).parents[2] / "examples/series/with-bos/tokens.npy")


@pytest.fixture
def hub(fake_hub, hub_folders):
    return fake_hub({**hub_folders, "main": hub_folders["step320"]})


def source(tmp_path, **options):
    return HubSource("owner/tiny", tmp_path / "downloads", **options)


def settings(tmp_path, **options):
    return ReplaySettings(
        model="owner/tiny",
        logdir=str(tmp_path / "run"),
        tokens=TokenSpec(tokens=TOKENS),
        threads=1,
        **options,
    )


def test_revisions_are_listed_in_order_of_step(hub, tmp_path):
    names = [c.name for c in source(tmp_path).checkpoints]
    assert names == ["step0", "step1", "step64", "step128", "step320"]


def test_model_without_steps_is_one_checkpoint(fake_hub, hub_folders, tmp_path):
    fake_hub({"main": hub_folders["step64"]})
    assert [c.name for c in source(tmp_path).checkpoints] == ["main"]


def test_fetched_files_are_deleted_after_use(hub, tmp_path):
    made = source(tmp_path)
    path = made.fetch(made.checkpoints[2])
    assert sorted(f.name for f in path.iterdir()) == ["config.json", "model.safetensors"]
    made.release(made.checkpoints[2])
    assert not list((tmp_path / "downloads").rglob("*.safetensors"))


def test_keep_leaves_them_in_the_hubs_cache(hub, tmp_path):
    made = source(tmp_path, keep=True)
    path = made.fetch(made.checkpoints[2])
    made.release(made.checkpoints[2])
    assert (path / "model.safetensors").is_file()
    assert (tmp_path / "hub-cache") in path.parents


def test_broken_download_is_tried_again(hub, tmp_path):
    hub.breaks["step64", "model.safetensors"] = 2
    made = source(tmp_path)
    assert made.fetch(made.checkpoints[2]).is_dir()
    assert hub.downloads() >= 2


def test_broken_every_time_is_reported(hub, tmp_path):
    hub.breaks["step64", "model.safetensors"] = 10_000
    made = source(tmp_path, attempts=2)
    with pytest.raises(CheckpointError, match="failed 2 times") as caught:
        made.fetch(made.checkpoints[2])
    assert caught.value.status == "failed"


def test_wrong_bytes_of_the_right_length_are_corrupt(hub, tmp_path):
    hub.lies.add(("step64", "model.safetensors"))
    made = source(tmp_path, attempts=2)
    with pytest.raises(CheckpointError, match="SHA-256") as caught:
        made.fetch(made.checkpoints[2])
    assert caught.value.status == "corrupt"
    assert hub.downloads() == 2  # the wrong file was not taken from the cache


def test_busy_hub_is_asked_again(hub, tmp_path):
    hub.refuse = 2
    assert len(source(tmp_path).checkpoints) == 5


def test_missing_revision_and_missing_weights(hub, hub_folders, tmp_path):
    hub.hidden.add("step64")
    (hub_folders["step128"] / "model.safetensors").unlink()
    made = source(tmp_path)
    for number, reason in ((2, "not on the hub"), (3, "no safetensors or .bin")):
        with pytest.raises(CheckpointError, match=reason) as caught:
            made.fetch(made.checkpoints[number])
        assert caught.value.status == "missing"


def test_unknown_model_is_one_line(hub, tmp_path):
    with pytest.raises(ReplayError, match="neither a path on this machine nor a model on the hub"):
        HubSource("owner/other", tmp_path)


def test_unreachable_hub_is_one_line(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ReplayError, match=r"cannot list owner/tiny on http://127\.0\.0\.1:9"):
        source(tmp_path, attempts=1)


def test_equal_weights_have_equal_fingerprints(hub, tmp_path):
    made = source(tmp_path)
    marks = [made.fingerprint(c) for c in made.checkpoints]
    assert marks[0] == marks[1] != marks[2]
    assert made.fingerprint(Checkpoint(name="x", step=0, where="x")) is None


def test_replay_streams_flags_and_reports(hub, tmp_path):
    hub.hidden.add("step128")
    hub.breaks["step320", "model.safetensors"] = 1
    said = []
    result = replay(settings(tmp_path, revisions="all"), say=said.append)
    assert result.exit_code == 1
    status = {o.name: o.status for o in result.outcomes}
    assert status["step128"] == "missing"
    assert sum(s == "measured" for s in status.values()) == 4
    lines = {line["name"]: line for line in result.summary["checkpoints"]}
    assert lines["step1"]["status"] == "duplicate"
    assert lines["step1"]["same_as"] == "step0"
    paths = [p for p in hub.requests if p.startswith("GET") and p.endswith("model.safetensors")]
    assert not [p for p in paths if hub.commit("step1") in p or "step1/" in p]  # not fetched twice
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert any("to download" in line for line in said)
    json.dumps(result.summary, allow_nan=False)


def test_download_above_the_budget_stops_before_it_starts(hub, tmp_path):
    with pytest.raises(ReplayError, match="--yes"):
        replay(settings(tmp_path, max_download_gb=1e-6))
    assert hub.downloads() == 0


def test_no_such_revision(hub, tmp_path):
    with pytest.raises(ReplayError, match="no revision 'step7'; it has 5, from step0 to step320"):
        replay(settings(tmp_path, revisions="step7"))
