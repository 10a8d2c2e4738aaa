"""A token's log-probability has the same bits in a greedy step and in a mixed one, generated and scored, with
``deterministic`` and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from native_library import THREADS

from gtp_serve import LLM, Completion
from gtp_serve.ops.cpu.native import native_ops
from gtp_serve.ops.logprobs import logprobs_of

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


def test_logits_that_their_owner_changes_are_normalised_as_they_are_then() -> None:
    """A trainer divides its logits by a temperature in place."""
    ops = native_ops(THREADS)
    assert ops.logits is not None
    generator = torch.Generator().manual_seed(4)
    x_SD, weight_VD = torch.randn(5, 32, generator=generator), torch.randn(300, 32, generator=generator)
    logits_SV = ops.logits(x_SD, weight_VD)
    logits_SV.div_(2.5)
    ids_S = torch.tensor([0, 299, 17, 5, 64])
    expected = logits_SV.log_softmax(-1).gather(1, ids_S[:, None])[:, 0]
    torch.testing.assert_close(logprobs_of(logits_SV, ids_S, 300, ops.normalise), expected, rtol=0, atol=1e-5)
