"""A rollout worker for reinforcement learning on Ray: an actor handle with ``generate``, ``score`` and ``push``.

It is a front without HTTP.  Weights come as objects that trainer actors have made of their own shards
(``cluster.push``), so that each byte leaves a trainer once, however many replicas there are.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.catch_up import EMPTY
from gtp_serve.cluster.client import FleetClient
from gtp_serve.cluster.fleet_actor import find_fleet
from gtp_serve.cluster.settings import FleetConfig
from gtp_serve.engine.messages import ControlCall, ControlRefused, encode, refusal_of
from gtp_serve.errors import RequestRejected, UpdateFailed
from gtp_serve.refit.orders import Begin, InFlight, Layout, UpdateRecord, UpdateRequest
from gtp_serve.request import LogprobOptions, Request, SamplingParams

WAIT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled sequence."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each output token, in the raw distribution, natural logarithms."""
    versions: tuple[tuple[str, int, int], ...] = field(default=())
    """(version, first, one past the last) of output tokens, in order."""
    finish: str = "length"


class RolloutWorker:
    """Made by ``rollout_worker``; all calls may run side by side.

    :param fleet: name of a fleet that serves.
    """

    def __init__(self, fleet: str) -> None:
        self._name = fleet
        self._client: FleetClient | None = None
        self._lock = asyncio.Lock()

    async def _fleet(self) -> FleetClient:
        async with self._lock:
            if self._client is None:
                actor = find_fleet(self._name)
                config = msgspec.json.decode(await actor.config.remote(), type=FleetConfig)
                self._client = FleetClient(actor, config)
                await self._client.wait_ready()
            return self._client

    async def version(self) -> str:
        """That the fleet serves."""
        return (await self._fleet()).weights.version

    async def layout(self) -> Any:
        """The model's logical tensors and where they lie, as ``GET /weights/layout`` tells."""
        return await (await self._fleet()).control(Layout())

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None, *, samples: int = 1
    ) -> list[list[Rollout]]:
        """``samples`` sequences of each prompt, in order, with log-probabilities and versions.

        :raises RequestRejected: a prompt is refused.
        :raises EngineFault: a replica was lost in the middle of a sequence.
        """
        client, chosen = await self._fleet(), sampling or SamplingParams()
        jobs = [self._one(client, tuple(ids), chosen, index) for ids in prompts for index in range(samples)]
        found = await asyncio.gather(*jobs)
        return [list(found[start : start + samples]) for start in range(0, len(found), samples)]

    async def _one(self, client: FleetClient, ids: tuple[int, ...], sampling: SamplingParams, index: int) -> Rollout:
        if sampling.seed is not None and index:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + index)
        output: list[int] = []
        logprobs: list[float] = []
        versions: list[tuple[str, int, int]] = []
        finish = "length"
        request = Request(rid=uuid.uuid4().hex, input_ids=ids, sampling=sampling)
        async with aclosing(client.submit(request)) as events:
            async for event in events:
                start = len(output)
                output += event.token_ids
                logprobs += event.logprobs
                if event.token_ids:
                    versions = _joined(versions, event.weight_version, start, len(output))
                if event.finish is not None:
                    finish = event.finish.type
        return Rollout(
            prompt_ids=ids,
            output_ids=tuple(output),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish=finish,
        )

    async def score(self, sequences: Sequence[Sequence[int]], *, start: int = 0) -> list[tuple[float, ...]]:
        """Log-probability of each token after position ``start``, given those before it.

        :raises RequestRejected: a sequence is refused.
        """
        client = await self._fleet()
        return list(await asyncio.gather(*(self._score(client, tuple(ids), start) for ids in sequences)))

    async def _score(self, client: FleetClient, ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        request = Request(
            rid=uuid.uuid4().hex,
            input_ids=ids,
            sampling=SamplingParams(max_new_tokens=0),
            logprobs=LogprobOptions(prompt_start=start),
        )
        scores: tuple[float, ...] = ()
        async with aclosing(client.submit(request)) as events:
            async for event in events:
                scores = event.prompt_logprobs or scores
        if len(scores) != max(0, len(ids) - start - 1):
            raise RequestRejected("the sequence was not scored to its end", code="score-incomplete")
        return scores

    async def push(
        self,
        parts: Sequence[Sequence[Bundle]],
        version: str,
        *,
        base: str | None = None,
        in_flight: InFlight = "keep",
        deadline_seconds: float | None = None,
    ) -> UpdateRecord:
        """Have all replicas serve these weights; returns when they do.

        :param parts: what ``cluster.push.bundle_shards`` has made on each trainer rank.
        :raises UpdateRefused: it cannot begin; nothing has changed.
        :raises UpdateFailed: it did not come about; the version before goes on serving.
        """
        client = await self._fleet()
        bundles = [bundle for part in parts for bundle in part]
        request = UpdateRequest(
            order=EMPTY, version=version, base=base, in_flight=in_flight, deadline_seconds=deadline_seconds
        )
        update = uuid.uuid4().hex
        frame = encode(ControlCall(call=0, command=Begin(request=request, id=update)))
        told = await client.ask_fleet(frame, bundles)
        if isinstance(told, ControlRefused):
            raise refusal_of(told)
        began = time.monotonic()
        record = await client.wait_update(update, WAIT_SECONDS)
        if record.state != "committed":
            raise UpdateFailed(record.message or "the update was dropped", record.details, code=record.code or None)
        return msgspec.structs.replace(record, seconds={**record.seconds, "waited": time.monotonic() - began})

    async def close(self) -> None:
        """Leave the fleet, which goes on."""
        if self._client is not None:
            with suppress(Exception):
                await self._client.stop(0, fleet=False)


def _joined(spans: list[tuple[str, int, int]], version: str, start: int, end: int) -> list[tuple[str, int, int]]:
    if spans and spans[-1][0] == version:
        return [*spans[:-1], (version, spans[-1][1], end)]
    return [*spans, (version, start, end)]


def rollout_worker(fleet: str = "default", **options: Any) -> Any:
    """A handle of a new worker; ``options`` are Ray's for its actor."""
    return ray.remote(RolloutWorker).options(num_cpus=0, max_concurrency=10_000, **options).remote(fleet)
