"""Tensor-parallel ranks of the server: which numbers of them a model allows, and how much one rank holds."""

from __future__ import annotations

from math import prod

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layout.spans import Shape

_WHOLE = ("norm.weight", ".mlp.gate.weight", ".shared_expert_gate.weight", "o_proj.bias", "down_proj.bias")
"""Ends of the names of tensors that are not cut."""
_KV = (".k_proj.", ".v_proj.")
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def possible_ranks(config: ModelConfig) -> list[int]:
    """Numbers of tensor-parallel ranks that the model can be cut for, ascending; 1 is always there."""
    moe = config.moe
    sizes = [config.num_heads, *([moe.ffn_size, moe.shared_ffn_size] if moe else [config.ffn_size])]
    return [
        count
        for count in range(1, config.num_heads + 1)
        if not any(size % count for size in sizes)
        and (config.num_kv_heads % count == 0 or count % config.num_kv_heads == 0)
    ]


def check_ranks(config: ModelConfig, tp: int) -> None:
    """Refuse a number of ranks that the model cannot be cut for.

    :raises UsageError: naming the numbers that work.
    """
    fitting = possible_ranks(config)
    if tp in fitting:
        return
    moe = config.moe
    inner = f"experts of {moe.ffn_size} rows" if moe else f"{config.ffn_size} feed-forward rows"
    raise UsageError(
        f"--tp {tp} is not possible for this model",
        [
            ("it has", f"{config.num_heads} attention heads, {config.num_kv_heads} KV heads, {inner}"),
            ("possible", "--tp " + ", ".join(map(str, fitting))),
        ],
    )


def kv_heads_per_rank(config: ModelConfig, tp: int) -> int:
    """KV heads that each rank holds: its share, or one that it shares with others."""
    return max(1, config.num_kv_heads // tp)


def rank_elements(name: str, shape: Shape, config: ModelConfig, tp: int) -> int:
    """Elements of a logical tensor that one rank holds, padding of the vocabulary included."""
    count = prod(shape)
    if name.endswith(_WHOLE):
        return count
    if any(part in name for part in _KV):
        return count * kv_heads_per_rank(config, tp) // config.num_kv_heads
    if name in _TABLES:
        return -(-shape[0] // tp) * prod(shape[1:])
    return count // tp
