"""The Hugging Face callback: Lightning's numbers, and the Trainer's own rows are kept."""

import copy

import numpy as np
import pytest
import torch
import transformers

from entropy_monitor import AttentionMonitor, EntropyMonitorCallback
from entropy_monitor.pipeline import EntropyMonitorWarning
from entropy_monitor.writers import MemoryWriter, read_run

CONFIG = transformers.LlamaConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    vocab_size=31,
    max_position_embeddings=32,
    use_cache=False,
)


class Ids(torch.utils.data.Dataset):
    def __init__(self, count=48, length=16):
        self.ids = torch.randint(31, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG)


def train(tmp_path, *callbacks, resume=None, net=None, cls=transformers.Trainer, **options):
    defaults = {
        "output_dir": str(tmp_path),
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "logging_steps": 5,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "seed": 3,
    }
    args = transformers.TrainingArguments(**{**defaults, **options})
    net = net or model()
    trainer = cls(
        model=net, args=args, train_dataset=Ids(), eval_dataset=Ids(8), callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def watch(**options):
    return EntropyMonitorCallback(
        **{"every_n_steps": 1, "rows": None, "on_error": "raise", **options}
    )


def test_training_is_the_same_bit_for_bit(tmp_path):
    plain = train(tmp_path / "plain")
    watched = train(tmp_path / "watched", watch(), watch_twin())
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)


def watch_twin():
    class Twin(EntropyMonitorCallback):
        pass

    return Twin(every_n_steps=3, rows=4, name="twin", record=False)


def test_numbers_and_steps(tmp_path):
    memory = MemoryWriter()
    net = model()
    before = copy.deepcopy(net)
    seen = []

    class Spying(transformers.Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            seen.append(inputs["input_ids"].clone())
            return super().compute_loss(model, inputs, **kwargs)

    train(tmp_path, watch(every_n_steps=4, writers=[memory]), net=net, cls=Spying)
    assert memory.steps == [0, 4, 8]
    monitor = AttentionMonitor(before.train(), rows=None)
    with monitor.observe(0):
        before(input_ids=seen[0])
    for stat in ("sink_mass", "content_entropy"):
        np.testing.assert_array_equal(
            memory.emissions[0].stat(stat), monitor.snapshot().array(stat).astype(np.float32)
        )


def test_same_numbers_as_lightning(tmp_path):
    import pytorch_lightning as pl

    from entropy_monitor import EntropyMonitor

    batches = []

    class Spying(transformers.Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            batches.append({k: v.clone() for k, v in inputs.items()})
            return super().compute_loss(model, inputs, **kwargs)

    ours, theirs = MemoryWriter(), MemoryWriter()
    train(tmp_path, watch(writers=[ours]), cls=Spying, max_steps=1)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model()

        def training_step(self, batch, batch_idx):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    pl.Trainer(
        max_steps=1,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[EntropyMonitor(every_n_steps=1, rows=None, writers=[theirs], on_error="raise")],
    ).fit(Module(), loader)
    np.testing.assert_array_equal(ours.emissions[0].stats, theirs.emissions[0].stats)


def test_own_rows_of_the_trainer_are_kept(tmp_path):
    plain = train(tmp_path / "plain")
    watched = train(tmp_path / "watched", watch(every_n_steps=5))
    losses = [(row["step"], row["loss"]) for row in plain.state.log_history if "loss" in row]
    kept = [(row["step"], row["loss"]) for row in watched.state.log_history if "loss" in row]
    assert kept == losses
    assert len(losses) == 2
    ours = [row for row in watched.state.log_history if "attention/sink_mass" in row]
    assert len(ours) == 2
    # the Trainer prints what it logs: a few numbers of the model, layers only where asked for
    assert not [tag for tag in ours[0] if "layers." in tag]
    layered = train(tmp_path / "layered", watch(every_n_steps=5, layer_stats=["sink_mass"]))
    rows = [row for row in layered.state.log_history if "attention/sink_mass" in row]
    assert "attention/sink_mass/model.layers.0.self_attn" in rows[0]


def test_accumulation_emits_once_per_step(tmp_path):
    memory = MemoryWriter()
    train(tmp_path, watch(writers=[memory]), gradient_accumulation_steps=3, max_steps=3)
    assert memory.steps == [0, 1, 2]
    assert memory.emissions[0].stat("rows_valid").tolist() == [3 * 4 * 14.0] * 4


def test_evaluation_is_left_alone(tmp_path):
    memory = MemoryWriter()
    train(tmp_path, watch(writers=[memory]), eval_strategy="steps", eval_steps=2)
    assert memory.steps == list(range(10))
    assert memory.emissions[3].stat("rows_valid").tolist() == [4 * 14.0] * 4


def test_resumed_run_keeps_its_baseline(tmp_path):
    whole, first, second = MemoryWriter(), MemoryWriter(), MemoryWriter()
    train(tmp_path / "whole", watch(writers=[whole]))
    train(
        tmp_path / "part", watch(writers=[first]), max_steps=10, save_strategy="steps", save_steps=5
    )
    train(
        tmp_path / "part",
        watch(writers=[second]),
        resume=str(tmp_path / "part" / "checkpoint-5"),
        save_strategy="no",
    )
    assert second.steps == [5, 6, 7, 8, 9]
    assert second.emissions[-1].summary["baseline_step"] == 0
    np.testing.assert_allclose(second.emissions[-1].change, whole.emissions[-1].change, atol=1e-6)
    assert read_run(tmp_path / "part").steps.tolist() == list(range(10))


def test_probe_measures_the_last_weights(tmp_path):
    memory = MemoryWriter()
    ids = Ids(2).ids
    trainer = train(tmp_path, watch(probe={"input_ids": ids}, every_n_steps=5, writers=[memory]))
    assert memory.steps == [0, 5, 10]
    monitor = AttentionMonitor(trainer.model.eval(), rows=None)
    with monitor.observe(0), torch.no_grad():
        trainer.model(input_ids=ids)
    np.testing.assert_array_equal(
        memory.emissions[-1].stat("sink_mass"),
        monitor.snapshot().array("sink_mass").astype(np.float32),
    )


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_exception(tmp_path, error):
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    made = []

    class Failing(transformers.Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            made.append(self)
            if self.state.global_step == 2:
                raise error
            return super().compute_loss(model, inputs, **kwargs)

    with pytest.raises(type(error)):
        train(tmp_path, watch(), cls=Failing)
    assert "compute_loss" not in vars(made[0])
    assert _get_current_dispatch_mode() is None
    assert read_run(tmp_path).steps.tolist() == [0, 1]


def test_own_error_switches_off(tmp_path, monkeypatch):
    import entropy_monitor.monitor as module

    monkeypatch.setattr(module, "measure_call", lambda *a, **k: 1 / 0)
    with pytest.warns(EntropyMonitorWarning, match="switched off"):
        trainer = train(tmp_path, EntropyMonitorCallback(every_n_steps=1))
    assert trainer.state.global_step == 10


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="`every_n_steps` must be a number of steps >= 1; got 0"):
        EntropyMonitorCallback(every_n_steps=0)
    with pytest.raises(ValueError, match="`name` must not contain"):
        EntropyMonitorCallback(name="a/b")


def test_tensorboard_gets_tab_and_scalars(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    train(tmp_path, watch(every_n_steps=5), report_to=["tensorboard"])
    folder = next(tmp_path.rglob("events.out.tfevents*")).parent
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    assert "train/attention/sink_mass" in tags["scalars"]
    assert "attention_heads" in tags["tensors"]
