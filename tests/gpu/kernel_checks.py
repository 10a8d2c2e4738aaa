"""Each kernel against its twin in plain torch, on any device that can run it.

``tests/gpu`` runs these on a GPU; ``tests/unit/test_triton_ops.py`` runs this file as a script in Triton's
interpreter, in a process of its own, since a kernel is interpreted or compiled for good when it is imported.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fakes import TINY_MODEL
from torch import Tensor

from gtp_serve.models.decoder import build_decoder
from gtp_serve.ops import greedy, paged, reference, table
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.cuda import triton_ops
from gtp_serve.ops.triton_attention import paged_attention
from gtp_serve.ops.triton_greedy import greedy as triton_greedy
from gtp_serve.ops.triton_heads import rotate_and_cache
from gtp_serve.ops.triton_norm import add_rms_norm, rms_norm
from gtp_serve.ops.triton_swiglu import swiglu
from gtp_serve.ops.varlen import Varlen

DTYPES = (torch.float32, torch.bfloat16)


def close(got: Tensor, expected: Tensor, *, ulps: int = 2, absolute: float = 1e-6) -> None:
    """Equal but for a few units in the last place of the dtype.

    The interpreter cuts bfloat16 where hardware rounds it: even what is computed in one way differs by one.
    """
    relative = ulps * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=relative, atol=absolute)


class Draw:
    """Random tensors of one device from one seed."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator).to(self.device)


def check_rms_norm(device: str) -> None:
    draw = Draw(device)
    for dtype in DTYPES:
        x, weight = draw.normal(5, 48, dtype=dtype), draw.normal(48, dtype=dtype)
        close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), ulps=4)
        assert rms_norm(x[:0], weight, 1e-5).shape == (0, 48)


def check_rms_norm_of_heads(device: str) -> None:
    """A view into fused projections: rows are not adjacent."""
    draw = Draw(device)
    for dtype in DTYPES:
        heads, weight = draw.normal(3, 7, 16, dtype=dtype)[:, 2:5], draw.normal(16, dtype=dtype)
        close(rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6), ulps=4)


def check_add_rms_norm(device: str) -> None:
    draw = Draw(device)
    for dtype in DTYPES:
        x, delta = draw.normal(4, 40, dtype=dtype), draw.normal(4, 40, dtype=dtype)
        weight = draw.normal(40, dtype=dtype)
        got, total = add_rms_norm(x, delta, weight, 1e-5)
        expected, expected_total = reference.add_rms_norm(x, delta, weight, 1e-5)
        close(total, expected_total)
        close(got, expected, ulps=6)


def check_swiglu(device: str) -> None:
    draw = Draw(device)
    for dtype in DTYPES:
        for features in (24, 1500):
            gate_up = draw.normal(3, 2 * features, dtype=dtype) * 4
            close(swiglu(gate_up), reference.swiglu(gate_up), ulps=4)


