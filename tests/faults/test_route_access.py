"""Who gets an answer from which route: a decision for each, tried over a real socket with every trick of a path."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

import pytest
from fakes_server import FakeClient, byte_tokenizer, engine_config
from starlette.applications import Starlette
from starlette.routing import Route

from gtp_serve.errors import UpdateRefused
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.app import build_app
from gtp_serve.server.front_door import PUBLIC, front_door
from gtp_serve.server.http_server import build_server
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.ports import bind
from gtp_serve.server.state import ServerState, Serving

API, ADMIN = "api-key-of-tests", "admin-key-of-tests"
Access = Literal["public", "client", "admin"]

#: Who may use a route. A route that is not here fails the first test: whoever adds one decides.
PUBLIC_ROUTES = ("/", "/docs", "/icon.svg", "/health", "/ready")
"""Answer everybody, also when there is an API key."""
CLIENT_ROUTES = (
    "/generate", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{id:path}",
    "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/tokenizer_info",
    "/server_info", "/get_server_info", "/v1/loads", "/version", "/liveness", "/health_generate",
    "/model_info", "/get_model_info", "/metrics", "/stats", "/checkpoint", "/openapi.json",
)  # fmt: skip
"""Want the API key, if there is one."""
ADMIN_ROUTES = (
    "/weights", "/weights/checksum", "/weights/layout", "/weights/updates", "/weights/updates/{id}",
    "/weights/updates/{id}/commit", "/weights/updates/{id}/abort", "/weights/rollback", "/pause", "/resume",
    "/update_weights_from_disk", "/init_weights_update_group", "/destroy_weights_update_group",
    "/begin_weight_update", "/end_weight_update", "/update_weights_from_distributed", "/update_weights_from_tensor",
    "/update_weights_from_ipc", "/update_weight_version", "/get_weight_version", "/get_weights_by_name",
    "/weights_checker", "/release_memory_occupation", "/resume_memory_occupation", "/flush_cache", "/abort_request",
    "/pause_generation", "/continue_generation", "/is_paused", "/abort_requests", "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/weight_info", "/weight_checker", "/get_world_size", "/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping",
)  # fmt: skip
"""Want the admin key or, where there is none, a client of this machine that no proxy and no browser has touched."""
DECISIONS: dict[str, Access] = {
    **dict.fromkeys(PUBLIC_ROUTES, "public"),
    **dict.fromkeys(CLIENT_ROUTES, "client"),
    **dict.fromkeys(ADMIN_ROUTES, "admin"),
}


def build(client: FakeClient, admin_key: str | None = None) -> Starlette:
    state = ServerState()
    state.set_serving(Serving(client=client, engine=engine_config(), tokenizer=byte_tokenizer(), name="fake"))
    return build_app(state, Metrics(state), logging.Logger("test"), guard=AdminGuard(admin_key))


ROUTES = [route for route in build(FakeClient()).routes if isinstance(route, Route)]
PAIRS = [(method, route.path) for route in ROUTES for method in sorted(route.methods or ())]


def test_each_route_of_the_application_has_a_decision() -> None:
    assert len(ROUTES) == len(build(FakeClient()).routes), "a mount or a socket route needs a decision of its own kind"
    assert {route.path for route in ROUTES} == set(DECISIONS)
    assert set(PUBLIC_ROUTES) == PUBLIC


@dataclass
class Wire:
    """One connection after another to a server; each request's target goes out byte for byte."""

    port: int
    client: FakeClient
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, target: str, headers: tuple[tuple[str, str], ...] = ()) -> tuple[int, bytes]:
        """(status, body) of a request; a body of two bytes goes with what may have one."""
        lines = [f"{method} {target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers]
        if not any(name == "host" for name, _ in headers):
            lines.append("host: localhost")
        if method in ("POST", "PUT"):
            lines += ["content-type: application/json", "content-length: 2"]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"{}" if method in ("POST", "PUT") else b"")
        if self.writer is None or self.writer.is_closing() or self.reader is None or self.reader.at_eof():
            await self.close()
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        assert self.reader is not None
        self.writer.write(head)
        return await self._answer(method)

    async def _answer(self, method: str) -> tuple[int, bytes]:
        assert self.reader is not None
        first = await self.reader.readline()
        status, size, chunked, closes = int(first.split()[1]), 0, False, False
        while (line := (await self.reader.readline()).strip().lower()) != b"":
            name, _, value = line.partition(b":")
            size = int(value) if name == b"content-length" else size
            chunked |= name == b"transfer-encoding"
            closes |= name == b"connection" and value.strip() == b"close"
        assert not chunked
        body = b"" if method == "HEAD" or status == 204 else await self.reader.readexactly(size)
        if closes:
            await self.close()
        return status, body

    async def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            with contextlib.suppress(OSError):
                await self.writer.wait_closed()
        self.reader = self.writer = None


