"""The kernels for routed experts against ``reference.experts``; run and used as ``kernel_checks`` is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fakes import TINY_MODEL
from gpu.kernel_checks import Draw, mixed_batch, run_on_the_cpu
from torch import Tensor

from gtp_serve.config import MoeConfig
from gtp_serve.engine.capture import EagerCapture
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops import reference, table, triton_experts
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.cuda import triton_ops

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-2}  # where the interpreter cuts bfloat16


class Case:
    """Tokens, their routes, and experts whose results are of the size of one."""

    def __init__(
        self, device: str, tokens: int, *, dtype: torch.dtype, experts: int = 5, chosen: int = 2, sizes: tuple[int, int]
    ) -> None:
        draw, (hidden, features) = Draw(device, seed=tokens), sizes
        self.x = draw.normal(tokens, hidden, dtype=dtype)
        self.weights = draw.normal(tokens, chosen).softmax(-1)
        self.routes = torch.stack([draw.shuffled(experts)[:chosen] for _ in range(tokens)])
        self.gate_up = draw.normal(experts, 2 * features, hidden, dtype=dtype) * hidden**-0.5
        self.down = draw.normal(experts, hidden, features, dtype=dtype) * features**-0.5

    def run(self, experts: Callable[..., Tensor], rows: slice = slice(None)) -> Tensor:
        return experts(self.x[rows], self.weights[rows], self.routes[rows], self.gate_up, self.down)


def check_experts(device: str) -> None:
    """Sizes that fill no tile, one token, and so many that blocks are large and several to an expert."""
    for dtype, tolerance in TOLERANCES.items():
        for tokens, sizes in ((1, (24, 20)), (9, (72, 40)), (170, (40, 72))):
            case = Case(device, tokens, dtype=dtype, sizes=sizes)
            expected = case.run(reference.experts)
            torch.testing.assert_close(case.run(triton_experts.experts), expected, rtol=tolerance, atol=tolerance)
            assert expected.abs().max() > 0.5


def check_all_tokens_may_choose_one_expert_and_others_none(device: str) -> None:
    case = Case(device, 40, dtype=torch.float32, chosen=1, sizes=(24, 16))
    case.routes.fill_(3)
    torch.testing.assert_close(case.run(triton_experts.experts), case.run(reference.experts), rtol=0, atol=3e-6)


def check_a_token_has_the_same_bits_among_other_tokens(device: str) -> None:
    for dtype in TOLERANCES:
        case = Case(device, 9, dtype=dtype, sizes=(72, 40))
        together = case.run(triton_experts.experts)
        for row in range(9):
            rows = slice(row, row + 1)
            assert torch.equal(case.run(triton_experts.experts, rows), together[rows])


def check_experts_that_are_not_chosen_are_not_read(device: str) -> None:
    case = Case(device, 3, dtype=torch.float32, chosen=1, sizes=(24, 16))
    case.routes.copy_(torch.tensor([[0], [4], [0]]))
    expected = case.run(reference.experts)
    case.gate_up[1:4], case.down[1:4] = torch.nan, torch.nan
    torch.testing.assert_close(case.run(triton_experts.experts), expected, rtol=0, atol=3e-6)


def check_no_tokens_and_scattered_stacks(device: str) -> None:
    case = Case(device, 2, dtype=torch.float32, sizes=(24, 16))
    assert case.run(triton_experts.experts, slice(0, 0)).shape == (0, 24)
    case.down = case.down.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="not one contiguous stack"):
        case.run(triton_experts.experts)


SPARSE = replace(
    TINY_MODEL, num_layers=2, hidden_size=24, num_heads=3, num_kv_heads=1, head_dim=8, ffn_size=0,
    moe=MoeConfig(num_experts=6, top_k=2, ffn_size=20, shared_ffn_size=16, shared_gate=True),
)  # fmt: skip
BLOCKS = 40


def sparse_model(ops: table.Ops, device: str) -> tuple[Decoder, KVPool]:
    decoder = build_decoder(SPARSE, dtype=torch.float32, device=device, ops=ops)
    draw = Draw(device)
    for target in decoder.targets():
        target.tensor.copy_(draw.normal(*target.tensor.shape) * 0.4)
    pool = KVPool(
        num_layers=2,
        num_blocks=BLOCKS + SCRATCH_BLOCKS,
        block_size=4,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
        device=device,
    )
    for cache in (*pool.keys, *pool.values):
        cache.copy_(draw.normal(*cache.shape))
    return decoder, pool


def single_tokens(batch: Batch) -> Batch:
    """The part of ``mixed_batch`` that is single tokens."""
    return Batch(
        token_ids_T=batch.token_ids_T[4:7] + 5,
        positions_T=batch.positions_T[4:7],
        slots_T=batch.slots_T[4:7],
        query_starts=(0, 1, 2, 3),
        context_lens=batch.context_lens[1:4],
        block_tables_SB=batch.block_tables_SB[1:4],
        logit_rows_S=batch.logit_rows_S[:3],
    )


def check_a_sparse_model_gives_the_references_logits_eagerly_and_in_a_bucket(device: str) -> None:
    """Prompt chunks, then single tokens; on a CPU the bucket is run and not recorded."""
    decoder, pool = sparse_model(triton_ops(None), device)
    plain, plain_pool = sparse_model(table.REFERENCE, device)
    batch = mixed_batch(device)
    expected, got = (
        model.forward(batch, cache.keys, cache.values) for model, cache in ((plain, plain_pool), (decoder, pool))
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-5)
    graphs = DecodeGraphs(decoder, pool, EagerCapture(), sizes=(4,), max_blocks=5)
    graphs.capture_next()
    assert graphs.failures == {}
    decode = single_tokens(batch)
    expected = plain.forward(decode, plain_pool.keys, plain_pool.values)
    torch.testing.assert_close(graphs.replay(decode), expected, rtol=0, atol=3e-5)


CHECKS: dict[str, Callable[[str], None]] = {
    name: function for name, function in list(globals().items()) if name.startswith("check_")
}


if __name__ == "__main__":
    run_on_the_cpu(CHECKS)
