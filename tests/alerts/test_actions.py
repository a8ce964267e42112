import http.server
import json
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from entropy_monitor.alerts import Alert
from entropy_monitor.alerts.actions import (
    AlertFile,
    AlertWarning,
    CheckpointNow,
    LoggerAlert,
    Only,
    StopTraining,
    Webhook,
    log_alert,
    warn_alert,
)

NOTE = Alert("sink_growth", "info", "model", 10, message="the sink grew")
WARN = Alert(
    "concentration", "warn", "layer", 20, "blocks.1", message="look", evidence={"evenness": 0.1}
)
ERROR = Alert("nonfinite", "error", "model", 30, message="act")


def test_log_levels(caplog):
    with caplog.at_level(logging.INFO, logger="entropy_monitor.alerts"):
        for alert in (NOTE, WARN, ERROR):
            log_alert(alert)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "ERROR"]


def test_warn_only_for_alarms(recwarn):
    warn_alert(NOTE)
    assert not recwarn.list
    with pytest.warns(AlertWarning, match="look"):
        warn_alert(WARN)


def test_only_filters_and_passes_on():
    seen = []
    for alert in (NOTE, WARN, ERROR):
        Only(seen.append, severity="warn", kinds=["nonfinite"])(alert)
    assert seen == [ERROR]
    stop = StopTraining()
    only = Only(stop)
    only.setup_trainer(SimpleNamespace(should_stop=False), None)
    assert only.all_ranks
    assert stop.trainer is not None
    with pytest.raises(ValueError, match="concentration, logit_growth"):
        Only(seen.append, kinds=["collapse"])


def test_alert_file_round_trip(tmp_path):
    file = AlertFile(tmp_path / "run")
    for alert in (NOTE, WARN, ERROR):
        file(alert)
    with file.path.open("a") as raw:
        raw.write('{"kind": "conc')  # the run died in the middle of a line
    assert file.path.name == "alerts.jsonl"
    assert file.read() == [NOTE, WARN, ERROR]


def test_stop_after_errors():
    trainer = SimpleNamespace(should_stop=False)
    stop = StopTraining(trainer, after=2)
    for alert in (NOTE, WARN, ERROR):
        stop(alert)
    assert not trainer.should_stop
    stop(ERROR)
    assert trainer.should_stop


def test_stop_grace_counts_an_event_once():
    stop = StopTraining(SimpleNamespace(should_stop=False), after=2, grace=100)
    stop(ERROR)
    stop(Alert("concentration", "error", "model", 60))
    assert stop.count == 1


def test_stop_transformers_and_callable():
    trainer = SimpleNamespace(control=SimpleNamespace(should_training_stop=False))
    StopTraining(trainer)(ERROR)
    assert trainer.control.should_training_stop
    calls = []
    StopTraining(lambda: calls.append(1))(ERROR)
    assert calls == [1]
    with pytest.raises(RuntimeError, match="no trainer"):
        StopTraining()(ERROR)


def test_checkpoint_now_is_bounded(tmp_path):
    paths = []
    save = CheckpointNow(SimpleNamespace(save_checkpoint=paths.append), folder=tmp_path, at_most=2)
    for alert in (NOTE, WARN, ERROR, ERROR):
        save(alert)
    assert paths == [
        str(tmp_path / "alert-concentration-step20.ckpt"),
        str(tmp_path / "alert-nonfinite-step30.ckpt"),
    ]


def test_logger_alert_finds_the_logger_with_alerts():
    calls = []
    wandb = SimpleNamespace(alert=lambda **fields: calls.append(fields))
    trainer = SimpleNamespace(
        loggers=[SimpleNamespace(experiment=object()), SimpleNamespace(experiment=wandb)]
    )
    action = LoggerAlert()
    action(WARN)  # no logger yet: nothing happens
    action.setup_trainer(trainer, None)
    action(NOTE)
    action(WARN)
    assert calls == [{"title": "concentration in layer blocks.1", "text": "look", "level": "WARN"}]


@pytest.fixture
def receiver():
    bodies, wait = [], threading.Event()
    wait.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            wait.wait(5)
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}/", bodies=bodies, wait=wait)
    wait.set()
    server.shutdown()
    server.server_close()


def test_webhook_posts(receiver):
    hook = Webhook(receiver.url)
    hook(NOTE)
    hook(WARN)
    assert hook.flush()
    assert (hook.sent, hook.failed) == (1, 0)
    assert receiver.bodies[0]["kind"] == "concentration"
    assert receiver.bodies[0]["text"] == "[warn] look"


def test_webhook_never_blocks_a_step(receiver):
    receiver.wait.clear()  # the receiver hangs
    hook = Webhook(receiver.url, timeout=0.3)
    start = time.perf_counter()
    for _ in range(50):
        hook(ERROR)
    assert time.perf_counter() - start < 0.2
    assert hook.dropped >= 50 - 34
    receiver.wait.set()


def test_webhook_failure_is_logged_once(caplog):
    caplog.clear()
    hook = Webhook("http://127.0.0.1:9/", timeout=0.5)
    for _ in range(3):
        hook(ERROR)
    assert hook.flush()
    assert hook.failed == 3
    assert len([record for record in caplog.records if "127.0.0.1:9/" in record.message]) == 1


def test_webhook_refuses_other_schemes():
    with pytest.raises(ValueError, match="http://"):
        Webhook("file:///etc/passwd")
