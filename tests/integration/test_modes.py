"""Ways of training with Lightning: the same weights bit for bit, each attention seen once."""

import copy
import io
import pickle
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from entropy_monitor import AttentionMonitor
from entropy_monitor.pipeline import EntropyMonitorWarning
from entropy_monitor.writers import MemoryWriter, read_run
from tests.runs import Block, Language, Net, bits, loader, traces, train, trainer, watch

LAYERS = ("net.attn0", "net.attn1")
ROWS = 4 * 7  # counted rows per head and step: 4 sequences x 7 rows that see two content keys
STEPS = list(range(6))


def both(tmp_path, make, *, steps=STEPS, layers=LAYERS, rows=ROWS, data=None, **options):
    """Trains with and without a monitor; checks that the weights agree; gives what was measured."""
    plain, _ = train(tmp_path / "plain", make=make, data=data, **options)
    memory = MemoryWriter()
    callback = watch(writers=[memory], on_error="raise")
    watched, run = train(tmp_path / "watched", callback, make=make, data=data, **options)
    assert bits(watched) == bits(plain)
    assert traces() == []
    assert "training_step" not in vars(run.strategy)
    if steps is not None:
        assert memory.steps == steps
    for emission in memory.emissions if layers is not None else ():
        assert tuple(name for name, _ in emission.layers) == layers
        assert (emission.stat("rows_valid") == rows).all()
        assert np.isfinite(emission.stat("content_entropy")).all()
    return SimpleNamespace(memory=memory, model=watched, run=run, plain=plain)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision(tmp_path, precision):
    both(tmp_path, Language, precision=precision)


class Autocast16(Language):
    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", torch.float16):
            return super().training_step(batch, batch_idx)


def test_float16_autocast(tmp_path):
    found = both(tmp_path, Autocast16)
    # float16 queries, float32 statistics: close to those of a float32 forward
    exact = both(tmp_path, Language).memory.emissions[0].stat("content_entropy")
    np.testing.assert_allclose(found.memory.emissions[0].stat("content_entropy"), exact, atol=2e-3)


class Adversarial(pl.LightningModule):
    """A generator and a judge, trained in turn by hand; the judge attends three times a step."""

    def __init__(self):
        super().__init__()
        self.generator, self.judge = Block(), Block()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        real = F.one_hot(batch[0], 16).float()
        first, second = self.optimizers()
        made = self.generator(torch.randn_like(real))
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.judge(made).mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        loss = self.judge(made.detach()).mean() - self.judge(real).mean()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.generator, self.judge)]


def test_two_networks_in_turn(tmp_path):
    found = both(tmp_path, Adversarial, layers=("generator", "judge", "judge#1", "judge#2"))
    assert (
        found.run.global_step == 12
    )  # Lightning counts both optimisers; the monitor counts batches


