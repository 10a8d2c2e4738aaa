"""Native attention: the reference's numbers over random shapes; bits that batch, chunks and threads leave alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from native_library import the_library
from torch import Tensor

from gtp_serve.ops import reference
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.cpu.native import Native

LIBRARY = the_library()
SETS = LIBRARY.instruction_sets()
TABLES = {(name, count): Native(Threads(LIBRARY, count, name)) for name in SETS for count in (1, 2, 3)}
BOUNDS = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
# Where kernels cut: blocks of 64 keys, splits of 512.
EDGES = (1, 2, 7, 63, 64, 65, 127, 128, 255, 320, 511, 512, 513, 600, 1023, 1025)


@dataclass(frozen=True)
class Case:
    """Sequences in a cache, and queries for all of their positions."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    queries: list[Tensor]
    window: int | None

    @property
    def contexts(self) -> list[int]:
        return [len(q) for q in self.queries]


def case_of(
    random: Random,
    contexts: Sequence[int],
    *,
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: int,
    block: int,
    window: int | None = None,
    sharpness: float = 1.0,
) -> Case:
    """:param sharpness: the standard deviation of scores."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    widths = [-(-context // block) for context in contexts]
    blocks = sum(widths) + 3
    order = torch.randperm(blocks, generator=generator)
    tables = torch.zeros(len(contexts), max(widths), dtype=torch.int64)
    at = 0
    for row, width in enumerate(widths):
        tables[row, :width] = order[at : at + width]
        at += width
    cache = torch.randn(2, blocks, block, heads[1], size, generator=generator)
    # What nobody may look at.
    used = torch.zeros(blocks * block, dtype=torch.bool)
    for row, context in enumerate(contexts):
        positions = torch.arange(context)
        used[tables[row, positions // block] * block + positions % block] = True
    cache.view(2, blocks * block, heads[1], size)[:, ~used] = torch.nan
    queries = [
        (sharpness * torch.randn(context, heads[0], size, generator=generator)).to(dtype) for context in contexts
    ]
    return Case(cache[0].to(dtype), cache[1].to(dtype), tables, queries, window)


def attend(native: Native, case: Case, parts: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Of each part: sequence, first position, position after its last."""
    batch = batch_of(case, parts)
    # A row of a wider tensor, as queries lie beside keys and values.
    q = torch.cat([case.queries[s][first:stop] for s, first, stop in parts])
    wide = torch.full((len(q), q.shape[1] + 2, q.shape[2]), torch.nan, dtype=q.dtype)
    wide[:, : q.shape[1]] = q
    plan = native.plan_attention(batch, case.keys.shape[1], case.window)
    out = plan.attend(wide[:, : q.shape[1]], case.keys, case.values, scale_of(q))
    return list(torch.split(out, [stop - first for _, first, stop in parts]))


def scale_of(q: Tensor) -> float:
    return float(q.shape[2] ** -0.5)


def batch_of(case: Case, parts: Sequence[tuple[int, int, int]]) -> Batch:
    starts = [0]
    for _, first, stop in parts:
        starts.append(starts[-1] + stop - first)
    positions = torch.cat([torch.arange(first, stop) for _, first, stop in parts])
    return Batch(
        token_ids_T=torch.zeros_like(positions),
        positions_T=positions,
        slots_T=torch.zeros_like(positions),
        query_starts=tuple(starts),
        context_lens=tuple(stop for _, _, stop in parts),
        block_tables_SB=case.tables[[s for s, _, _ in parts]],
        logit_rows_S=torch.tensor([0]),
    )


