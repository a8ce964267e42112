"""A real TensorBoard, with both of its loaders, over a log folder that wishes it ill."""

import json
import shutil
import urllib.parse

import numpy as np
import pytest

LAYERS = (("enc.0", 2), ("enc.1", 3))
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, synthetic):
    """A log folder, and the names of its runs."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

    from entropy_monitor.alerts.alert import Alert

    root = tmp_path_factory.mktemp("hostile")
    layout = {"version": 1, "stats": ["sink_mass"], "layers": [{"name": "a", "heads": 2}]}
    alert = Alert(
        kind="dilution", severity="warn", level="layer", step=0, layer=MARKUP, message=MARKUP
    )
    synthetic.write_run(root / "good", LAYERS, range(0, 51, 10))
    synthetic.write_run(root / MARKUP, ((MARKUP, 2), ("b", 1)), [0, 10], alerts=[alert])
    synthetic.write_run(root / "a run & ünïcode '\"`", LAYERS, [0, 10])
    for name, tensor in {
        "rank": np.zeros(3, np.float32),
        "int": np.zeros((1, 1, 2), np.int32),
        "text": np.array([b"x"]),
        "nan": np.full((1, 1, 2), np.nan, np.float32),
    }.items():
        log = synthetic.EventLog(root / name)
        log.raw("attention_heads", tensor, layout, step=1)
        log.close()
    log = synthetic.EventLog(root / "meta")
    log.raw("attention_heads", np.zeros((1, 1, 2), np.float32), b"\xff{", step=1)
    log.close()
    # A tensor that says it has more values than it brings.
    log = synthetic.EventLog(root / "short")
    value = synthetic.heads_summary(synthetic.emission(LAYERS, 0, 1))
    value.tensor.tensor_content = value.tensor.tensor_content[:5]
    log.summary(value, step=0)
    log.close()
    log = synthetic.EventLog(root / "scalar")
    value = synthetic.heads_summary(synthetic.emission(LAYERS, 0, 1))
    value.ClearField("tensor")
    value.simple_value = 3.0
    log.summary(value, step=0)
    value.tensor.CopyFrom(tensor_pb2.TensorProto(dtype=types_pb2.DT_RESOURCE))
    log.summary(summary_pb2.Summary.Value(tag="attention_heads", tensor=value.tensor), step=1)
    log.close()
    synthetic.write_run(root / "cut", LAYERS, range(0, 51, 10))
    (cut,) = (root / "cut").iterdir()
    cut.write_bytes(cut.read_bytes()[:-700])
    (root / "garbage").mkdir()
    (root / "garbage" / "events.out.tfevents.1.x").write_bytes(bytes(range(256)) * 40)
    (root / "emptied").mkdir()
    (root / "emptied" / "events.out.tfevents.1.x").write_bytes(b"")
    return root


def routes(run):
    name = urllib.parse.quote(run, safe="")
    yield f"frames?run={name}&stat=sink_mass"
    yield f"frames?run={name}&stat=change_total&from=0"
    yield f"series?run={name}&layer=0&head=0"
    yield f"attribution?run={name}"
    yield f"attribution?run={name}&from=0&to=10"
    yield f"alerts?run={name}"


@pytest.mark.parametrize("loader", ["rust", "python"])
def test_a_hostile_log_folder(hostile, tmp_path, serving, loader):
    with serving.tensorboard(
        hostile, tmp_path, loader, ready=lambda one: {"good", MARKUP, "cut"} <= set(one.runs())
    ) as server:
        server.wait(serving.has_step("good", 50))
        listed = server.runs()
        assert "problem" in listed["good"]
        for run in [*listed, "garbage", "emptied", "..", "../../etc/passwd", "good/..", ""]:
            for route in routes(run):
                status, body, kind = server.get(route)
                assert status in (200, 400, 404), (run, route, body[:200])
                assert kind in ("application/json", "application/octet-stream")
                if kind == "application/json":
                    json.loads(body)
        assert server.get("frames?run=good&stat=sink_mass")[0] == 200
        split = json.loads(server.get("attribution?run=good&from=0&to=50")[1])
        assert split["total"] == pytest.approx(split["sink"] + split["content"], abs=1e-6)
        for path in ("../index.js", "%2e%2e/plugin.py", "static/index.js", "plugin.py"):
            assert server.get(path)[0] == 404
        assert server.process.poll() is None


def test_a_broken_installation_does_not_stop_tensorboard(tmp_path, synthetic, serving):
    log, copy = tmp_path / "log", tmp_path / "copy"
    synthetic.write_run(log / "run", LAYERS, [0, 10])
    package = serving.ROOT / "entropy_monitor"
    target = copy / "entropy_monitor"
    target.mkdir(parents=True)
    for name in ("__init__.py", "names.py"):
        shutil.copy(package / name, target / name)
    shutil.copytree(package / "tensorboard_plugin", target / "tensorboard_plugin")
    (target / "tensorboard_plugin" / "plugin.py").write_text("def broken(:\n")
    with serving.tensorboard(log, tmp_path, "python", path=[copy]) as server:
        listing = json.loads(server.get("data/plugins_listing", plugin=False)[1])
        assert "scalars" in listing
        assert "entropy_monitor" not in listing
        assert "left out" in server.log.read_text()
