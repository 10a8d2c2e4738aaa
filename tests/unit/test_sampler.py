"""What shapes logits, samples and tells log-probabilities, against a twin written out in plain Python."""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from sampling_twin import Choice, choose, shaped

from gtp_serve.engine.sampler import Sampler
from gtp_serve.engine.step import NO_TOKEN, SampleSpec, ScoreSpec, Shaping, StepItem, StepPlan, StepResult
from gtp_serve.ops.greedy import Greedy, greedy
from gtp_serve.ops.sampling import Chooser
from gtp_serve.request import LogprobOptions, SamplingParams

torch.set_num_threads(1)


def spec_of(
    params: SamplingParams,
    shaping: Shaping | None,
    *,
    seed: int = 0,
    index: int = 0,
    banned: tuple[int, ...] = (),
    logprobs: LogprobOptions | None = None,
) -> SampleSpec:
    return SampleSpec(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        index=index,
        banned=banned,
        shaping=shaping,
        logprobs=logprobs,
    )


def item_of(rid: str, sample: SampleSpec | None, tokens: Sequence[int] = (1,)) -> StepItem:
    return StepItem(rid=rid, token_ids=tuple(tokens), start=0, block_table=(0,), sample=sample)


def run(sampler: Sampler, specs: Sequence[SampleSpec], logits: torch.Tensor) -> StepResult:
    plan = StepPlan(step=0, block_size=4, items=tuple(item_of(str(at), one) for at, one in enumerate(specs)))
    return sampler.finish(sampler.begin(plan), logits).wait()


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    penalised = rng.random() < 0.6
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-7, 0.3, 1.0, 1.7]),
        top_k=rng.choice([-1, -1, 1, 3, 17, vocab, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-3]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        presence_penalty=rng.choice([0.0, 1.5, -2.0]) if penalised else 0.0,
        frequency_penalty=rng.choice([0.0, 0.3, 2.0]) if penalised else 0.0,
        repetition_penalty=rng.choice([1.0, 1.3, 0.7]) if penalised else 1.0,
        logit_bias={t: rng.choice([-100.0, 1.0, 5.0]) for t in rng.sample(range(vocab), rng.choice([0, 0, 3]))},
        allowed_token_ids=tuple(rng.sample(range(vocab), rng.choice([0, 0, 0, 3, 9]))),
    )


class Case:
    """A sequence with random past and parameters."""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        self.params = random_params(rng, vocab)
        self.prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 6))]
        self.output = [rng.randrange(vocab) for _ in range(rng.randrange(0, 6))]
        self.tokens = [*self.prompt, *self.output]
        self.seed, self.index = rng.getrandbits(63), rng.randrange(1000)
        self.banned = tuple(sorted(rng.sample(range(vocab), rng.choice([0, 0, 2]))))
        self.logits = [float(torch.tensor(rng.gauss(0, 3))) for _ in range(vocab)]
        self.shaping = Shaping.of(self.params, self.tokens, prompt_len=len(self.prompt))

    @property
    def spec(self) -> SampleSpec:
        options = LogprobOptions(processed=True, token_ids=tuple(range(len(self.logits))))
        return spec_of(
            self.params, self.shaping, seed=self.seed, index=self.index, banned=self.banned, logprobs=options
        )

    def twin(self) -> Choice:
        logits = shaped(self.logits, self.prompt, self.output, self.params)
        return choose(logits, self.banned, self.params, self.seed, self.index)


def test_ten_thousand_random_rows_agree_with_the_written_out_twin() -> None:
    rng, vocab = random.Random(11), 24
    sampler = Sampler(vocab_size=vocab, device="cpu")
    close = 0
    for _ in range(100):
        cases = [Case(rng, vocab) for _ in range(100)]
        result = run(sampler, [case.spec for case in cases], torch.tensor([case.logits for case in cases]))
        for case, token, logprob, details in zip(cases, result.token_ids, result.logprobs, result.details, strict=True):
            want = case.twin()
            if want.margin < 1e-6:
                close += 1
                continue
            assert token == want.token
            assert details is not None
            got = {at: value for at, value in enumerate(details.listed) if value > -math.inf}
            assert got == pytest.approx({k: v for k, v in want.logprobs.items() if v > -math.inf}, abs=2e-4)
            assert logprob == details.listed[token]
    assert close < 20  # rounding may decide there; all others were compared


