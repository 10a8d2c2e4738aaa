"""Requests run alone and in random company on one decoder, for tests of ``--deterministic``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gtp_serve.assembly import build_pool, empty_decoder, fill_decoder
from gtp_serve.config import CacheConfig, DType, EngineConfig
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.loaders import open_checkpoint
from gtp_serve.models.decoder import Decoder
from gtp_serve.request import LogprobOptions, Request, SamplingParams

BLOCK_SIZE = 4
Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and log-probabilities; floats are compared as they are, to the last bit."""


@dataclass
class Subject:
    """A decoder, the requests of which all mixes are drawn, and what each answers alone."""

    decoder: Decoder
    config: EngineConfig
    pool: list[Request]
    alone: dict[str, Answer] = field(default_factory=dict)
    preemptions: int = 0
    cached_tokens: int = 0

    def run(self, requests: Sequence[Request], config: EngineConfig) -> dict[str, Answer]:
        """Answers of an engine of its own."""
        engine = Engine(config, ModelRunner(self.decoder, build_pool(config, self.decoder), config))
        ids: dict[str, list[int]] = {request.rid: [] for request in requests}
        logprobs: dict[str, list[float]] = {request.rid: [] for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_work():
            for event in engine.step():
                assert event.finish is None or event.finish.type != "abort", event.finish
                ids[event.rid] += event.token_ids
                logprobs[event.rid] += [*event.prompt_logprobs, *event.logprobs]
        engine.check_invariants()
        self.preemptions += engine.stats().preemptions_total
        self.cached_tokens += engine.stats().cached_tokens_total
        return {rid: (tuple(ids[rid]), tuple(logprobs[rid])) for rid in ids}

    def solo(self, request: Request) -> Answer:
        """The answer of a request that has the engine to itself, its prompt in one piece."""
        if request.rid not in self.alone:
            config = replace(self.config, max_running=1, max_step_tokens=4096, prefix_cache=False)
            self.alone |= self.run([request], config)
        return self.alone[request.rid]


def open_subject(
    path: Path,
    dtype: DType,
    *,
    longest: int,
    deterministic: bool = True,
    count: int = 16,
    max_new: int = 8,
    device: str = "cpu",
) -> Subject:
    """A checkpoint with requests of up to ``longest`` prompt tokens, some of which begin alike."""
    checkpoint = open_checkpoint(path)
    try:
        config = EngineConfig(
            model=replace(checkpoint.config, eos_token_ids=()),
            cache=CacheConfig(num_blocks=1024, block_size=BLOCK_SIZE),
            dtype=dtype,
            device=device,
            max_context=longest + max_new + 1,
            deterministic=deterministic,
        )
        decoder = empty_decoder(config)
        fill_decoder(decoder, checkpoint, threads=1, progress=lambda done, total: None)
    finally:
        checkpoint.close()
    vocab = min(checkpoint.config.vocab_size, 30_000)
    return Subject(decoder, config, _requests(vocab, longest, count, max_new))


def _requests(vocab: int, longest: int, count: int, max_new: int) -> list[Request]:
    rng = random.Random(vocab + longest)
    beginnings = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(3)]
    requests = []
    for number in range(count):
        # Every fourth may be longer than a block of keys, where the model is to be tried on that.
        length = rng.randint(1, longest if number % 4 == 1 else min(longest, 40))
        shared = rng.choice(beginnings)[: rng.choice((0, length // 2, length))]
        ids = [*shared, *(rng.randrange(vocab) for _ in range(length - len(shared)))]
        requests.append(
            Request(
                rid=f"r{number}",
                input_ids=tuple(ids),
                sampling=SamplingParams(
                    max_new_tokens=rng.randint(1, max_new),
                    temperature=rng.choice((0.0, 1.0)),
                    top_p=rng.choice((1.0, 0.9)),
                    seed=number,
                ),
                logprobs=LogprobOptions(prompt_start=length // 2) if number % 4 == 0 else None,
            )
        )
    return requests


def random_mix(subject: Subject, seed: int) -> tuple[list[Request], EngineConfig]:
    """1 to 16 of the subject's requests, and an engine that cuts, caches and preempts at random."""
    rng = random.Random(seed)
    chunk = rng.choice((1, 7, 64, 64))
    # One token a step is one sequence at a time: a few short ones show what there is to show.
    most = {1: 2, 7: 4}.get(chunk, 16)
    candidates = [r for r in subject.pool if chunk > 1 or len(r.input_ids) <= 20]
    mix = rng.sample(candidates, min(rng.randint(1, most), len(candidates)))
    longest = max(len(r.input_ids) + r.sampling.max_new_tokens for r in mix)
    tight = -(-longest // BLOCK_SIZE) + 1
    config = replace(
        subject.config,
        cache=CacheConfig(num_blocks=rng.choice((tight, 1024)), block_size=BLOCK_SIZE),
        max_running=rng.choice((4, 16)),
        max_step_tokens=chunk,
        prefix_cache=rng.random() < 0.5,
    )
    return mix, config


def check_mixes(subject: Subject, seeds: Sequence[int]) -> None:
    """Every answer in every mix is the one that the request gives alone."""
    for seed in seeds:
        mix, config = random_mix(subject, seed)
        answers = subject.run(mix, config)
        for request in mix:
            assert answers[request.rid] == subject.solo(request), f"mix {seed}, {request.rid}"


torch.set_num_threads(1)
