"""The Lightning callback: same training, right numbers, nothing left behind."""

import copy
import json
import warnings

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from entropy_monitor import AttentionMonitor, EntropyMonitor
from entropy_monitor.alerts import Alert
from entropy_monitor.pipeline import EntropyMonitorWarning
from entropy_monitor.writers import MemoryWriter, read_run
from tests.versions import WEIGHTS_ONLY


class Block(nn.Module):
    def __init__(self, width=16, heads=2, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return x + y.transpose(1, 2).flatten(-2)


class Model(pl.LightningModule):
    """Two attention layers on 11 tokens."""

    def __init__(self, dropout=0.0, fail_at=None):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.attn0, self.attn1 = Block(dropout=dropout), Block(dropout=dropout)
        self.head = nn.Linear(16, 11)
        self.fail_at = fail_at
        self.losses = []

    def forward(self, ids):
        return self.head(self.attn1(self.attn0(self.embed(ids))))

    def training_step(self, batch, batch_idx):
        (ids,) = batch
        logits = self(ids)
        if self.fail_at is not None and batch_idx == self.fail_at[0]:
            raise self.fail_at[1]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Dropping(Model):
    def __init__(self):
        super().__init__(dropout=0.1)


class Validated(Model):
    def validation_step(self, batch, batch_idx):
        (ids,) = batch
        self.log("val_loss", self(ids).mean())


def data(batches=12, batch=4, length=9, seed=0):
    ids = torch.randint(
        11, (batches * batch, length), generator=torch.Generator().manual_seed(seed)
    )
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=batch)


def trainer(tmp_path, *callbacks, **options):
    defaults = {
        "max_epochs": 1,
        "logger": False,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(tmp_path, *callbacks, model=None, loader=None, **options):
    torch.manual_seed(0)
    model = (model or Model)()  # built after the seed is set
    run = trainer(tmp_path, *callbacks, **options)
    run.fit(model, loader or data())
    return model, run


def monitor(**options):
    return EntropyMonitor(**{"every_n_steps": 1, "rows": None, "on_error": "raise", **options})


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}]
)
@pytest.mark.parametrize("probed", [False, True])
def test_training_is_the_same_bit_for_bit(tmp_path, options, probed):
    probe = torch.arange(10)[None] if probed else None
    plain, _ = fit(tmp_path, model=Dropping, **options)
    state = torch.get_rng_state()
    watched, _ = fit(tmp_path, monitor(probe=probe, sink="auto"), model=Dropping, **options)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(plain.losses, watched.losses, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_numbers_are_those_of_a_plain_forward(tmp_path):
    """Step k is measured on the weights after k updates, on the batch of step k."""
    memory = MemoryWriter()
    torch.manual_seed(0)
    model = Model()
    before = copy.deepcopy(model)
    loader = data()
    run = trainer(tmp_path, monitor(writers=[memory]), max_steps=1)
    run.fit(model, loader)
    plain = AttentionMonitor(before, rows=None)
    with plain.observe(step=0):
        before(next(iter(loader))[0])
    snapshot = plain.snapshot()
    assert snapshot.layers == ("attn0", "attn1")
    emission = memory.emissions[0]
    for stat in ("sink_mass", "content_entropy", "total_entropy"):
        np.testing.assert_array_equal(emission.stat(stat), snapshot.array(stat).astype(np.float32))


def test_one_emission_per_optimiser_step_adds_up_its_micro_batches(tmp_path):
    memory = MemoryWriter()
    fit(tmp_path, monitor(writers=[memory]), accumulate_grad_batches=3)
    assert memory.steps == [0, 1, 2, 3]
    # 3 micro-batches x 4 sequences x 7 counted rows x 4 heads
    assert memory.emissions[0].stat("rows_valid").sum() == 3 * 4 * 7 * 4


def test_schedule_and_tags(tmp_path):
    memory = MemoryWriter()
    fit(tmp_path, monitor(every_n_steps=5, writers=[memory]))
    assert memory.steps == [0, 5, 10]
    tags = memory.emissions[-1].model
    for tag in ("attention/sink_mass", "attention/content_entropy/attn0", "attention_change/sink"):
        assert tag in tags
    change = {
        name: tags[f"attention_change/{name}"] for name in ("total", "sink", "content", "support")
    }
    parts = change["sink"] + change["content"] + change["support"]
    assert change["total"] == pytest.approx(parts, abs=1e-12)
    early = EntropyMonitor(log_early=True)
    assert [s for s in range(25) if early.schedule(s)] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        10,
        11,
        13,
        16,
        19,
        20,
        23,
    ]