def test_chosen_frequencies_follow_the_distribution() -> None:
    vocab, draws = 6, 6000
    cases = [
        SamplingParams(temperature=0.7, presence_penalty=1.0, repetition_penalty=1.2, logit_bias={3: 1.0}),
        SamplingParams(temperature=1.3, top_k=4, frequency_penalty=0.5),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.02, logit_bias={0: -1.0}),
    ]
    logits = [0.3, -0.4, 1.2, 0.1, -1.0, 0.8]
    tokens = [1, 2, 2, 5]
    sampler = Sampler(vocab_size=vocab, device="cpu")
    for params in cases:
        shaping = Shaping.of(params, tokens, prompt_len=1)
        specs = [spec_of(params, shaping, seed=5, index=at) for at in range(draws)]
        counts = Counter(run(sampler, specs, torch.tensor([logits] * draws)).token_ids)
        want = choose(shaped(logits, tokens[:1], tokens[1:], params), (), params, 0, 0).logprobs
        assert set(counts) <= set(want)
        chi2 = sum((counts[t] - draws * math.exp(lp)) ** 2 / (draws * math.exp(lp)) for t, lp in want.items())
        assert chi2 < 25  # 5 degrees of freedom at most: p > 1e-4


@pytest.mark.parametrize(
    ("params", "want"),
    [
        (SamplingParams(top_k=1), {2}),
        (SamplingParams(top_k=-1), {0, 1, 2, 3}),
        (SamplingParams(top_k=2), {2, 0}),  # 0 and 3 are equal: the lower id stays
        (SamplingParams(top_k=1000), {0, 1, 2, 3}),
        (SamplingParams(top_p=1.0), {0, 1, 2, 3}),
        (SamplingParams(top_p=1e-30), {2}),
        (SamplingParams(min_p=0.0), {0, 1, 2, 3}),
        (SamplingParams(min_p=1.0), {2}),
        (SamplingParams(temperature=1e-7), {2}),
    ],
)
def test_the_edges_of_the_filters_are_the_documented_ones(params: SamplingParams, want: set[int]) -> None:
    logits = torch.tensor([[1.0, 0.0, 1.5, 1.0]] * 400)
    specs = [spec_of(params, None, seed=9, index=at) for at in range(400)]
    assert set(run(Sampler(vocab_size=4, device="cpu"), specs, logits).token_ids) == want


def test_counts_are_brought_up_to_date_by_new_tokens_only_and_dropped_with_the_sequence() -> None:
    tokens = [0, 1]
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    shaping = Shaping.of(params, tokens, prompt_len=2)
    sampler = Sampler(vocab_size=4, device="cpu")
    chosen = []
    for _ in range(4):
        token = run(sampler, [spec_of(params, shaping)], torch.tensor([[1.5, 1.0, 0.5, 0.0]])).token_ids[0]
        tokens.append(token)
        chosen.append(token)
    assert chosen == [0, 1, 2, 3]  # each that was said is pushed below the rest
    assert sampler.num_histories == 1
    del shaping
    gc.collect()
    assert sampler.num_histories == 0


def test_a_neighbour_with_penalties_changes_nobody_else() -> None:
    params = SamplingParams(temperature=0.9)
    heavy = SamplingParams(temperature=0.9, repetition_penalty=1.9, logit_bias={0: 50.0})
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(4))
    sampler = Sampler(vocab_size=40, device="cpu")
    alone = run(sampler, [spec_of(params, None, seed=7)], logits[:1])
    shaping = Shaping.of(heavy, [1, 2, 3], prompt_len=1)
    beside = run(sampler, [spec_of(params, None, seed=7), spec_of(heavy, shaping, seed=7)], logits)
    assert (beside.token_ids[0], beside.logprobs[0]) == (alone.token_ids[0], alone.logprobs[0])
    assert beside.token_ids[1] == 0


def test_a_row_that_is_not_finite_fails_alone() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={1: 3.0})
    shaping = Shaping.of(params, [0], prompt_len=1)
    logits = torch.tensor([[1.0, 0.0], [torch.nan, 0.0], [torch.inf, 0.0]])
    specs = [spec_of(params, shaping, logprobs=LogprobOptions(top_n=1))] * 3
    result = run(Sampler(vocab_size=2, device="cpu"), specs, logits)
    assert result.token_ids == (1, NO_TOKEN, NO_TOKEN)


