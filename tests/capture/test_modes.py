"""Ways of training: the monitor sees each attention once, under its name, and changes nothing."""

import copy
import functools
import gc
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from entropy_monitor.calls import AttentionCall
from entropy_monitor.capture import CaptureSession
from entropy_monitor.capture.owners import Owners
from entropy_monitor.capture.tap import recompiles_in_modes
from entropy_monitor.statistics import measure_call
from tests.capture.helpers import assert_same_training, capture, gradients
from tests.handmade import WIDTH, Fused, NanoGPT, Projected


class Stack(nn.Module):
    """Layers with a residual, with a way to run each of them."""

    def __init__(self, kind: type[nn.Module] = Fused, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(depth))
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.run(layer, x)
        return x.square().mean()


NAMES = ["layers.0", "layers.1"]


def stack(kind: type[nn.Module] = Fused) -> Stack:
    torch.manual_seed(0)
    return Stack(kind)


def x(seed: int = 1, length: int = 6) -> Tensor:
    return torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def names_in(session: CaptureSession, run: Callable[[], Any]) -> list[str]:
    names: list[str] = []
    with session.window(lambda call: names.append(call.name)):
        run()
    return names


def _selective(layer: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    )
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


CHECKPOINTS = {
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "non_reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "selective": _selective,
}


@pytest.mark.parametrize("kind", [Fused, NanoGPT])
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_recomputed_attention_is_not_counted_twice(way: str, kind: type[nn.Module]) -> None:
    plain, watched = stack(kind), stack(kind)
    plain.run = watched.run = CHECKPOINTS[way]
    start = x().requires_grad_()
    expected = plain(start)
    expected.backward()
    session = CaptureSession(watched, on_error="raise")
    names = []
    with session.window(lambda call: names.append(call.name)) as report:
        loss = watched(start)
        loss.backward()  # inside the window on purpose
    assert names == NAMES
    assert report.complete
    assert_same_training(plain, watched, (expected, loss))


def test_micro_batches_keep_one_name_and_repeated_layers_get_numbers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Fused()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(self.layer(x))).mean()

    model = Shared()
    session = CaptureSession(model, on_error="raise")
    names = ["layer", "layer#1", "layer#2"]
    assert names_in(session, lambda: [model(x()).backward() for _ in range(2)]) == 2 * names
    # The same tensor object twice is still two forward passes.
    same = x()
    assert names_in(session, lambda: [model(same), model(same)]) == 2 * names


def test_a_forward_is_known_by_an_object_that_no_other_forward_has() -> None:
    """Addresses of frames come again; the keyword arguments of a call are kept and do not."""
    forwards: list[Any] = []

    class Probed(Fused):
        def forward(self, x: Tensor) -> Tensor:
            owner = owners.find(sys._getframe())
            assert (owner.name, owner.args) == ("layers.0", (x,))
            forwards.append(owner.forward)
            return super().forward(x)

    model = stack()
    model.layers[0] = Probed()
    owners = Owners(model)
    same = x()
    for _ in range(5):
        model(same)
    assert all(isinstance(forward, dict) for forward in forwards)
    assert len({id(forward) for forward in forwards}) == 5


def test_gan_in_one_training_step() -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = Fused(), Fused()

        def training_step(self, real: Tensor, noise: Tensor) -> Tensor:
            fake = self.generator(noise)
            return self.critic(real).mean() - self.critic(fake).mean()

    model = Gan()
    session = CaptureSession(model, on_error="raise")
    want = ["generator", "critic", "critic#1"]
    assert names_in(session, lambda: model.training_step(x(), x(2))) == want


def test_attention_in_a_method_and_in_a_closure() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Fused()
            self.other = Fused()

        def attend(self, layer: nn.Module, x: Tensor) -> Tensor:
            q, k, v = layer.project(x)
            return layer.merge(nn.functional.scaled_dot_product_attention(q, k, v))

        def forward(self, x: Tensor) -> Tensor:
            again = lambda y: self.other(y)  # noqa: E731
            return again(self.mix(x)) + self.attend(self.other, x)

    model = Odd()
    session = CaptureSession(model, on_error="raise")
    assert names_in(session, lambda: model(x())) == ["mix", "other", "Odd"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Fused, NanoGPT])
