"""The load of ``bench``: groups of samples of one prompt each, with long-tailed lengths, a fixed number at a time."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

from gtp_serve.errors import GtpServeError
from gtp_serve.server.bench_http import Connection, Refused

TAIL = 8.0
"""No reply is asked to be longer than so many times the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is asked for."""

    groups: int
    samples: int
    input_tokens: int
    output_tokens: int
    """Mean."""
    spread: float
    """Of the logarithm of the lengths; 0 makes them all equal."""
    concurrency: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One request."""

    group: int
    input_ids: tuple[int, ...]
    output_tokens: int
    seed: int


@dataclass(kw_only=True, slots=True)
class Sample:
    """What came of one request; times in seconds since the run began."""

    job: Job
    sent: float
    ended: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    versions: int = 1
    """Weight versions that made its tokens."""
    error: str = ""

    @property
    def tokens(self) -> int:
        """Of the reply."""
        return sum(count for _, count in self.arrivals)


def plan_jobs(shape: Shape, *, vocab_size: int, max_context: int, never: Sequence[int] = ()) -> list[Job]:
    """Every request, the samples of a group next to one another, as a trainer sends them.

    :param never: ids that no prompt may hold.
    """
    dice = random.Random(shape.seed)
    banned = set(never)
    inputs = max(1, min(shape.input_tokens, max_context - 1))
    most = max(1, max_context - inputs)
    jobs = []
    for group in range(shape.groups):
        prompt = tuple(_draw(dice, vocab_size, banned) for _ in range(inputs))
        jobs += [
            Job(
                group=group,
                input_ids=prompt,
                output_tokens=min(most, draw_length(dice, shape.output_tokens, shape.spread)),
                seed=dice.randrange(1 << 31),
            )
            for _ in range(shape.samples)
        ]
    return jobs


def _draw(dice: random.Random, vocab_size: int, banned: set[int]) -> int:
    while (token := dice.randrange(vocab_size)) in banned:
        if len(banned) >= vocab_size:
            break
    return token


def draw_length(dice: random.Random, mean: int, spread: float) -> int:
    """A length from a log-normal distribution of this mean, at least 1 and at most ``TAIL`` times the mean."""
    if not spread:
        return mean
    value = dice.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return max(1, min(round(value), int(TAIL * mean)))


async def run_load(
    url: SplitResult,
    key: str | None,
    jobs: Sequence[Job],
    *,
    concurrency: int,
    seconds: float,
    began: float,
    done: Callable[[Sample], None],
) -> list[Sample]:
    """Send every job, so many at a time, and wait for all.

    :param seconds: of silence until a request counts as lost.
    :param began: the run's beginning on the monotonic clock.
    :param done: told each sample as it ends.
    """
    waiting = iter(jobs)
    samples: list[Sample] = []

    async def work() -> None:
        connection = Connection(url, key, seconds)
        try:
            for job in waiting:  # shared: each worker takes the next one
                sample = Sample(job=job, sent=time.monotonic() - began)
                samples.append(sample)
                await _ask(connection, sample, began)
                done(sample)
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(work())
    return samples


async def _ask(connection: Connection, sample: Sample, began: float) -> None:
    """One request, and what came of it into its sample."""
    body = {
        "input_ids": sample.job.input_ids,
        "stream": "delta",
        "sampling_params": {
            "max_new_tokens": sample.job.output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "sampling_seed": sample.job.seed,
        },
    }
    meta: dict[str, Any] = {}
    try:
        async for event in connection.events("/generate", body):
            now = time.monotonic() - began
            if "error" in event:
                raise Refused(str(event["error"].get("message", event["error"])))
            meta = event["meta_info"]
            if event["output_ids"]:
                sample.arrivals.append((now, len(event["output_ids"])))
    except GtpServeError as error:
        sample.error = str(error)
    sample.ended = time.monotonic() - began
    sample.prompt_tokens = int(meta.get("prompt_tokens", 0))
    sample.cached_tokens = int(meta.get("cached_tokens", 0))
    sample.versions = len(meta.get("weight_versions", ())) or 1
    finish = meta.get("finish_reason") or {}
    if not sample.error and finish.get("type") != "length":
        sample.error = f"ended with {finish.get('type', 'nothing')}: {finish.get('message', '')}".rstrip(": ")
