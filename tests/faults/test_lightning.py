"""Whatever fails in the monitor, a Lightning run ends as it would have ended without it."""

import errno
import json
import os
import warnings
from contextlib import suppress

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger

from entropy_monitor import EntropyMonitor
from entropy_monitor.pipeline import EntropyMonitorWarning
from entropy_monitor.writers import ConsoleWriter, MemoryWriter, read_run
from tests.faults.faults import STAGES, Fault
from tests.runs import Language, bits, loader, traces, train, trainer, watch
from tests.versions import WEIGHTS_ONLY


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Final weights without a monitor."""
    return bits(train(tmp_path_factory.mktemp("plain"))[0])


def told(caught):
    return [str(w.message) for w in caught if w.category is EntropyMonitorWarning]


def assert_unharmed(model, run, plain):
    assert bits(model) == plain
    assert traces() == []
    assert "training_step" not in vars(run.strategy)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks


LATER = ["tap", "measure_call", "attribution", "RecordWriter.write", "metrics"]


@pytest.mark.parametrize(("stage", "nth"), [*((s, 0) for s in STAGES), *((s, 3) for s in LATER)])
def test_an_error_of_ours(tmp_path, monkeypatch, plain, stage, nth):
    fault = Fault(monkeypatch, stage, nth=nth)
    memory = MemoryWriter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EntropyMonitorWarning)
        callback = watch(writers=[memory])
        model, run = train(tmp_path, callback)
        run.save_checkpoint(tmp_path / "one.ckpt")
    assert fault.raised, "the stage was not reached"
    assert_unharmed(model, run, plain)
    messages = told(caught)
    assert len(messages) == 1, messages
    assert all("entropy_monitor: " in m and "ours, on purpose" in m for m in messages)
    if nth:
        assert read_run(tmp_path).steps.tolist()[:1] == [0]  # written before, and readable
        assert memory.steps[0] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_those_who_want_it_get_the_error(tmp_path, monkeypatch, stage):
    fault = Fault(monkeypatch, stage, nth=0)
    callback = watch(on_error="raise", writers=[MemoryWriter()])
    run = trainer(tmp_path, [callback], max_steps=2)

    def everything():
        run.fit(Language(), loader())
        run.save_checkpoint(tmp_path / "one.ckpt")

    with pytest.raises(fault.kind, match="ours, on purpose"):
        everything()
    assert traces() == []
    assert "training_step" not in vars(run.strategy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_queries_that_are_not_finite(tmp_path, value):
    def make():
        return Language(spoil=(3, value))

    plain = bits(train(tmp_path / "plain", make=make)[0])
    callback = watch()
    model, run = train(tmp_path, callback, make=make)  # and no warning, which would be an error
    assert_unharmed(model, run, plain)
    record = read_run(tmp_path)
    assert record.stat("rows_nonfinite")[3].sum() > 0
    assert (record.stat("rows_nonfinite")[:3] == 0).all()
    assert any(a.kind == "nonfinite" and a.step == 3 for a in record.alerts)


class FullDisk:
    """A writer on a disk that is full from its second emission on."""

    def __init__(self):
        self.steps, self.closed = [], 0

    def write(self, emission):
        if self.steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.steps.append(emission.step)

    def close(self):
        self.closed += 1
        if self.closed == 1:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(tmp_path, plain):
    full, memory = FullDisk(), MemoryWriter()
    with pytest.warns(
        EntropyMonitorWarning, match="writer FullDisk failed.*No space left"
    ) as caught:
        model, run = train(tmp_path, watch(writers=[full, memory]))
    assert len(told(caught)) == 1
    assert (full.steps, memory.steps) == ([0], list(range(6)))
    assert_unharmed(model, run, plain)
    assert read_run(tmp_path).steps.tolist() == list(range(6))


def test_a_folder_that_cannot_be_made(tmp_path, plain):
    (tmp_path / "taken").write_text("a file")
    memory = MemoryWriter()
    with pytest.warns(EntropyMonitorWarning, match="the record cannot be written") as caught:
        model, run = train(tmp_path, watch(record=str(tmp_path / "taken"), writers=[memory]))
    assert len(told(caught)) == 1
    assert memory.steps == list(range(6))
    assert_unharmed(model, run, plain)


class BrokenLogger(CSVLogger):
    """Fails where the monitor uses it: the run's own logging takes another way."""

    @property
    def experiment(self):
        return super().experiment

    def log_metrics(self, metrics, step=None):
        if any(tag.startswith("attention") for tag in metrics):
            raise ConnectionError("the logger's server is away")


