"""The routes on a log folder that TensorBoard reads, without a server."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from entropy_monitor.names import CHANGE_NAMES, CHANGE_STAT_NAMES, STAT_NAMES
from entropy_monitor.tensorboard_plugin import answers, packing, plugin, store
from entropy_monitor.tensorboard_plugin.history import build_history
from entropy_monitor.tensorboard_plugin.layout import Layer, Layout

LAYERS = (("enc.0", 2), ("enc.1", 4), ("dec.0.cross", 3), ("dec.0.cross#1", 3))
HOSTILE = '<img src=x onerror="alert(1)"></script>'


@pytest.fixture(scope="session")
def unpack():
    path = Path(__file__).with_name("test_packing.py")
    spec = importlib.util.spec_from_file_location("tests_packing_reader", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.unpack


@pytest.fixture
def run(tmp_path, synthetic, app):
    written = synthetic.write_run(tmp_path / "run", LAYERS, range(0, 101, 10), baseline_at=20)
    return app(tmp_path), written


def test_runs_are_listed_with_layers_and_statistics(run):
    routes, _ = run
    answer = routes.get("runs").json
    (run_found,), (layout,) = answer["runs"], answer["layouts"]
    found = {**run_found, **layout}
    assert found["name"] == "run"
    assert [(layer["name"], layer["heads"]) for layer in found["layers"]] == list(LAYERS)
    assert [stat["name"] for stat in found["stats"]] == [*STAT_NAMES, *CHANGE_STAT_NAMES]
    assert found["version"][0] == 100
    sink = found["stats"][0]
    assert (sink["formula"], sink["unit"]) == ("s", "mass")


def test_runs_of_one_model_share_their_layout(tmp_path, synthetic, app):
    for name in ("a", "b", "c"):
        layers = LAYERS[:2] if name == "c" else LAYERS
        synthetic.write_run(tmp_path / name, layers, [0], alerts=[])
    answer = app(tmp_path).get("runs").json
    assert [run["layout"] for run in answer["runs"]] == [0, 0, 1]
    assert len(answer["layouts"][1]["layers"]) == 2


def test_frames_are_what_was_written(run, unpack):
    routes, written = run
    header, arrays = unpack(routes.get("frames", run="run", stat="sink_mass").data)
    assert header["steps"] == list(range(0, 101, 10))
    expected = np.stack([one.stat("sink_mass") for one in written])
    np.testing.assert_array_equal(arrays["values"], expected)
    assert header["limits"] == [float(expected.min()), float(expected.max())]


def test_series_of_one_head(run, unpack):
    routes, written = run
    header, arrays = unpack(routes.get("series", run="run", layer=2, head=1).data)
    place = header["stats"].index("content_entropy")
    expected = [one.stat("content_entropy")[2 + 4 + 1] for one in written]
    np.testing.assert_array_equal(arrays["values"][place], np.float32(expected))
    assert np.isnan(arrays["changes"][:, :2]).all()
    np.testing.assert_array_equal(
        arrays["changes"][:, 2:].T, [one.change[:, 7] for one in written[2:]]
    )


def test_attribution_averages_over_heads_not_over_layers(run, unpack):
    routes, written = run
    header, arrays = unpack(routes.get("attribution", run="run").data)
    assert header["since"] == {"kind": "baseline", "step": 20}
    np.testing.assert_allclose(
        arrays["model"][:, -1], written[-1].change.mean(axis=1, dtype=np.float64), rtol=1e-6
    )
    np.testing.assert_allclose(
        arrays["layers"][:, -1, 1], written[-1].change[:, 2:6].mean(axis=1), rtol=1e-5
    )
    place = header["stats"].index("sink_mass")
    np.testing.assert_allclose(
        arrays["means"][place, 3], written[3].stat("sink_mass").mean(), rtol=1e-6
    )
    assert arrays["highest"][-1] == written[-1].stat("max_logit").max()


def test_split_between_two_steps_adds_up(run):
    routes, _ = run
    split = routes.get("attribution", run="run", **{"from": 10, "to": 90}).json
    assert split["from"] == {"kind": "step", "step": 10}
    assert split["total"] == pytest.approx(
        split["sink"] + split["content"] + split["support"], abs=1e-6
    )
    layer = split["layers"][1]
    assert layer["sink"] == pytest.approx(np.mean(layer["heads"]["sink"]))
    assert len(layer["heads"]["total"]) == 4


def test_alerts_know_where_their_layer_stands(run):
    routes, _ = run
    found = routes.get("alerts", run="run").json
    assert found["total"] == 4
    by_kind = {alert["kind"]: alert for alert in found["alerts"]}
    assert by_kind["concentration"]["layer_index"] == 2
    assert by_kind["concentration"]["head"] == 1
    assert by_kind["dilution"]["layer_index"] is None


def test_new_steps_show_after_a_reload(tmp_path, synthetic, app, unpack):
    log_folder = tmp_path / "run"
    synthetic.write_run(log_folder, LAYERS, range(0, 51, 10))
    routes = app(tmp_path)
    before = routes.get("runs").json["runs"][0]["version"]
    assert unpack(routes.get("frames", run="run", stat="sink_mass").data)[0]["steps"][-1] == 50
    log = synthetic.EventLog(log_folder)
    log.summary(synthetic.heads_summary(synthetic.emission(LAYERS, 60, 100)), step=60)
    log.close()
    routes.reload()
    assert routes.get("runs").json["runs"][0]["version"] != before
    assert unpack(routes.get("frames", run="run", stat="sink_mass").data)[0]["steps"][-1] == 60


@pytest.mark.parametrize(
    ("route", "params", "status"),
    [
        ("frames", {}, 400),
        ("frames", {"run": "run"}, 400),
        ("frames", {"run": "run", "stat": "nope"}, 404),
        ("frames", {"run": "..", "stat": "sink_mass"}, 404),
        ("frames", {"run": "../../etc/passwd", "stat": "sink_mass"}, 404),
        ("frames", {"run": HOSTILE, "stat": "sink_mass"}, 404),
        ("frames", {"run": "run", "stat": HOSTILE}, 404),
        ("frames", {"run": "x" * 5000, "stat": "sink_mass"}, 400),
        ("frames", {"run": "run", "stat": "change_sink", "from": "x"}, 400),
        ("frames", {"run": "run", "stat": "change_sink", "from": "5"}, 404),
        ("series", {"run": "run", "layer": "1"}, 400),
        ("series", {"run": "run", "layer": "1_0", "head": "0"}, 400),
        ("series", {"run": "run", "layer": "٣", "head": "0"}, 400),
        ("series", {"run": "run", "layer": "4", "head": "0"}, 400),
        ("series", {"run": "run", "layer": "-1", "head": "0"}, 400),
        ("series", {"run": "run", "layer": "0", "head": "9" * 30}, 400),
        ("attribution", {"run": "run", "from": "7"}, 404),
        ("attribution", {"run": "run", "from": "0", "to": "7"}, 404),
        ("attribution", {"run": "run", "to": "1e3"}, 400),
        ("alerts", {"run": "nope"}, 404),
        ("alerts", {}, 400),
    ],
)
def test_wrong_parameters_are_answered_in_json(run, route, params, status):
    routes, _ = run
    answer = routes.get(route, **params)
    assert answer.status_code == status
    assert answer.content_type == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert isinstance(answer.json["error"], str)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_only_get(run, method):
    routes, _ = run
    assert routes.get("runs", method=method).status_code == 405


def test_static_files_are_served_under_their_names_only(run):
    routes, _ = run
    names = {route[1:] for route in routes.apps} - {
        "runs",
        "frames",
        "series",
        "attribution",
        "alerts",
    }
    assert {"index.js", "app.js", "style.css"} <= names
    assert all("/" not in name and ".." not in name for name in names)
    answer = routes.get("index.js")
    assert answer.content_type.startswith("text/javascript")
    assert b"render" in answer.data


def test_unexpected_errors_are_no_server_errors(run, monkeypatch):
    routes, _ = run

    def broken(*args, **kwargs):
        raise RuntimeError("<script>")

    monkeypatch.setattr(store.RunStore, "history", broken)
    answer = routes.get("alerts", run="run")
    assert answer.status_code == 400
    assert "<" not in answer.json["error"]


STRANGE = {
    "no-metadata": (np.zeros((2, 2, 2), np.float32), b""),
    "wrong-rank": (np.zeros(3, np.float32), None),
    "wrong-dtype": (np.zeros((1, 1, 2), np.int32), None),
    "text": (np.array([b"a", b"b"]), None),
    "scalar": (np.float32(1.0), None),
    "all-nan": (np.full((1, 1, 2), np.nan, np.float32), None),
    "infinite": (np.full((1, 1, 2), np.inf, np.float32), None),
    "empty": (np.zeros((0, 1, 2), np.float32), None),
    "half": (np.zeros((1, 1, 2), np.float16), None),
    "huge-claim": (
        np.zeros((1, 1, 2), np.float32),
        {"version": 1, "stats": ["s"], "layers": [{"name": "a", "heads": 4000}] * 4000},
    ),
    "markup": (
        np.zeros((1, 1, 2), np.float32),
        {"version": 1, "stats": [HOSTILE], "layers": [{"name": HOSTILE, "heads": 2}]},
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_tensors_are_answered(tmp_path, synthetic, app, name):
    tensor, layout = STRANGE[name]
    if layout is None:
        layout = {"version": 1, "stats": ["sink_mass"], "layers": [{"name": "a", "heads": 2}]}
    log = synthetic.EventLog(tmp_path / "run")
    log.raw("attention_heads", tensor, layout, step=1)
    log.close()
    routes = app(tmp_path)
    (found,) = routes.get("runs").json["runs"]
    assert found["problem"] is None or isinstance(found["problem"], str)
    stat = layout["stats"][0] if isinstance(layout, dict) else "sink_mass"
    for route, params in (
        ("frames", {"stat": stat}),
        ("frames", {"stat": "change_sink"}),
        ("series", {"layer": 0, "head": 0}),
        ("attribution", {}),
        ("alerts", {}),
    ):
        answer = routes.get(route, run="run", **params)
        assert answer.status_code in (200, 400, 404)
        if route == "alerts" and answer.status_code == 200:
            assert answer.json["total"] == 0


STRANGE_ALERTS = [
    b"",
    b"null",
    b"[]",
    b'{"alerts": 3}',
    b"\xff\xfe",
    b'{"alerts": [1, null, {"step": "x", "layer": 5, "head": [], "message": 7}]}',
    b'{"alerts": [{"step": 1e400, "head": true, "severity": "<b>"}], "count": -5}',
    b'{"alerts": [{"message": "\\ud800"}], "count": 1e9}',
    b"[" * 50_000,
]


@pytest.mark.parametrize("content", STRANGE_ALERTS, ids=lambda content: repr(content[:24]))
def test_strange_alerts_are_answered(tmp_path, synthetic, app, content):
    synthetic.write_run(tmp_path / "run", LAYERS, [0, 10], alerts=[])
    log = synthetic.EventLog(tmp_path / "run")
    log.raw("attention_alerts_json", np.array(content), {"version": 1, "kind": "alerts"}, step=5)
    log.close()
    answer = app(tmp_path).get("alerts", run="run")
    assert answer.status_code == 200
    for alert in answer.json["alerts"]:
        assert alert["layer_index"] is None
        assert alert["step"] is None or isinstance(alert["step"], int)


def test_more_alerts_than_the_log_keeps(tmp_path, synthetic, app):
    from entropy_monitor.alerts.alert import Alert

    raised = [
        Alert(
            kind="concentration",
            severity="warn",
            level="head",
            step=0,
            layer="enc.1",
            head=1,
            message=str(i),
        )
        for i in range(700)
    ]
    synthetic.write_run(tmp_path / "run", LAYERS, [0, 10], alerts=raised)
    found = app(tmp_path).get("alerts", run="run").json
    assert found["total"] == 700
    assert len(found["alerts"]) == 500
    assert found["alerts"][-1]["message"] == "699"


def large_history(steps, layers, heads, stats=("sink_mass",)):
    layout = Layout(
        stats=stats, layers=tuple(Layer(name=f"l{i}", heads=heads) for i in range(layers))
    )
    rng = np.random.default_rng(0)
    return build_history(
        "r", layout, ((i, rng.random(layout.shape, np.float32)) for i in range(steps))
    )


def test_answers_stay_within_their_budget(unpack):
    history = large_history(200, 100, 128)
    content = answers.frames_answer(history, "sink_mass")
    assert len(content) <= packing.BUDGET
    header, arrays = unpack(content)
    assert header["exact"] is False
    assert len(header["steps"]) == 200
    low, high = header["ranges"]["values"]
    back = low + arrays["values"] * ((high - low) / 65534)
    np.testing.assert_allclose(back, history.stat("sink_mass"), atol=1.6e-5)


def test_beyond_sixteen_bits_steps_are_thinned(unpack):
    history = large_history(60, 10, 16)
    content = answers.frames_answer(history, "sink_mass", budget=(64 << 10) + 30 * (2 * 160 + 4))
    header, _ = unpack(content)
    assert len(header["steps"]) == 30
    assert (header["steps"][0], header["steps"][-1], header["total_steps"]) == (0, 59, 60)


def test_huge_steps_are_exact(unpack):
    layout = Layout(stats=("sink_mass",), layers=(Layer(name="a", heads=1),))
    frames = [(2**40 + i, np.zeros((1, 1, 1), np.float32)) for i in range(3)]
    header, _ = unpack(answers.frames_answer(build_history("r", layout, frames), "sink_mass"))
    assert header["steps"] == [2**40, 2**40 + 1, 2**40 + 2]


@pytest.fixture
def small_budgets(monkeypatch):
    """Room for 3 steps of `LAYERS` at once and 6 in the background; what was asked for."""
    one = 4 * (len(STAT_NAMES) + len(CHANGE_NAMES) + 1) * 4 * 4
    monkeypatch.setattr(store, "FIRST_BUDGET", 3 * one)
    monkeypatch.setattr(store, "READ_BUDGET", 6 * one)
    asked = []
    read = store.RunStore._read_tag

    def watch(self, ctx, experiment, run, tag, limit):
        if tag == "attention_heads":
            asked.append(limit)
        return read(self, ctx, experiment, run, tag, limit)

    monkeypatch.setattr(store.RunStore, "_read_tag", watch)
    return asked


def test_a_large_run_comes_in_two_parts(tmp_path, synthetic, app, unpack, small_budgets):
    synthetic.write_run(tmp_path / "run", LAYERS, range(0, 41, 10))
    routes = app(tmp_path)
    before = routes.get("runs").json["runs"][0]
    first = routes.get("alerts", run="run").json["notices"]
    assert "Showing 3 of the recorded steps while" in first[0]
    routes.plugin._store.wait()
    after = routes.get("runs").json["runs"][0]
    assert (before["version"] != after["version"], after["loading"]) == (True, False)
    header, _ = unpack(routes.get("frames", run="run", stat="sink_mass").data)
    assert header["steps"] == [0, 10, 20, 30, 40]
    assert routes.get("alerts", run="run").json["notices"] == []
    assert small_budgets == [3, 6]


def test_a_read_asks_for_no_more_than_the_byte_budget(tmp_path, synthetic, app, small_budgets):
    synthetic.write_run(tmp_path / "run", LAYERS, range(0, 101, 10))
    routes = app(tmp_path)
    routes.get("alerts", run="run")
    routes.plugin._store.wait()
    assert (
        "Showing 6 of the recorded steps: one" in routes.get("alerts", run="run").json["notices"][0]
    )
    assert max(small_budgets) == 6


def test_a_large_run_that_grows_stays_on_the_page(tmp_path, synthetic, app, unpack, small_budgets):
    synthetic.write_run(tmp_path / "run", LAYERS, range(0, 41, 10))
    routes = app(tmp_path)
    routes.get("alerts", run="run")
    routes.plugin._store.wait()
    log = synthetic.EventLog(tmp_path / "run")
    log.summary(synthetic.heads_summary(synthetic.emission(LAYERS, 50, 50)), step=50)
    log.close()
    routes.reload()
    last = []
    for _ in range(2):
        header, _ = unpack(routes.get("frames", run="run", stat="sink_mass").data)
        last.append(header["steps"][-1])
        routes.plugin._store.wait()
    assert last == [40, 50]


def test_one_read_serves_all_answers_until_the_run_grows(run, monkeypatch):
    routes, _ = run
    count = []
    read = store.RunStore._read
    monkeypatch.setattr(
        store.RunStore,
        "_read",
        lambda self, *args, **named: count.append(1) or read(self, *args, **named),
    )
    for route, params in (("attribution", {}), ("alerts", {}), ("frames", {"stat": "sink_mass"})):
        assert routes.get(route, run="run", **params).status_code == 200
    assert len(count) == 1


def test_the_front_end_parses_no_markup_and_asks_nobody_else():
    for name, content in plugin.static_files().items():
        text = content.decode()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
        ):
            assert word not in text, f"{word} in {name}"
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text


def test_answers_hold_no_nan_in_json(run):
    routes, _ = run
    for route, params in (
        ("runs", {}),
        ("alerts", {"run": "run"}),
        ("attribution", {"run": "run", "to": 0}),
    ):
        text = routes.get(route, **params).get_data(as_text=True)
        json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
