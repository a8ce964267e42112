"""Flex attention used directly, and the table of transformers that it hides behind."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from entropy_monitor import AttentionMonitor
from entropy_monitor.calls import AttentionCall, RowKind
from entropy_monitor.capture import CaptureSession
from entropy_monitor.capture.interface import read_call
from entropy_monitor.capture.seen import Lost, Seen
from entropy_monitor.statistics import measure_call
from tests.capture.helpers import assert_weights, capture
from tests.handmade import WIDTH, Projected
from tests.versions import stays_compiled

pytestmark = pytest.mark.filterwarnings("ignore")  # flex attention warns about running uncompiled

T = 20


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


class Flex(Projected):
    """Flex attention with a score function that reads a table, and a mask that reads another."""

    kernel = staticmethod(flex_attention)
    grouped = False
    scored = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.linspace(0.1, 1, self.heads))
        self.register_buffer("document", torch.arange(T) // 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.grouped:
            k, v = k[:, :2], v[:, :2]

        def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (self.document[i] == self.document[j])

        def distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 2 * torch.tanh(score / 2) - self.slope[h] * (i - j)

        mask = create_block_mask(same_document, None, None, T, T, device="cpu")
        y = self.kernel(
            q, k, v, block_mask=mask, score_mod=distance if self.scored else None,
            enable_gqa=self.grouped, scale=0.3,
        )  # fmt: skip
        scores = 0.3 * q @ k.repeat_interleave(self.heads // k.shape[1], 1).mT
        gap = torch.arange(T)[:, None] - torch.arange(T)
        if self.scored:
            scores = 2 * torch.tanh(scores / 2) - self.slope[:, None, None] * gap
        visible = (gap >= 0) & (self.document[:, None] == self.document)
        self.keep(scores.masked_fill(~visible, -torch.inf).softmax(-1))
        return self.merge(y)


class Net(nn.Module):
    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).square().mean()


def x() -> Tensor:
    return torch.randn(2, T, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_uncompiled_flex_attention(grouped: bool, scored: bool) -> None:
    torch.manual_seed(0)
    model = Net(Flex())
    model.mix.grouped, model.mix.scored = grouped, scored
    with torch.no_grad():
        expected = model(x())
        # The softmax that the test computes for reference never meets values.
        measured, report, loss = capture(model, lambda: model(x()))
    assert report.way == {"mix": "flex"}
    assert torch.equal(loss, expected)
    assert_weights(measured, {"mix": model.mix.weights})


@stays_compiled
def test_compiled_flex_attention_is_reported_as_hidden() -> None:
    torch.manual_seed(0)
    model = Net(Flex())
    model.mix.scored = False
    model.mix.kernel = torch.compile(flex_attention)
    session = CaptureSession(model, compiled="skip")
    with torch.no_grad():
        seen, *_ = capture(model, lambda: model(x()), session=session)
        hidden, report, _ = capture(model, lambda: model(x()), session=session)
    assert list(seen.stats) == ["mix"]
    assert not hidden.stats
    assert "compiled" in report.opaque["mix"]


# The table of transformers ------------------------------------------------------------------------


class HuggingFace(Projected):
    """Calls the attention interface as models of transformers do."""

    is_causal = True

    def __init__(self, entry: str, **kwargs: Any) -> None:
        super().__init__()
        self.entry, self.kwargs = entry, kwargs
        self.sinks = nn.Parameter(torch.linspace(-1, 1, self.heads))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        q, k, v = self.project(x)
        y = ALL_ATTENTION_FUNCTIONS[self.entry](
            self, q, k, v, mask, dropout=0.0, scaling=0.4, **self.kwargs
        )[0]
        return self.out(y.flatten(2))


def _hidden_kernel(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands for a kernel of which no operation can be seen."""
    return (0.5 * value).transpose(1, 2), None


