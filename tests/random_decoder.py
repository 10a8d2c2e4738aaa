"""A decoder with random weights on some ops, and a KV pool for it with the block of captured steps."""

from __future__ import annotations

import torch

from gtp_serve.config import ModelConfig
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.table import Ops


def random_decoder(
    model: ModelConfig, dtype: torch.dtype, ops: Ops, *, blocks: int, block_size: int
) -> tuple[Decoder, KVPool]:
    """The same weights at each call.

    :param blocks: beside the scratch block, the last one.
    """
    decoder = build_decoder(model, dtype=dtype, device="cpu", ops=ops)
    generator = torch.Generator().manual_seed(5)
    for target in decoder.targets():
        target.tensor.copy_(torch.randn(target.tensor.shape, generator=generator) * 0.2)
    pool = KVPool(
        num_layers=model.num_layers,
        num_blocks=blocks + SCRATCH_BLOCKS,
        block_size=block_size,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        device="cpu",
    )
    return decoder, pool
