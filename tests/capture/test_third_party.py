"""Libraries outside transformers: right numbers, or a report of what was not seen."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.helpers import assert_same_training, assert_weights, capture
from tests.models import loss_of
from tests.third_party import load
from tests.versions import TRANSFORMERS_5

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that touch what torch deprecates


def ids() -> Tensor:
    return torch.randint(0, 50, (2, 10), generator=torch.Generator().manual_seed(0))


def image(size: int = 16) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def sharpen(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.double()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("registers", [0, 4])
def test_timm(fused: bool, registers: int) -> None:
    timm = load("timm", wants_torchvision=True)
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=3,
        reg_tokens=registers,
    )  # fmt: skip
    sharpen(model)
    weights: dict[str, Tensor] = {}
    for n, block in enumerate(model.blocks):
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(
            lambda module, args, out, n=n: weights.update({f"blocks.{n}.attn": out.detach()})
        )
    model(image().double())
    for block in model.blocks:
        block.attn.fused_attn = fused
    measured, report, _ = capture(model, lambda: model(image().double()))
    assert set(measured.stats) == {"blocks.0.attn", "blocks.1.attn"}
    assert set(report.way.values()) == {"sdpa" if fused else "softmax"}
    assert report.complete
    assert_weights(measured, weights, atol=1e-9)


X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "grouped": {"attn_kv_heads": 2},
    "one_key_head": {"attn_one_kv_head": True},
    "alibi": {"alibi_pos_bias": True},
    "rotary": {"rotary_pos_emb": True},
    "relative": {"rel_pos_bias": True},
    "qk_norm": {"attn_qk_norm": True},
    "memory_keys": {"attn_num_mem_kv": 2},
    "talking_heads": {"attn_pre_talking_heads": True},
    "sparse": {"attn_sparse_topk": 4},
    "sinks": {"attn_head_learned_sink": True},
    "gated": {"attn_gate_values": True},
}


@pytest.mark.parametrize("variant", X_TRANSFORMERS)
def test_x_transformers(variant: str) -> None:
    library = load("x_transformers")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = library.Decoder(
            dim=32, depth=2, heads=4, attn_dim_head=8, **X_TRANSFORMERS[variant]
        )
        models.append(library.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers))
    plain, watched = models
    expected = loss_of(plain(ids()))
    measured, report, loss = capture(watched, lambda: loss_of(watched(ids())))
    expected.backward()
    loss.backward()
    assert_same_training(plain, watched, (expected, loss))
    names = [f"attn_layers.layers.{n}.1" for n in (0, 2)]
    assert [name.removesuffix(".attend") for name in measured.stats] == names
    assert report.complete

    sharpen(watched).eval()
    measured, *_ = capture(watched, lambda: watched(ids()))
    if variant == "flash":  # keeps no weights: the other kernel has the same ones
        for layer in watched.attn_layers.layers:
            if hasattr(layer[1], "attend"):
                layer[1].attend.flash = False
    _, maps = watched(ids(), return_attn=True)
    if variant == "sinks":  # the map still has the column of the sink in front
        maps = [weights[..., 1:] for weights in maps]
    # What is missing to a sum of one is coarse in float32, and the sink is told by nothing else.
    atol = 1e-3 if variant == "sinks" else 1e-5
    assert_weights(measured, dict(zip(measured.stats, maps, strict=True)), atol=atol)


def test_x_transformers_encoder_and_decoder() -> None:
    library = load("x_transformers")
    model = library.XTransformer(
        dim=32, enc_num_tokens=50, enc_depth=1, enc_heads=2, enc_max_seq_len=16,
        dec_num_tokens=50, dec_depth=1, dec_heads=2, dec_max_seq_len=16,
    )  # fmt: skip
    measured, report, _ = capture(model, lambda: model(ids(), ids()))
    assert report.complete
    assert list(measured.cross.values()) == [None, None, True]


def test_forms_without_a_softmax_over_keys_are_reported() -> None:
    library = load("x_transformers")
    layers = library.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_sigmoid=True)
    model = library.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)
    measured, report, _ = capture(model, lambda: model(ids()))
    assert not measured.stats
    assert set(report.unseen) == {f"attn_layers.layers.{n}.1" for n in (0, 2)}


def _transformers(name: str, **config: Any) -> nn.Module:
    transformers = load("transformers")
    kind = getattr(transformers, name)
    small = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32}
    return kind(kind.config_class(num_hidden_layers=1, num_attention_heads=4, **small, **config))


def test_longformer_is_reported_not_guessed() -> None:
    model = _transformers("LongformerModel", max_position_embeddings=40, attention_window=[8])
    measured, report, _ = capture(model, lambda: model(ids()))
    assert not measured.stats
    assert "encoder.layer.0.attention.self" in {**report.unseen, **report.lost}


def test_block_sparse_bigbird_is_reported_as_incomplete() -> None:
    model = _transformers(
        "BigBirdModel", max_position_embeddings=128, block_size=4, num_random_blocks=1,
        attention_type="block_sparse",
    )  # fmt: skip
    long = ids().repeat(1, 8)
    _, report, _ = capture(model, lambda: model(long))
    assert "side by side" in report.lost["encoder.layer.0.attention.self"]
    assert not report.complete


def test_swin_windows_are_sequences_and_its_mask_of_minus_100_hides() -> None:
    transformers = load("transformers")
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4
    )
    model = transformers.SwinModel._from_config(config, attn_implementation="eager").eval()
    measured, report, _ = capture(model, lambda: model(image()))
    inner = "" if TRANSFORMERS_5 else ".self"
    names = [f"encoder.layers.0.blocks.{n}.attention{inner}" for n in (0, 1)]
    assert list(measured.stats) == names
    assert report.complete
    assert measured.shapes[names[0]] == (8, 2, 16, 16)
    # The second block is shifted: its windows hold parts that must not see each other.
    assert int(measured.stats[names[0]].support.min()) == 15
    assert int(measured.stats[names[1]].support.min()) == 3