@pytest.fixture
def table() -> Iterator[dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping
    before = dict(table)
    table["flash_attention_2"] = _hidden_kernel
    table["mine"] = _hidden_kernel
    during = dict(table)
    yield table
    assert table == during  # the window left the table as it found it
    table.clear()
    table.update(before)


def test_flash_attention_is_read_from_its_arguments(table: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = HuggingFace("flash_attention_2", sliding_window=5, softcap=2.0)
    model = Net(layer)
    padding = torch.ones(2, T, dtype=torch.long)
    padding[1, :6] = 0
    calls: list[AttentionCall] = []
    session = CaptureSession(model, on_error="raise")
    for _ in range(2):
        with session.window(lambda call: calls.append(call)) as report:
            layer(x(), padding)
    assert report.way == {"mix": "interface"}
    q, k, _ = layer.project(x())
    scores = 2 * torch.tanh(0.4 * q @ k.mT / 2)
    gap = torch.arange(T)[:, None] - torch.arange(T)
    visible = (gap >= 0) & (gap < 5) & padding[:, None, None, :].bool()
    got = measure_call(calls[-1])
    want = measure_call(AttentionCall(logits=scores.masked_fill(~visible, -torch.inf)))
    assert torch.equal(got.kind, want.kind)
    torch.testing.assert_close(got.content_entropy, want.content_entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.sink_mass, want.sink_mass, atol=1e-5, rtol=0)


def test_learned_sinks_and_packed_documents_through_the_table(table: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = HuggingFace("flash_attention_2")
    layer.kwargs = {
        "s_aux": layer.sinks,
        "position_ids": torch.tensor([[*range(12), *range(T - 12)]]),
    }
    calls: list[AttentionCall] = []
    with CaptureSession(layer, on_error="raise").window(calls.append):
        layer(x()[:1])
    (call,) = calls
    assert torch.equal(call.sink_logits, layer.sinks)
    assert call.mask is not None
    assert call.mask[0, 0, :12, :12].all()
    assert not call.mask[0, 0, 12:, :12].any()


def test_positions_that_start_again_separate_nothing_in_a_batch_of_two(
    table: dict[str, Any],
) -> None:
    positions = torch.tensor([[*range(12), *range(T - 12)]] * 2)
    layer = HuggingFace("flash_attention_2", position_ids=positions)
    measured, *_ = capture(layer, lambda: layer(x()))
    # All but the first two causal rows see the one sink and two content keys or more.
    stats = measured.stats["HuggingFace"]
    assert stats.support[:, 0].tolist() == [list(range(T))] * 2
    assert (stats.kind == RowKind.VALID).sum(-1).unique().tolist() == [T - 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_the_table_shows_is_not_counted_again_when_it_is_recomputed(
    table: dict[str, Any], reentrant: bool
) -> None:
    layer = HuggingFace("flash_attention_2")
    names: list[str] = []
    with CaptureSession(layer, on_error="raise").window(lambda call: names.append(call.name)):
        loss = checkpoint(layer, x().requires_grad_(), use_reentrant=reentrant).square().mean()
        loss.backward()  # inside the window on purpose
    assert names == ["HuggingFace"]


def test_statistics_of_what_the_table_shows_keep_no_graph_alive(table: dict[str, Any]) -> None:
    class Mark:
        pass

    layer, mark = HuggingFace("flash_attention_2"), Mark()
    monitor = AttentionMonitor(layer, rows=None, on_error="raise", keep_rows=True)
    start = x().requires_grad_() * 1.0
    with monitor.observe(step=0):
        loss = layer(start).square().mean()
    start.grad_fn.metadata["mark"] = mark  # queries and keys descend from it
    graph = weakref.ref(mark)
    del mark, start, loss
    gc.collect()
    assert monitor.snapshot().layers == ("HuggingFace",)
    assert graph() is None


def test_an_unknown_attention_function_is_not_guessed(table: dict[str, Any]) -> None:
    model = HuggingFace("mine")
    measured, report, _ = capture(model, lambda: model(x()))
    assert not measured.stats
    assert "'mine'" in report.opaque["HuggingFace"]


def test_what_the_kernel_computed_comes_before_what_the_interface_asked(
    table: dict[str, Any],
) -> None:
    def fused(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        # Like transformers 4.57 with gemma2 and sdpa: the soft-cap is asked for and ignored.
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return y.transpose(1, 2), None

    table["flash_attention_2"] = fused
    layer = HuggingFace("flash_attention_2", softcap=0.1)
    calls: list[AttentionCall] = []
    with CaptureSession(layer, on_error="raise").window(calls.append) as report:
        layer(x())
    table["flash_attention_2"] = _hidden_kernel
    assert report.way == {"HuggingFace": "sdpa"}
    assert [call.softcap for call in calls] == [None]


def test_two_windows_share_the_wrapping_and_exceptions_remove_it(table: dict[str, Any]) -> None:
    layer = HuggingFace("flash_attention_2")
    names: list[str] = []
    one = CaptureSession(layer).window(lambda call: names.append("one"))
    two = CaptureSession(layer).window(lambda call: names.append("two"))
    one.open()
    two.open()
    layer(x())
    one.close()
    layer(x())
    two.close()
    layer(x())
    assert names == ["one", "two", "two"]
    with pytest.raises(KeyboardInterrupt), CaptureSession(layer).window(lambda call: None):
        raise KeyboardInterrupt


def test_lengths_of_packed_sequences_are_not_guessed() -> None:
    q = torch.zeros(1, 2, 4, 8)
    module = SimpleNamespace(is_causal=True)
    found = read_call(
        "flash_attention_2", module, q, q, q, None, cu_seq_lens_q=torch.tensor([0, 4])
    )
    assert isinstance(found, Lost)
    assert isinstance(read_call("flash_attention_2", module, q, q, q, None), Seen)