def check_rotate_and_cache(device: str) -> None:
    draw = Draw(device)
    for dtype in DTYPES:
        for size in (16, 20):
            qkv = draw.normal(5, 10, size, dtype=dtype)
            q, k, v = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
            angles = draw.normal(5, size // 2)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            slots = draw.shuffled(24)[:5]
            caches = [torch.zeros(6, 4, 2, size, dtype=dtype, device=device) for _ in range(4)]
            got = rotate_and_cache(q, k, v, cos, sin, caches[0], caches[1], slots)
            expected = table.rotate_and_cache(q, k, v, cos, sin, caches[2], caches[3], slots)
            close(got, expected, ulps=3, absolute=4 * torch.finfo(dtype).eps)
            close(caches[0], caches[2], ulps=3, absolute=4 * torch.finfo(dtype).eps)
            assert torch.equal(caches[1], caches[3])
            untouched = torch.ones(24, dtype=torch.bool, device=device).index_fill(0, slots, False)
            for cache in caches[:2]:
                assert not cache.view(24, -1)[untouched].any()


def check_greedy(device: str) -> None:
    draw = Draw(device)
    for vocab, columns in ((50, 64), (4096, 4100), (9001, 9002)):
        logits = draw.normal(5, columns) * 3
        logits[:, vocab:] = 1e9
        logits[1, 7] = logits[1, vocab - 2] = 40.0  # equals: the lower id
        logits[2, 11] = torch.nan
        logits[3, vocab - 1] = torch.inf
        logits[4, 3] = -torch.inf
        got, expected = triton_greedy(logits, vocab), greedy.greedy(logits, vocab)
        assert got.finite_S.tolist() == expected.finite_S.tolist() == [True, True, False, False, False]
        assert got.token_ids_S.tolist() == expected.token_ids_S.tolist()
        assert got.token_ids_S[1] == 7
        torch.testing.assert_close(got.logprobs_S, expected.logprobs_S, rtol=1e-5, atol=1e-6, equal_nan=True)


class PagedCase:
    """Rows with their keys in shuffled blocks; whatever no row may see is NaN."""

    def __init__(
        self,
        device: str,
        lengths: tuple[int, ...],
        dtype: torch.dtype,
        *,
        heads: int = 6,
        kv_heads: int = 2,
        size: int = 16,
        block: int = 4,
        window: int | None = None,
        columns: int | None = None,
    ) -> None:
        draw = Draw(device, seed=sum(lengths))
        widest = -(-max(lengths) // block)
        blocks = widest * len(lengths)
        self.q = draw.normal(len(lengths), heads, size, dtype=dtype)
        self.keys, self.values = (
            torch.full((blocks, block, kv_heads, size), torch.nan, dtype=dtype, device=device) for _ in range(2)
        )
        tables = draw.shuffled(blocks).view(len(lengths), widest)
        for table_B, length in zip(tables, lengths, strict=True):
            positions = torch.arange(max(0, length - (window or length)), length, device=device)
            slots = table_B[positions // block] * block + positions % block
            for cache in (self.keys, self.values):
                cache.view(-1, kv_heads, size)[slots] = draw.normal(len(positions), kv_heads, size, dtype=dtype)
        # Wider than needed, as in a captured step.
        self.tables = torch.nn.functional.pad(tables, (0, (columns or widest) - widest))
        self.lengths = torch.tensor(lengths, device=device)
        self.window, self.scale = window, size**-0.5

    def run(self, attention: paged.PagedAttention, rows: slice = slice(None)) -> Tensor:
        return attention(
            self.q[rows],
            self.keys,
            self.values,
            self.tables[rows],
            self.lengths[rows],
            self.scale,
            self.window,
        )


def plain(case: PagedCase) -> Tensor:
    """The twin, with NaN in hidden slots taken away: it multiplies them by zero."""
    case.keys, case.values = case.keys.nan_to_num(0.0), case.values.nan_to_num(0.0)
    return case.run(paged.paged_attention)


def check_paged_attention(device: str) -> None:
    for dtype in DTYPES:
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        for window in (None, 1, 5, 70):
            case = PagedCase(device, (1, 4, 9, 130), dtype, window=window)
            torch.testing.assert_close(case.run(paged_attention), plain(case), rtol=tolerance, atol=tolerance)


def check_paged_attention_of_many_pieces(device: str) -> None:
    """Contexts of several pieces, heads that are no power of two, one KV head, blocks of 16."""
    for window in (None, 300):
        case = PagedCase(
            device,
            (255, 256, 257, 700),
            torch.float32,
            heads=3,
            kv_heads=1,
            size=24,
            block=16,
            window=window,
        )
        torch.testing.assert_close(case.run(paged_attention), plain(case), rtol=2e-6, atol=2e-6)


def check_a_row_has_the_same_bits_in_any_batch_and_table(device: str) -> None:
    for dtype in DTYPES:
        case = PagedCase(device, (300, 3, 40), dtype, block=16)
        together = case.run(paged_attention)
        for row in range(3):
            assert torch.equal(case.run(paged_attention, slice(row, row + 1)), together[row : row + 1])
        wider = PagedCase(device, (300, 3, 40), dtype, block=16, columns=80)
        assert torch.equal(wider.run(paged_attention), together)


def whole_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    num_splits: int,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """What torch's ``varlen_attn`` promises, written out: queries are aligned with the last keys."""
    assert (enable_gqa, num_splits, window_size[1]) == (True, 1, 0)
    assert max_q == cu_seq_q.diff().max()
    out = torch.empty_like(query)
    for s, (first, stop) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
        if block_table is None or seqused_k is None:
            k, v = (x[int(cu_seq_k[s]) : int(cu_seq_k[s + 1])] for x in (key, value))
        else:
            k, v = (x[block_table[s].long()].flatten(0, 1)[: int(seqused_k[s])] for x in (key, value))
        assert len(k) <= max_k
        group = query.shape[1] // k.shape[1]
        for row in range(first, stop):
            last = len(k) - (stop - row)
            begin = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            for head in range(query.shape[1]):
                scores = k[begin : last + 1, head // group] @ query[row, head] * scale
                out[row, head] = scores.softmax(0) @ v[begin : last + 1, head // group]
    return out


def mixed_batch(device: str, block: int = 4) -> Batch:
    """A chunk, two single tokens, a first token, a chunk after a long context."""
    lengths = [(4, 9), (1, 6), (1, 13), (1, 1), (3, 17)]
    starts = [0]
    positions: list[int] = []
    blocks = iter(Draw("cpu", 5).shuffled(40).tolist())
    tables = [[next(blocks) for _ in range(5)] for _ in lengths]
    slots: list[int] = []
    for (count, context), row in zip(lengths, tables, strict=True):
        starts.append(starts[-1] + count)
        positions += range(context - count, context)
        slots += [row[p // block] * block + p % block for p in range(context - count, context)]
    return Batch(
        token_ids_T=torch.zeros(starts[-1], dtype=torch.int64),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        query_starts=tuple(starts),
        context_lens=tuple(context for _, context in lengths),
        block_tables_SB=torch.tensor(tables),
        logit_rows_S=torch.arange(len(lengths)),
    ).to(device)


def check_a_mixed_step_attends_as_the_reference_does(device: str) -> None:
    """Chunks through a written-out ``varlen_attn``, gathered or in place; single tokens by the kernel."""
    draw, batch = Draw(device), mixed_batch(device)
    keys, values = draw.normal(40, 4, 2, 16), draw.normal(40, 4, 2, 16)
    q = draw.normal(10, 4, 16)
    for window in (None, 5):
        segments = reference.plan_attention(batch, 4, window)
        expected = reference.attend(q, keys, values, segments, 0.25)
        for varlen in (
            None,
            *(Varlen(function=whole_rows, paged=p, takes_splits=True) for p in (False, True)),
        ):
            plan = triton_ops(varlen).plan_attention(batch, 4, window)
            torch.testing.assert_close(plan.attend(q, keys, values, 0.25), expected, rtol=0, atol=3e-6)


def check_a_step_of_chunks_alone_needs_no_single_tokens(device: str) -> None:
    draw, batch = Draw(device), mixed_batch(device)
    keys, values, q = draw.normal(40, 4, 2, 16), draw.normal(40, 4, 2, 16), draw.normal(4, 4, 16)
    alone = Batch(
        token_ids_T=batch.token_ids_T[:4],
        positions_T=batch.positions_T[:4],
        slots_T=batch.slots_T[:4],
        query_starts=(0, 4),
        context_lens=(9,),
        block_tables_SB=batch.block_tables_SB[:1],
        logit_rows_S=batch.logit_rows_S[:1],
    )
    expected = reference.attend(q, keys, values, reference.plan_attention(alone, 4), 0.25)
    varlen = Varlen(function=whole_rows, paged=False, takes_splits=True)
    got = triton_ops(varlen).plan_attention(alone, 4, None).attend(q, keys, values, 0.25)
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-6)


def check_rows_that_are_not_contiguous_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        swiglu(torch.zeros(8, 4, device=device).t())


def check_a_whole_model_gives_the_references_logits(device: str) -> None:
    """Prompt chunks, then single tokens, with norms of queries and keys and a window, in the cache too."""
    config = replace(
        TINY_MODEL,
        num_layers=2,
        hidden_size=24,
        num_heads=3,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=40,
        qk_norm=True,
        sliding_window=7,
    )
    logits: list[Tensor] = []
    caches: list[list[Tensor]] = []
    for ops in (table.REFERENCE, triton_ops(None)):
        decoder = build_decoder(config, dtype=torch.float32, device=device, ops=ops)
        draw = Draw(device)
        for target in decoder.targets():
            target.tensor.copy_(draw.normal(*target.tensor.shape) * 0.4)
        keys, values = ([torch.zeros(40, 4, 1, 8, device=device) for _ in range(2)] for _ in range(2))
        batch = mixed_batch(device)
        decode = Batch(
            token_ids_T=batch.token_ids_T[4:7] + 5,
            positions_T=batch.positions_T[4:7],
            slots_T=batch.slots_T[4:7],
            query_starts=(0, 1, 2, 3),
            context_lens=batch.context_lens[1:4],
            block_tables_SB=batch.block_tables_SB[1:4],
            logit_rows_S=batch.logit_rows_S[:3],
        )
        logits.append(torch.cat([decoder.forward(part, keys, values) for part in (batch, decode)]))
        caches.append(keys + values)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2e-5)
    for got, expected in zip(caches[1], caches[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


CHECKS: dict[str, Callable[[str], None]] = {
    name: function for name, function in list(globals().items()) if name.startswith("check_")
}


def run_on_the_cpu(checks: dict[str, Callable[[str], None]]) -> None:
    """Print what failed, by name, as JSON."""
    torch.set_num_threads(1)
    failures: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check("cpu")
        except Exception:
            failures[name] = traceback.format_exc()
    json.dump({"ran": list(checks), "failures": failures}, sys.stdout)


if __name__ == "__main__":
    run_on_the_cpu(CHECKS)