def expected(case: Case, parts: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    batch = batch_of(case, parts)
    q = torch.cat([case.queries[s][first:stop] for s, first, stop in parts])
    segments = reference.plan_attention(batch, case.keys.shape[1], case.window)
    # The reference multiplies what is hidden by 0.
    clean = [cache.nan_to_num() for cache in (case.keys, case.values)]
    out = reference.attend(q, clean[0], clean[1], segments, scale_of(q))
    return list(torch.split(out, [stop - first for _, first, stop in parts]))


def random_case(random: Random, dtype: torch.dtype) -> Case:
    kv_heads = random.choice((1, 1, 2, 3))
    return case_of(
        random,
        [random.choice(EDGES) + random.choice((0, 0, random.randrange(40))) for _ in range(random.randint(1, 4))],
        dtype=dtype,
        heads=(kv_heads * random.choice((1, 2, 3, 4, 5, 7, 8)), kv_heads),
        size=random.choice((1, 2, 5, 8, 12, 16, 20, 33, 64)),
        block=random.choice((1, 8, 16)),
        window=random.choice((None, None, 1, 5, 64, 100, 256)),
        sharpness=random.choice((1.0, 2.0, 5.0)),
    )


def random_parts(random: Random, case: Case) -> list[tuple[int, int, int]]:
    """A step: some sequences with their last token, some with a chunk that ends anywhere."""
    parts = []
    for sequence, context in enumerate(case.contexts):
        stop = random.randint(1, context)
        first = stop - 1 if random.random() < 0.5 else random.randrange(max(0, stop - 90), stop)
        parts.append((sequence, first, stop))
    random.shuffle(parts)
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seed", range(12))
def test_a_step_gives_the_reference_s_numbers_and_nobody_elses(name: str, dtype: torch.dtype, seed: int) -> None:
    random = Random(seed)
    case = random_case(random, dtype)
    parts = random_parts(random, case)
    found = attend(TABLES[name, random.choice((1, 2, 3))], case, parts)
    for mine, theirs in zip(found, expected(case, parts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seed", range(6))
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(
    name: str, dtype: torch.dtype, seed: int
) -> None:
    random = Random(100 + seed)
    case = random_case(random, dtype)
    parts = random_parts(random, case)
    found = attend(TABLES[name, 2], case, parts)
    for count in (1, 3):
        for mine, other in zip(found, attend(TABLES[name, count], case, parts), strict=True):
            assert torch.equal(mine, other)
    for mine, part in zip(found, parts, strict=True):
        assert torch.equal(mine, attend(TABLES[name, 1], case, [part])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("heads", "size", "window"), [((9, 3), 64, None), ((4, 4), 20, 70), ((8, 1), 16, None)])
def test_a_prompt_has_the_same_bits_whole_in_chunks_and_token_by_token(
    name: str, dtype: torch.dtype, heads: tuple[int, int], size: int, window: int | None
) -> None:
    random = Random(7)
    case = case_of(random, [530], dtype=dtype, heads=heads, size=size, block=8, window=window)
    native = TABLES[name, 2]
    whole = attend(native, case, [(0, 0, 530)])[0]
    for step in (1, 3, 17, 64, 100, 257):
        last = 0
        for first in range(0, 530, step):
            # Token by token takes long: a few places tell.
            if step == 1 and first % 37 and first not in (63, 64, 511, 512, 529):
                continue
            stop = min(first + step, 530)
            assert torch.equal(attend(native, case, [(0, first, stop)])[0], whole[first:stop]), (step, first)
            last = stop
        assert last == 530


@pytest.mark.parametrize("name", SETS)
def test_a_long_context_is_shared_by_threads_without_changing_a_bit(name: str) -> None:
    case = case_of(Random(3), [2900, 40], dtype=torch.bfloat16, heads=(6, 2), size=32, block=16)
    parts = [(0, 2899, 2900), (1, 39, 40)]
    shared = [attend(TABLES[name, count], case, parts) for count in (1, 2, 3)]
    alone = attend(TABLES[name, 1], case, [(0, 2830, 2900)])[0][-1]
    for found in shared:
        assert torch.equal(found[0][0], alone)
        assert torch.equal(found[1], shared[0][1])
    torch.testing.assert_close(shared[0], expected(case, parts), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
def test_what_is_not_a_number_stays_in_its_row(name: str, dtype: torch.dtype) -> None:
    case = case_of(Random(4), [200], dtype=dtype, heads=(4, 2), size=16, block=8)
    clean = attend(TABLES[name, 2], case, [(0, 0, 200)])[0]
    query = case.queries[0][50, 1].clone()
    case.queries[0][50, 1] = torch.nan
    found = attend(TABLES[name, 2], case, [(0, 0, 200)])[0]
    assert found[50, 1].isnan().all()
    found[50, 1] = clean[50, 1]
    assert torch.equal(found, clean)
    case.queries[0][50, 1] = query
    # A value is seen from its position on, by the heads of its KV head; positions are taken in pairs somewhere.
    for position in (100, 101):
        slot = case.tables[0, position // 8], position % 8
        value = case.values[slot][1].clone()
        case.values[slot][1] = torch.inf
        found = attend(TABLES[name, 2], case, [(0, 0, 200)])[0]
        assert torch.equal(found[:position], clean[:position])
        assert not found[position:, 2:].isfinite().any()
        assert torch.equal(found[:, :2], clean[:, :2])
        for row in (position - 1, position):
            assert torch.equal(
                attend(TABLES[name, 1], case, [(0, row, row + 1)])[0].isfinite(), found[row : row + 1].isfinite()
            )
        case.values[slot][1] = value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
def test_scores_of_minus_infinity_weigh_nothing_and_of_infinity_are_no_numbers(name: str, dtype: torch.dtype) -> None:
    case = case_of(Random(5), [150], dtype=dtype, heads=(1, 1), size=4, block=16)
    case.queries[0].fill_(1.0)
    flat_keys = case.keys.view(-1, 4)
    slots = case.tables[0, torch.arange(150) // 16] * 16 + torch.arange(150) % 16
    flat_keys[slots[:70]] = -torch.inf
    parts = [(0, 149, 150)]
    found, wanted = attend(TABLES[name, 2], case, parts)[0], expected_unclean(case, parts)
    torch.testing.assert_close(found, wanted, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    assert found.isfinite().all()
    assert attend(TABLES[name, 2], case, [(0, 60, 61)])[0].isnan().all()
    flat_keys[slots[149]] = torch.inf
    assert attend(TABLES[name, 2], case, parts)[0].isnan().all()


def expected_unclean(case: Case, parts: Sequence[tuple[int, int, int]]) -> Tensor:
    """The reference on a cache as it is: rows that see all of it."""
    segments = reference.plan_attention(batch_of(case, parts), case.keys.shape[1], case.window)
    q = torch.cat([case.queries[s][first:stop] for s, first, stop in parts])
    unseen = [torch.where(cache.isnan(), 0.0, cache) for cache in (case.keys, case.values)]
    return reference.attend(q, unseen[0], unseen[1], segments, scale_of(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
def test_scores_that_rise_from_block_to_block_are_summed_to_their_own_scale(name: str, dtype: torch.dtype) -> None:
    """By less than sums are scaled anew for, by just as much, by far more; up and down again."""
    case = case_of(Random(8), [640], dtype=dtype, heads=(2, 1), size=16, block=16)
    case.queries[0].fill_(1.0)
    rising = torch.tensor([0.0, 5.0, 5.5, 5.6, 30.0, 90.0, 91.0, 89.0, 200.0, 0.0]).repeat_interleave(64)
    slots = case.tables[0, torch.arange(640) // 16] * 16 + torch.arange(640) % 16
    case.keys.view(-1, 16)[slots] = (rising / 4)[:, None].expand(-1, 16).to(dtype)  # the scale is 1/4
    parts = [(0, 0, 640)]
    torch.testing.assert_close(
        attend(TABLES[name, 2], case, parts)[0], expected(case, parts)[0], rtol=BOUNDS[dtype], atol=BOUNDS[dtype]
    )


@pytest.mark.parametrize("name", SETS)
def test_blocks_and_positions_out_of_range_reach_no_foreign_memory(name: str) -> None:
    case = case_of(Random(6), [40], dtype=torch.float32, heads=(2, 1), size=8, block=8)
    case.keys.nan_to_num_()
    case.values.nan_to_num_()
    right = attend(TABLES[name, 1], case, [(0, 0, 40)])[0]
    case.tables[0, 3] = 1 << 40
    case.tables[0, 4] = -(1 << 40)
    found = attend(TABLES[name, 1], case, [(0, 0, 40)])[0]
    assert torch.equal(found[:24], right[:24])
    assert found.isfinite().all()
