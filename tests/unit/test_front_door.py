"""Keys, request ids and web origins, in front of the whole application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gtp_serve.server.front_door import front_door

PATHS = ("/", "/health", "/ready", "/generate", "/metrics", "/weights", "/bug")


async def answer(request: Request) -> Response:
    if request.url.path == "/bug":
        raise ValueError("boom")
    return PlainTextResponse(request.state.request_id)


@asynccontextmanager
async def client(
    api_key: str | None = None, admin_key: str | None = None, cors: tuple[str, ...] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in PATHS])
    door = front_door(app, api_key=api_key, admin_key=admin_key, cors=cors)
    transport = httpx.ASGITransport(app=door, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_a_key_every_path_answers() -> None:
    async def check() -> None:
        async with client() as http:
            assert {(await http.get(path)).status_code for path in PATHS[:-1]} == {200}

    asyncio.run(check())


def test_with_a_key_only_probes_and_the_page_answer_without_it() -> None:
    async def check() -> None:
        async with client("secret", "admin") as http:
            for path in PATHS[:-1]:
                status = (await http.get(path)).status_code
                assert status == (200 if path in ("/", "/health", "/ready") else 401), path
                assert (await http.post(path, headers=bearer("secret"))).status_code == 200
                assert (await http.get(path, headers=bearer("admin"))).status_code == 200
            assert (await http.get("/generate/../health/")).status_code == 401

    asyncio.run(check())


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer secre")],
        [("authorization", "Bearer secretx")],
        [("authorization", "Basic secret")],
        [("authorization", "secret")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer secret"), ("authorization", "Bearer secret")],
        [("x-api-key", "secret")],
    ],
)
def test_anything_but_the_key_is_refused_in_the_one_error_shape(headers: list[tuple[str, str]]) -> None:
    async def check() -> None:
        async with client("secret") as http:
            reply = await http.post("/generate", headers=headers, content=b"{}")
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            error = json.loads(reply.text)["error"]
            assert (error["code"], error["type"]) == ("api-key-needed", "invalid_request_error")
            assert "secret" not in reply.text

    asyncio.run(check())


def test_a_clients_id_comes_back_and_an_unusable_one_is_replaced() -> None:
    async def check() -> None:
        async with client("secret") as http:
            named = await http.get("/health", headers={"x-request-id": "run-7.a"})
            assert (named.headers["x-request-id"], named.text) == ("run-7.a", "run-7.a")
            refused = await http.get("/generate", headers={"x-request-id": "run-8"})
            assert (refused.status_code, refused.headers["x-request-id"]) == (401, "run-8")
            fresh = {(await http.get("/health")).headers["x-request-id"] for _ in range(3)}
            assert len(fresh) == 3
            for bad in ("x" * 129, "a b", "", "\u00e9".encode()):
                raw = bad if isinstance(bad, bytes) else bad.encode()
                reply = await http.get("/health", headers=[(b"x-request-id", raw)])
                assert len(reply.headers["x-request-id"]) == 32
                assert reply.headers["x-request-id"] == reply.text

    asyncio.run(check())


def test_the_answer_to_a_bug_has_an_id_too() -> None:
    async def check() -> None:
        async with client() as http:
            reply = await http.get("/bug", headers={"x-request-id": "seven"})
            assert (reply.status_code, reply.headers["x-request-id"]) == (500, "seven")

    asyncio.run(check())


def test_no_other_origin_may_read_answers_unless_it_is_named() -> None:
    async def check() -> None:
        origin = {"origin": "https://lab.example"}
        asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        async with client("secret") as http:
            assert "access-control-allow-origin" not in (await http.get("/health", headers=origin)).headers
            assert (await http.options("/generate", headers=asked)).status_code == 401
        async with client("secret", cors=("https://lab.example",)) as http:
            allowed = await http.options("/generate", headers=asked)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == "https://lab.example"
            assert "authorization" in allowed.headers["access-control-allow-headers"]
            refused = await http.get("/generate", headers=origin)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == "https://lab.example"
            assert "access-control-allow-credentials" not in refused.headers
            other = await http.get("/health", headers={"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers

    asyncio.run(check())
