"""A token's log-probability has the same bits in a greedy step and in a mixed one, generated and scored, with
``deterministic`` and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from native_library import the_library

from gtp_serve import LLM, Completion

the_library()
CKPT = Path(__file__).parents[1] / "data" / "megatron" / "llama-tp2-pp1-gtp2-pad16-padded"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
OTHERS: list[dict[str, Any]] = [
    GREEDY | {"temperature": 1.0, "seed": 5},
    GREEDY | {"temperature": 0.7, "top_p": 0.8, "seed": 6},
    GREEDY | {"temperature": 1.3, "top_k": 7, "min_p": 0.01, "seed": 7},
    GREEDY | {"presence_penalty": 0.5},
    GREEDY | {"temperature": 1.0, "seed": 8, "logit_bias": {5: 3.0}},
]


@pytest.fixture(scope="module", params=[False, True], ids=["as it comes", "deterministic"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(CKPT, tokenizer=False, kv_memory="4MiB", deterministic=request.param) as made:
        yield made


def ids_and_logprobs(made: Completion) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return made.ids, made.logprobs


@pytest.mark.parametrize("sampling", [GREEDY, *OTHERS], ids=str)
def test_alone_beside_others_and_scored(llm: LLM, sampling: dict[str, Any]) -> None:
    (alone,) = llm.generate([PROMPT], sampling)
    beside = llm.generate([PROMPT, *([7, 7, 1 + row] for row in range(5))], [sampling, *OTHERS])[0]
    assert ids_and_logprobs(beside) == ids_and_logprobs(alone)
    crowd = llm.generate([PROMPT, *([9, row] for row in range(1, 8))], [sampling] + [GREEDY] * 7)[0]
    assert ids_and_logprobs(crowd) == ids_and_logprobs(alone)
    (score,) = llm.score([[*PROMPT, *alone.ids]], start=len(PROMPT) - 1)
    assert score.logprobs == alone.logprobs
    (detailed,) = llm.generate([PROMPT], sampling, top_logprobs=4)
    assert ids_and_logprobs(detailed) == ids_and_logprobs(alone)
    told = [dict(top).get(token) for token, top in zip(detailed.ids, detailed.top_logprobs, strict=True)]
    found = [(value, one) for value, one in zip(told, detailed.logprobs, strict=True) if value is not None]
    assert found or sampling != GREEDY
    assert all(value == one for value, one in found)
