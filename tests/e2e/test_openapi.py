"""``/openapi.json``: complete, valid, and true of what the routes answer to requests that are made from it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from fakes_server import FakeClient, serving
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema.validators import Draft202012Validator
from schemathesis import GenerationMode, checks

from gtp_serve.refit.orders import Begin, Checksum, Layout, ReadTensor, RollBack
from gtp_serve.server.openai.fields import CHAT_NAMES, COMPLETION_NAMES
from gtp_serve.server.openapi import described
from gtp_serve.server.openapi_bodies import BODIES
from gtp_serve.server.openapi_weights import WEIGHT_BODIES, WEIGHT_REPLIES
from gtp_serve.server.schemas import KNOWN_CALL
from gtp_serve.server.update_fields import JSON_FIELDS, SOURCES

pytestmark = pytest.mark.e2e

CHECKS: list[Any] = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
MADE_UP = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Ending(FakeClient):
    """Takes every update at once."""

    async def control(self, command: Any) -> Any:
        if isinstance(command, Checksum | Layout):
            return {"digest": "0" * 32, "ranks": ["0" * 32]}
        if isinstance(command, ReadTensor):
            return {"values": [[0.0]]}
        told = await super().control(command)
        if isinstance(command, Begin | RollBack):
            self.end_update("committed")
        return told


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread of its own."""
    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[str] = []

    async def serve() -> None:
        async with serving(Ending(), context=512) as server:
            found.append(server.url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    return httpx.get(f"{url}/openapi.json", trust_env=False).json()


def test_document_lists_every_route_and_each_schema_is_one(document: Any) -> None:
    assert document["openapi"] == "3.1.0"
    assert {"/generate", "/v1/chat/completions", "/weights/updates", "/update_weights"} <= document["paths"].keys()
    names = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))
    for path in document["paths"].values():
        for operation in path.values():
            bodies = [operation["requestBody"]] if "requestBody" in operation else []
            for part in [*bodies, *operation["responses"].values()]:
                for content in part.get("content", {}).values():
                    Draft202012Validator.check_schema(content["schema"])


def test_document_has_exactly_the_fields_that_the_routes_take() -> None:
    assert set(BODIES["/generate"]["properties"]) == {*KNOWN_CALL}
    assert set(BODIES["/v1/completions"]["properties"]) == {*COMPLETION_NAMES}
    assert set(BODIES["/v1/chat/completions"]["properties"]) == {*CHAT_NAMES}
    update = WEIGHT_BODIES["/weights/updates"]["properties"]
    assert set(update) == {*JSON_FIELDS}
    sources = update["source"]["oneOf"]
    assert {one["properties"]["kind"]["const"]: {*one["properties"]} for one in sources} == {
        kind: {*names} for kind, names in SOURCES.items()
    }


def test_every_body_is_described(document: Any) -> None:
    taking = {path for path, one in document["paths"].items() if {"post", "put"} & one.keys()}
    assert taking == {*BODIES, *WEIGHT_BODIES}