def test_record_needs_no_logger(tmp_path):
    callback = monitor()
    fit(tmp_path, callback)
    run = read_run(tmp_path / "entropy_logs" / "version_0")
    assert run.steps.tolist() == list(range(12))
    assert [name for name, _ in run.layers] == ["attn0", "attn1"]
    assert run.summary(11)["baseline_step"] == 0
    fit(tmp_path, monitor())
    assert (tmp_path / "entropy_logs" / "version_1").is_dir()


def test_loggers_get_the_tags(tmp_path):
    from pytorch_lightning.loggers import CSVLogger

    _, run = fit(tmp_path, monitor(), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    table = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "attention/sink_mass" in table[0]
    assert read_run(run.log_dir).steps.tolist() == list(range(12))


def test_early_stopping_and_checkpoints_can_watch_attention(tmp_path):
    stop = pl.callbacks.EarlyStopping(
        monitor="attention/content_evenness", patience=0, mode="max", check_on_train_epoch_end=True
    )
    keep = pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path, monitor="attention/sink_mass", filename="{attention/sink_mass:.3f}"
    )
    _, run = fit(
        tmp_path, monitor(every_n_steps=5), stop, keep, max_epochs=3, enable_checkpointing=True
    )
    assert run.callback_metrics["attention/content_evenness"] <= 1
    assert keep.best_model_score is not None


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("batch", [0, 1])  # a monitored and an unmonitored step
def test_nothing_is_left_after_an_exception(tmp_path, error, batch):
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    callback = monitor(every_n_steps=2)
    model = Model(fail_at=(batch, error))
    run = trainer(tmp_path, callback)
    with (
        pytest.raises(type(error)) if isinstance(error, RuntimeError) else pytest.raises(SystemExit)
    ):
        run.fit(model, data())
    assert "training_step" not in vars(run.strategy)
    assert _get_current_dispatch_mode() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if batch:
        assert read_run(tmp_path / "entropy_logs" / "version_0").steps.tolist() == [0]