def test_a_logger_that_raises(tmp_path, plain):
    with pytest.warns(EntropyMonitorWarning, match="server is away") as caught:
        model, run = train(tmp_path, watch(), logger=BrokenLogger(tmp_path), log_every_n_steps=1)
    assert len(told(caught)) == 1
    assert_unharmed(model, run, plain)
    assert read_run(run.logger.log_dir).steps.tolist() == list(range(6))


def test_an_action_that_raises(tmp_path):
    def make():
        return Language(spoil=(2, float("nan")))

    def broken(alert):
        raise KeyError("no such channel")

    plain = bits(train(tmp_path / "plain", make=make)[0])
    with pytest.warns(EntropyMonitorWarning, match="alert action broken failed") as caught:
        model, run = train(tmp_path, watch(on_alert=[broken]), make=make)
    assert len(told(caught)) == 1
    assert_unharmed(model, run, plain)
    assert read_run(tmp_path).alerts


def test_a_schedule_that_raises(tmp_path, plain):
    def schedule(step):
        if step == 2:
            raise IndexError("no entry for step 2")
        return True

    with pytest.warns(
        EntropyMonitorWarning, match="could not read the schedule.*no entry for step 2"
    ) as caught:
        model, run = train(tmp_path, EntropyMonitor(schedule=schedule, on_alert=[]))
    assert len(told(caught)) == 1
    assert_unharmed(model, run, plain)
    assert read_run(tmp_path).steps.tolist() == [0, 1]


def test_a_probe_that_raises(tmp_path, plain):
    def probe(module):
        raise ValueError("a bad batch")

    with pytest.warns(EntropyMonitorWarning, match="the probe failed.*a bad batch") as caught:
        model, run = train(tmp_path, watch(probe=probe))
    assert len(told(caught)) == 1
    assert model.training
    assert_unharmed(model, run, plain)


def test_a_batch_without_the_ids_that_name_the_sink(tmp_path):
    class Embedded(Language):
        def training_step(self, batch, batch_idx):
            x = self.net.attn0(batch[0])
            return self.net.head(x).square().mean()

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 9, 16)), batch_size=4
    )
    plain = bits(train(tmp_path / "plain", make=Embedded, data=data)[0])
    with pytest.warns(EntropyMonitorWarning, match="needs a batch with `input_ids`"):
        model, run = train(tmp_path, watch(sink={"token_ids": [1]}), make=Embedded, data=data)
    assert_unharmed(model, run, plain)