def test_autocast(dtype: torch.dtype, kind: type[nn.Module]) -> None:
    plain, watched, exact = stack(kind), stack(kind), stack(kind)
    with torch.autocast("cpu", dtype):
        expected = plain(x())
    expected.backward()
    dtypes = set()

    def run() -> Tensor:
        with torch.autocast("cpu", dtype):
            return watched(x())

    session = CaptureSession(watched, on_error="raise")
    stats = {}

    def receive(call: AttentionCall) -> None:
        source = call.query if call.query is not None else call.logits
        dtypes.add(source.dtype)
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        stats[call.name] = measure_call(call)

    with session.window(receive):
        loss = run()
    loss.backward()
    assert_same_training(plain, watched, (expected, loss))
    assert dtypes <= {dtype, torch.float32}
    truth, *_ = capture(exact, lambda: exact(x()))
    for name, got in stats.items():
        want = truth.stats[name]
        assert torch.equal(got.kind, want.kind)
        assert abs(got.content_entropy.mean() - want.content_entropy.mean()) < 2e-3
        assert got.content_entropy.isfinite().all()


def test_copies_are_not_mistaken_for_the_model() -> None:
    model = stack()
    session = CaptureSession(model, on_error="raise")
    with session.window(lambda call: None):
        average = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model.layers))
        average(x())
    names: list[str] = []
    with session.window(lambda call: names.append(call.name)) as report:
        model(x())
        average(x())
        again[0](x())
    assert names == NAMES
    assert report.foreign == {"Fused": 3}
    assert not hasattr(average, "_forward_hooks") or not average._forward_hooks


def test_a_teacher_hidden_inside_the_model_is_left_out() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = Fused()
            self.hidden = [Fused()]

        def forward(self, x: Tensor) -> Tensor:
            return (self.student(x) - self.hidden[0](x)).square().mean()

    model = Distilled()
    names: list[str] = []
    with CaptureSession(model, on_error="raise").window(lambda c: names.append(c.name)) as report:
        model(x())
    assert names == ["student"]
    assert report.foreign == {"Fused": 1}
    assert "Fused" in report.describe()


def test_functional_call_and_vmap_of_gradients() -> None:
    model = stack()
    session = CaptureSession(model, on_error="raise")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    run = lambda: torch.func.functional_call(model, parameters, (x(),))  # noqa: E731
    assert names_in(session, run) == NAMES
    assert names_in(session, lambda: torch.func.grad(lambda y: model(y))(x())) == NAMES


def test_frozen_layers_and_no_grad() -> None:
    model = stack()
    for p in model.layers[0].parameters():
        p.requires_grad_(False)
    session = CaptureSession(model, on_error="raise")
    assert names_in(session, lambda: model(x()).backward()) == NAMES
    with torch.no_grad():
        assert names_in(session, lambda: model(x())) == NAMES
    with torch.inference_mode():
        assert names_in(session, lambda: model(x())) == NAMES
        written = stack(NanoGPT)
        assert names_in(CaptureSession(written, on_error="raise"), lambda: written(x())) == NAMES


def test_unused_layers_are_named_as_idle() -> None:
    class Unused(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2)

    model = Unused()
    _, report, _ = capture(model, lambda: model(x()))
    assert report.idle == ("attention",)
    assert not report.unseen


def test_a_model_that_changes_in_mid_run() -> None:
    model = stack()
    session = CaptureSession(model, on_error="raise")
    assert names_in(session, lambda: model(x())) == NAMES
    model.layers.append(Fused())
    assert names_in(session, lambda: model(x())) == [*NAMES, "layers.2"]
    del model.layers[0]
    assert names_in(session, lambda: model(x())) == NAMES


def test_wrapper_names_are_taken_away() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = stack()
    inner.layers[1] = checkpoint_wrapper(inner.layers[1])
    averaged = torch.optim.swa_utils.AveragedModel(inner)
    for model in (inner, averaged, torch.nn.DataParallel(inner)):
        session = CaptureSession(model, on_error="raise")
        assert names_in(session, lambda m=model: m(x()).backward()) == NAMES


def test_a_child_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Fused()

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    model = Holder()
    assert names_in(CaptureSession(model), lambda: model(x())) == ["module"]
    assert names_in(CaptureSession(model.module), lambda: model(x())) == ["Fused"]


def test_two_sessions_close_in_opening_order() -> None:
    model = stack()
    seen: dict[str, list[str]] = {"one": [], "two": []}
    one = CaptureSession(model).window(lambda call: seen["one"].append(call.name))
    two = CaptureSession(model.layers[1]).window(lambda call: seen["two"].append(call.name))
    one.open()
    two.open()
    model(x())
    one.close()
    model(x())
    two.close()
    model(x())
    assert seen == {"one": NAMES, "two": ["Fused", "Fused"]}
    assert torch._C._len_torch_dispatch_stack() == 0


def test_two_models_in_one_window() -> None:
    model, other = stack(), stack()
    assert names_in(CaptureSession(model), lambda: (model(x()), other(x()))) == NAMES