@contextlib.asynccontextmanager
async def wire(*, api_key: str | None = None, admin_key: str | None = None) -> AsyncIterator[Wire]:
    client = FakeClient()
    app = front_door(build(client, admin_key), api_key=api_key, admin_key=admin_key, cors=())
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        server = build_server(app)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.up.wait()
        wire = Wire(listener.getsockname()[1], client)
        try:
            yield wire
        finally:
            await wire.close()
            server.should_exit = True
            await asyncio.wait_for(task, 30)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def concrete(path: str) -> str:
    return path.replace("{id:path}", "some/model").replace("{id}", "u-1")


def spellings(path: str) -> Iterator[str]:
    """A path as a proxy, a browser or an attacker may write it."""
    plain = concrete(path)
    yield plain
    yield "/" + plain
    yield plain + "/"
    yield plain.upper()
    yield plain + "?x=/health"
    yield plain + "?access_token=" + API + "&authorization=Bearer%20" + API
    yield "/" + "".join(f"%{ord(char):02x}" for char in plain[1:])
    yield plain.replace("/", "/%2e/", 1)
    yield "/health/.." + plain
    yield "/health/%2e%2e" + plain
    yield "/health%2f..%2f" + plain[1:]
    yield plain + ";/health"
    yield plain + "%00"
    yield plain + "%2f"
    yield plain + "."
    yield "\\" + plain[1:]
    yield "http://127.0.0.1" + plain
    yield "http://health/" + plain


def reaches_public(target: str) -> bool:
    """Whether a target is one of the public paths once it has been read as HTTP says."""
    return unquote(urlsplit(target).path) in PUBLIC


def expect_json_error(status: int, body: bytes, what: object) -> None:
    if body:
        error = json.loads(body)["error"]
        assert set(error) >= {"code", "message", "type"}, what
        assert API not in body.decode()
        assert ADMIN not in body.decode()


def run(check: Callable[[Wire], Awaitable[None]], **keys: str | None) -> None:
    async def go() -> None:
        async with wire(**keys) as one:
            await check(one)

    asyncio.run(go())


def test_a2_with_keys_nothing_but_the_public_list_answers_without_one() -> None:
    wrong = ((), bearer("wrong"), bearer(API[:-1]), bearer(API + "x"), (("host", "health"),), (("x-api-key", API),))

    async def check(one: Wire) -> None:
        for method, path in PAIRS:
            for number, target in enumerate(spellings(path)):
                if path == "/" or reaches_public(target):
                    continue
                for headers in wrong if number == 0 else wrong[:1]:
                    status, body = await one.ask(method, target, headers)
                    assert status in (400, 401), (method, target, headers, status)
                    expect_json_error(status, body, target)
        assert one.client.commands == []
        assert one.client.requests == []
        for path in PUBLIC_ROUTES:
            assert (await one.ask("GET", path))[0] == 200
            assert (await one.ask("HEAD", path))[0] == 200

    run(check, api_key=API, admin_key=ADMIN)