def test_unmonitored_steps_have_nothing_installed(tmp_path):
    seen = {}

    class Spy(pl.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            seen[trainer.global_step] = "training_step" in vars(trainer.strategy)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen[f"start {batch_idx}"] = "training_step" in vars(trainer.strategy)

    fit(tmp_path, monitor(every_n_steps=4), Spy())
    assert not any(value for key, value in seen.items() if isinstance(key, int))
    armed = [key for key, value in seen.items() if value]
    assert armed == ["start 0", "start 4", "start 8"]


def test_validation_and_sanity_check_are_left_alone(tmp_path):
    memory = MemoryWriter()
    run = trainer(tmp_path, monitor(writers=[memory]), num_sanity_val_steps=2, val_check_interval=3)
    run.fit(Validated(), data(), data(batches=2))
    assert memory.steps == list(range(12))
    assert memory.emissions[0].stat("rows_valid").sum() == 4 * 7 * 4


def test_a_resumed_run_goes_on_like_an_uninterrupted_one(tmp_path):
    whole = MemoryWriter()
    fit(tmp_path / "whole", monitor(writers=[whole]), max_epochs=2)
    first, second = MemoryWriter(), MemoryWriter()
    _, run = fit(tmp_path / "part", monitor(writers=[first]), max_epochs=1)
    run.save_checkpoint(tmp_path / "part.ckpt")
    torch.load(tmp_path / "part.ckpt", weights_only=True)
    callback = monitor(writers=[second])
    again = trainer(tmp_path / "part", callback, max_epochs=2)
    again.fit(Model(), data(), ckpt_path=tmp_path / "part.ckpt", **WEIGHTS_ONLY)
    assert first.steps + second.steps == whole.steps
    for a, b in zip(whole.emissions[-3:], second.emissions[-3:], strict=True):
        np.testing.assert_array_equal(a.change, b.change)
        assert a.summary["baseline_step"] == b.summary["baseline_step"] == 0
    record = read_run(tmp_path / "part" / "entropy_logs" / "version_0")
    assert record.steps.tolist() == whole.steps


def test_two_monitors_side_by_side(tmp_path):
    one, two = MemoryWriter(), MemoryWriter()
    a, b = monitor(writers=[one]), monitor(writers=[two], name="last", sink=[-1], every_n_steps=3)
    fit(tmp_path, a, b)
    assert one.steps == list(range(12))
    assert two.steps == [0, 3, 6, 9]
    assert "last/attention/sink_mass" in two.emissions[0].model
    assert "attention/sink_mass" in one.emissions[0].model
    assert a.state_key != b.state_key
    with pytest.raises(RuntimeError, match="state_key"):  # Lightning's own check
        fit(tmp_path, monitor(), monitor())


def test_probe_pairs_rows_and_measures_the_last_weights(tmp_path):
    memory = MemoryWriter()
    probe = torch.arange(10).repeat(3, 1)
    model, _ = fit(tmp_path, monitor(probe=probe, writers=[memory], every_n_steps=5))
    assert memory.steps == [0, 5, 10, 12]
    assert memory.emissions[-1].summary["paired"] is True
    plain = AttentionMonitor(model, rows=None)
    model.eval()
    with plain.observe(step=0), torch.no_grad():
        model(probe)
    np.testing.assert_array_equal(
        memory.emissions[-1].stat("content_entropy"),
        plain.snapshot().array("content_entropy").astype(np.float32),
    )
    assert model.training is False


@pytest.mark.parametrize(
    "probe",
    [
        (torch.arange(10)[None],),
        {"ids": torch.arange(10)[None]},
        lambda module: module(torch.arange(10)[None]),
    ],
    ids=["tuple", "dict", "function"],
)
def test_probe_forms(tmp_path, probe):
    memory = MemoryWriter()
    fit(tmp_path, monitor(probe=probe, writers=[memory], every_n_steps=6))
    assert memory.steps == [0, 6, 12]


def test_probe_leaves_modes_and_statistics(tmp_path):
    class Normed(Model):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.frozen = nn.Dropout(0.5)

        def on_train_start(self):
            self.frozen.eval()

        def forward(self, ids):
            x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
            return self.head(self.attn1(self.attn0(self.frozen(x))))

    plain, _ = fit(tmp_path, model=Normed)
    watched, _ = fit(tmp_path, monitor(probe=torch.arange(10)[None]), model=Normed)
    assert torch.equal(plain.norm.running_mean, watched.norm.running_mean)
    for a, b in zip(plain.losses, watched.losses, strict=True):
        assert torch.equal(a, b)


def test_token_ids_as_sink(tmp_path):
    memory = MemoryWriter()
    fit(tmp_path, monitor(sink={"token_ids": [3]}, writers=[memory]), max_steps=1)
    ids = data().dataset.tensors[0][:4]
    visible_sinks = sum(int((ids[b, : i + 1] == 3).any()) for b in range(4) for i in range(9))
    stats = {
        n: memory.emissions[0].stat(n)[0] for n in ("rows_no_sink", "rows_valid", "rows_trivial")
    }
    assert stats["rows_valid"] <= visible_sinks
    assert stats["rows_no_sink"] > 0


def test_manual_optimisation_with_two_optimisers(tmp_path):
    class Manual(Model):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                loss = super().training_step(batch, batch_idx)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            halves = (self.attn0.parameters(), self.attn1.parameters())
            return [torch.optim.SGD(half, lr=0.1) for half in halves]

    memory = MemoryWriter()
    plain, _ = fit(tmp_path, model=Manual)
    watched, _ = fit(tmp_path, monitor(writers=[memory]), model=Manual)
    assert memory.steps == list(range(12))
    for a, b in zip(plain.losses, watched.losses, strict=True):
        assert torch.equal(a, b)


def test_lbfgs_is_measured_once_per_step(tmp_path):
    class Second(Model):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    memory = MemoryWriter()
    plain, _ = fit(tmp_path, model=Second, max_steps=3)
    watched, _ = fit(tmp_path, monitor(writers=[memory]), model=Second, max_steps=3)
    assert memory.steps == [0, 1, 2]
    assert memory.emissions[1].stat("rows_valid").sum() == 4 * 7 * 4
    for a, b in zip(plain.losses, watched.losses, strict=True):
        assert torch.equal(a, b)


def test_alerts_reach_actions_and_can_stop(tmp_path):
    class Diverging(Model):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.attn1.qkv.weight[:16].mul_(torch.nan if self.global_step == 6 else 1.0)
            return super().training_step(batch, batch_idx)

    heard: list[Alert] = []
    fit(tmp_path, monitor(on_alert=[heard.append]), model=Diverging)
    assert any(alert.kind == "nonfinite" and alert.step == 6 for alert in heard)
    run = read_run(tmp_path / "entropy_logs" / "version_0")
    assert [alert.kind for alert in run.alerts] == [alert.kind for alert in heard]


def test_a_failing_action_or_writer_is_left_out_with_one_warning(tmp_path):
    class Broken:
        def write(self, emission):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    memory = MemoryWriter()
    callback = EntropyMonitor(every_n_steps=1, writers=[Broken(), memory])
    with pytest.warns(EntropyMonitorWarning, match="writer Broken failed") as caught:
        plain, _ = fit(tmp_path, callback)
    assert sum("Broken" in str(w.message) for w in caught) == 1
    assert memory.steps == list(range(12))
    assert len(plain.losses) == 12


def test_an_error_of_ours_never_reaches_training(tmp_path, monkeypatch):
    import entropy_monitor.monitor as module

    plain, _ = fit(tmp_path)

    def broken(*args, **kwargs):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(module, "measure_call", broken)
    with pytest.warns(
        EntropyMonitorWarning, match="switched off.*ZeroDivisionError: ours"
    ) as caught:
        watched, _ = fit(tmp_path, EntropyMonitor(every_n_steps=1))
    assert sum(issubclass(w.category, EntropyMonitorWarning) for w in caught) == 1
    for a, b in zip(plain.losses, watched.losses, strict=True):
        assert torch.equal(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EntropyMonitorWarning)  # even where warnings are errors
        watched, _ = fit(tmp_path, EntropyMonitor(every_n_steps=1))
    assert len(watched.losses) == 12
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, monitor())