@pytest.mark.parametrize("part", ["baseline", "alerts", "alert_count", "record"])
def test_a_saved_state_that_makes_no_sense(tmp_path, part):
    _, run = train(tmp_path / "first", watch(), data=loader(3))
    run.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
    saved["callbacks"]["EntropyMonitor"][part] = {"nonsense": torch.ones(1)}
    torch.save(saved, tmp_path / "one.ckpt")
    callback = watch()
    torch.manual_seed(0)
    again = trainer(tmp_path / "second", [callback], max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.fit(Language(), loader(3), ckpt_path=tmp_path / "one.ckpt", **WEIGHTS_ONLY)
    if part == "record":
        assert not told(caught)
        assert callback.last.summary["baseline_step"] == 0
    else:
        (message,) = told(caught)
        assert "the saved state cannot be read; the baseline starts anew" in message
        assert callback.last.summary["baseline_step"] == 3
    # The folder of the record is told apart from what failed: the first run's goes on.
    folder, steps = ("second", [3, 4, 5]) if part == "record" else ("first", [0, 1, 2, 3, 4, 5])
    assert read_run(tmp_path / folder).steps.tolist() == steps


class Interrupt(pl.Callback):
    """Raises at one point of one step."""

    def __init__(self, hook, error):
        def raising(trainer, module, *args):
            if trainer.global_step == 3:
                raise error

        setattr(self, hook, raising)


class InForward(Language):
    error: BaseException

    def training_step(self, batch, batch_idx):
        self.net(batch[0])
        if self.global_step == 3:
            raise self.error
        return super().training_step(batch, batch_idx)


HOOKS = ["on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_before_zero_grad"]


@pytest.mark.parametrize("where", ["forward", *HOOKS])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ArithmeticError("the user's own")], ids=["interrupt", "error"]
)
@pytest.mark.parametrize(
    "order", [1, pytest.param(-1, marks=pytest.mark.slow)], ids=["before", "behind"]
)
def test_errors_and_interrupts_of_the_user(tmp_path, where, error, order):
    """The run ends at the same place, with the same error, with the same weights."""

    def ended(folder, *callbacks):
        torch.manual_seed(0)
        model = InForward() if where == "forward" else Language()
        model.error = error
        callbacks = [*callbacks, *([Interrupt(where, error)] if where != "forward" else [])]
        run = trainer(folder, callbacks[::order])
        with pytest.raises((SystemExit, ArithmeticError)) as seen:
            run.fit(model, loader())
        return model, run, (type(seen.value), str(seen.value), run.global_step)

    model, _, end = ended(tmp_path / "plain")
    watched, run, watched_end = ended(tmp_path, watch(on_error="raise"))
    assert end == watched_end
    assert_unharmed(watched, run, bits(model))
    assert read_run(tmp_path).steps.tolist()[:2] == [0, 1]


def test_an_error_of_ours_does_not_hide_the_users(tmp_path):
    """A writer that cannot be closed, while the user's error ends the run, even with "raise"."""

    class Unclosable(MemoryWriter):
        def close(self):
            raise OSError("ours")

    class Failing(Language):
        def training_step(self, batch, batch_idx):
            raise ArithmeticError("the user's own")

    run = trainer(tmp_path, [watch(writers=[Unclosable()], on_error="raise")])
    with pytest.raises(ArithmeticError, match="the user's own"):
        run.fit(Failing(), loader())


def test_warnings_as_errors_do_not_harm(tmp_path, monkeypatch, plain, caplog):
    Fault(monkeypatch, "measure_call", nth=0)
    model, run = train(tmp_path, watch())  # warnings are errors in all tests that do not catch them
    assert_unharmed(model, run, plain)
    assert "ours, on purpose" in caplog.text


def test_a_console_that_is_gone(tmp_path, plain):
    read, write = os.pipe()
    os.close(read)
    gone = os.fdopen(write, "w", buffering=1)
    with pytest.warns(EntropyMonitorWarning, match="ConsoleWriter failed.*Broken pipe"):
        model, run = train(tmp_path, watch(writers=[ConsoleWriter(gone)]))
    with suppress(BrokenPipeError):
        gone.close()
    assert_unharmed(model, run, plain)


def test_the_record_is_readable_after_any_number_of_lines(tmp_path):
    """A crash can cut the record anywhere."""
    train(tmp_path, watch())
    folder = next(tmp_path.glob("**/record.jsonl")).parent
    whole = (folder / "record.jsonl").read_bytes()
    steps = []
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        (folder / "record.jsonl").write_bytes(whole[:length])
        if b'"header"' in whole[:length].split(b"\n")[0] and b"\n" in whole[:length]:
            steps.append(len(read_run(folder).steps))
    assert steps == sorted(steps)
    assert steps[-1] == 5
    json.loads(whole.splitlines()[-1])
