"""Tokens drawn by the native op: the reference's (but for a number on a boundary, of which there is none here); a row's
own, whatever is drawn beside it; and log-probabilities normalised as the most probable token's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from native_library import the_library
from torch import Tensor

from gtp_serve.ops.cpu.draw import draw
from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.cpu.native import native_ops
from gtp_serve.ops.sampling import Draw, SamplingRows, draw_rows, sample

SETS = the_library().instruction_sets()
KINDS = ["spread", "bfloat16", "few allowed", "equal", "falling", "extreme", "peaked", "flat"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    x = torch.randn(rows, vocab) * 3
    match kind:
        case "bfloat16":  # many equals
            return x.bfloat16().float()
        case "few allowed":
            x[:, torch.rand(vocab) < 0.97] = -torch.inf
            x[:, vocab // 2] = 1.0
        case "equal":
            return torch.zeros(rows, vocab).copysign(x)  # zeros of both signs
        case "falling":
            return -torch.arange(float(vocab)).repeat(rows, 1) / 7
        case "extreme":
            return x * 1e30
        case "peaked":
            x[:, ::97] += 9
        case "flat":
            return x / 300
    return x


def rows_of(count: int, **values: Callable[[int], object]) -> SamplingRows:
    """Each value from the number of its row."""
    defaults: dict[str, Callable[[int], object]] = {
        "temperature": lambda row: (1.0, 0.3, 2.5, 1e-5, 0.01, 40.0)[row % 6],
        "top_k": lambda row: -1,
        "top_p": lambda row: 1.0,
        "min_p": lambda row: 0.0,
        "seed": lambda row: row,
        "index": lambda row: 3,
        "banned": lambda row: (),
    }
    columns = {name: tuple(map(value, range(count))) for name, value in (defaults | values).items()}
    return SamplingRows(**columns)  # type: ignore[arg-type]


FILTERS: dict[str, dict[str, Callable[[int], object]]] = {
    "none": {},
    "top_k": {"top_k": lambda row: (1, 5, 64, 65, 300, 10**6)[row % 6]},
    "top_p": {"top_p": lambda row: (0.9, 0.5, 0.999, 1e-9)[row % 4]},
    "min_p": {"min_p": lambda row: (0.02, 0.5, 1.0, 1e-7)[row % 4]},
    "all": {
        "top_k": lambda row: (5, 400, 2000)[row % 3],
        "top_p": lambda row: (0.9, 0.97)[row % 2],
        "min_p": lambda row: (0.0, 0.01)[row % 2],
    },
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_the_references_tokens_are_drawn(name: str, kind: str, filters: str) -> None:
    native: Draw = partial(draw, Threads(the_library(), 2, name))
    for rows, vocab in ((1, 1), (6, 70), (24, 1030), (48, 4003)):
        wide = torch.cat((logits_of(kind, rows, vocab), torch.full((rows, 5), torch.nan)), 1)
        logits = wide[:, :vocab]
        asked = rows_of(rows, **FILTERS[filters])
        which = [row for row in range(rows) if row % 5 != 3]
        assert torch.equal(native(logits, which, asked), draw_rows(logits, which, asked))


@pytest.mark.parametrize("kind", ["bfloat16", "flat", "peaked"])
def test_a_rows_token_is_its_own(kind: str) -> None:
    rows, vocab = 40, 9001
    logits = logits_of(kind, rows, vocab)
    asked = rows_of(rows, **FILTERS["all"])
    native: Draw = partial(draw, Threads(the_library(), 2))
    together = native(logits, range(rows), asked).tolist()
    for row in range(rows):
        assert native(logits[row : row + 1].clone(), [0], asked.take([row])).tolist() == [together[row]]
    assert native(logits, [31, 2], asked).tolist() == [together[31], together[2]]


@pytest.mark.parametrize("name", SETS)
def test_all_ids_come_as_often_as_they_weigh(name: str) -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, -torch.inf, 1.0]])
    draws = 4000
    native: Draw = partial(draw, Threads(the_library(), 1, name))
    asked = rows_of(draws, temperature=lambda row: 1.5, seed=lambda row: 5, index=lambda row: row)
    found = native(logits.expand(draws, -1).contiguous(), range(draws), asked)
    shares = torch.bincount(found, minlength=5) / draws
    torch.testing.assert_close(shares, (logits[0] / 1.5).softmax(0), rtol=0, atol=0.02)


ENDS: dict[str, dict[str, Callable[[int], object]]] = {
    "none": {},
    "top_k": {"top_k": lambda row: 300},
    "top_p": {"top_p": lambda row: 0.6},
    "min_p": {"min_p": lambda row: 0.2},
}


@pytest.mark.parametrize("number", [1 - 2**-53, 0.9999])
@pytest.mark.parametrize("filters", ENDS)
@pytest.mark.parametrize("name", SETS)
def test_numbers_next_to_1_draw_the_last_id_that_is_kept(name: str, filters: str, number: float) -> None:
    """Of 300 that weigh 1, 700 that weigh a tenth, and thousands that weigh nothing: sums may come out a little smaller
    in one order than in another, and still nothing behind the end is drawn."""
    rows, vocab = 40, 5000
    logits = torch.full((rows, vocab), -torch.inf)
    logits[:, 100:400] = 0.0
    logits[:, 3000:3700] = -2.3
    native: Draw = partial(draw, Threads(the_library(), 1, name))
    temperature = torch.linspace(0.9, 1.1, rows).tolist()
    asked = rows_of(rows, temperature=lambda row: temperature[row], **ENDS[filters])
    with patch("gtp_serve.ops.cpu.draw.uniform", lambda seed, index: number):
        found = native(logits, range(rows), asked).tolist()
    masses = [300 + 700 * math.exp(-2.3 / one) for one in temperature]
    last = {"none": [3699] * rows, "top_p": [99 + math.ceil(0.6 * mass) for mass in masses]}
    assert found == last.get(filters, [399] * rows)


@pytest.mark.parametrize("behind", [-torch.inf, -26.0], ids=["what weighs nothing", "what top-k drops"])
@pytest.mark.parametrize("name", SETS)
def test_rounding_lets_nothing_be_drawn_from_behind_the_end(name: str, behind: float) -> None:
    """Weights that float64 rounds, summed up in two orders: the last sum may be a little less than what is drawn by."""
    rows, vocab = 60, 4003
    logits = torch.full((rows, vocab), behind)
    logits[:, 0] = 0.0
    logits[:, 1:301] = -25 + torch.rand(rows, 300) * 0.004
    top_k = -1 if behind == -torch.inf else 301
    native: Draw = partial(draw, Threads(the_library(), 2, name))
    with patch("gtp_serve.ops.cpu.draw.uniform", lambda seed, index: 1 - 2**-53):
        found = native(logits, range(rows), rows_of(rows, temperature=lambda row: 1.0, top_k=lambda row: top_k))
    assert int(found.min()) > 0
    assert int(found.max()) <= 300


@pytest.mark.parametrize("vocab", [70, 9001])
def test_log_probabilities_are_normalised_as_the_most_probable_tokens(vocab: int) -> None:
    ops = native_ops(Threads(the_library(), 2))
    logits = logits_of("bfloat16", 30, vocab)
    logits[4, 3] = torch.inf
    logits[9, 1] = torch.nan
    asked = rows_of(30, temperature=lambda row: 0.8 * (row % 2), banned=lambda row: (row,) if row % 3 == 0 else ())
    best = ops.greedy(logits, vocab)
    found = sample(logits, asked, vocab_size=vocab, draw=ops.draw, best=best)
    wanted = sample(logits, asked, vocab_size=vocab)
    fine = wanted.finite_S
    assert fine.tolist() == [row not in (4, 9) for row in range(30)]
    assert torch.equal(found.finite_S, fine)
    assert torch.equal(found.token_ids_S[fine], wanted.token_ids_S[fine])
    torch.testing.assert_close(found.logprobs_S[fine], wanted.logprobs_S[fine], rtol=0, atol=1e-5)
    greedy = fine & (found.token_ids_S == best.token_ids_S)
    assert int(greedy.sum()) > 5
    assert torch.equal(found.logprobs_S[greedy], best.logprobs_S[greedy])
    some = fine.nonzero()[:, 0][3:11]
    rows_RV = found.raw_logprobs(some)
    torch.testing.assert_close(rows_RV, logits[some].log_softmax(-1), rtol=0, atol=2e-5)
    chosen = rows_RV.gather(1, found.token_ids_S[some][:, None])[:, 0]
    assert torch.equal(chosen, found.logprobs_S[some])