def sample(schema: Any) -> Any:
    """A value that a schema allows."""
    if "anyOf" in schema:
        return sample(schema["anyOf"][0])
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object":
            return {name: sample(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [sample(schema["items"])] * schema.get("minItems", 1)
        case "integer":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case _:
            return "float32"


OTHERS = [path for path in WEIGHT_BODIES if path not in WEIGHT_REPLIES]


@pytest.mark.parametrize("path", OTHERS)
def test_other_servers_bodies_are_what_the_document_says(url: str, path: str) -> None:
    """What is needed is needed, and each field that is described is looked at; the rest is its senders' to have."""
    for schema in WEIGHT_BODIES[path].get("anyOf", [WEIGHT_BODIES[path]]):
        good = sample(schema)
        told = httpx.post(f"{url}{path}", json={**good, "some_field_of_theirs": 1}, trust_env=False, timeout=30)
        assert told.status_code < 500, told.text
        assert not any(f"{name} is missing" in told.text for name in good), told.text
        for name in good:
            less = {field: value for field, value in good.items() if field != name}
            told = httpx.post(f"{url}{path}", json=less, trust_env=False, timeout=30)
            assert (told.status_code, name in told.text) == (400, True), (name, told.text)
        for name, one in schema.get("properties", {}).items():
            if "type" in one or "anyOf" in one or "enum" in one:
                told = httpx.post(f"{url}{path}", json={**good, name: 0.5}, trust_env=False, timeout=30)
                assert (told.status_code, name in told.text) == (400, True), (name, told.text)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({}, None),
        ({"version": "a b"}, "version"),
        ({"in_flight": "stop"}, "in_flight"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"id": "-"}, "id"),
        ({"source": {"kind": "disk"}}, "source.path"),
        ({"source": {"kind": "disk", "path": "relative"}}, "source.path"),
        ({"source": {"kind": "distributed", "trainers": 0}}, "source.trainers"),
        ({"source": {"kind": "memory", "segments": [{}], "shards": []}}, "source.segments[0]"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_document_and_server_agree_on_what_an_update_is(url: str, document: Any, more: Any, param: str | None) -> None:
    content = document["paths"]["/weights/updates"]["post"]["requestBody"]["content"]
    body = {"version": "7", "source": {"kind": "disk", "path": "/ckpts/run"}, **more}
    valid = Draft202012Validator(content["application/json"]["schema"]).is_valid(body)
    told = httpx.post(f"{url}/weights/updates", json=body, trust_env=False)
    assert (valid, told.status_code) == ((True, 202) if param is None else (False, 400))
    if param is not None:
        assert told.json()["error"]["param"] == param
    assert content["application/octet-stream"]["schema"]["format"] == "binary"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"temperature": -1}, {"temprature": 1}, {"max_tokens": 1.5}, {"n": 0}])
def test_document_and_server_agree_on_what_is_wrong(url: str, document: Any, path: str, more: Any) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    valid = Draft202012Validator(schema).is_valid({**body, **more})
    status = httpx.post(f"{url}{path}", json={**body, **more}, trust_env=False).status_code
    assert (valid, status) == ((True, 200) if not more else (False, 400))


def answered(strategy: Any, url: str, session: requests.Session, most: int = 15) -> set[int]:
    """Statuses of the answers to made-up requests, each held to the document."""
    found: set[int] = set()

    def check(case: Any) -> None:
        found.add(case.call_and_validate(base_url=url, session=session, checks=CHECKS).status_code)

    settings(MADE_UP, max_examples=most)(given(case=strategy)(check))()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_requests_made_from_the_document_get_what_it_says(url: str, document: Any, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(document)
    paths = described(document["paths"])
    assert len(paths) > 15
    with requests.Session() as session:
        session.trust_env = False
        for path in paths if mode == GenerationMode.POSITIVE else BODIES:
            for method in document["paths"][path]:
                strategy = schema[path][method.upper()].as_strategy(generation_mode=mode)
                statuses = answered(strategy, url, session)
                expected = {400} if mode == GenerationMode.NEGATIVE else {404} if "{" in path else {200}
                assert expected <= statuses, (path, statuses)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_weight_requests_made_from_the_document_get_what_it_says(url: str, document: Any, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(document)
    found: dict[str, set[int]] = {}
    with requests.Session() as session:
        session.trust_env = False
        for path in sorted({*WEIGHT_BODIES, *WEIGHT_REPLIES}):
            for method in document["paths"][path]:
                if mode == GenerationMode.NEGATIVE and method != "post":
                    continue
                strategy = schema[path][method.upper()].as_strategy(generation_mode=mode)
                found.setdefault(path, set()).update(answered(strategy, url, session, most=4))
    for path in ("/weights/updates", "/weights/rollback", "/update_weight_version", "/pause_generation"):
        expected = {400} if mode == GenerationMode.NEGATIVE else {200, 202}
        assert found[path] & expected, (path, found[path])
