"""Sizes beyond which a model description is taken for damage; each is far above any model that is known."""

from __future__ import annotations

from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointCorrupt

#: Rows, columns, heads, tokens.
MAX_SIZE = 1 << 28
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
#: Layers times experts.
MAX_BLOCKS = 1 << 18


def check_limits(config: ModelConfig, file: str) -> None:
    """Refuse a model with so many tensors that listing them would already be too much.

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
