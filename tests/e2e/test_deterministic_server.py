"""``gtp-serve --deterministic`` over HTTP, on one rank and on two: company changes no bit of a log-probability."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve_command import Command

from gtp_serve import LLM

pytestmark = pytest.mark.e2e

DATA = Path(__file__).parents[1] / "data"
CKPT = DATA / "megatron" / "moe-tp2-pp1-gtp2-egtp2-pad32-logical"
SAMPLING = {"temperature": 0, "max_new_tokens": 12}
PROMPTS = [[1 + n, *range(n, 3 * n)] for n in range(12)]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    words = ("--kv-memory", "2MiB", "--dtype", "float32", "--deterministic", "--tp", str(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        command = Command("--ckpt", str(CKPT), "--no-tokenizer", "--port", "0", *words)
    try:
        with httpx.Client(base_url=command.url(), timeout=60, trust_env=False, verify=False) as http:
            yield http
    finally:
        command.stop()


def ask(http: httpx.Client, ids: list[int]) -> list[Any]:
    body = {"input_ids": ids, "sampling_params": SAMPLING, "return_logprob": True}
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    triples: list[Any] = reply.json()["meta_info"]["output_token_logprobs"]
    return triples


@pytest.mark.parametrize("server", [1, 2], indirect=True)
def test_log_probabilities_are_the_same_alone_and_in_company(server: httpx.Client) -> None:
    alone = [ask(server, ids) for ids in PROMPTS]

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda ids: ask(server, ids), PROMPTS * 2))

    assert together == alone * 2


@pytest.mark.parametrize("server", [1], indirect=True)
def test_llm_gives_the_bits_of_the_server(server: httpx.Client) -> None:
    over_http = [ask(server, ids) for ids in PROMPTS]

    torch.set_num_threads(1)
    with LLM(CKPT, tokenizer=False, kv_memory="2MiB", dtype="float32", deterministic=True) as llm:
        made = llm.generate(PROMPTS, temperature=0, max_new_tokens=12)

    assert [[value for value, _, _ in triples] for triples in over_http] == [list(one.logprobs) for one in made]
