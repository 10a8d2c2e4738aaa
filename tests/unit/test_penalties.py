"""Penalties and bias against their definitions, and the counts that they are computed from."""

from __future__ import annotations

import random

import torch

from gtp_serve.ops.penalties import TokenCounts, add_bias, penalise

torch.set_num_threads(1)


def test_each_penalty_is_the_documented_formula() -> None:
    rng = random.Random(3)
    for _ in range(200):
        vocab = rng.randrange(2, 20)
        logits = [[rng.gauss(0, 4) for _ in range(vocab)] for _ in range(3)]
        counts = [[rng.choice([0, 0, 1, 3]) for _ in range(vocab)] for _ in range(3)]
        prompt = [[rng.random() < 0.3 for _ in range(vocab)] for _ in range(3)]
        repetition, presence, frequency = (
            [rng.choice(values) for _ in range(3)] for values in ([1.0, 1.3, 0.5], [0.0, 1.5, -2.0], [0.0, 0.7, -0.1])
        )
        got = penalise(
            torch.tensor(logits),
            output_SV=torch.tensor(counts, dtype=torch.int32),
            in_prompt_SV=torch.tensor(prompt),
            repetition_S=torch.tensor(repetition),
            presence_S=torch.tensor(presence),
            frequency_S=torch.tensor(frequency),
        )
        for row in range(3):
            for token in range(vocab):
                value, count = logits[row][token], counts[row][token]
                if count or prompt[row][token]:
                    value = value / repetition[row] if value > 0 else value * repetition[row]
                value -= presence[row] * (count > 0) + frequency[row] * count
                assert abs(float(got[row, token]) - value) < 1e-5


def test_a_row_with_neutral_values_keeps_its_bits() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    one, zero = torch.ones(1), torch.zeros(1)
    got = penalise(
        logits,
        output_SV=torch.ones(1, 50, dtype=torch.int32),
        in_prompt_SV=torch.ones(1, 50, dtype=torch.bool),
        repetition_S=one,
        presence_S=zero,
        frequency_S=zero,
    )
    assert torch.equal(got, logits)


def test_bias_is_added_to_its_rows_and_ids_only() -> None:
    got = add_bias(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([1.5, -100.0]))
    assert got.tolist() == [[0.0, 0.0, 1.5], [-100.0, 0.0, 0.0]]


def test_counts_follow_each_sequence_and_a_released_row_starts_afresh() -> None:
    counts = TokenCounts(6, "cpu")
    first, second = counts.take([1, 1, 2]), counts.take([5])
    counts.count([first, first, second], [3, 3, 0])
    output, prompt = counts.of(torch.tensor([second, first]))
    assert output.tolist() == [[1, 0, 0, 0, 0, 0], [0, 0, 0, 2, 0, 0]]
    assert prompt.nonzero().tolist() == [[0, 5], [1, 1], [1, 2]]
    counts.release(first)
    third = counts.take([4])
    assert third == first
    output, prompt = counts.of(torch.tensor([third]))
    assert int(output.sum()) == 0
    assert prompt.nonzero().tolist() == [[0, 4]]


def test_the_table_grows_with_its_sequences_and_keeps_what_it_has() -> None:
    counts = TokenCounts(4, "cpu")
    rows = [counts.take([index % 4]) for index in range(11)]
    counts.count(rows, [index % 3 for index in range(11)])
    assert len(set(rows)) == counts.num_used == 11
    output, prompt = counts.of(torch.tensor(rows))
    assert output.argmax(1).tolist() == [index % 3 for index in range(11)]
    assert prompt.int().argmax(1).tolist() == [index % 4 for index in range(11)]
