"""A model on several ranks with rank 0 in the test's own process; the others are real engine processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gtp_serve.assembly import (
    build_pool,
    check_addresses,
    check_device,
    empty_decoder,
    fill_decoder,
    keep_weights,
    rank_weights,
    with_graphs,
)
from gtp_serve.config import CacheConfig, EngineConfig
from gtp_serve.engine.collective import join_group
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.peer import Patience
from gtp_serve.engine.ranks import Leader
from gtp_serve.engine.runner import ForwardPass, ModelRunner
from gtp_serve.engine.step import SampleSpec, StepItem, StepPlan
from gtp_serve.engine.updates import Updates
from gtp_serve.kv.pool import KVPool
from gtp_serve.loaders import open_checkpoint
from gtp_serve.models.decoder import Decoder
from gtp_serve.refit.store import WeightStore
from gtp_serve.request import LogprobOptions, Request, SamplingParams, TokenEvent
from gtp_serve.server.launch import Launch, launch_argv
from gtp_serve.server.options import SavedGrid

BLOCK_SIZE = 16
GREEDY = SampleSpec(temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0, seed=0, index=0)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What rank 0 has."""

    leader: Leader | None
    decoder: Decoder
    model: ForwardPass
    """The decoder, with captured steps where the device can."""
    runner: ModelRunner
    config: EngineConfig
    store: WeightStore
    pool: KVPool

    @property
    def peers_of_rank_0(self) -> Leader:
        assert self.leader is not None
        return self.leader

    def engine(self) -> Engine:
        """An engine of its own; one at a time."""
        return Engine(self.config, self.runner, draw_seed=lambda: 0)

    def updates(self, engine: Engine) -> Updates:
        """What changes the weights of all ranks under an engine."""
        news = self.peers_of_rank_0.news
        weights = rank_weights(self.config, self.decoder, self.store, self.pool, news.put)
        after_swap = check_addresses(self.model)
        return Updates(engine, weights, news, others=self.peers_of_rank_0, after_swap=after_swap)


@contextmanager
def running(
    ckpt: Path, tp: int, *, patience: Patience | None = None, num_blocks: int = 256, device: str = "cpu"
) -> Iterator[Ranks]:
    """The checkpoint's model in float32 on ``tp`` ranks of one thread each."""
    checkpoint = open_checkpoint(ckpt)
    config = EngineConfig(
        model=checkpoint.config,
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        dtype="float32",
        device=device,
        tp=tp,
        max_context=checkpoint.config.max_context,
    )
    launch = Launch(
        ckpt=str(ckpt.absolute()), iteration=None, saved=SavedGrid(), engine=config, threads=1, first_prompt=(1,)
    )
    leader = Leader(launch_argv(launch), tp, patience=patience) if tp > 1 else None
    try:
        check_device(config)
        group = None if leader is None else leader.join(lambda meeting: join_group(meeting, device))
        decoder = empty_decoder(config, group)
        store = keep_weights(decoder, config)
        fill_decoder(decoder, checkpoint, threads=1, progress=lambda done, total: None)
        pool = build_pool(config, decoder)
        if leader is None:
            model, _ = with_graphs(config, decoder, pool)
            runner = ModelRunner(model, pool, config)
        else:
            leader.wait_built()
            model, _ = with_graphs(config, decoder, pool, together=leader.capture)
            runner = ModelRunner(model, pool, config, together=leader.step)
        yield Ranks(leader=leader, decoder=decoder, model=model, runner=runner, config=config, store=store, pool=pool)
    finally:
        checkpoint.close()
        if leader is not None:
            leader.close()


def plan_of(step: int, *parts: tuple[int, Sequence[int]]) -> StepPlan:
    """A step that feeds tokens at a start to sequences 0, 1, ...; sequence n has blocks 3n to 3n + 2."""
    items = tuple(
        StepItem(
            rid=str(n),
            token_ids=tuple(tokens),
            start=start,
            block_table=tuple(range(3 * n, 3 * n - (-(start + len(tokens)) // BLOCK_SIZE))),
            sample=GREEDY,
        )
        for n, (start, tokens) in enumerate(parts)
    )
    return StepPlan(step=step, block_size=BLOCK_SIZE, items=items)


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """What the engine adds to each prompt when all run at once."""
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    for n, prompt in enumerate(prompts):
        engine.add(Request(rid=str(n), input_ids=tuple(prompt), sampling=sampling))
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for event in engine.step():
            outputs[int(event.rid)] += event.token_ids
    return outputs


def scored(engine: Engine, prompt: Sequence[int], *, routes: bool) -> list[TokenEvent]:
    """Events of one request that asks for all that a request can ask of the model: prompt scores, routed experts."""
    sampling = SamplingParams(max_new_tokens=3, temperature=1.0, seed=5, frequency_penalty=0.5, ignore_eos=True)
    logprobs = LogprobOptions(top_n=2, prompt_start=0)
    engine.add(
        Request(rid="0", input_ids=tuple(prompt), sampling=sampling, logprobs=logprobs, return_routed_experts=routes)
    )
    events: list[TokenEvent] = []
    while engine.has_work():
        events += engine.step()
    return events


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def until(holds: Callable[[], bool], seconds: float) -> float:
    """Wait for something to hold; how long it took."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < seconds, "it did not come about"
        time.sleep(0.01)
    return time.monotonic() - started


def listening(pid: int) -> set[str]:
    """Addresses, in the kernel's hexadecimal, on which a process listens for TCP connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(words[1].partition(":")[0])
    return found