def test_other_dispatch_modes_keep_their_place_and_their_numbers() -> None:
    model = stack()
    with FlopCounterMode(display=False) as alone:
        model(x())
    session = CaptureSession(model, on_error="raise")
    window = session.window(lambda call: measure_call(call))
    with FlopCounterMode(display=False) as outer, window as report:
        model(x())
    assert report.complete
    assert outer.get_total_flops() == alone.get_total_flops()
    with window.__class__(session, lambda call: measure_call(call)):  # noqa: SIM117
        with FlopCounterMode(display=False) as inner:
            model(x())
    assert inner.get_total_flops() == alone.get_total_flops()
    # Closing out of order takes the tap from under the other mode.
    late = session.window(lambda call: None)
    late.open()
    with FlopCounterMode(display=False) as counter:
        model(x())
        late.close()
        assert torch._C._len_torch_dispatch_stack() == 1
        model(x())
    assert counter.get_total_flops() == 2 * alone.get_total_flops()
    assert torch._C._len_torch_dispatch_stack() == 0
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    assert not is_in_torch_dispatch_mode()


def test_another_thread_is_not_seen() -> None:
    model = stack()
    names: list[str] = []
    with CaptureSession(model).window(lambda call: names.append(call.name)) as report:
        thread = threading.Thread(target=lambda: model(x()))
        thread.start()
        thread.join()
    assert not names
    assert "No attention" in report.describe()


def test_nothing_is_kept_alive() -> None:
    model = stack(NanoGPT)
    session = CaptureSession(model, on_error="raise")
    with session.window(measure_call):
        batch = x()
        loss = model(batch)
    graph, given = weakref.ref(loss), weakref.ref(batch)
    loss.backward()
    del loss, batch
    gc.collect()
    assert graph() is None
    assert given() is None


def test_a_training_loop_keeps_no_graph_of_the_step_before() -> None:
    model = stack()
    session = CaptureSession(model, on_error="raise")
    graphs = []

    class Mark:
        pass

    def loop() -> None:
        for _ in range(3):
            with session.window(measure_call):
                loss = model(x())
            mark = Mark()
            graphs.append(weakref.ref(mark))
            loss.grad_fn.metadata["mark"] = mark
            del mark
            loss.backward()
            del loss
            gc.collect()
            assert graphs[-1]() is None

    loop()


def test_generation_leaves_single_queries_out() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.models import tiny, tokens

    assert transformers
    model = tiny("llama").eval()
    session = CaptureSession(model, on_error="raise")
    prompt = tokens(length=5)
    for _ in range(2):
        shapes = []
        with session.window(lambda call, to=shapes: to.append(call.shape)) as report:
            model.generate(prompt, max_new_tokens=4, do_sample=False)
        assert shapes == [(2, 4, 5, 5)] * 2
        assert sum(report.skipped.values()) == 6
        assert not report.lost
    decoding = CaptureSession(model, on_error="raise", decode=True)
    assert len(names_in(decoding, lambda: model.generate(prompt, max_new_tokens=4))) == 8


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lora() -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    from tests.models import FAMILIES, loss_of, tiny

    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    session = CaptureSession(model, on_error="raise")
    names = names_in(session, lambda: loss_of(model(**FAMILIES["llama"].inputs())).backward())
    assert names == [f"base_model.model.model.layers.{n}.self_attn" for n in range(2)]


def test_scripted_model_is_seen_under_its_own_name() -> None:
    class Plain(Projected):
        def forward(self, x: Tensor) -> Tensor:
            b, t, c = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(Plain(), x())
    session = CaptureSession(scripted, on_error="raise")
    assert len(names_in(session, lambda: scripted(x()))) == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_exception_of_the_model_removes_everything(kind: type[BaseException]) -> None:
    def fail(layer: nn.Module, x: Tensor) -> Tensor:
        layer(x)
        raise kind("stop")

    model = stack()
    model.run = fail
    with pytest.raises(kind, match="stop"), CaptureSession(model).window(lambda call: None):
        model(x())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_exception_of_the_receiver_never_reaches_the_model() -> None:
    plain, watched = stack(), stack()
    expected = plain(x())
    expected.backward()

    def fail(call: AttentionCall) -> None:
        raise RuntimeError("broken")

    with CaptureSession(watched).window(fail) as report:
        loss = watched(x())
    loss.backward()
    assert_same_training(plain, watched, (expected, loss))
    assert [str(error) for error in report.errors] == ["broken"]
    assert not report.complete
    with (
        pytest.raises(RuntimeError, match="broken"),
        CaptureSession(watched, on_error="raise").window(fail),
    ):
        loss = watched(x())
    assert torch.equal(loss, expected)


