"""A Hugging Face ``config.json`` as a model description.

Defaults are those of each family's class in ``transformers``.  A setting that changes the computation and
that this server does not compute is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtp_serve.config import FAMILIES, ModelConfig, MoeConfig, RopeConfig
from gtp_serve.errors import CheckpointCorrupt, LayoutMismatch, UnsupportedModel
from gtp_serve.loaders.files import shown
from gtp_serve.loaders.limits import MAX_LAYERS, MAX_SIZE, check_limits


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What a family's class takes where the file says nothing."""

    norm_eps: float = 1e-6
    theta: float = 10000.0
    max_context: int = 32768
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None


_DEFAULTS = {
    "llama": _Defaults(max_context=2048),
    "mistral": _Defaults(max_context=131072, kv_heads=8, window=4096),
    "qwen2": _Defaults(kv_heads=32),
    "qwen3": _Defaults(kv_heads=32, head_dim=128),
    "mixtral": _Defaults(norm_eps=1e-5, theta=1e6, max_context=131072, kv_heads=8),
    "qwen3_moe": _Defaults(kv_heads=4),
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


class _Fields:
    """Settings with checked types; ``null`` counts as absent, as it does in transformers."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values = values
        self.file = file

    def integer(self, name: str, default: int | None = None, high: int = MAX_SIZE) -> int | None:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not int or not 0 < value <= high:
            raise self.wrong(name, f"a whole number from 1 to {high}")
        return value

    def need(self, name: str, high: int = MAX_SIZE) -> int:
        value = self.integer(name, high=high)
        if value is None:
            raise CheckpointCorrupt(f"{self.file} does not say {name}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def need_number(self, name: str) -> float:
        if self.values.get(name) is None:
            raise CheckpointCorrupt(f"{self.file} does not say {name}")
        return self.number(name, 0.0)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return default if value is None else value

    def wrong(self, name: str, needed: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.file}: {name} is {shown(self.values.get(name))}", [("needed", needed)])

    def unsupported(self, name: str, needed: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.file}: {name} is {shown(self.values.get(name))}, which this server does not compute",
            [("needed", needed)],
        )


def model_config(values: Mapping[str, Any], generation: Mapping[str, Any], file: str) -> ModelConfig:
    """The model that a ``config.json`` describes.

    :param generation: ``generation_config.json``, or nothing; its end tokens win.
    :raises UnsupportedModel: for a family or a setting that is not served.
    :raises CheckpointCorrupt: for a value of the wrong kind.
    """
    fields = _Fields(values, file)
    family = _family(fields)
    _check_fixed(fields, family)
    defaults = _DEFAULTS[family]
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads") or _default_kv_heads(values, defaults, heads)
    bias, moe = fields.flag("attention_bias"), _moe(fields, family)
    if heads % kv_heads:
        raise LayoutMismatch(f"{file}: {heads} heads are not a multiple of {kv_heads} key and value heads")
    vocab = fields.need("vocab_size")
    config = ModelConfig(
        family=family,
        num_layers=fields.need("num_hidden_layers", MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, defaults, hidden, heads),
        ffn_size=0 if moe is not None else fields.need("intermediate_size"),
        vocab_size=vocab,
        vocab_rows=vocab,
        norm_eps=fields.number("rms_norm_eps", defaults.norm_eps),
        rope=_rope(fields, defaults),
        tied=fields.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or (bias and family in ("llama", "qwen3", "qwen3_moe")),
        proj_bias=bias and family in ("llama", "qwen3", "qwen3_moe"),
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=_window(fields, family, defaults),
        max_context=fields.integer("max_position_embeddings", defaults.max_context) or defaults.max_context,
        moe=moe,
        eos_token_ids=_token_ids("eos_token_id", file, generation, values),
        bos_token_id=next(iter(_token_ids("bos_token_id", file, generation, values)), None),
    )
    check_limits(config, file)
    return config


def _family(fields: _Fields) -> str:
    family, names = fields.values.get("model_type"), fields.values.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if family is None and isinstance(architecture, str):
        family = ARCHITECTURES.get(architecture)
    if family not in FAMILIES or (architecture is not None and ARCHITECTURES.get(str(architecture)) != family):
        raise UnsupportedModel(
            f"{fields.file}: the model is of the kind {shown(family or architecture)}"
            + (f" ({shown(architecture)})" if family and architecture else ""),
            [("supported", ", ".join(FAMILIES))],
        )
    return str(family)


def _check_fixed(fields: _Fields, family: str) -> None:
    quantised = fields.values.get("quantization_config") or fields.values.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise UnsupportedModel(
            f"{fields.file}: the weights are quantised ({shown(method or 'quantization_config')})",
            [("needed", "bfloat16, float16 or float32 weights")],
        )
    if fields.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", "silu")
    if fields.values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.unsupported("partial_rotary_factor", "1")
    if family == "qwen3_moe":
        if fields.values.get("decoder_sparse_step") not in (None, 1):
            raise fields.unsupported("decoder_sparse_step", "1: experts in each layer")
        if fields.values.get("mlp_only_layers"):
            raise fields.unsupported("mlp_only_layers", "none: experts in each layer")


def _default_kv_heads(values: Mapping[str, Any], defaults: _Defaults, heads: int) -> int:
    """Written as null it means as many as heads; absent, what the family's class has."""
    return heads if "num_key_value_heads" in values or defaults.kv_heads is None else defaults.kv_heads


def _head_dim(fields: _Fields, defaults: _Defaults, hidden: int, heads: int) -> int:
    said = fields.integer("head_dim")
    if said is None and "head_dim" not in fields.values:
        said = defaults.head_dim
    if said is None and hidden % heads:
        raise LayoutMismatch(f"{fields.file}: hidden_size {hidden} is not a multiple of {heads} heads")
    size = said or hidden // heads
    if size % 2:
        raise LayoutMismatch(f"{fields.file}: heads have {size} elements, an odd number, which cannot be rotated")
    return size


def _moe(fields: _Fields, family: str) -> MoeConfig | None:
    if family == "mixtral":
        experts, ffn, normalise = (
            fields.integer("num_local_experts", 8),
            fields.need("intermediate_size"),
            True,
        )
        top_k = fields.integer("num_experts_per_tok", 2)
    elif family == "qwen3_moe":
        experts = fields.integer("num_experts") or fields.integer("num_local_experts", 128)
        ffn, normalise = fields.integer("moe_intermediate_size", 768) or 768, fields.flag("norm_topk_prob")
        top_k = fields.integer("num_experts_per_tok", 8)
    else:
        return None
    if not experts or not top_k or top_k > experts:
        raise LayoutMismatch(f"{fields.file}: {top_k} experts per token of {experts} experts")
    return MoeConfig(num_experts=experts, top_k=top_k, ffn_size=ffn, normalise_top_k=normalise)


def _window(fields: _Fields, family: str, defaults: _Defaults) -> int | None:
    """Positions attended to; some families have a switch, and a mix of windowed and full layers is
    refused."""
    if family in ("llama",):
        return None
    if family in ("mistral", "mixtral"):
        return fields.integer("sliding_window") if "sliding_window" in fields.values else defaults.window
    layers, types = fields.need("num_hidden_layers", MAX_LAYERS), fields.values.get("layer_types")
    on = fields.flag("use_sliding_window")
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096) if on else None
    if family == "qwen3_moe":
        return window
    if isinstance(types, list):
        sliding = {kind == "sliding_attention" for kind in types}
        if len(types) != layers or any(t not in ("full_attention", "sliding_attention") for t in types):
            raise fields.unsupported("layer_types", "one kind for each layer, full_attention or sliding_attention")
    else:
        first = fields.values.get("max_window_layers")
        first = 28 if first is None else first
        if type(first) is not int:
            raise fields.wrong("max_window_layers", "a whole number")
        sliding = {window is not None and layer >= first for layer in range(layers)}
    if len(sliding) > 1:
        raise UnsupportedModel(
            f"{fields.file}: some layers have a sliding window and others none",
            [("supported", "the same for all layers")],
        )
    if sliding == {True} and window is None:
        window = fields.integer("sliding_window")
    return window if sliding == {True} else None


