"""Compile every kernel for GPUs that need not be there; run as a script, prints what came out as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gtp_serve.ops import (
    triton_attention,
    triton_experts,
    triton_greedy,
    triton_heads,
    triton_norm,
    triton_swiglu,
)

INTEGERS = {"slots", "tables", "lengths", "ids", "token_ids", "order", "experts", "starts", "stops"}
FLOATS = {"parts", "sums", "best", "logprobs", "logits", "weights"}
ATTENTION = {"TILE": 64, "PIECE": 256, "PIECES": 64}


def pointer(name: str, dtype: str) -> str:
    """Type of a tensor argument."""
    if name in INTEGERS:
        return "*i64"
    if name == "finite":
        return "*u1"
    return "*fp32" if name in FLOATS else f"*{dtype}"


def compiled(kernel: Any, dtype: str, capability: int, **constants: int) -> tuple[str, str, int, int]:
    """(name, dtype, capability, bytes of shared memory)."""
    signature = {
        param.name: "constexpr"
        if param.is_constexpr
        else pointer(param.name, dtype)
        if param.annotation == "tensor"
        else param.annotation
        for param in kernel.params
    }
    made = triton.compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False},
    )
    return kernel.__name__, dtype, capability, made.metadata.shared


def main() -> None:
    """All kernels as a Llama of a billion parameters and Qwen3-30B-A3B use them, some also as takes most memory."""
    attention = {"BLOCK": 16, "KV_HEADS": 8, "GROUP": 4, "ROWS": 16, "PIECE": 256, "PIECES": 64}
    usual = attention | {"WIDE": False, "SIZE": 64, "COLUMNS": 64, "WINDOW": 0, "TILE": 64}
    piece, join = triton_attention._attend_to_piece, triton_attention._join_pieces
    routed = {"EXPERTS": 128, "ROWS": 64, "COLUMNS": 64, "STEP": 64, "WIDE": False}
    few, wide = routed | {"ROWS": 16}, routed | {"STEP": 32}
    gate_and_up, down = triton_experts._gate_and_up, triton_experts._down
    done = [
        compiled(triton_norm._rms_norm, "bf16", 80, INNER=1, SIZE=2048, TILE=2048),
        compiled(triton_norm._add_rms_norm, "bf16", 80, SIZE=2048, TILE=2048),
        compiled(triton_swiglu._swiglu, "bf16", 80, SIZE=8192, TILE=1024),
        compiled(triton_heads._rotate_and_cache, "bf16", 80, HEADS=32, KV_HEADS=8, HALF=32, TILE=32),
        compiled(triton_greedy._best_of_chunk, "fp32", 80, CHUNK=4096),
        compiled(triton_greedy._best_of_row, "fp32", 80),
        compiled(join, "bf16", 80, SIZE=64, COLUMNS=64, WINDOW=0, TILE=64, PIECE=256, PIECES=64),
        compiled(piece, "bf16", 80, **usual),
        compiled(piece, "bf16", 90, **usual),
        compiled(piece, "bf16", 80, **(usual | {"SIZE": 256, "COLUMNS": 256, "WINDOW": 300})),
        compiled(gate_and_up, "bf16", 80, CHOSEN=8, INNER=2048, OUTER=768, **routed),
        compiled(gate_and_up, "bf16", 90, CHOSEN=8, INNER=2048, OUTER=768, **few),
        compiled(gate_and_up, "fp32", 80, CHOSEN=8, INNER=2048, OUTER=768, **wide),
        compiled(down, "bf16", 80, INNER=768, OUTER=2048, **routed),
        compiled(down, "bf16", 90, INNER=768, OUTER=2048, **few),
        compiled(triton_experts._combine, "bf16", 80, CHOSEN=8, SIZE=2048, TILE=1024),
        compiled(piece, "fp32", 80, **(usual | {"SIZE": 80, "COLUMNS": 128, "GROUP": 3})),
    ]
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()
