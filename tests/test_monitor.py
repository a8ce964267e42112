"""`AttentionMonitor`: right numbers, right names, right words, and no harm."""

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from entropy_monitor import AttentionMonitor
from entropy_monitor.calls import select_rows
from entropy_monitor.monitor import check_options, check_patterns
from entropy_monitor.pipeline import EntropyMonitorWarning


class Attention(nn.Module):
    def __init__(self, width=16, heads=2, gain=1.0):
        super().__init__()
        self.heads, self.gain = heads, gain
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q * self.gain, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def ids(batch=3, length=12, seed=0):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(seed))


def watch(model, **options):
    return AttentionMonitor(model, **{"rows": None, "on_error": "raise", **options})


def measured(monitor, *inputs, step=0, **options):
    with monitor.observe(step, **options):
        for x in inputs:
            monitor.model(x)
    return monitor.snapshot()


def weights(model, x):
    """float64 attention weights of both layers, by the textbook."""
    model = copy.deepcopy(model).double()
    x = model.embed(x)
    found = []
    for block in model.blocks:
        q, k, _ = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in block.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        found.append(scores.masked_fill(~mask, -torch.inf).softmax(-1))
        x = x + block(x)
    return found


def test_equals_float64_weights(model):
    snapshot = measured(watch(model), ids())
    assert snapshot.layers == ("blocks.0", "blocks.1")
    for layer, p in zip(snapshot.layers, weights(model, ids()), strict=True):
        p = p[:, :, 2:]
        s = p[..., 0].mean((0, 2))
        pi = p[..., 1:] / p[..., 1:].sum(-1, keepdim=True)
        h = torch.special.entr(pi).sum(-1).mean((0, 2))
        total = torch.special.entr(p).sum(-1).mean((0, 2))
        torch.testing.assert_close(snapshot.values("sink_mass")[layer], s, atol=1e-6, rtol=0)
        torch.testing.assert_close(snapshot.values("content_entropy")[layer], h, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            snapshot.values("total_entropy")[layer], total, atol=1e-5, rtol=0
        )


def test_micro_batches_of_one_step_add_up(model):
    monitor, whole = watch(model), watch(model)
    for part in ids(batch=4).split(2):
        measured(monitor, part, step=5)
    parts = monitor.snapshot()
    together = measured(whole, ids(batch=4), step=5)
    assert parts.layers == ("blocks.0", "blocks.1")
    for stat in ("sink_mass", "content_entropy", "rows_valid"):
        torch.testing.assert_close(
            torch.tensor(parts.array(stat)),
            torch.tensor(together.array(stat)),
            atol=1e-6,
            rtol=1e-6,
        )


def test_several_forwards_in_one_block_are_micro_batches(model):
    snapshot = measured(watch(model), *ids(batch=4).split(2))
    assert snapshot.layers == ("blocks.0", "blocks.1")
    assert snapshot.array("rows_valid").tolist() == [40.0] * 4


def test_a_layer_called_twice_in_one_forward_keeps_its_calls_apart():
    class Shared(Model):
        def forward(self, ids):
            x = self.embed(ids)
            for _ in range(3):
                x = x + self.blocks[0](x)
            return x

    snapshot = measured(watch(Shared()), ids())
    assert snapshot.layers == ("blocks.0", "blocks.0#1", "blocks.0#2")


def test_a_new_step_starts_anew(model):
    monitor = watch(model)
    measured(monitor, ids(), step=0)
    assert measured(monitor, ids(), step=1).array("rows_valid").tolist() == [30.0] * 4
    assert measured(monitor, ids(), step=None).array("rows_valid").tolist() == [30.0] * 4
    assert measured(monitor, ids(), step=None).array("rows_valid").tolist() == [30.0] * 4


def test_layers_can_be_chosen(model):
    assert measured(watch(model, layers="*.1"), ids()).layers == ("blocks.1",)


def test_sampled_rows_are_used(model):
    snapshot = measured(watch(model, rows=4), ids(length=64))
    rows, weight = select_rows(64, 4, batch=3)
    counted = float((weight * (rows >= 2)).sum())
    assert snapshot.array("rows_valid").tolist() == [counted] * 4


