"""The beginning of each row's ids in order, by native ops: what a token is drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.sampling import Ordered


def order(threads: Threads, logits_SV: Tensor, temperature_S: Tensor, width: int) -> Ordered:
    """See ``ops.sampling.order``; a row's result has the same bits whatever is computed beside it.

    :param logits_SV: float32, a row's without gaps.
    """
    count, vocab = logits_SV.shape
    top_SW, ids_SW = torch.empty(count, width), torch.empty(count, width, dtype=torch.int64)
    mass_S = torch.empty(count, dtype=torch.float64)
    op = structs.Order(
        **structs.pointers(logits=logits_SV, temperatures=temperature_S, top=top_SW, ids=ids_SW, mass=mass_S),
        rows=count,
        vocab=vocab,
        logits_row=logits_SV.stride(0),
        width=width,
    )
    threads.run([op])
    return Ordered(top_SW, ids_SW, mass_S)
