"""Sampling against a plain, written-out twin, and the statistics of what it draws."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import fields, replace
from itertools import accumulate, pairwise

import pytest
import torch

from gtp_serve.ops.sampling import Sampled, SamplingRows, sample, uniform

torch.set_num_threads(1)


def make_rows(count: int = 1, **values: object) -> SamplingRows:
    defaults: dict[str, object] = {
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "index": 0,
        "banned": (),
    }
    columns = {name: values.get(name, default) for name, default in defaults.items()}
    # A list is one value for each row; anything else is the value of every row.
    return SamplingRows(**{n: tuple(v) if isinstance(v, list) else (v,) * count for n, v in columns.items()})  # type: ignore[arg-type]


def one_row(rows: SamplingRows, at: int) -> SamplingRows:
    return replace(rows, **{f.name: (getattr(rows, f.name)[at],) for f in fields(rows)})


def plain_choice(logits: list[float], rows: SamplingRows, at: int) -> tuple[int, float]:
    """(token, distance of the random number from the nearest boundary), in plain Python floats."""
    allowed = [i for i in range(len(logits)) if i not in rows.banned[at]]
    order = sorted(allowed, key=lambda i: (-logits[i], i))
    temperature = rows.temperature[at]
    if temperature < 1e-6:
        return order[0], 1.0
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    if rows.top_k[at] > 0:
        weights = weights[: rows.top_k[at]]
    close = 1.0
    if rows.top_p[at] < 1:
        mass, before, kept = math.fsum(weights), 0.0, 0
        for weight in weights:
            close = min(close, abs(before / mass - rows.top_p[at]))
            if before >= rows.top_p[at] * mass:
                break
            before, kept = before + weight, kept + 1
        weights = weights[:kept]
    if 0 < rows.min_p[at] < 1:
        close = min(close, *(abs(w - rows.min_p[at]) for w in weights))
    weights = [w for w in weights if w >= rows.min_p[at]]
    sums = list(accumulate(weights))
    target = uniform(rows.seed[at], rows.index[at]) * sums[-1]
    place = next(n for n, mass in enumerate(sums) if mass > target)
    return order[place], min(close, *(abs(mass - target) / sums[-1] for mass in [*sums[:-1], math.inf]))


def random_rows(rng: random.Random, count: int, vocab: int) -> SamplingRows:
    return make_rows(
        temperature=[rng.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(count)],
        top_k=[rng.choice([-1, -1, 1, 3, 40, 64, 65, 300, 5000]) for _ in range(count)],
        top_p=[rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.01]) for _ in range(count)],
        min_p=[rng.choice([0.0, 0.0, 0.001, 0.2, 1.0]) for _ in range(count)],
        seed=[rng.choice([rng.getrandbits(63), -rng.getrandbits(63), rng.randrange(9)]) for _ in range(count)],
        index=[rng.randrange(5000) for _ in range(count)],
        banned=[tuple(sorted(rng.sample(range(vocab), rng.choice([0, 0, 1, 2])))) for _ in range(count)],
    )


@pytest.mark.parametrize(("vocab", "count"), [(3, 500), (50, 900), (700, 600), (5001, 150)])
def test_tokens_and_logprobs_agree_with_the_plain_twin(vocab: int, count: int) -> None:
    rng = random.Random(vocab)
    logits = torch.randn(count, vocab + 3, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = torch.where(torch.arange(count)[:, None] % 2 == 0, logits.round(), logits)  # half with many equals
    logits = torch.where(torch.arange(count)[:, None] % 5 == 0, logits * 0.05, logits)  # some almost flat
    rows = random_rows(rng, count, vocab)

    got = sample(logits, rows, vocab_size=vocab)

    raw = torch.log_softmax(logits[:, :vocab].double(), -1)
    unclear = 0
    for at in range(count):
        token, close = plain_choice(logits[at, :vocab].tolist(), rows, at)
        if close < 1e-6:
            unclear += 1  # float32 weights may decide such a one either way
            continue
        assert int(got.token_ids_S[at]) == token, (at, one_row(rows, at))
        assert float(got.logprobs_S[at]) == pytest.approx(float(raw[at, token]), abs=1e-4)
    assert unclear < count / 20
    assert bool(got.finite_S.all())


def test_a_row_is_the_same_alone_as_among_others_to_the_last_bit() -> None:
    count, vocab = 48, 5003
    logits = torch.randn(count, vocab + 5, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    rows = random_rows(random.Random(4), count, vocab)

    together = sample(logits, rows, vocab_size=vocab)

    alone = [sample(logits[at : at + 1], one_row(rows, at), vocab_size=vocab) for at in range(count)]
    assert torch.equal(together.token_ids_S, torch.cat([one.token_ids_S for one in alone]))
    assert torch.equal(together.logprobs_S, torch.cat([one.logprobs_S for one in alone]))


def draw(logits: torch.Tensor, count: int, **values: object) -> Sampled:
    return sample(logits.expand(count, -1), make_rows(count, **values), vocab_size=logits.shape[0])


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 0.5])
    count = 20_000

    drawn = Counter(draw(logits, count, seed=list(range(count)), temperature=0.8).token_ids_S.tolist())

    expected = (torch.softmax(logits / 0.8, -1) * count).tolist()
    chi_square = sum((drawn[i] - expected[i]) ** 2 / expected[i] for i in range(6))
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("vary", ["seed", "index"])
def test_neighbouring_seeds_and_indices_draw_independently(vary: str) -> None:
    count = 8_000
    numbers = [uniform(n, 7) if vary == "seed" else uniform(7, n) for n in range(count + 1)]

    cells = Counter((int(a * 4), int(b * 4)) for a, b in pairwise(numbers))

    chi_square = sum((cells[x, y] - count / 16) ** 2 / (count / 16) for x in range(4) for y in range(4))
    assert chi_square < 37.7  # 15 degrees of freedom, p = 0.001


def test_random_numbers_are_what_splitmix64_gives() -> None:
    numbers = [uniform(0, 0), uniform(0, 1), uniform(-1, 0), uniform(2**64 - 1, 0)]

    # splitmix64's first output for seed 0 is 0xE220A8397B1DCDAF; it starts the sequence that the index walks.
    def mix(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    first = (0xE220A8397B1DCDAF + 0x9E3779B97F4A7C15) % 2**64
    assert numbers[0] == (mix(first) >> 11) / 2**53
    assert numbers[1] != numbers[0]
    assert numbers[2] == numbers[3]
    assert all(0 <= number < 1 for number in numbers)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])

    assert draw(logits, 1, temperature=0.0).token_ids_S.tolist() == [1]
    assert draw(logits, 1, temperature=9e-7).token_ids_S.tolist() == [1]
    assert draw(logits, 1, top_k=1).token_ids_S.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_x3_padding_ids_are_never_chosen_and_take_no_probability(temperature: float) -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0, math.nan]])

    got = sample(logits, make_rows(temperature=temperature), vocab_size=2)

    assert int(got.token_ids_S[0]) in (0, 1)
    assert float(got.logprobs_S[0]) == pytest.approx(math.log(0.5))
    assert bool(got.finite_S[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_chosen_but_keep_their_raw_probability(temperature: float) -> None:
    logits = torch.tensor([5.0, 0.0, 4.0])

    got = draw(logits, 200, temperature=temperature, banned=(0, 2), seed=list(range(200)))

    assert set(got.token_ids_S.tolist()) == {1}
    assert float(got.logprobs_S[0]) == pytest.approx(float(torch.log_softmax(logits, -1)[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_reported_and_leaves_its_neighbours_alone(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2))
    rows = make_rows(3, temperature=temperature)
    expected = sample(logits, rows, vocab_size=300).token_ids_S
    spoiled = logits.clone()
    spoiled[1, 17] = bad

    got = sample(spoiled, rows, vocab_size=300)

    assert got.finite_S.tolist() == [True, False, True]
    assert got.token_ids_S[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_no_rows_give_no_tokens() -> None:
    got = sample(torch.empty(0, 9), make_rows(0), vocab_size=9)

    assert got.token_ids_S.shape == got.logprobs_S.shape == (0,)
