"""Every kernel against its twin on the device, and torch's own attention where it serves prompt chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gpu import expert_checks
from gpu.kernel_checks import CHECKS, Draw, PagedCase, mixed_batch

from gtp_serve.ops import reference, table
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.cuda import triton_ops
from gtp_serve.ops.triton_attention import paged_attention
from gtp_serve.ops.triton_heads import rotate_and_cache
from gtp_serve.ops.varlen import find_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


ALL_CHECKS = CHECKS | expert_checks.CHECKS


@pytest.mark.parametrize("check", ALL_CHECKS.values(), ids=ALL_CHECKS)
def test_on_the_device(check: Callable[[str], None]) -> None:
    check("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    draw = Draw("cuda")
    q, k, v = draw.normal(9, 8, 64, dtype=dtype), *(draw.normal(9, 2, 64, dtype=dtype) for _ in range(2))
    angles = draw.normal(9, 32)
    cos, sin, slots = angles.cos().to(dtype), angles.sin().to(dtype), draw.shuffled(64)[:9]
    caches = [torch.zeros(4, 16, 2, 64, dtype=dtype, device="cuda") for _ in range(4)]
    got = rotate_and_cache(q, k, v, cos, sin, caches[0], caches[1], slots)
    expected = table.rotate_and_cache(q, k, v, cos, sin, caches[2], caches[3], slots)
    assert torch.equal(got, expected)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prompt_chunks_through_varlen_attn_are_the_references(dtype: torch.dtype, window: int | None) -> None:
    varlen = find_varlen(device="cuda", dtype=dtype, head_dim=64)
    if varlen is None:
        pytest.skip("varlen_attn does not serve this GPU")
    draw, batch = Draw("cuda"), mixed_batch("cuda")
    keys, values = draw.normal(40, 4, 2, 64, dtype=dtype), draw.normal(40, 4, 2, 64, dtype=dtype)
    q = draw.normal(10, 8, 64, dtype=dtype)
    expected = reference.attend(q, keys, values, reference.plan_attention(batch, 4, window), 0.125)
    got = triton_ops(varlen).plan_attention(batch, 4, window).attend(q, keys, values, 0.125)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_attention_over_a_long_context_in_many_blocks() -> None:
    case = PagedCase("cuda", (1, 700, 5000), torch.bfloat16, heads=32, kv_heads=8, size=128, block=16)
    alone = case.run(paged_attention, slice(2, 3))
    assert torch.equal(case.run(paged_attention)[2:], alone)
    wide = PagedCase("cuda", (1, 700, 5000), torch.float32, heads=32, kv_heads=8, size=128, block=16)
    torch.testing.assert_close(case.run(paged_attention).float(), wide.run(paged_attention), rtol=0, atol=3e-2)


def test_the_device_gets_triton_and_float32_prompts_go_through_the_paged_kernel() -> None:
    assert choose_ops(device="cuda", dtype=torch.float32, head_dim=64).name.endswith("the paged kernel")
    ops = choose_ops(device="cuda", dtype=torch.bfloat16, head_dim=64)
    assert ops.name.startswith("Triton kernels")
    assert ops.capturable
    assert ops.captures_experts
    assert replace(ops, name="") != replace(table.REFERENCE, name="")
