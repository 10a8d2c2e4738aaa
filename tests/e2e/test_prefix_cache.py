"""The prefix cache on a real model (SmolLM2), through the real process: what is cached is reported and not computed."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from gtp_serve.config import CacheConfig, EngineConfig
from gtp_serve.engine.client import EngineClient
from gtp_serve.engine.messages import EngineStats
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.request import Request, SamplingParams, TokenEvent
from gtp_serve.server.launch import Launch, launch_argv
from gtp_serve.server.options import SavedGrid

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROMPT = tuple(100 + (n * 7919) % 40_000 for n in range(1000))
CACHED = 992
"""The full blocks of 16 tokens among the first 999: the last token is always computed."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered request: its events, when the first one came, and what the engine did for it."""

    events: list[TokenEvent]
    first_token_seconds: float
    prompt_tokens_computed: int
    tokens_fed: int


@pytest.mark.timeout(900)
def test_a_second_identical_prompt_is_served_from_the_cache(demo_dir: Path) -> None:
    first, second, other_salt = asyncio.run(ask_three_times(demo_dir / "hf"))

    assert [{event.cached_tokens for event in answer.events} for answer in (first, second, other_salt)] == [
        {0},
        {CACHED},
        {0},
    ]
    assert [answer.prompt_tokens_computed for answer in (first, second, other_salt)] == [1000, 8, 1000]
    assert [answer.tokens_fed for answer in (first, second, other_salt)] == [1003, 11, 1003]
    texts = [[token for event in answer.events for token in event.token_ids] for answer in (first, second, other_salt)]
    assert texts[0] == texts[1] == texts[2]
    cold, warm = first.first_token_seconds, second.first_token_seconds
    print(f"time to first token: {cold:.3f} s, then {warm:.3f} s: {cold / warm:.1f}x")


async def ask_three_times(checkpoint: Path) -> list[Answer]:
    client = await EngineClient.start(launch_argv(launch_of(checkpoint)))
    try:
        await client.wait_ready()
        return [await ask(client, f"r{n}", salt) for n, salt in enumerate(("", "", "another"))]
    finally:
        await client.stop(0)


async def ask(client: EngineClient, rid: str, salt: str) -> Answer:
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    request = Request(rid=rid, input_ids=PROMPT, sampling=sampling, cache_salt=salt)
    before = await settled(client)
    started = time.monotonic()
    events: list[TokenEvent] = []
    first_token_seconds = 0.0
    async for event in client.submit(request):
        first_token_seconds = first_token_seconds or time.monotonic() - started
        events.append(event)
    after = await settled(client, before.steps_total + sampling.max_new_tokens - 1)
    return Answer(
        events=events,
        first_token_seconds=first_token_seconds,
        prompt_tokens_computed=after.prompt_tokens_total - before.prompt_tokens_total,
        tokens_fed=after.step_tokens_total - before.step_tokens_total,
    )


async def settled(client: EngineClient, steps: int = 0) -> EngineStats:
    """The engine's numbers once it is idle after more than so many steps, and has said so."""
    while True:
        stats = client.stats()
        if stats.steps_total > steps and not stats.running:
            return stats
        await asyncio.sleep(0.02)


def launch_of(checkpoint: Path) -> Launch:
    with closing(open_checkpoint(checkpoint)) as opened:
        model = opened.config
    engine = EngineConfig(
        model=model, cache=CacheConfig(num_blocks=256, block_size=16), dtype="float32", max_context=2048
    )
    return Launch(ckpt=str(checkpoint), iteration=None, saved=SavedGrid(), engine=engine, threads=2, first_prompt=(1,))
