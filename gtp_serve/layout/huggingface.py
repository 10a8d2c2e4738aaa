"""Logical tensors: their names and shapes, as in Hugging Face's Llama (dense) and Qwen3-MoE (experts).

Some families store the same tensors under other names (Mixtral's experts); ``logical_name`` and ``stored_name``
translate, and are inverse to one another.
"""

from __future__ import annotations

import re

from gtp_serve.config import ModelConfig
from gtp_serve.layout.spans import Shape

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """Prefix of a layer's tensors."""
    return f"model.layers.{layer}."


def logical_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of each tensor that the model needs.  A tied head is the embedding and is not listed."""
    hidden = config.hidden_size
    tensors: dict[str, Shape] = {EMBEDDING: (config.vocab_rows, hidden)}
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config).items():
            tensors[layer_prefix(layer) + name] = shape
    tensors[FINAL_NORM] = (hidden,)
    if not config.tied:
        tensors[HEAD] = (config.vocab_rows, hidden)
    return tensors


def _layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, q, kv = config.hidden_size, config.q_rows, config.kv_rows
    tensors: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qkv_bias:
        tensors |= {f"self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", q), ("k", kv), ("v", kv))}
    if config.proj_bias:
        tensors["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        tensors |= {f"self_attn.{n}_norm.weight": (config.head_dim,) for n in ("q", "k")}
    return tensors | _mlp_tensors(config)


def _mlp_tensors(config: ModelConfig) -> dict[str, Shape]:
    if config.moe is None:
        return _gated("mlp.", config.ffn_size, config.hidden_size, bias=config.mlp_bias)
    tensors: dict[str, Shape] = {"mlp.gate.weight": (config.moe.num_experts, config.hidden_size)}
    for expert in range(config.moe.num_experts):
        tensors |= _gated(f"mlp.experts.{expert}.", config.moe.ffn_size, config.hidden_size, bias=False)
    if config.moe.shared_ffn_size:
        tensors |= _gated("mlp.shared_expert.", config.moe.shared_ffn_size, config.hidden_size, bias=False)
        if config.moe.shared_gate:
            tensors["mlp.shared_expert_gate.weight"] = (1, config.hidden_size)
    return tensors


def _gated(prefix: str, ffn: int, hidden: int, *, bias: bool) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {
        f"{prefix}gate_proj.weight": (ffn, hidden),
        f"{prefix}up_proj.weight": (ffn, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn),
    }
    if bias:
        tensors |= {
            f"{prefix}gate_proj.bias": (ffn,),
            f"{prefix}up_proj.bias": (ffn,),
            f"{prefix}down_proj.bias": (hidden,),
        }
    return tensors


#: Mixtral's name for each part of an expert.
_MIXTRAL_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MIXTRAL = re.compile(r"(model\.layers\.\d+\.)block_sparse_moe\.(?:experts\.(\d+)\.(w[123])|(gate))\.weight")
_EXPERTS = re.compile(r"(model\.layers\.\d+\.)mlp\.(?:experts\.(\d+)\.(gate|up|down)_proj|(gate))\.weight")


def logical_name(stored: str) -> str:
    """The logical name of a tensor as some family stores it; other names come back as they are."""
    match = _MIXTRAL.fullmatch(stored)
    if match is None:
        return stored
    layer, expert, part, _gate = match.groups()
    if expert is None:
        return f"{layer}mlp.gate.weight"
    return f"{layer}mlp.experts.{expert}.{_MIXTRAL_PARTS[part]}.weight"


def stored_name(logical: str, family: str) -> str:
    """The name under which Hugging Face folders of this family store a logical tensor."""
    match = _EXPERTS.fullmatch(logical) if family == "mixtral" else None
    if match is None:
        return logical
    layer, expert, part, _gate = match.groups()
    if expert is None:
        return f"{layer}block_sparse_moe.gate.weight"
    code = next(w for w, name in _MIXTRAL_PARTS.items() if name == f"{part}_proj")
    return f"{layer}block_sparse_moe.experts.{expert}.{code}.weight"
