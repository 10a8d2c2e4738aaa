"""Greedy choice and its log-probability in one reading of the logits, as two Triton kernels.

The vocabulary is cut into chunks of fixed length; a row's chunks are joined in order.
Legend: S rows, V vocabulary ids, C chunks.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gtp_serve.ops.greedy import Greedy
from gtp_serve.ops.triton_jit import kernel, row_stride

_CHUNK = 4096


def greedy(logits: Tensor, vocab_size: int) -> Greedy:
    """See ``greedy.greedy``."""
    rows, chunks = logits.shape[0], -(-vocab_size // _CHUNK)
    device = logits.device
    best_SC, sums_SC = (torch.empty((rows, chunks), dtype=torch.float32, device=device) for _ in range(2))
    ids_SC = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    token_ids_S = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs_S = torch.empty(rows, dtype=torch.float32, device=device)
    finite_S = torch.empty(rows, dtype=torch.bool, device=device)
    if rows:
        _best_of_chunk[(rows, chunks)](
            logits,
            best_SC,
            sums_SC,
            ids_SC,
            row_stride(logits),
            vocab_size,
            chunks,
            CHUNK=_CHUNK,
            enable_fp_fusion=False,
            num_warps=8,
        )
        _best_of_row[(rows,)](
            best_SC,
            sums_SC,
            ids_SC,
            token_ids_S,
            logprobs_S,
            finite_S,
            chunks,
            enable_fp_fusion=False,
            num_warps=1,
        )
    return Greedy(token_ids_S, logprobs_S, finite_S)


@kernel
def _best_of_chunk(
    logits: tl.tensor,
    best: tl.tensor,
    sums: tl.tensor,
    ids: tl.tensor,
    stride: int,
    vocab: int,
    chunks: int,
    CHUNK: tl.constexpr,
) -> None:
    """Largest logit, its lowest id, and the sum of exp(logit - largest): NaN when a logit is not finite."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    real = at < vocab
    x = tl.load(logits + row * stride + at, mask=real, other=float("-inf"))
    # NaN and both infinities fail this comparison.
    broken = tl.sum((real & ~(tl.abs(x) < float("inf"))).to(tl.int32), axis=0) > 0
    largest = tl.max(x, axis=0)
    lowest = tl.min(tl.where(x == largest, at, 2147483647), axis=0)
    total = tl.sum(tl.where(real, tl.exp(x - largest), 0.0), axis=0)
    place = row * chunks + chunk
    tl.store(best + place, largest)
    tl.store(sums + place, tl.where(broken, float("nan"), total))
    tl.store(ids + place, lowest.to(tl.int64))


@kernel
def _best_of_row(
    best: tl.tensor,
    sums: tl.tensor,
    ids: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    finite: tl.tensor,
    chunks: int,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(best + row * chunks)
    total = tl.load(sums + row * chunks)
    token = tl.load(ids + row * chunks)
    for chunk in range(1, chunks):
        other = tl.load(best + row * chunks + chunk)
        # Strictly larger: among equals the earlier chunk holds the lower id.
        token = tl.where(other > largest, tl.load(ids + row * chunks + chunk), token)
        joined = tl.maximum(largest, other)
        added = tl.load(sums + row * chunks + chunk) * tl.exp(other - joined)
        total = total * tl.exp(largest - joined) + added
        largest = joined
    good = total == total
    tl.store(token_ids + row, tl.where(good, token, 0))
    tl.store(logprobs + row, -tl.log(total))
    tl.store(finite + row, good)
