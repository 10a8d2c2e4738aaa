"""Plans as values: what followers are told, what shapes a sequence."""

from __future__ import annotations

import msgspec

from gtp_serve.engine.step import SampleSpec, ScoreSpec, Shaping, StepItem, StepPlan
from gtp_serve.request import Grammar, LogprobOptions, SamplingParams


def plan() -> StepPlan:
    shaping = Shaping.of(SamplingParams(presence_penalty=1.0), [1, 2, 3], prompt_len=2)
    sample = SampleSpec(temperature=0.7, top_k=5, top_p=0.9, min_p=0.0, seed=8, index=1, shaping=shaping)
    options = LogprobOptions(top_n=2, prompt_start=0)
    first = StepItem(rid="a", token_ids=(3,), start=2, block_table=(0,), sample=sample, routes=True)
    score = ScoreSpec(first=0, targets=(5, 6), options=options)
    second = StepItem(rid="b", token_ids=(4, 5), start=0, block_table=(1,), sample=None, score=score)
    return StepPlan(step=4, block_size=16, items=(first, second))


def test_followers_get_the_same_passes_and_nothing_of_the_sampling() -> None:
    whole, told = plan(), plan().for_followers()
    assert [item.token_ids for item in told.items] == [item.token_ids for item in whole.items]
    assert [item.sample is None for item in told.items] == [item.sample is None for item in whole.items]
    assert told.items[1] == whole.items[1]
    sample = told.items[0].sample
    assert sample is not None
    assert sample.shaping is None
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=StepPlan)
    assert again == told


def test_a_sequence_that_nothing_shapes_has_no_shaping() -> None:
    plain = SamplingParams(temperature=0.0, top_p=0.5, min_p=0.1, bad_words=((1,),))
    assert Shaping.of(plain, [1], prompt_len=1) is None
    for params in (
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(repetition_penalty=0.9),
        SamplingParams(logit_bias={1: 1.0}),
        SamplingParams(grammar=Grammar(kind="json_object")),
        SamplingParams(allowed_token_ids=(1,)),
    ):
        assert Shaping.of(params, [1], prompt_len=1) is not None


def test_two_shapings_of_equal_values_are_two() -> None:
    params = SamplingParams(presence_penalty=1.0)
    one, other = (Shaping.of(params, [1], prompt_len=1) for _ in range(2))
    assert one is not None
    assert one != other
