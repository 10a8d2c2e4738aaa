"""A model description as Hugging Face's ``config.json``: the inverse of ``hf_config``, and checked against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UnsupportedModel
from gtp_serve.loaders.hf_config import ARCHITECTURES, model_config

_CLASSES = {family: name for name, family in ARCHITECTURES.items()}


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model; ``vocab_size`` counts the embedding's rows.

    :raises UnsupportedModel: when no such file describes the model, naming what it cannot say.
    """
    values = {
        "architectures": [_CLASSES[config.family]],
        "model_type": config.family,
        "attention_bias": config.proj_bias,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.ffn_size or (config.moe.ffn_size if config.moe else 0),
        "max_position_embeddings": config.max_context,
        "mlp_bias": config.mlp_bias,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": _rope_scaling(config),
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.dtype,
        "use_cache": True,
        "vocab_size": config.vocab_rows,
        **_window(config),
        **_moe(config),
        **_tokens(config),
    }
    _check(config, values)
    return values


def _check(config: ModelConfig, values: Mapping[str, Any]) -> None:
    """Read the file as a loader will: whatever comes back different is something that it cannot say."""
    expected = replace(config, vocab_size=config.vocab_rows, dtype="bfloat16")
    read = model_config(values, {}, "config.json")
    wrong = [field.name for field in fields(ModelConfig) if getattr(read, field.name) != getattr(expected, field.name)]
    if wrong:
        raise UnsupportedModel(
            f"Hugging Face's {config.family} cannot say this model's {', '.join(wrong)}",
            [
                ("this model", ", ".join(f"{name} {getattr(expected, name)}" for name in wrong)),
                ("there", ", ".join(f"{name} {getattr(read, name)}" for name in wrong)),
            ],
        )


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope
    if rope.scaling == "none":
        return None
    values: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn", "dynamic"):
        values["original_max_position_embeddings"] = rope.original_context
    if rope.scaling == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            values["attention_factor"] = rope.attention_factor
    return values


def _window(config: ModelConfig) -> dict[str, Any]:
    if config.family in ("mistral", "mixtral"):
        return {"sliding_window": config.sliding_window}
    if config.family in ("qwen2", "qwen3", "qwen3_moe"):
        on = config.sliding_window is not None
        return {"use_sliding_window": on, "sliding_window": config.sliding_window, "max_window_layers": 0 if on else 28}
    return {}


def _moe(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    count = "num_local_experts" if config.family == "mixtral" else "num_experts"
    values: dict[str, Any] = {count: moe.num_experts, "num_experts_per_tok": moe.top_k}
    if config.family == "qwen3_moe":
        values |= {
            "moe_intermediate_size": moe.ffn_size,
            "norm_topk_prob": moe.normalise_top_k,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return values


def _tokens(config: ModelConfig) -> dict[str, Any]:
    ends = list(config.eos_token_ids)
    return {"bos_token_id": config.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