class Copying(Language):
    """Copies of all kinds, made and run while the forward pass is being watched."""

    def __init__(self):
        super().__init__()
        self.averages = []

    def training_step(self, batch, batch_idx):
        copied = copy.deepcopy(self)
        again = pickle.loads(pickle.dumps(self.net))
        file = io.BytesIO()
        torch.save(self.net, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        self.averages = [copied.net, again, loaded]
        with torch.no_grad():
            seen = [net.train()(batch[0]).shape for net in self.averages]
        assert len(seen) == 3
        return super().training_step(batch, batch_idx)


def test_copies_made_and_run_in_mid_step(tmp_path):
    both(tmp_path, Copying)


@pytest.mark.skipif(not hasattr(pl.callbacks, "WeightAveraging"), reason="Lightning has none")
def test_weight_averaging(tmp_path):
    class Average(pl.callbacks.WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return step_idx is not None

    results = []
    for callbacks in ([], [watch(on_error="raise")]):
        folder = tmp_path / str(len(callbacks))
        results.append(bits(train(folder, Average(), *callbacks, max_epochs=2)[0]))
    assert results[0] == results[1]
    assert read_run(tmp_path / "1").steps.tolist() == list(range(12))


class Functional(Language):
    def training_step(self, batch, batch_idx):
        parameters = {k: 2 * v for k, v in self.net.named_parameters()}
        logits = torch.func.functional_call(self.net, parameters, (batch[0],))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def test_functional_call(tmp_path):
    """What is measured is what was computed: with the parameters of the call."""
    found = both(tmp_path, Functional)
    torch.manual_seed(0)
    net = Functional().net
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    net.eval()
    monitor = AttentionMonitor(net, rows=None)
    with monitor.observe(0):
        net(next(iter(loader()))[0])
    np.testing.assert_allclose(
        found.memory.emissions[0].stat("content_entropy")[:2],
        monitor.snapshot().array("content_entropy")[:2],  # before the first dropout
        atol=1e-6,
    )


class Frozen(Language):
    def __init__(self):
        super().__init__()
        self.net.embed.requires_grad_(False)
        self.net.attn0.requires_grad_(False)


class Unused(Language):
    def __init__(self):
        super().__init__()
        self.spare = Block()


@pytest.mark.parametrize("make", [Frozen, Unused])
def test_layers_without_gradient_or_use(tmp_path, make):
    both(tmp_path, make)


class Checkpointed(Language):
    reentrant = False

    def training_step(self, batch, batch_idx):
        net, (ids,) = self.net, batch
        x = net.embed(ids)
        for block in (net.attn0, net.attn1):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = net.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class CheckpointedReentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("make", [Checkpointed, CheckpointedReentrant])
def test_activation_checkpointing(tmp_path, make):
    found = both(tmp_path, make)
    same = both(tmp_path, Language)
    for a, b in zip(found.memory.emissions, same.memory.emissions, strict=True):
        np.testing.assert_array_equal(a.stat("content_entropy"), b.stat("content_entropy"))


def test_micro_batches(tmp_path):
    both(tmp_path, Language, accumulate_grad_batches=3, steps=[0, 1], rows=3 * ROWS)


def _whole():
    return torch.compile(Language(), backend="aot_eager")


def _in_place():
    model = Language()
    model.net.compile(backend="aot_eager")
    return model


def _wrapped():
    return Language(torch.compile(Net(), backend="aot_eager"))


class CompiledLate(Language):
    """Compiled by the module itself, after the callbacks were set up."""

    def on_train_start(self):
        self.net.compile(backend="aot_eager")


@pytest.mark.filterwarnings("ignore")  # dynamo touches deprecated names while it traces
@pytest.mark.parametrize("make", [_whole, _in_place, _wrapped, CompiledLate])
def test_compiled(tmp_path, make):
    torch._dynamo.reset()
    data = loader(8)
    found = both(tmp_path, make, data=data, steps=list(range(8)))
    exact = both(tmp_path / "eager", Language, data=data, steps=list(range(8)))
    for a, b in zip(found.memory.emissions, exact.memory.emissions, strict=True):
        want = b.stat("content_entropy")
        np.testing.assert_allclose(a.stat("content_entropy"), want, atol=1e-5)
    torch._dynamo.reset()


class Skipping(Language):
    """Some batches give no loss, and one epoch ends early: what was armed must not stay."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def test_batches_that_are_skipped(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned `None`")
        found = both(tmp_path, Skipping, steps=None, max_epochs=2)
    assert found.memory.steps == sorted(found.memory.steps)
    assert len(found.memory.steps) >= 6


class Rolling(Language):
    """Writes text in validation, with the same model."""

    def write(self, ids):
        with torch.no_grad():
            for _ in range(3):
                ids = torch.cat([ids, self.net(ids)[:, -1:].argmax(-1)], 1)
        return ids

    def validation_step(self, batch, batch_idx):
        assert self.write(batch[0]).shape == (4, 12)


def test_generation_in_validation(tmp_path):
    results = []
    memory = MemoryWriter()
    for callbacks in ([], [watch(writers=[memory], on_error="raise")]):
        torch.manual_seed(0)
        model = Rolling()
        run = trainer(tmp_path / str(len(callbacks)), callbacks, val_check_interval=2)
        run.fit(model, loader(), loader(2))
        results.append(bits(model))
    assert results[0] == results[1]
    assert memory.steps == STEPS
    assert all((e.stat("rows_valid") == ROWS).all() for e in memory.emissions)


class Growing(Language):
    """Changes its layers in mid-run: one is added, one is cut into more heads, one goes."""

    def on_train_batch_start(self, batch, batch_idx):
        net = self.net
        if self.global_step == 2:
            net.attn1 = nn.Sequential(net.attn1, Block())
        if self.global_step == 4:
            net.attn0.heads = 4
        if self.global_step == 5:
            net.attn1 = nn.Identity()


def test_a_model_that_changes_in_mid_run(tmp_path):
    memory = MemoryWriter()
    plain, _ = train(tmp_path / "plain", make=Growing)
    with pytest.warns(EntropyMonitorWarning, match="a new baseline starts here") as caught:
        watched, _ = train(tmp_path, watch(writers=[memory]), make=Growing)
    assert bits(watched) == bits(plain)
    assert len([w for w in caught if w.category is EntropyMonitorWarning]) == 1
    layers = [emission.layers for emission in memory.emissions]
    old, grown = (("net.attn0", 2), ("net.attn1", 2)), ("net.attn1.0", 2)
    assert layers[:2] == [old, old]
    assert layers[2:4] == 2 * [(("net.attn0", 2), grown, ("net.attn1.1", 2))]
    assert layers[4:] == [(("net.attn0", 4), grown, ("net.attn1.1", 2)), (("net.attn0", 4),)]
    assert np.isnan(memory.emissions[2].change[:, 2:]).all()  # the baseline lacks these layers
    record = read_run(tmp_path)
    assert record.steps.tolist() == STEPS


def test_a_notebook_cell_run_again(tmp_path):
    """The callback of an earlier cell, a new model: a new baseline, new alerts, a new record."""
    memory = MemoryWriter()
    callback = watch(writers=[memory], on_error="raise")
    for _ in range(2):
        train(tmp_path, callback)
    first, second = memory.emissions[:6], memory.emissions[6:]
    assert second[0].summary["baseline_step"] == 0
    assert np.nanmax(np.abs(second[0].change)) == 0
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.stats, b.stats)
        np.testing.assert_array_equal(a.change, b.change)
        assert a.alerts == b.alerts
    assert read_run(tmp_path / "entropy_logs" / "version_1").steps.tolist() == STEPS


def test_a_run_that_is_continued(tmp_path):
    """The same Trainer fits on: the baseline stays."""
    memory = MemoryWriter()
    callback = watch(writers=[memory], on_error="raise")
    model, run = train(tmp_path, callback)
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    assert memory.steps == list(range(12))
    assert memory.emissions[-1].summary["baseline_step"] == 0


def test_the_search_for_a_learning_rate_is_another_run(tmp_path):
    memory = MemoryWriter()
    torch.manual_seed(0)
    model = Language()
    model.lr = 1e-3
    run = trainer(tmp_path, [watch(writers=[memory], on_error="raise")])
    found = pl.tuner.Tuner(run).lr_find(model, loader(), num_training=4)
    assert found is not None
    searched = len(memory.emissions)
    run.fit(model, loader())
    assert memory.steps[searched:] == STEPS
    assert np.nanmax(np.abs(memory.emissions[searched].change)) == 0


def test_two_monitors_on_one_model(tmp_path):
    """A second monitor by hand in mid-step, as when a notebook's cell made one twice."""

    class Twice(Language):
        def training_step(self, batch, batch_idx):
            self.inner = getattr(self, "inner", None) or AttentionMonitor(self.net, rows=None)
            with self.inner.observe(batch_idx):
                return super().training_step(batch, batch_idx)

    found = both(tmp_path, Twice)
    snapshot = found.model.inner.snapshot()
    assert snapshot.layers == ("attn0", "attn1")
    np.testing.assert_array_equal(
        found.memory.emissions[-1].stat("content_entropy"),
        snapshot.array("content_entropy").astype(np.float32),
    )


def test_a_dry_run(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        both(tmp_path, Language, fast_dev_run=True, steps=[0])


def test_low_rank_adapters(tmp_path):
    """peft: frozen weights with adapters beside them; the attention keeps its owner."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")

    class Adapted(pl.LightningModule):
        def __init__(self):
            super().__init__()
            config = transformers.LlamaConfig(
                vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=16, attn_implementation="sdpa",
            )  # fmt: skip
            adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
            self.net = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)

        def training_step(self, batch, batch_idx):
            return self.net(input_ids=batch[0], labels=batch[0]).loss

        def validation_step(self, batch, batch_idx):
            self.net.generate(input_ids=batch[0], max_new_tokens=2, do_sample=False, pad_token_id=0)

        def configure_optimizers(self):
            trained = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.AdamW(trained, lr=1e-2)

    layers = tuple(f"net.base_model.model.model.layers.{n}.self_attn" for n in (0, 1))
    data = loader(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both(tmp_path, Adapted, layers=layers, data=data, steps=[0, 1, 2])


def test_nets_are_alike():
    """The models of these tests are what the tests say."""
    assert [name for name, m in Net().named_modules() if isinstance(m, Block)] == ["attn0", "attn1"]


def test_a_torch_that_is_too_old_does_not_end_the_run(tmp_path, monkeypatch):
    plain, _ = train(tmp_path / "plain")
    monkeypatch.setattr("entropy_monitor.capture.tap.TorchDispatchMode", object)
    with pytest.warns(EntropyMonitorWarning, match=r"needs torch 2\.9 or newer"):
        watched, _ = train(tmp_path, watch())
    assert bits(watched) == bits(plain)