def test_a2_no_method_but_a_routes_own_does_anything() -> None:
    async def check(one: Wire) -> None:
        for route in ROUTES:
            own = route.methods or set()
            for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"):
                target = "example.org:443" if method == "CONNECT" else concrete(route.path)
                if method in own:
                    continue
                status, body = await one.ask(method, target, bearer(ADMIN))
                wanted = {"OPTIONS": (204,), "CONNECT": (400, 404, 405)}.get(method, (400, 405))
                assert status in wanted, (method, target, status)
                expect_json_error(status, body, (method, target))
        assert one.client.commands == []
        assert one.client.requests == []

    run(check, admin_key=ADMIN)


def test_n3_weight_routes_want_the_admin_key_and_the_api_key_is_not_it() -> None:
    async def check(one: Wire) -> None:
        for method, path in PAIRS:
            if DECISIONS[path] != "admin":
                continue
            for number, target in enumerate(spellings(path)):
                for headers in others if number == 0 else ((),):
                    status, body = await one.ask(method, target, headers)
                    assert status in (400, 401, 404), (method, target, headers, status)
                    expect_json_error(status, body, target)
        assert one.client.commands == []
        one.client.refuse = UpdateRefused("not now")
        for method, path in PAIRS:
            if DECISIONS[path] == "admin":
                assert (await one.ask(method, concrete(path), bearer(ADMIN)))[0] not in (401, 403), path
        assert one.client.commands != []

    others = ((), bearer(API), bearer(ADMIN.upper()), (*bearer(ADMIN), *bearer(API)))
    run(check, admin_key=ADMIN)


def test_n3_the_api_key_opens_no_weight_route() -> None:
    async def check(one: Wire) -> None:
        for method, path in PAIRS:
            if DECISIONS[path] == "admin":
                assert (await one.ask(method, concrete(path), bearer(API)))[0] == 401, path
        assert one.client.commands == []

    run(check, api_key=API, admin_key=ADMIN)


@pytest.mark.parametrize(
    "headers",
    [
        (("host", "evil.example"),),
        (("host", "localhost.evil.example"),),
        (("host", "127.0.0.1.evil.example:80"),),
        (("host", "evil.example@127.0.0.1"),),
        (("host", "evil.example/weights"),),
        (("x-forwarded-host", "localhost"),),
        (("forwarded", "for=127.0.0.1"),),
        (("x-real-ip", "127.0.0.1"),),
        (("origin", "http://localhost"),),
        (("origin", "null"),),
        (("sec-fetch-site", "cross-site"),),
    ],
    ids=lambda headers: f"{headers[0][0]}={headers[0][1]}",
)
def test_n4_without_keys_weight_routes_refuse_proxies_browsers_and_foreign_names(
    headers: tuple[tuple[str, str], ...],
) -> None:
    async def check(one: Wire) -> None:
        for method, path in PAIRS:
            if DECISIONS[path] != "admin":
                continue
            for target in spellings(path) if headers[0][1] == "evil.example" else (concrete(path),):
                status, body = await one.ask(method, target, headers)
                assert status in (400, 403, 404), (method, target, status)
                expect_json_error(status, body, target)
        assert one.client.commands == []
        assert (await one.ask("GET", "/weights"))[0] == 200

    run(check)


def test_n4_a_form_or_a_text_from_a_page_of_another_origin_starts_nothing() -> None:
    """What a browser sends across origins without asking first: three media types, and no authorization header."""

    async def check(one: Wire) -> None:
        for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                await one.close()
                one.reader, one.writer = await asyncio.open_connection("127.0.0.1", one.port)
                body = b'{"text":"a","prompt":"a"}'
                head = (
                    f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n\r\n"
                )
                one.writer.write(head.encode() + body)
                status, _ = await one._answer("POST")
                assert status == 415, (media, path)
        assert one.client.requests == []

    run(check)
