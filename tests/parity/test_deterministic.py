"""``--deterministic``: the same bits alone, in any company, in any pieces, from the cache or not, preempted or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deterministic_mixes import check_mixes, open_subject
from msgspec import structs

from gtp_serve.config import DType
from gtp_serve.request import LogprobOptions, SamplingParams

MEGATRON = Path(__file__).parents[1] / "data" / "megatron"
FIXTURES = {
    "llama": "llama-tp1-pp1-gtp4-pad16-logical",
    "qwen2": "qwen2-tp2-pp1-gtp2-pad32-padded-per-layer-keys",
    "moe": "moe-tp2-pp1-gtp2-egtp2-pad32-logical",
}
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
LONGEST = 136
"""More than one block of keys."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model", "seeds"), [("llama", range(17)), ("qwen2", range(17, 34)), ("moe", range(34, 50))])
def test_50_random_mixes_give_each_request_the_bits_it_has_alone(model: str, seeds: range, dtype: DType) -> None:
    subject = open_subject(MEGATRON / FIXTURES[model], dtype, longest=LONGEST)

    check_mixes(subject, seeds)

    assert subject.preemptions > 0
    assert subject.cached_tokens > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", FIXTURES)
def test_scoring_an_output_gives_the_bits_of_generating_it(model: str, dtype: DType) -> None:
    subject = open_subject(MEGATRON / FIXTURES[model], dtype, longest=LONGEST)
    request = subject.pool[0]
    ids, logprobs = subject.solo(structs.replace(request, logprobs=None))
    whole = structs.replace(
        request,
        rid="scored",
        input_ids=(*request.input_ids, *ids),
        sampling=SamplingParams(max_new_tokens=0),
        logprobs=LogprobOptions(prompt_start=len(request.input_ids) - 1),
    )

    scored = subject.run([whole, *subject.pool[1:6]], replace(subject.config, max_step_tokens=33))

    assert scored["scored"] == ((), logprobs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", FIXTURES)
def test_log_probabilities_are_the_reference_arithmetics_within_rounding(model: str, dtype: DType) -> None:
    path = MEGATRON / FIXTURES[model]
    ours, plain = (open_subject(path, dtype, longest=LONGEST, deterministic=d, count=8) for d in (True, False))
    tolerance = 2e-5 if dtype == "float32" else 0.03

    differences: list[float] = []
    for request in ours.pool:
        asked = structs.replace(
            request, sampling=SamplingParams(max_new_tokens=0), logprobs=LogprobOptions(prompt_start=0)
        )
        pairs = zip(ours.solo(asked)[1], plain.solo(asked)[1], strict=True)
        differences += [abs(one - other) for one, other in pairs]
    differences.sort()
    # In bfloat16 two experts can be equally likely for a token, and then either may be taken.
    assert differences[len(differences) * 97 // 100] < tolerance
    assert differences[-1] < 10 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm_gives_each_request_the_bits_it_has_alone(demo_dir: Path, dtype: DType) -> None:
    subject = open_subject(demo_dir / "hf", dtype, longest=140, count=6, max_new=5)

    check_mixes(subject, range(100, 104))
