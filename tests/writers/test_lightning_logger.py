import csv
import sys
import types

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.loggers.logger import DummyLogger

from entropy_monitor.writers import LightningLoggerWriter, TensorBoardWriter, writer_for


class Recorder:
    """A logger that only keeps what it is given."""

    group_separator = "/"

    def __init__(self, experiment=None):
        self.rows = []
        self.experiment = experiment

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


def test_values_and_step_reach_the_logger(make, make_alert):
    logger = Recorder()
    writer = LightningLoggerWriter(logger)
    writer.write(make(5, alerts=[make_alert(5)]))
    writer.write(make(6))
    writer.close()
    step, values = logger.rows[0]
    assert step == 5
    assert values == {
        "attention/alerts": 1.0,
        "attention/sink_mass": 0.25,
        "attention/total_entropy": 1.5,
        "attention/sink_mass/blocks.0.attn": 0.0,
        "attention/sink_mass/blocks.1.attn_1": 1.0,
        "attention/sink_mass/cross": 2.0,
    }
    assert logger.rows[1][1]["attention/alerts"] == 1.0


def test_group_separator_and_layers_off(make):
    logger = Recorder()
    logger.group_separator = "-"
    LightningLoggerWriter(logger, layers=False).write(make(5))
    assert set(logger.rows[0][1]) == {
        "attention-alerts",
        "attention-sink_mass",
        "attention-total_entropy",
    }


def test_the_count_of_alerts_of_the_run_wins(make):
    logger = Recorder()
    LightningLoggerWriter(logger).write(make(5, model={"attention/alerts": 7.0}))
    assert logger.rows[0][1] == {"attention/alerts": 7.0}


def test_something_that_is_no_logger():
    with pytest.raises(TypeError, match="`logger` must have a method log_metrics, got object"):
        LightningLoggerWriter(object())


def test_csv_logger(tmp_path, make):
    logger = CSVLogger(tmp_path)
    writer = writer_for(logger)
    writer.write(make(5))
    writer.write(make(6, model={"attention/sink_mass": 0.5, "attention/new": 1.0}))
    writer.close()
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:  # noqa: PTH123
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["5", "6"]
    assert [float(row["attention/sink_mass"]) for row in rows] == [0.25, 0.5]
    assert rows[1]["attention/new"] == "1.0"


def test_tensorboard_logger_gets_the_tab(tmp_path, make):
    logger = TensorBoardLogger(tmp_path)
    writer = writer_for(logger, layers=["cross"])
    assert isinstance(writer, TensorBoardWriter)
    assert writer.summary_writer is logger.experiment
    assert writer.layers == ("cross",)
    logger.experiment.close()


def test_dummy_logger_of_fast_dev_run(make, make_alert):
    writer = writer_for(DummyLogger())
    writer.write(make(5, alerts=[make_alert()]))
    writer.close()


def test_mlflow_logger_on_a_local_file_store(tmp_path, make, make_alert, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from pytorch_lightning.loggers import MLFlowLogger

    # mlflow calls its file store legacy and asks for this; it is what needs no server.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("attention", tracking_uri=f"file:{tmp_path}")
    writer = writer_for(logger)
    writer.write(make(5, alerts=[make_alert()]))
    writer.write(make(6))
    writer.close()
    history = logger.experiment.get_metric_history(
        logger.run_id, "attention/sink_mass.blocks.1.attn_1"
    )
    assert [(point.step, point.value) for point in history] == [(5, 1.0), (6, 1.0)]


def test_wandb_logger_offline(tmp_path, make, make_alert, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from pytorch_lightning.loggers import WandbLogger

    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_SILENT", "true"),
        ("WANDB_DIR", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
    logger = WandbLogger(project="attention", save_dir=str(tmp_path), offline=True)
    sent = []
    run = logger.experiment
    monkeypatch.setattr(type(run), "alert", lambda self, **kwargs: sent.append(kwargs))
    writer = writer_for(logger)
    writer.write(make(5, alerts=[make_alert(5)]))
    writer.write(make(6))
    writer.close()
    assert run.summary["attention/sink_mass"] == 0.25
    assert run.summary["trainer/global_step"] == 6
    assert sent == [
        {
            "title": "attention: concentration",
            "text": "step 5: content entropy fell",
            "level": wandb.AlertLevel.WARN,
        }
    ]
    wandb.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def service(monkeypatch, name):
    """A library that can send alerts, as far as it is used here."""
    module = types.ModuleType(name)
    module.AlertLevel = types.SimpleNamespace(INFO="i", WARN="w", ERROR="e")
    module.sent = []
    module.alert = lambda **kwargs: module.sent.append(kwargs)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_alerts_go_to_the_service_of_the_logger(make, make_alert, monkeypatch, name):
    module = service(monkeypatch, name)
    other = service(monkeypatch, {"wandb": "trackio", "trackio": "wandb"}[name])
    logger_class = type(f"{name.title()}Logger", (Recorder,), {})
    alerts = [make_alert(5), make_alert(5, severity="error"), make_alert(5, severity="info")]
    LightningLoggerWriter(logger_class()).write(make(5, alerts=alerts))
    assert [sent["level"] for sent in module.sent] == ["w", "e", "i"]
    assert module.sent[0]["title"] == "attention: concentration"
    assert other.sent == []


def test_a_library_that_is_merely_loaded_is_not_sent_to(make, make_alert, monkeypatch):
    modules = [service(monkeypatch, name) for name in ("wandb", "trackio")]
    LightningLoggerWriter(Recorder()).write(make(5, alerts=[make_alert(5)]))
    assert all(module.sent == [] for module in modules)
