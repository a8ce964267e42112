"""torch.compile in its usual forms: names, numbers, no recompilation, nothing hidden silently."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from entropy_monitor.capture import CaptureSession
from tests.capture.helpers import capture, gradients
from tests.handmade import WIDTH, Fused, NanoGPT
from tests.versions import stays_compiled

pytestmark = [
    # Dynamo itself touches deprecated names and gradients of non-leaves while it traces.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


class Block(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = kind()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Quiet(Fused):
    """The fused kernel and nothing else."""

    dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout
        )
        return self.merge(y)


class Written(NanoGPT):
    """Softmax by hand, which inductor fuses."""

    def keep(self, weights: Tensor) -> None:
        pass


class Dropping(Quiet):
    """Dropout on the weights: no fused kernel on a CPU."""

    dropout = 0.1


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Quiet, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Towers(nn.Module):
    """Two independent stacks of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Stack(depth=1), Stack(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(2 * x)


NAMES = [f"layers.{n}.attention" for n in range(3)]


def stack(kind: Callable[[], nn.Module] = Quiet, depth: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(kind, depth)


def x(length: int = 8) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1))


def whole(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def per_layer(model: nn.Module, backend: str) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def wrapped_layers(model: nn.Module, backend: str) -> nn.Module:
    for n, layer in enumerate(model.layers):
        model.layers[n] = torch.compile(layer, backend=backend)
    return model


def dynamic(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend, dynamic=True)


FORMS = [
    (form, attach)
    for form in (whole, in_place, per_layer, wrapped_layers, dynamic)
    for attach in ("before", "after")
    if (form, attach) != (dynamic, "before")
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("form", "attach"), FORMS)
def test_names_and_numbers_without_recompiling(
    form: Callable[[nn.Module, str], nn.Module], attach: str, backend: str
) -> None:
    plain, reference = form(stack(), backend), stack()
    expected = plain(x())
    expected.backward()
    graphs = counters["stats"]["unique_graphs"]

    raw = stack()
    session = CaptureSession(raw, on_error="raise") if attach == "before" else None
    model = form(raw, backend)
    session = session or CaptureSession(model, on_error="raise")
    first, *_ = capture(model, lambda: model(x()), session=session)
    truth, *_ = capture(reference, lambda: reference(x()))
    for _ in range(3):
        model.zero_grad()
        seen, report, loss = capture(model, lambda: model(x()), session=session)
        loss.backward()
        assert list(first.stats) == list(seen.stats) == NAMES
        assert report.complete
        for name in NAMES:
            want, got = truth.stats[name], seen.stats[name]
            torch.testing.assert_close(got.sink_mass, want.sink_mass, atol=1e-5, rtol=0)
            torch.testing.assert_close(got.content_entropy, want.content_entropy, atol=1e-5, rtol=0)
    # A monitored step of compiled code is the unmonitored one, bit for bit.
    assert torch.equal(loss, expected)
    for one, other in zip(gradients(plain).values(), gradients(model).values(), strict=True):
        assert torch.equal(one, other)
    assert not counters["recompiles"]
    assert counters["stats"]["unique_graphs"] <= 2 * graphs  # dynamo may share them


@stays_compiled
@pytest.mark.parametrize("form", [whole, in_place])
def test_compiled_code_still_runs_compiled_in_a_window(
    form: Callable[[nn.Module, Any], nn.Module],
) -> None:
    runs = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(graph)
            return graph(*args)

        return run

    model = form(stack(), counting)
    session = CaptureSession(model, on_error="raise")
    model(x())
    capture(model, lambda: model(x()), session=session)  # learns the names, uncompiled
    runs.clear()
    for n in range(1, 4):
        capture(model, lambda: model(x()), session=session)
        assert len(runs) == n


@stays_compiled
def test_compiling_for_the_first_time_inside_a_window() -> None:
    raw = stack()
    model = torch.compile(raw, backend="aot_eager")
    session = CaptureSession(raw, on_error="raise")
    capture(raw, lambda: model(x()), session=session)
    assert counters["stats"]["unique_graphs"] == 0  # discovery compiles nothing
    seen, report, _ = capture(raw, lambda: model(x()), session=session)
    assert counters["stats"]["unique_graphs"] == 1
    assert list(seen.stats) == NAMES
    assert report.complete


def test_a_graph_break_in_every_layer() -> None:
    class Breaking(Quiet):
        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            torch._dynamo.graph_break()
            return super().forward(x)

    raw = stack(Breaking)
    model = torch.compile(raw, backend="aot_eager")
    session = CaptureSession(model, on_error="raise")
    for _ in range(3):
        seen, report, _ = capture(model, lambda: model(x()), session=session)
        assert list(seen.stats) == NAMES
        assert report.complete
    assert not counters["recompiles"]


@stays_compiled
@pytest.mark.parametrize("kind", [Written, pytest.param(Dropping, marks=pytest.mark.slow)])
def test_attention_that_compiled_code_hides_is_reported_and_found_again(
    kind: Callable[[], nn.Module],
) -> None:
    model = torch.compile(stack(kind, depth=1))
    session = CaptureSession(model, on_error="raise")
    assert list(capture(model, lambda: model(x()), session=session)[0].stats) == NAMES[:1]
    hidden, report, _ = capture(model, lambda: model(x()), session=session)
    assert not hidden.stats
    assert set(report.opaque) == set(NAMES[:1])
    assert "compiled" in report.describe()
    for _ in range(2):
        seen, report, _ = capture(model, lambda: model(x()), session=session)
        assert list(seen.stats) == NAMES[:1]
    assert not counters["recompiles"]


@stays_compiled
def test_hidden_layers_can_be_left_out_instead() -> None:
    model = torch.compile(stack(Written, depth=1))
    session = CaptureSession(model, on_error="raise", compiled="skip")
    capture(model, lambda: model(x()), session=session)
    for _ in range(3):
        hidden, report, _ = capture(model, lambda: model(x()), session=session)
        assert not hidden.stats
        assert set(report.opaque) == set(NAMES[:1])


@stays_compiled
def test_two_towers_of_one_shape_get_no_guessed_names() -> None:
    torch.manual_seed(0)
    raw = Towers()
    model = torch.compile(raw, backend="aot_eager")
    session = CaptureSession(model, on_error="raise")
    names = ["left.layers.0.attention", "right.layers.0.attention"]
    assert list(capture(model, lambda: model(x()), session=session)[0].stats) == names
    unsure, report, _ = capture(model, lambda: model(x()), session=session)
    assert not unsure.stats
    assert "several kinds of attention of the same shape" in report.describe()
    seen, report, _ = capture(model, lambda: model(x()), session=session)
    assert list(seen.stats) == names
    assert report.complete


@stays_compiled
def test_a_compiled_model_that_skips_a_layer_gives_no_misnamed_numbers() -> None:
    from entropy_monitor import AttentionMonitor

    class Skipping(Stack):
        first = 0

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[self.first :]:
                x = layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    raw = Skipping()
    model = torch.compile(raw, backend="aot_eager")
    monitor = AttentionMonitor(model, on_error="raise")
    with monitor.observe(step=0):
        model(x())
    assert monitor.snapshot().layers == tuple(NAMES)
    raw.first = 1
    with (
        pytest.warns(UserWarning, match="could not be told apart"),
        monitor.observe(step=1),
    ):
        model(x())
    assert not monitor.report.reliable
    assert monitor.snapshot().layers == ()
    with monitor.observe(step=2):  # uncompiled from now on: names are certain
        model(x())
    assert monitor.snapshot().layers == tuple(NAMES[1:])


def test_no_stance_is_left_behind() -> None:
    from torch._dynamo import eval_frame

    model = torch.compile(stack(), backend="aot_eager")
    before = eval_frame._stance
    one, other = CaptureSession(model), CaptureSession(model)
    first, second = one.window(lambda call: None), other.window(lambda call: None)
    first.open()
    second.open()
    assert eval_frame._stance.stance == "force_eager"
    model(x())
    first.close()  # in opening order, as Lightning's callbacks do
    assert eval_frame._stance.stance == "force_eager"
    second.close()
    assert eval_frame._stance == before
    with pytest.raises(KeyboardInterrupt), CaptureSession(model).window(lambda call: None):
        raise KeyboardInterrupt
    assert eval_frame._stance == before


@pytest.mark.parametrize("old", [True, False])
def test_a_torch_whose_guards_fail_in_a_mode_runs_windows_uncompiled(
    old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("session", "tap"):
        monkeypatch.setattr(f"entropy_monitor.capture.{module}.recompiles_in_modes", lambda: old)
    torch._dynamo.reset()
    model = stack()
    model.compile(backend="aot_eager")
    model(x())
    session = CaptureSession(model, on_error="raise")
    texts = []
    for _ in range(3):
        seen, report, _ = capture(model, lambda: model(x()), session=session)
        assert list(seen.stats) == NAMES
        texts.append(report.describe())
    assert ("torch 2.9 would compile" in texts[0]) is old
    assert "torch 2.9" not in texts[1]
    assert session._uncompiled is old