def test_raw_log_probabilities_are_of_the_model_and_not_of_what_was_sampled_from() -> None:
    params = SamplingParams(temperature=0.5, top_k=1, logit_bias={0: 10.0})
    shaping = Shaping.of(params, [0], prompt_len=1)
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 99.0]])  # the last is padding
    options = LogprobOptions(top_n=3, token_ids=(2, 0))
    result = run(Sampler(vocab_size=4, device="cpu"), [spec_of(params, shaping, logprobs=options)], logits)
    raw = logits[0, :4].log_softmax(0).tolist()
    assert result.token_ids == (0,)
    assert result.logprobs[0] == pytest.approx(raw[0])
    details = result.details[0]
    assert details is not None
    assert [token for token, _ in details.top] == [1, 3, 2]  # equals by id
    assert [value for _, value in details.top] == pytest.approx([raw[1], raw[3], raw[2]])
    assert details.listed == pytest.approx((raw[2], raw[0]))


def test_nothing_more_is_computed_for_those_who_did_not_ask() -> None:
    params = SamplingParams()
    specs = [spec_of(params, None), spec_of(params, None, logprobs=LogprobOptions(top_n=2))]
    result = run(Sampler(vocab_size=4, device="cpu"), specs, torch.zeros(2, 4))
    assert result.details[0] is None
    assert result.details[1] is not None
    assert len(result.details[1].top) == 2
    assert run(Sampler(vocab_size=4, device="cpu"), specs[:1], torch.zeros(1, 4)).details == ()


def test_prompt_log_probabilities_come_in_pieces_and_in_the_order_of_the_rows() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 8)
    options = LogprobOptions(top_n=2, token_ids=(3,), prompt_start=1)
    items = (
        item_of("a", None, (1, 2)),
        StepItem(
            rid="b",
            token_ids=(4, 5, 6),
            start=0,
            block_table=(0,),
            sample=None,
            score=ScoreSpec(first=1, targets=(4, 5), options=options),
        ),
        StepItem(
            rid="c",
            token_ids=(1, 1, 1),
            start=4,
            block_table=(0,),
            sample=None,
            score=ScoreSpec(first=0, targets=(0, 1, 2), options=LogprobOptions(prompt_start=0)),
        ),
    )
    plan = StepPlan(step=0, block_size=4, items=items)
    sampler = Sampler(vocab_size=6, device="cpu")
    prepared = sampler.begin(plan)
    assert prepared.taps is not None
    assert prepared.taps.scored is not None
    prepared.taps.scored(logits[:1])
    prepared.taps.scored(logits[1:])
    result = sampler.finish(prepared, torch.empty(0, 8)).wait()
    want = logits[:, :6].log_softmax(-1)
    assert result.scores[0] is None
    second, third = result.scores[1], result.scores[2]
    assert second is not None
    assert third is not None
    assert third.logprobs == pytest.approx([float(want[2, 0]), float(want[3, 1]), float(want[4, 2])])
    assert (third.top, third.listed) == ((), ())
    assert [one for (one,) in second.listed] == pytest.approx([float(want[0, 3]), float(want[1, 3])])
    assert [token for token, _ in second.top[0]] == want[0].topk(2).indices.tolist()


def test_a_devices_own_greedy_choice_serves_steps_that_are_all_greedy_and_no_others() -> None:
    calls: list[int] = []

    def counted(logits: torch.Tensor, vocab_size: int) -> Greedy:
        calls.append(len(logits))
        return greedy(logits, vocab_size)

    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    logits[1, 7] = torch.inf
    sure = spec_of(SamplingParams(temperature=0.0), None)
    drawn = spec_of(SamplingParams(temperature=1.0), None, seed=3)
    both = [Sampler(vocab_size=40, device="cpu", chooser=Chooser(greedy=choice)) for choice in (None, counted)]

    plain, quick = (run(sampler, [sure, sure, sure], logits) for sampler in both)
    assert (calls, quick.token_ids) == ([3], plain.token_ids)
    assert quick.token_ids[1] == NO_TOKEN
    assert [quick.logprobs[i] for i in (0, 2)] == pytest.approx([plain.logprobs[i] for i in (0, 2)], abs=1e-5)
    assert run(both[1], [sure, sure, drawn], logits) == run(both[0], [sure, sure, drawn], logits)
    assert calls == [3]
