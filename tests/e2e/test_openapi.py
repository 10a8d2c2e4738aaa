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

from gtp_serve.server.openai.fields import CHAT_NAMES, COMPLETION_NAMES
from gtp_serve.server.openapi import described
from gtp_serve.server.openapi_bodies import BODIES
from gtp_serve.server.schemas import KNOWN_CALL

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


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread of its own."""
    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[str] = []

    async def serve() -> None:
        async with serving(FakeClient(), context=512) as server:
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
                for content in part["content"].values():
                    Draft202012Validator.check_schema(content["schema"])


def test_document_has_exactly_the_fields_that_the_routes_take() -> None:
    assert set(BODIES["/generate"]["properties"]) == {*KNOWN_CALL}
    assert set(BODIES["/v1/completions"]["properties"]) == {*COMPLETION_NAMES}
    assert set(BODIES["/v1/chat/completions"]["properties"]) == {*CHAT_NAMES}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"temperature": -1}, {"temprature": 1}, {"max_tokens": 1.5}, {"n": 0}])
def test_document_and_server_agree_on_what_is_wrong(url: str, document: Any, path: str, more: Any) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    valid = Draft202012Validator(schema).is_valid({**body, **more})
    status = httpx.post(f"{url}{path}", json={**body, **more}, trust_env=False).status_code
    assert (valid, status) == ((True, 200) if not more else (False, 400))


def answered(strategy: Any, url: str, session: requests.Session) -> set[int]:
    """Statuses of the answers to made-up requests, each held to the document."""
    found: set[int] = set()

    def check(case: Any) -> None:
        found.add(case.call_and_validate(base_url=url, session=session, checks=CHECKS).status_code)

    MADE_UP(given(case=strategy)(check))()
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
