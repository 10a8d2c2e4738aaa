"""Sizes beyond which a model description is taken for damage; each is far above any model that is known."""

from __future__ import annotations

from gtp_serve.config import ModelConfig, RopeConfig
from gtp_serve.errors import CheckpointCorrupt

#: Rows, columns, heads, tokens.
MAX_SIZE = 1 << 28
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
#: Layers times experts.
MAX_BLOCKS = 1 << 18
#: Numbers of a rotary embedding: the least and the most.  Outside, angles overflow or a logarithm has no value.
ROPE_RANGES = {
    "theta": (1.001, 1e15),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
}


def check_limits(config: ModelConfig, file: str) -> None:
    """Refuse a model with so many tensors that listing them would already be too much, and one whose angles could
    not be computed.

    :raises CheckpointCorrupt: naming the file and the number.
    """
    experts = config.moe.num_experts if config.moe is not None else 1
    for what, value, limit in (
        ("layers", config.num_layers, MAX_LAYERS),
        ("experts", experts, MAX_EXPERTS),
        ("experts in all layers", config.num_layers * experts, MAX_BLOCKS),
    ):
        if value > limit:
            raise CheckpointCorrupt(f"{file} describes a model of {value} {what}", [("limit", str(limit))])
    _check_rope(config.rope, config.head_dim, file)


def _check_rope(rope: RopeConfig, head_dim: int, file: str) -> None:
    for name, (low, high) in ROPE_RANGES.items():
        value = getattr(rope, name)
        if value is not None and not low <= value <= high:
            raise CheckpointCorrupt(
                f"{file}: {name} of the rotary embedding is {value:g}", [("possible", f"{low:g} to {high:g}")]
            )
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise CheckpointCorrupt(
            f"{file}: low_freq_factor {rope.low_freq_factor:g} of the rotary embedding is not below "
            f"high_freq_factor {rope.high_freq_factor:g}"
        )
    if rope.scaling == "yarn" and rope.beta_slow >= rope.beta_fast:
        raise CheckpointCorrupt(
            f"{file}: beta_slow {rope.beta_slow:g} of the rotary embedding is not below beta_fast {rope.beta_fast:g}"
        )
    if rope.scaling == "dynamic" and head_dim < 4:
        raise CheckpointCorrupt(f"{file}: heads of {head_dim} elements have no dynamic rotary scaling")
