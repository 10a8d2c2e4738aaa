"""Native norms, rotation, SwiGLU, gathering and greedy choice beside the reference, over random shapes and strides."""

from __future__ import annotations

from random import Random

import pytest
import torch
from native_library import the_library
from torch import Tensor

from gtp_serve.ops import reference
from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.cpu.native import Native
from gtp_serve.ops.greedy import Greedy
from gtp_serve.ops.greedy import greedy as plain_greedy

LIBRARY = the_library()
SETS = LIBRARY.instruction_sets()
TABLES = {(name, count): Native(Threads(LIBRARY, count, name)) for name in SETS for count in (1, 2, 3)}
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 5, 17, 70)
SIZES = (1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 577)


def close(found: Tensor, wanted: Tensor, *, steps: int = 1) -> None:
    """Equal but for ``steps`` roundings of the type."""
    bound = 1e-5 if found.dtype == torch.float32 else steps * 2**-7
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * 1e-2)


def strided(random: Random, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie in wider ones, the rest not a number."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    wide = torch.full((rows, size + random.choice((0, 1, 9))), torch.nan, dtype=dtype)
    wide[:, :size] = torch.randn(rows, size, generator=generator) * random.choice((0.1, 1.0, 30.0))
    return wide[:, :size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seed", range(12))
def test_norms_with_and_without_an_addition(name: str, dtype: torch.dtype, seed: int) -> None:
    random = Random(seed)
    native, rows, size = TABLES[name, 1 + seed % 3], random.choice(ROWS), random.choice(SIZES)
    x, delta = (strided(random, rows, size, dtype) for _ in range(2))
    weight = torch.rand(size).to(dtype)
    close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    out, total = native.add_rms_norm(x, delta, weight, 1e-5)
    wanted, wanted_total = reference.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, wanted_total)
    close(out, wanted)
    for row in (0, rows - 1):
        alone = native.add_rms_norm(x[row : row + 1], delta[row : row + 1], weight, 1e-5)
        assert torch.equal(alone[0], out[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_norms_of_heads_and_of_rows_that_are_no_numbers(name: str, dtype: torch.dtype) -> None:
    native = TABLES[name, 2]
    x = torch.randn(6, 7, 20).to(dtype)[:, 1:5]
    weight = torch.rand(20).to(dtype)
    found = native.rms_norm(x, weight, 1e-6)
    close(found, reference.rms_norm(x, weight, 1e-6))
    x = x.clone()
    x[2, 1, 3] = torch.inf
    x[4, 0, 0] = torch.nan
    other = native.rms_norm(x, weight, 1e-6)
    wanted = reference.rms_norm(x, weight, 1e-6)
    assert torch.equal(other.isnan(), wanted.isnan())
    clean = ~wanted.isnan().any(-1) & x.isfinite().all(-1)
    assert torch.equal(other[clean], found[clean])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seed", range(10))
def test_rotation_and_the_cache(name: str, dtype: torch.dtype, seed: int) -> None:
    random = Random(seed)
    native, rows = TABLES[name, 1 + seed % 3], random.choice(ROWS)
    half, kv_heads = random.choice((1, 3, 8, 11, 16, 32)), random.choice((1, 2, 3))
    heads, size, block = kv_heads * random.choice((1, 2, 3)), 2 * half, random.choice((1, 8, 16))
    fused = torch.randn(rows, (heads + 2 * kv_heads) * size).to(dtype)
    q, k, v = (
        part.view(rows, -1, size)
        for part in torch.split(fused, [heads * size, kv_heads * size, kv_heads * size], dim=1)
    )
    cos, sin = torch.randn(2, rows, half + random.choice((0, 3))).to(dtype)[:, :, :half]
    blocks = rows // block + 2
    slots = torch.randperm(blocks * block)[:rows]
    caches = [torch.randn(blocks, block, kv_heads, size).to(dtype) for _ in range(2)]
    wanted = [cache.clone() for cache in caches]
    out = native.rotate_and_cache(q, k, v, cos, sin, caches[0], caches[1], slots)
    assert torch.equal(out, reference.apply_rotary(q, cos, sin))
    reference.write_kv(reference.apply_rotary(k, cos, sin), v, wanted[0], wanted[1], slots)
    assert torch.equal(caches[0], wanted[0])
    assert torch.equal(caches[1], wanted[1])
    # No slot of this cache: nothing is written.
    native.rotate_and_cache(q, k, v, cos, sin, caches[0], caches[1], torch.full_like(slots, -1))
    native.rotate_and_cache(q, k, v, cos, sin, caches[0], caches[1], torch.full_like(slots, blocks * block))
    assert torch.equal(caches[0], wanted[0])
    assert torch.equal(caches[1], wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seed", range(8))
def test_swiglu_and_what_a_shared_expert_adds(name: str, dtype: torch.dtype, seed: int) -> None:
    random = Random(seed)
    native, rows, size = TABLES[name, 1 + seed % 3], random.choice(ROWS), random.choice(SIZES)
    x = strided(random, rows, 2 * size, dtype)
    close(native.swiglu(x), reference.swiglu(x), steps=2)
    base, shared, gate = (torch.randn(rows, width).to(dtype) for width in (size, size, 1))
    for found, wanted in (
        (native.add_shared(base, shared, None), base + shared),
        (native.add_shared(base, shared, gate), base + gate.sigmoid() * shared),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 2**-6, atol=2**-6)


@pytest.mark.parametrize("name", SETS)
def test_swiglu_far_out_is_as_the_reference_has_it(name: str) -> None:
    gates = torch.tensor([-torch.inf, -200.0, -100.0, -88.0, -20.0, 0.0, 20.0, 100.0, torch.inf, torch.nan, 1e38])
    x = torch.cat([gates, torch.ones_like(gates)])[None]
    found, wanted = TABLES[name, 1].swiglu(x), reference.swiglu(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("name", SETS)
def test_rows_are_gathered_and_numbers_of_no_row_give_zeros(name: str, dtype: torch.dtype) -> None:
    table = torch.randint(1, 100, (50, 23)).to(dtype)[:, :19]
    numbers = torch.randint(0, 50, (70,))
    found = TABLES[name, 3].take_rows(numbers, table)
    assert torch.equal(found, reference.embedding(numbers, table))
    numbers[[0, 40, 69]] = torch.tensor([-1, 50, 1 << 60])
    found = TABLES[name, 2].take_rows(numbers, table)
    assert not found[[0, 40, 69]].any()
    assert torch.equal(found[1:40], table[numbers[1:40]])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 500, 4097, 49152])
def test_greedy_choice(name: str, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = 5 if vocab > 5000 else 40
    logits = torch.randn(rows, vocab + 7, generator=generator) * 5
    logits[:, vocab:] = torch.nan
    # Equal ones: the first counts.
    logits[1, :vocab] = 1.5
    if vocab > 70:
        logits[2, [69, 5, vocab - 1]] = 60.0
    found, wanted = TABLES[name, 2].greedy(logits, vocab), plain_greedy(logits, vocab)
    assert torch.equal(found.token_ids_S, wanted.token_ids_S)
    assert found.finite_S.all()
    torch.testing.assert_close(found.logprobs_S, wanted.logprobs_S, rtol=1e-5, atol=2e-6)
    for count in (1, 3):
        assert all(map(torch.equal, TABLES[name, count].greedy(logits, vocab), found))
    alone = TABLES[name, 3].greedy(logits[3:4], vocab)
    assert all(torch.equal(mine, theirs[3:4]) for mine, theirs in zip(alone, found, strict=True))


@pytest.mark.parametrize("name", SETS)
def test_a_row_with_a_logit_that_is_not_finite_says_so_and_no_other_does(name: str) -> None:
    logits = torch.randn(6, 300)
    for row, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row, (0, 70, 299)[row]] = bad
    found = TABLES[name, 2].greedy(logits, 300)
    wanted = plain_greedy(logits, 300)
    assert torch.equal(found.finite_S, wanted.finite_S)
    assert torch.equal(found.token_ids_S, wanted.token_ids_S)
    assert torch.equal(found.logprobs_S.isnan(), wanted.logprobs_S.isnan())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_choice_from_what_the_head_noted_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    rows, vocab, size = 9, 333, 40
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(vocab + 3, size).to(dtype)
    blocks = -(-vocab // structs.HEAD_BLOCK)
    partials, logits = torch.empty(rows, blocks, structs.PARTIAL_FLOATS), torch.empty(rows, vocab + 3)
    head = structs.Linear(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=logits.data_ptr(),
        partials=partials.data_ptr(),
        rows=rows,
        in_size=size,
        out_size=vocab + 3,
        x_row=size,
        weight_row=size,
        out_row=vocab + 3,
        dtype=structs.F32 if dtype == torch.float32 else structs.BF16,
        weight_dtype=structs.F32 if dtype == torch.float32 else structs.BF16,
        out_dtype=structs.F32,
        vocab=vocab,
    )
    found = Greedy(torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows, dtype=torch.bool))
    choice = structs.Greedy(
        partials=partials.data_ptr(),
        token_ids=found.token_ids_S.data_ptr(),
        logprobs=found.logprobs_S.data_ptr(),
        finite=found.finite_S.data_ptr(),
        rows=rows,
        vocab=vocab,
    )
    TABLES[name, 2].threads.run([head, choice])
    assert all(map(torch.equal, found, TABLES[name, 3].greedy(logits, vocab)))
