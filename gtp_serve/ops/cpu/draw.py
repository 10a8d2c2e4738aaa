"""Drawing of tokens by one native op for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_double, c_float, c_int64

import torch
from torch import Tensor

from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.sampling import SamplingRows, uniform


def draw(threads: Threads, logits_SV: Tensor, which: Sequence[int], rows: SamplingRows) -> Tensor:
    """See ``ops.sampling.draw_rows``; a row's id does not depend on what is drawn beside it.

    :param logits_SV: float32, a row's without gaps.
    """
    count = len(which)
    # Arrays of ctypes, which cost a tenth of what tensors of so few numbers do.
    at, top_k = (c_int64 * count)(*which), (c_int64 * count)(*[rows.top_k[row] for row in which])
    temperatures = (c_float * count)(*[rows.temperature[row] for row in which])
    top_p, min_p = ((c_double * count)(*[column[row] for row in which]) for column in (rows.top_p, rows.min_p))
    uniforms = (c_double * count)(*[uniform(rows.seed[row], rows.index[row]) for row in which])
    ids = torch.empty(count, dtype=torch.int64)
    op = structs.Draw(
        **structs.pointers(logits=logits_SV, ids=ids),
        at=addressof(at),
        temperatures=addressof(temperatures),
        top_k=addressof(top_k),
        top_p=addressof(top_p),
        min_p=addressof(min_p),
        uniform=addressof(uniforms),
        rows=count,
        vocab=logits_SV.shape[1],
        logits_row=logits_SV.stride(0),
    )
    threads.run([op])
    return ids