def test_sink_by_token_ids(model):
    x = ids()
    snapshot = measured(watch(model, sink={"token_ids": [4]}), x, input_ids=x)
    p = weights(model, x)[0]
    is_sink = (x == 4)[:, None, None, :]
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    sees = (is_sink & visible).any(-1).expand(3, 2, 12)
    content = (~is_sink & visible).sum(-1).expand(3, 2, 12)
    seeing = sees & (content >= 2)
    s = (p * is_sink).sum(-1)
    by_hand = torch.stack([s[:, h][seeing[:, h]].mean() for h in range(2)])
    torch.testing.assert_close(snapshot.values("sink_mass")["blocks.0"], by_hand, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("sink", "counts"),
    [
        ("first", {"valid": 8, "trivial": 2, "no_content": 2}),
        ("auto", {"valid": 8, "trivial": 2, "no_content": 2}),
        ([0, 2], {"valid": 6, "trivial": 4, "no_content": 2}),
        (2, {"valid": 8, "no_sink": 2, "trivial": 2}),
        (-1, {"valid": 2, "no_sink": 8, "trivial": 2}),
        ("none", {"no_sink": 10, "trivial": 2}),
        ("learned", {"no_sink": 10, "trivial": 2}),
        # The first sequence holds it at 0 and 2, the second at 3.
        ({"token_ids": [3]}, {"valid": 6, "no_sink": 2, "trivial": 3, "no_content": 1}),
        ({"token_ids": [9]}, {"no_sink": 10, "trivial": 2}),
    ],
    ids=str,
)
def test_kinds_of_rows_of_each_sink(model, sink, counts):
    x = torch.tensor([[3, 1, 3, 2, 2, 2], [1, 2, 2, 3, 2, 2]])
    snapshot = measured(watch(model, sink=sink), x, input_ids=x)
    for kind in ("valid", "no_sink", "trivial", "no_content", "empty", "nonfinite"):
        assert snapshot.array(f"rows_{kind}").tolist() == [counts.get(kind, 0)] * 4, kind


def test_token_ids_need_the_ids(model):
    with pytest.raises(ValueError, match="`input_ids` must be"):
        measured(watch(model, sink={"token_ids": [4]}), ids())


def test_auto_proposes_the_key_that_holds_the_mass(model):
    with torch.no_grad():
        model.embed.weight[7] = 3.0
        for block in model.blocks:
            block.qkv.weight.zero_()
            block.qkv.bias.zero_()
            block.qkv.weight[16:32] = torch.eye(16)  # k = x
            block.qkv.bias[:16] = 4.0  # every query looks for the token with large entries
    x = ids(length=16)
    x[x == 7] = 0
    x[:, 1] = 7
    monitor = watch(model, sink="auto")
    for step in range(4):
        measured(monitor, x, step=step)
        assert monitor.proposed_sink is None
    measured(monitor, x, step=4)
    assert monitor.proposed_sink == (1,)
    assert monitor.snapshot().mean("best_column_is_sink") == 0.0  # measured with "first" all along
    assert monitor.snapshot().mean("best_column_mass") > 0.3


def test_kept_rows_pair(model):
    from entropy_monitor import attribute_change

    monitor = watch(model, keep_rows=True)
    before = measured(monitor, ids(), step=0)
    with torch.no_grad():
        model.blocks[0].qkv.weight.mul_(3)
    change = attribute_change(before, measured(monitor, ids(), step=1))
    assert change.paired
    assert change.layer("blocks.0")["content"] < 0


def test_model_error_goes_through_and_leaves_nothing(model):
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    monitor = watch(model)
    with pytest.raises(KeyboardInterrupt), monitor.observe(0):
        raise KeyboardInterrupt
    assert _get_current_dispatch_mode() is None
    assert monitor.enabled
    assert measured(monitor, ids()).layers


def test_a_forward_that_failed_is_not_merged_with_its_retry(model):
    monitor = watch(model)
    expected = measured(monitor, ids(), step=0).to_dict()
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), monitor.observe(1):
        model(ids())
    hook.remove()
    assert monitor.snapshot().layers == ()
    assert measured(monitor, ids(), step=1).to_dict() == expected


def test_a_window_in_a_window_counts_nothing_twice(model):
    monitor = watch(model)
    expected = measured(monitor, ids(), step=0).to_dict()
    with monitor.observe(1), monitor.observe(1):
        model(ids())
    assert monitor.snapshot().to_dict() == expected
    assert measured(monitor, ids(), step=2).to_dict() == expected


@pytest.mark.parametrize("given", [torch.ones(5).long(), torch.ones(2, 3).long()])
def test_token_ids_that_fit_no_attention_are_told(model, given):
    monitor = AttentionMonitor(model, sink={"token_ids": [4]}, on_error="raise")
    with pytest.raises(ValueError, match="`input_ids` must"), monitor.observe(0, input_ids=given):
        model(ids())
    assert monitor.snapshot().layers == ()


@pytest.mark.parametrize(
    "option", [{"layers": 5}, {"layers": []}, {"layers": [1]}, {"attention_modules": 3}]
)
def test_patterns_must_be_text(option):
    options = {"layers": None, "attention_modules": None, **option}
    with pytest.raises(ValueError, match=f"`{next(iter(option))}` must .*; got"):
        check_patterns(**options)


def test_nothing_is_installed_on_the_model(model):
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    measured(watch(model), ids())
    for name, module in model.named_modules():
        assert vars(module).keys() == state[name].keys()
    pickle.loads(pickle.dumps(model))