def _rope(fields: _Fields, defaults: _Defaults) -> RopeConfig:
    """Old spelling (``rope_theta`` beside ``rope_scaling``) and new (all in ``rope_parameters``)."""
    name = "rope_parameters" if fields.values.get("rope_parameters") is not None else "rope_scaling"
    scaling = fields.values.get(name)
    if scaling is None:
        return RopeConfig(theta=fields.number("rope_theta", defaults.theta))
    if not isinstance(scaling, dict):
        raise fields.wrong(name, "an object")
    if fields.values.get("rope_scaling") not in (None, scaling):
        raise LayoutMismatch(
            f"{fields.file} has both rope_parameters and rope_scaling, and they differ", [("needed", "one of them")]
        )
    rope = _Fields(scaling, f"{fields.file}: {name}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = rope.number("rope_theta", fields.number("rope_theta", defaults.theta))
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise rope.unsupported("partial_rotary_factor", "1")
    if kind == "default" and not any(isinstance(value, dict) for value in scaling.values()):
        return RopeConfig(theta=theta)
    context = fields.integer("max_position_embeddings", defaults.max_context) or defaults.max_context
    name = "original_max_position_embeddings"  # some files have it beside max_position_embeddings
    original = rope.integer(name) or fields.integer(name, context) or context
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=rope.need_number("factor"))
    if kind == "dynamic":
        return RopeConfig(theta=theta, scaling="dynamic", factor=rope.need_number("factor"), original_context=original)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=rope.need_number("factor"),
            low_freq_factor=rope.need_number("low_freq_factor"),
            high_freq_factor=rope.need_number("high_freq_factor"),
            original_context=original,
        )
    if kind == "yarn":
        return _yarn(rope, theta, context, original)
    raise UnsupportedModel(
        f"{rope.file}: the rotary embedding is of the kind {shown(kind)}",
        [("supported", "default, linear, dynamic, llama3, yarn; one for all layers")],
    )


def _yarn(rope: _Fields, theta: float, context: int, original: int) -> RopeConfig:
    if rope.values.get("truncate") is False:
        raise rope.unsupported("truncate", "true")
    factor = rope.number("factor", context / original)
    attention: float | None = None
    if rope.values.get("attention_factor") is not None:
        attention = rope.number("attention_factor", 1.0)
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention = _mscale(factor, rope.number("mscale", 1.0)) / _mscale(factor, rope.number("mscale_all_dim", 1.0))
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_context=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=attention,
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _token_ids(name: str, file: str, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """One id, a list, or nothing, from the first source that says; a negative number means none.

    :raises CheckpointCorrupt: for anything else: a model without its end tokens never stops.
    """
    for source in sources:
        value = source.get(name)
        values = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
        wrong = next((v for v in values if type(v) is not int), None)
        if wrong is not None:
            raise CheckpointCorrupt(
                f"{file}, or generation_config.json beside it: {name} has {shown(wrong)}",
                [("needed", "a token id, a list of them, or null")],
            )
        found = tuple(dict.fromkeys(v for v in values if type(v) is int and 0 <= v < MAX_SIZE))
        if found:
            return found
    return ()
