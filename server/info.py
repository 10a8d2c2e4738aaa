"""What a server says of itself beyond ``/model_info``, and two probes: that it lives, and that it makes tokens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from gtp_serve import __version__
from gtp_serve.errors import EngineFault, GtpServeError
from gtp_serve.request import Request, SamplingParams
from gtp_serve.server.answer import new_rid
from gtp_serve.server.http_errors import JsonResponse, error_response, plain_error
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.reply import abort_status
from gtp_serve.server.state import ServerState, Serving

PROBE_SECONDS = 20.0
"""A probe's token must be there within so long."""


class InfoRoutes:
    """Facts and probes; none of them needs the admin key."""

    def __init__(self, state: ServerState, metrics: Metrics, *, probe_seconds: float = PROBE_SECONDS) -> None:
        self._state = state
        self._metrics = metrics
        self._probe_seconds = probe_seconds

    def routes(self) -> list[Route]:
        """Every path of this module."""
        return [
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/get_server_info", self.server_info, methods=["GET"]),
            Route("/v1/loads", self.loads, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/liveness", self.liveness, methods=["GET"]),
            Route("/health_generate", self.health_generate, methods=["GET"]),
        ]

    async def version(self, request: HttpRequest) -> Response:
        """This program's version; answered from the start."""
        return JsonResponse({"version": __version__})

    async def liveness(self, request: HttpRequest) -> Response:
        """200 unless only a new process can help: also while starting, stopping, paused or busy."""
        if self._state.status()["status"] == "failed":
            return JsonResponse(plain_error(503, "worker-died", "the engine has ended"), status_code=503)
        return JsonResponse({"status": "alive"})

    async def server_info(self, request: HttpRequest) -> Response:
        """The engine's limits and what start-up took; SGLang's keys where it has them."""
        serving = self._state.require_serving()
        engine, cache = serving.engine, serving.engine.cache
        stats, weights = serving.client.stats(), serving.client.weights
        phases = {
            sample.labels["phase"]: sample.value for one in self._metrics.startup.collect() for sample in one.samples
        }
        body: dict[str, Any] = {
            "model_path": serving.name,
            "served_model_name": serving.name,
            "model_type": engine.model.family,
            "version": __version__,
            "status": self._state.status()["status"],
            "weight_version": weights.version or engine.weight_version,
            "dtype": engine.dtype,
            "device": engine.device,
            "tp_size": engine.tp,
            "context_length": engine.max_context,
            "max_model_len": engine.max_context,
            "max_running_requests": engine.max_running,
            "max_queued_requests": engine.max_waiting,
            "max_step_tokens": engine.max_step_tokens,
            "page_size": cache.block_size,
            "max_total_num_tokens": cache.num_blocks * cache.block_size,
            "prefix_cache": engine.prefix_cache,
            "graphs": engine.graphs,
            "attention_backend": engine.attention,
            "quant": engine.quant,
            "deterministic": engine.deterministic,
            "refit_memory": engine.refit_memory,
            "running_requests": stats.running,
            "waiting_requests": stats.waiting,
            "startup_seconds": phases,
        }
        return JsonResponse(body | serving.facts)

    async def loads(self, request: HttpRequest) -> Response:
        """How much is in progress, as SGLang tells it: trainers wait here until nothing is."""
        serving = self._state.require_serving()
        stats, cache = serving.client.stats(), serving.engine.cache
        load = {
            "dp_rank": 0,
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            # What the engine has not told yet counts too.
            "num_total_reqs": max(len(self._state.rids), stats.running + stats.waiting),
            "num_used_tokens": stats.kv_blocks_used * cache.block_size,
            "max_total_num_tokens": cache.num_blocks * cache.block_size,
        }
        return JsonResponse({"version": __version__, "dp_rank_count": 1, "loads": [load]})

    async def health_generate(self, request: HttpRequest) -> Response:
        """200 when a token was made just now; without one where somebody holds the steps (a pause, an update)."""
        serving = self._state.require_whole()
        if serving.client.weights.paused or serving.client.weights.update is not None:
            return self._health()
        try:
            async with asyncio.timeout(self._probe_seconds):
                await _make_token(serving)
        except TimeoutError:
            message = f"no token was made within {self._probe_seconds:g} s"
            return JsonResponse(plain_error(503, "unhealthy", message), status_code=503)
        except GtpServeError as error:
            return error_response(error)
        return JsonResponse({"status": "healthy"})

    def _health(self) -> Response:
        reason = self._state.health()
        if reason is None:
            return JsonResponse({"status": "healthy"})
        return JsonResponse(plain_error(503, "unhealthy", reason), status_code=503)


async def _make_token(serving: Serving) -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
    probe = Request(rid=f"health-{new_rid()}", input_ids=(0,), sampling=sampling)
    async with aclosing(serving.client.submit(probe)) as events:
        async for event in events:
            if event.finish is not None and event.finish.type == "abort" and abort_status(event.finish) >= 500:
                raise EngineFault(event.finish.message)
            if event.token_ids or event.finish is not None:
                return
