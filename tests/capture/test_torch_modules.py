"""nn.MultiheadAttention and the nn.Transformer family."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.helpers import assert_same_training, assert_weights, capture

B, T, S, E = 3, 6, 8, 16


@contextmanager
def weights_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Weights of every nn.MultiheadAttention by its own code, from the inputs it is given."""
    weights: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):

            def hook(module: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                handle = own.pop(name)
                handle.remove()
                given = {**kwargs, "need_weights": True, "average_attn_weights": False}
                with torch.no_grad():
                    w = module(*args, **given)[1]
                weights[name or "MultiheadAttention"] = w if w.ndim == 4 else w[None]

            handles.append((name, module.register_forward_hook(hook, with_kwargs=True)))
    own = dict(handles)
    yield weights
    for handle in own.values():
        handle.remove()


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def compare(model: nn.Module, run: Callable[[], Any], names: set[str]) -> dict[str, bool | None]:
    with weights_of(model) as weights:
        run()
    measured, report, _ = capture(model, run)
    assert set(measured.stats) == names == set(weights)
    assert report.complete
    assert_weights(measured, weights, atol=1e-9)
    return measured.cross


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention(batch_first: bool, need_weights: bool, masked: bool) -> None:
    model = made(lambda: nn.MultiheadAttention(E, 4, batch_first=batch_first))
    x = tensor(B, T, E) if batch_first else tensor(T, B, E)
    mask = nn.Transformer.generate_square_subsequent_mask(T).double() if masked else None
    compare(
        model,
        lambda: model(x, x, x, need_weights=need_weights, attn_mask=mask),
        {"MultiheadAttention"},
    )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch", [B, T])
def test_batch_and_length_are_told_apart(need_weights: bool, batch: int) -> None:
    model = made(lambda: nn.MultiheadAttention(E, 4))
    x = tensor(T, batch, E)
    compare(model, lambda: model(x, x, x, need_weights=need_weights), {"MultiheadAttention"})


@pytest.mark.parametrize("need_weights", [True, False])
def test_unbatched_cross_with_other_widths_and_added_keys(need_weights: bool) -> None:
    model = made(
        lambda: nn.MultiheadAttention(
            E, 4, kdim=5, vdim=7, add_bias_kv=True, add_zero_attn=True, batch_first=True
        )
    )
    q, k, v = tensor(T, E), tensor(S, 5, seed=1), tensor(S, 7, seed=2)
    compare(model, lambda: model(q, k, v, need_weights=need_weights), {"MultiheadAttention"})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder(batch_first: bool, norm_first: bool) -> None:
    layer = lambda: nn.TransformerEncoderLayer(  # noqa: E731
        E, 4, 20, 0.0, batch_first=batch_first, norm_first=norm_first
    )
    model = made(lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False))
    x = tensor(B, T, E) if batch_first else tensor(T, B, E)
    compare(model, lambda: model(x), {"layers.0.self_attn", "layers.1.self_attn"})


def test_decoder_keeps_self_and_cross_apart() -> None:
    model = made(
        lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(E, 4, 20, 0.0, batch_first=True), 2
        )
    )
    names = {f"layers.{n}.{kind}" for n in range(2) for kind in ("self_attn", "multihead_attn")}
    # Equal lengths: shapes alone would not tell cross-attention from self-attention.
    for length in (S, T):
        memory = tensor(B, length, E, seed=1)
        cross = compare(model, lambda m=memory: model(tensor(B, T, E), m), names)
        assert {name for name, is_cross in cross.items() if is_cross} == {
            "layers.0.multihead_attn",
            "layers.1.multihead_attn",
        }


def test_whole_transformer_trains_the_same() -> None:
    losses, models = [], []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Transformer(E, 4, 2, 2, 20, dropout=0.1, batch_first=True)
        src, tgt = tensor(B, S, E).float(), tensor(B, T, E, seed=1).float()
        torch.manual_seed(1)

        def run(model: nn.Module = model, src: Tensor = src, tgt: Tensor = tgt) -> Tensor:
            return model(src, tgt).square().mean()

        if watched:
            measured, report, loss = capture(model, run)
            assert len(measured.stats) == 6
            assert report.complete
        else:
            loss = run()
        loss.backward()
        losses.append(loss)
        models.append(model)
    assert_same_training(*models, tuple(losses))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masked", ["", "src_key_padding_mask", "mask", "both"])
def test_inference_fast_path(norm_first: bool, masked: str) -> None:
    layer = nn.TransformerEncoderLayer(E, 4, 20, batch_first=True, norm_first=norm_first)
    model = made(lambda: nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    x = tensor(B, T, E)
    given: dict[str, Tensor] = {}
    if masked in ("src_key_padding_mask", "both"):
        given["src_key_padding_mask"] = torch.arange(T) >= torch.tensor([[T], [4], [3]])
    if masked in ("mask", "both"):
        given["mask"] = ~torch.ones(T, T, dtype=torch.bool).tril()
    slow, *_ = capture(model, lambda: model(x, **given))
    with torch.no_grad():
        expected = model(x, **given)
        fast, report, out = capture(model, lambda: model(x, **given))
    assert set(report.way.values()) == {"native"}
    assert report.complete
    assert torch.equal(out, expected)
    assert set(fast.stats) == set(slow.stats) == {"layers.0.self_attn", "layers.1.self_attn"}
    for name, want in slow.stats.items():
        got = fast.stats[name]
        assert torch.equal(got.kind, want.kind)
        torch.testing.assert_close(got.total_entropy, want.total_entropy, atol=1e-9, rtol=0)
        torch.testing.assert_close(got.sink_mass, want.sink_mass, atol=1e-9, rtol=0)


def test_fast_path_of_attention_alone() -> None:
    model = made(lambda: nn.MultiheadAttention(E, 4, batch_first=True)).eval()
    x = tensor(B, T, E)
    slow, *_ = capture(model, lambda: model(x, x, x))
    with torch.no_grad():
        fast, report, _ = capture(model, lambda: model(x, x, x))
    assert report.way == {"MultiheadAttention": "native"}
    (want,), (got,) = slow.stats.values(), fast.stats.values()
    torch.testing.assert_close(got.total_entropy, want.total_entropy, atol=1e-9, rtol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # nested tensors are a prototype
def test_nested_tensors_of_the_fast_path_are_reported() -> None:
    layer = nn.TransformerEncoderLayer(E, 4, 20, batch_first=True)
    model = made(lambda: nn.TransformerEncoder(layer, 2)).eval()
    padding = torch.arange(T) >= torch.tensor([[T], [4], [3]])
    with torch.no_grad():
        measured, report, _ = capture(
            model, lambda: model(tensor(B, T, E), src_key_padding_mask=padding)
        )
    assert not measured.stats
    assert all("nested" in reason for reason in report.opaque.values())
    assert "nested" in report.describe()
    assert not report.unseen
