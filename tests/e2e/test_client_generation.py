"""Requests of training frameworks as they send them, and everything that they read from the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes_server import FakeClient, FakeServer, serving

pytestmark = pytest.mark.e2e

RECORDED = sorted((Path(__file__).parents[1] / "data" / "clients" / "generation").glob("*.json"))
KINDS: Mapping[str, type] = {"int": int, "float": float, "str": str, "dict": dict}


def reached(answer: Any, path: str) -> Any:
    """The value at ``choices.0.text``."""
    for part in path.split("."):
        answer = answer[int(part) if part.isdigit() else part]
    return answer


def filled(value: Any, kept: Mapping[str, Any]) -> Any:
    """A body with the messages of earlier answers in it."""
    if isinstance(value, str):
        return kept.get(value, value)
    if isinstance(value, list):
        return [filled(one, kept) for one in value]
    return {name: filled(one, kept) for name, one in value.items()} if isinstance(value, dict) else value


async def play(server: FakeServer, steps: list[dict[str, Any]]) -> list[httpx.Response]:
    kept: dict[str, Any] = {}
    replies = []
    for step in steps:
        body = {"json": filled(step["json"], kept)} if "json" in step else {}
        reply = await server.http.request(step.get("method", "POST"), step["path"], **body)
        replies.append(reply)
        if "keep" in step:
            kept[f"${step['keep']}"] = reply.json()["choices"][0]["message"]
    return replies


def test_there_is_a_recording_of_each_framework() -> None:
    assert {path.stem for path in RECORDED} == {"lm_eval", "nemo_rl", "prime_rl", "slime", "trl"}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_requests_are_answered_with_what_their_client_reads(path: Path) -> None:
    steps = json.loads(path.read_text(encoding="utf-8"))["steps"]

    async def run() -> None:
        async with serving(FakeClient()) as server:
            replies = await play(server, steps)
            for step, reply in zip(steps, replies, strict=True):
                assert reply.status_code == step.get("status", 200), (step["path"], reply.text)
                for name, kind in step.get("reads", {}).items():
                    assert isinstance(reached(reply.json(), name), KINDS[kind]), (name, reply.text)

    asyncio.run(run())


def test_aborting_everything_leaves_nothing_in_progress() -> None:
    """As slime ends a rollout: abort, then ask for the load until it is none."""

    async def run() -> None:
        async with serving(FakeClient(hold=True)) as server:
            asked = asyncio.create_task(server.generate(input_ids=[5]))
            while not server.client.running:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
            load = (await server.http.get("/v1/loads")).json()["loads"][0]
            assert (load["num_running_reqs"], load["num_total_reqs"]) == (1, 1)
            await server.http.post("/abort_request", json={"abort_all": True})
            assert len(server.client.aborted) == 1
            asked.cancel()

    asyncio.run(run())
