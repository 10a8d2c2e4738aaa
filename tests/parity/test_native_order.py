"""The beginning of a row's ids in order by native ops: exactly the reference's ids, and the same tokens drawn."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from native_library import the_library
from torch import Tensor

from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.cpu.order import order as native_order
from gtp_serve.ops.sampling import SamplingRows, order, sample

SETS = the_library().instruction_sets()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    x = torch.randn(rows, vocab) * 3
    if kind == "bfloat16":  # many equals
        return x.bfloat16().float()
    if kind == "few allowed":
        x[:, torch.rand(vocab) < 0.97] = -torch.inf
        x[:, vocab // 2] = 1.0
    if kind == "equal":
        return torch.zeros(rows, vocab).copysign(x)  # zeros of both signs
    if kind == "falling":
        return -torch.arange(float(vocab)).repeat(rows, 1) / 7
    if kind == "extreme":
        return x * 1e30
    return x


@pytest.mark.parametrize("kind", ["spread", "bfloat16", "few allowed", "equal", "falling", "extreme"])
@pytest.mark.parametrize("name", SETS)
def test_ids_logits_and_mass_are_the_references(name: str, kind: str) -> None:
    threads = Threads(the_library(), 2, name)
    for rows, vocab, widths in ((1, 1, (1,)), (3, 70, (1, 9, 64, 70)), (5, 4003, (1, 64, 256, 4002, 4003))):
        wide = torch.cat((logits_of(kind, rows, vocab), torch.full((rows, 5), torch.nan)), 1)
        logits = wide[:, :vocab]
        temperature = torch.tensor([1.0, 0.3, 2.5, 1e-5, 0.01])[:rows]
        for width in widths:
            found, wanted = native_order(threads, logits, temperature, width), order(logits, temperature, width)
            assert torch.equal(found.ids_SW, wanted.ids_SW)
            assert torch.equal(found.top_SW, wanted.top_SW)
            torch.testing.assert_close(found.mass_S, wanted.mass_S, rtol=1e-5, atol=0)
            alone = native_order(threads, logits[rows - 1 :], temperature[rows - 1 :], width)
            assert torch.equal(alone.mass_S, found.mass_S[rows - 1 :])


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("top_k", [-1, 5, 300])
def test_the_same_tokens_are_drawn(top_k: int, top_p: float) -> None:
    native = partial(native_order, Threads(the_library(), 2))
    rows, vocab = 40, 9001
    logits = logits_of("bfloat16", rows, vocab)
    asked = SamplingRows(
        temperature=tuple(0.4 + 0.05 * (row % 30) for row in range(rows)),
        top_k=(top_k,) * rows,
        top_p=(top_p,) * rows,
        min_p=tuple(0.02 * (row % 2) for row in range(rows)),
        seed=tuple(range(rows)),
        index=tuple(range(rows)),
        banned=tuple((row,) if row % 3 == 0 else () for row in range(rows)),
    )
    wanted = sample(logits, asked, vocab_size=vocab)
    found = sample(logits, asked, vocab_size=vocab, order=native)
    assert torch.equal(found.token_ids_S, wanted.token_ids_S)
    assert torch.equal(found.logprobs_S, wanted.logprobs_S)
    some = [3, 17, 31]
    fewer = sample(logits[some], asked.take(some), vocab_size=vocab, order=native)
    assert torch.equal(fewer.token_ids_S, found.token_ids_S[some])
