"""Tiny models with random weights, a few thousand parameters each, for all tests.

`FAMILIES` has one line per model family: how to build it from a configuration, what to feed it, and
which modules compute attention, in the order in which the model returns its weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.versions import TRANSFORMERS_5

VOCABULARY = 61
BATCH, LENGTH = 2, 9


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        name: Key in `FAMILIES`.
        build: Makes the model for one attention implementation, after seeding.
        inputs: Makes keyword arguments of its forward pass.
        layers: Names of the attention modules per field of the output that holds their weights.
        ways: Attention implementations that run.
        differs: Implementations that compute other weights than eager does, with the reason.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    layers: Mapping[str, tuple[str, ...]]
    ways: tuple[str, ...] = ("eager", "sdpa")
    differs: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.layers.values() for name in names)


def tokens(seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def language_inputs() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def masked_inputs() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def encoder_decoder_inputs() -> dict[str, Any]:
    return {
        "input_ids": tokens(0, length=11),
        "labels": tokens(1),
        "use_cache": False,
    }


def image_inputs(size: int = 12) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(BATCH, 3, size, size, generator=generator)}


def whisper_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_features": torch.randn(BATCH, 8, 24, generator=generator),
        "labels": tokens(),
        "use_cache": False,
    }


def clip_inputs() -> dict[str, Any]:
    return {**image_inputs(), "input_ids": tokens(), "return_loss": True}


def numbered(pattern: str, count: int) -> tuple[str, ...]:
    return tuple(pattern.format(n) for n in range(count))


def hugging_face(
    name: str,
    model: str,
    layers: Mapping[str, tuple[str, ...]] | str,
    config: dict[str, Any],
    *,
    inputs: Callable[[], dict[str, Any]] = language_inputs,
    ways: tuple[str, ...] = ("eager", "sdpa"),
    nested: Mapping[str, dict[str, Any]] | None = None,
    depth: int = 2,
    differs: Mapping[str, str] | None = None,
) -> Family:
    """A family of transformers: class name, names of its attention modules, configuration."""

    def build(way: str) -> nn.Module:
        import transformers

        kind = getattr(transformers, model)
        made = kind.config_class(**config)
        for part, values in (nested or {}).items():
            for key, value in values.items():
                setattr(getattr(made, part), key, value)
        made._attn_implementation = way
        if hasattr(made, "_experts_implementation"):
            made._experts_implementation = "eager"  # grouped products know no float64
        return kind._from_config(made, attn_implementation=way)

    if isinstance(layers, str):
        layers = {"attentions": numbered(layers, depth)}
    return Family(
        name=name, build=build, inputs=inputs, layers=layers, ways=ways, differs=differs or {}
    )


_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_LLAMA = "model.layers.{}.self_attn"
_FLEX = ("eager", "sdpa", "flex_attention")

_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
_INNER = "" if TRANSFORMERS_5 else ".attention"
"""Version 4 has a module within the attention of a vision model."""

_VIT_4 = "vit.encoder.layer.{}.attention.attention"

_IMAGE = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 12, "patch_size": 4, **_NO_DROPOUT,
}  # fmt: skip


def _encoder_decoder(
    prefix: str, self_attn: str, cross: str, encoder: str
) -> dict[str, tuple[str, ...]]:
    return {
        "encoder_attentions": numbered(f"{prefix}encoder.{encoder}", 2),
        "decoder_attentions": numbered(f"{prefix}decoder.{self_attn}", 2),
        "cross_attentions": numbered(f"{prefix}decoder.{cross}", 2),
    }


_TRANSFORMERS = (
    hugging_face(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "gpt_neox.layers.{}.attention",
        {**_SMALL, **_NO_DROPOUT},
        ways=_FLEX,
    ),
    hugging_face("gpt2", "GPT2LMHeadModel", "transformer.h.{}.attn", _GPT2),
    hugging_face(
        "gptj",
        "GPTJForCausalLM",
        "transformer.h.{}.attn",
        {**_GPT2, "rotary_dim": 4},
        ways=("eager",),
    ),
    hugging_face(
        "llama", "LlamaForCausalLM", _LLAMA, {**_SMALL, "num_key_value_heads": 2}, ways=_FLEX
    ),
    hugging_face(
        "mistral",
        "MistralForCausalLM",
        _LLAMA,
        {**_SMALL, "num_key_value_heads": 2, "sliding_window": 4},
        ways=_FLEX,
    ),
    hugging_face(
        "qwen3",
        "Qwen3ForCausalLM",
        _LLAMA,
        {**_SMALL, "num_key_value_heads": 2, "head_dim": 8},
        ways=_FLEX,
    ),
    hugging_face(
        "gemma2",
        "Gemma2ForCausalLM",
        _LLAMA,
        {
            **_SMALL,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 0.5,
        },
        ways=("eager", "flex_attention"),
    ),
    hugging_face(
        "gemma3",
        "Gemma3ForCausalLM",
        _LLAMA,
        {
            **_SMALL,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        ways=_FLEX,
    ),
    hugging_face(
        "gpt_oss",
        "GptOssForCausalLM",
        _LLAMA,
        {
            **_SMALL,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        ways=("eager",),
    ),
    hugging_face(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _LLAMA,
        {
            **_SMALL,
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    hugging_face(
        "phi3", "Phi3ForCausalLM", _LLAMA, {**_SMALL, "num_key_value_heads": 2}, ways=_FLEX
    ),
    hugging_face(
        "falcon_alibi",
        "FalconForCausalLM",
        "transformer.h.{}.self_attention",
        {
            **_SMALL,
            **_NO_DROPOUT,
            "alibi": True,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
        differs={"sdpa": "transformers adds ALiBi twice in eager mode (5.24)"},
    ),
    hugging_face(
        "falcon_mqa",
        "FalconForCausalLM",
        "transformer.h.{}.self_attention",
        {
            **_SMALL,
            **_NO_DROPOUT,
            "alibi": False,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
    ),
    hugging_face(
        "bloom",
        "BloomForCausalLM",
        "transformer.h.{}.self_attention",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_NO_DROPOUT},
        ways=("eager",),
    ),
    hugging_face(
        "mpt",
        "MptForCausalLM",
        "transformer.blocks.{}.attn",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        ways=("eager",),
    ),
    hugging_face(
        "bert",
        "BertForMaskedLM",
        "bert.encoder.layer.{}.attention.self",
        {**_SMALL, **_NO_DROPOUT},
        inputs=masked_inputs,
        ways=_FLEX,
    ),
    hugging_face(
        "roberta",
        "RobertaForMaskedLM",
        "roberta.encoder.layer.{}.attention.self",
        {**_SMALL, **_NO_DROPOUT, "max_position_embeddings": 80},
        inputs=masked_inputs,
        ways=_FLEX,
    ),
    hugging_face(
        "modernbert",
        "ModernBertForMaskedLM",
        "model.layers.{}.attn",
        {
            **_SMALL,
            **_NO_DROPOUT,
            "local_attention": 4,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        inputs=masked_inputs,
    ),
    hugging_face(
        "albert",
        "AlbertForMaskedLM",
        {
            "attentions": (
                "albert.encoder.albert_layer_groups.0.albert_layers.0.attention",
                "albert.encoder.albert_layer_groups.0.albert_layers.0.attention#1",
            )
        },
        {**_SMALL, **_NO_DROPOUT, "embedding_size": 16},
        inputs=masked_inputs,
    ),
    hugging_face(
        "deberta",
        "DebertaV2ForMaskedLM",
        "deberta.encoder.layer.{}.attention.self",
        {
            **_SMALL,
            **_NO_DROPOUT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        inputs=masked_inputs,
        ways=("eager",),
    ),
    hugging_face(
        "t5",
        "T5ForConditionalGeneration",
        _encoder_decoder(
            "",
            "block.{}.layer.0.SelfAttention",
            "block.{}.layer.1.EncDecAttention",
            "block.{}.layer.0.SelfAttention",
        ),
        _T5,
        ways=("eager", "sdpa") if TRANSFORMERS_5 else ("eager",),
        inputs=encoder_decoder_inputs,  # its flex attention reads its bias out of bounds (5.24)
    ),
    hugging_face(
        "bart",
        "BartForConditionalGeneration",
        _encoder_decoder(
            "model.", "layers.{}.self_attn", "layers.{}.encoder_attn", "layers.{}.self_attn"
        ),
        _BART,
        inputs=encoder_decoder_inputs,
        ways=_FLEX,
    ),
    hugging_face(
        "whisper",
        "WhisperForConditionalGeneration",
        _encoder_decoder(
            "model.", "layers.{}.self_attn", "layers.{}.encoder_attn", "layers.{}.self_attn"
        ),
        {**_BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32},
        inputs=whisper_inputs,
        ways=_FLEX,
    ),
    hugging_face(
        "vit",
        "ViTForImageClassification",
        "vit.layers.{}.attention" if TRANSFORMERS_5 else _VIT_4,
        _IMAGE,
        inputs=image_inputs,
        ways=_FLEX,
    ),
    hugging_face(
        "dinov2_registers",
        "Dinov2WithRegistersModel",
        f"encoder.layer.{{}}.attention{_INNER}",
        {**_IMAGE, "num_register_tokens": 2, "mlp_ratio": 1},
        inputs=image_inputs,
    ),
    hugging_face(
        "clip",
        "CLIPModel",
        {
            "text_model_output.attentions": numbered("text_model.encoder.layers.{}.self_attn", 2),
            "vision_model_output.attentions": numbered(
                "vision_model.encoder.layers.{}.self_attn", 2
            ),
        },
        {"projection_dim": 16},
        inputs=clip_inputs,
        nested={"text_config": {**_SMALL, "eos_token_id": 2}, "vision_config": _IMAGE},
    ),
    hugging_face(
        "jamba",
        "JambaForCausalLM",
        {"attentions": ("model.layers.1.self_attn",)},
        {
            **_SMALL,
            "num_key_value_heads": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _TRANSFORMERS}


def tiny(name: str, way: str = "sdpa", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of this family in training mode, with the same weights for every implementation."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[name].build(way)
        # Random initialisation is close to uniform attention; larger weights make rows differ.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).train()


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }


def loss_of(output: Any) -> Tensor:
    """A number to differentiate: the model's own loss, or a sum of squares of its result."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if not isinstance(output, Tensor):
        output = getattr(output, "logits", None) if hasattr(output, "logits") else output[0]
    return output.square().mean()


def eager_weights(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Attention weights per layer, from the eager model's own output, in float64."""
    family = FAMILIES[name]
    model = tiny(name, "eager", dtype)
    with torch.no_grad():
        output = model(**cast(family.inputs(), dtype), output_attentions=True)
    weights: dict[str, Tensor] = {}
    for path, layers in family.layers.items():
        value = output
        for part in path.split("."):
            value = getattr(value, part)
        weights.update(zip(layers, [w for w in value if w is not None], strict=True))
    return weights