def test_a_receiver_that_fails_takes_nothing_from_another() -> None:
    def fail(call: AttentionCall) -> None:
        raise RuntimeError("broken")

    model = stack()
    names: list[str] = []
    failing, other = CaptureSession(model), CaptureSession(model, on_error="raise")
    with failing.window(fail) as broken, other.window(lambda c: names.append(c.name)) as report:
        model(x())
    assert names == NAMES
    assert report.complete
    assert [str(error) for error in broken.errors] == ["broken"]


def test_interrupting_the_receiver_interrupts_the_run_and_removes_everything() -> None:
    def stop(call: AttentionCall) -> None:
        raise KeyboardInterrupt

    model = stack()
    with pytest.raises(KeyboardInterrupt), CaptureSession(model).window(stop):
        model(x())
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.is_grad_enabled()
    assert gradients(model)["layers.0.qkv.weight"] is None


STAGES = [
    "entropy_monitor.capture.owners.Owners.find",
    "entropy_monitor.capture.owners.Owners.refresh",
    "entropy_monitor.capture.fused.read_kernel",
    "entropy_monitor.capture.softmax.SoftmaxWay._weigh",
    "entropy_monitor.capture.window._material",
    "entropy_monitor.capture.window.Window._next_forward",
    "entropy_monitor.capture.session.CaptureSession.begin",
    "entropy_monitor.capture.session.CaptureSession.end",
    "entropy_monitor.capture.hub.Hub.handler",
    "entropy_monitor.capture.hub.Hub.open",
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [Fused, NanoGPT])
def test_a_fault_of_ours_at_any_stage_changes_nothing(
    stage: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, watched = stack(kind), stack(kind)
    expected = plain(x())
    expected.backward()
    session = CaptureSession(watched)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("injected")

    # A new hub: the old one remembers what to do with operations it has met.
    monkeypatch.setattr("entropy_monitor.capture.hub._LOCAL", threading.local())
    monkeypatch.setattr(stage, fail)
    with session.window(measure_call) as report:
        loss = watched(x())
    loss.backward()
    assert_same_training(plain, watched, (expected, loss))
    if not ("fused" in stage and kind is NanoGPT):
        assert report.errors
    assert torch._C._len_torch_dispatch_stack() == 0


def test_wrong_options_are_named() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn"):  # or by the type checker of the tests
        CaptureSession(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`compiled` must be 'force_eager' or 'skip', got 'x'"):
        CaptureSession(nn.Linear(1, 1), compiled="x")
    with pytest.raises(ValueError, match="`on_error` must be 'warn' or 'raise', got 'x'"):
        CaptureSession(nn.Linear(1, 1), on_error="x")


def test_a_model_without_attention_says_what_was_looked_for() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4))
    _, report, _ = capture(model, lambda: model(x()))
    assert "scaled_dot_product_attention" in report.describe()
    assert "attention_modules" in report.describe()


@pytest.mark.parametrize("compiled_before", [False, True])
def test_windows_look_for_fused_kernels_alone_once_that_is_all_there_is(
    compiled_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What compiled elsewhere in the process must not be blamed for what was not looked for.
    monkeypatch.setattr(
        "entropy_monitor.capture.session._something_was_compiled", lambda: compiled_before
    )

    class Changing(Fused):
        written = False

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x)
            if self.written:
                return self.merge((q @ k.mT).softmax(-1) @ v)
            return self.merge(nn.functional.scaled_dot_product_attention(q, k, v))

    model = stack(Changing)
    session = CaptureSession(model, on_error="raise")

    def look() -> tuple[bool, list[str], str]:
        names: list[str] = []
        window = session.window(lambda call: names.append(call.name))
        with window as report:
            model(x())
        return window.fused_only, names, report.describe()

    assert [look()[0] for _ in range(9)] == [False, *[True] * 7, False]
    model.layers[1].written = True
    fused_only, names, text = look()
    assert (fused_only, names) == (True, ["layers.0"])
    assert "layers.1 did not show as fused kernels" in text
    for _ in range(3):
        fused_only, names, _ = look()
        assert (fused_only, names) == (False, NAMES)
    assert session._uncompiled is recompiles_in_modes()
    # Another mode of the model may use another kernel.
    session = CaptureSession(model, on_error="raise")
    model.layers[1].written = False
    look()
    assert look()[0]
    model.eval()
    assert not look()[0]


def test_torch_dynamo_is_not_loaded_by_a_window() -> None:
    code = (
        "import sys, torch\n"
        "from entropy_monitor.capture import CaptureSession\n"
        "layer = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0)\n"
        "session = CaptureSession(layer)\n"
        "for _ in range(3):\n"
        "    with session.window(lambda call: None) as report:\n"
        "        layer(torch.zeros(3, 2, 8))\n"
        "assert report.complete\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