def test_gradients_and_random_state_are_the_same(model):
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    twin(ids()).square().sum().backward()
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    with watch(model, rows=4).observe(0):
        model(ids()).square().sum().backward()
    assert torch.equal(torch.get_rng_state(), expected)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_own_error_switches_off_with_one_warning(model, monkeypatch):
    import entropy_monitor.monitor as module

    monkeypatch.setattr(module, "measure_call", lambda *a, **k: 1 / 0)
    monitor = AttentionMonitor(model)
    with pytest.warns(EntropyMonitorWarning, match="switched off.*ZeroDivisionError"):
        measured(monitor, ids())
    assert not monitor.enabled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured(monitor, ids(), step=1).layers == ()
    with pytest.raises(ZeroDivisionError):
        measured(watch(model), ids())


def test_a_model_without_attention_says_what_was_looked_for():
    monitor = AttentionMonitor(nn.Sequential(nn.Linear(2, 2)))
    with pytest.warns(EntropyMonitorWarning, match="no attention was seen") as caught:
        measured(monitor, torch.zeros(1, 2))
    measured(monitor, torch.zeros(1, 2), step=1)  # warnings are errors: a second one would show
    assert "softmax" in str(caught[0].message)


@pytest.mark.parametrize(
    "sink", ["second", [], [1.5], {"token_ids": []}, {"token_ids": 5}, {"ids": [1]}, True, None]
)
def test_bad_sinks_are_named(sink):
    with pytest.raises(ValueError, match="`sink` must be one of"):
        check_options(sink=sink, rows=None, on_error="warn")


def test_bad_sink_position_is_named(model):
    with pytest.raises(ValueError, match=r"`sink` must hold key positions.*got \[40\]"):
        measured(watch(model, sink=[40]), ids())


def test_bad_model_is_named():
    # in a process of its own, without the type checks of the test run
    code = "from entropy_monitor import AttentionMonitor; AttentionMonitor(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "TypeError: `model` must be a torch.nn.Module; got int" in done.stderr


def test_a_position_that_short_batches_lack_is_no_error_in_a_run(model):
    """Lengths vary; a key position beyond the end of a short batch must not end monitoring."""
    monitor = watch(model, sink=[0, 10])
    measured(monitor, ids(length=12), step=0)
    assert measured(monitor, ids(length=6), step=1).layers


@pytest.fixture
def graph_recording(monkeypatch):
    """As if a GPU recorded a CUDA graph; gives what ends the recording."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return monkeypatch.undo


def test_a_cuda_graph_recorded_within_a_window_is_left_alone(model, monkeypatch):
    """Whatever we computed would become part of the graph."""
    import entropy_monitor.capture.tap as tap

    monitor = AttentionMonitor(model)
    monkeypatch.setattr(tap, "recording", lambda: True)
    with pytest.warns(EntropyMonitorWarning, match="recorded into a CUDA graph"):
        measured(monitor, ids())
    monkeypatch.undo()
    assert monitor.snapshot().layers == ()
    assert measured(monitor, ids(), step=2).layers == ("blocks.0", "blocks.1")


def test_no_window_opens_while_a_cuda_graph_is_recorded(model, graph_recording):
    monitor = watch(model)
    with monitor.observe(1):
        assert torch._C._len_torch_dispatch_stack() == 0
    graph_recording()
    assert measured(monitor, ids(), step=2).layers == ("blocks.0", "blocks.1")


def test_a_torch_that_is_too_old_is_named(model, monkeypatch):
    monkeypatch.setattr("entropy_monitor.capture.tap.TorchDispatchMode", object)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.9 or newer.*this is torch"):
        AttentionMonitor(model)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_monitor_watches_the_copied_model(model, way):
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model
            self.monitor = watch(model)

    holder = Holder()
    measured(holder.monitor, ids(), step=0)
    copied = (
        copy.deepcopy(holder) if way == "deepcopy" else pickle.loads(pickle.dumps(holder.monitor))
    )
    monitor = copied if way == "pickle" else copied.monitor
    assert monitor.model is not model
    with monitor.observe(1):
        monitor.model(ids())
        model(ids())  # the original is not its business
    seen = monitor.snapshot()
    assert seen.layers == ("blocks.0", "blocks.1")
    assert seen.sums["blocks.0"].slots == 3  # sequences


@pytest.mark.parametrize(("batch", "length"), [(0, 12), (2, 0), (0, 0)])
def test_an_empty_batch_is_no_error(model, batch, length):
    monitor = watch(model)
    measured(monitor, ids(), step=0)
    with monitor.observe(1):
        model(torch.zeros(batch, length, dtype=torch.long))
    assert monitor.enabled
    assert measured(monitor, ids(), step=2).layers == ("blocks.0", "blocks.1")