def test_a_model_without_attention_says_so_at_once(tmp_path):
    class Plain(Model):
        def forward(self, ids):
            return self.head(self.embed(ids))

    with pytest.warns(EntropyMonitorWarning, match="no attention was seen"):
        fit(tmp_path, EntropyMonitor(every_n_steps=1, alerts=None), model=Plain)


def test_layers_that_match_nothing_are_named(tmp_path):
    with pytest.warns(EntropyMonitorWarning, match="`layers` must match.*attn0, attn1; got nope"):
        fit(tmp_path, EntropyMonitor(every_n_steps=1, layers="nope*", alerts=None), max_steps=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` must be a number of steps >= 1; got 0"),
        ({"rows": 0}, "`rows` must be a number of rows >= 1 or None"),
        (
            {"sink": "frist"},
            "`sink` must be one of 'first', 'none', 'learned', 'auto'.*got 'frist'",
        ),
        ({"sink": {"tokens": [1]}}, "`sink` must be one of"),
        ({"layer_stats": ["sink"]}, "`layer_stats` must be names out of"),
        ({"baseline": (5, 2)}, "`baseline` must be a step >= 0 or"),
        ({"on_error": "ignore"}, "`on_error` must be 'warn' or 'raise'; got 'ignore'"),
        ({"name": "a/b"}, "`name` must not contain '/'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        EntropyMonitor(**options)


def test_bad_probe_is_named():
    with pytest.raises(TypeError, match="`probe` must be a tensor"):
        EntropyMonitor(probe=3)


def test_summary_is_json(tmp_path):
    callback = monitor()
    fit(tmp_path, callback)
    json.dumps(callback.last.summary, allow_nan=False)


def test_fit_twice_with_the_same_callback(tmp_path):
    memory = MemoryWriter()
    callback = monitor(writers=[memory])
    fit(tmp_path, callback)
    fit(tmp_path, callback)
    assert memory.steps == 2 * list(range(12))


def test_lightning_package_works_too(tmp_path):
    import subprocess
    import sys

    pytest.importorskip("lightning.pytorch")
    code = f"""
import lightning.pytorch as pl, torch
from entropy_monitor import EntropyMonitor
assert issubclass(EntropyMonitor, pl.Callback)
class M(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    def training_step(self, batch, i):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
rows = torch.utils.data.TensorDataset(torch.randn(8, 6, 8))
loader = torch.utils.data.DataLoader(rows, batch_size=4)
callback = EntropyMonitor(every_n_steps=1, on_error="raise")
pl.Trainer(max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False,
           callbacks=[callback], enable_checkpointing=False,
           default_root_dir={str(tmp_path)!r}).fit(M(), loader)
assert callback.last.step == 1, callback.last
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
