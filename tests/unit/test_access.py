"""Who may change what is served: every route against every kind of client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import HTTPConnection

from gtp_serve.errors import RequestRejected, UsageError
from gtp_serve.server.access import AdminGuard, is_loopback
from gtp_serve.server.admin_key import KEY_VARIABLE, find_admin_key
from gtp_serve.server.http_errors import error_response

HERE, ELSEWHERE = ("127.0.0.1", 4711), ("10.1.2.3", 4711)
SERVER = ("127.0.0.1", 30000)


def connection(
    client: tuple[str, int] | None = HERE, server: tuple[str, int | None] | None = SERVER, **headers: str
) -> HTTPConnection:
    given = {"host": "127.0.0.1:30000", **{name.replace("_", "-"): value for name, value in headers.items()}}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    return HTTPConnection({"type": "http", "headers": raw, "client": client, "server": server})


def status(guard: AdminGuard, asked: HTTPConnection) -> int:
    try:
        guard.check(asked)
    except RequestRejected as error:
        return error.http_status
    return 200


CLIENTS: dict[str, tuple[HTTPConnection, int, int]] = {
    # name: connection, its status without a key on the server, and with one
    "here": (connection(), 200, 401),
    "here, another address of this machine": (connection(("127.8.8.8", 1)), 200, 401),
    "here, by IPv6": (connection(("::1", 1)), 200, 401),
    "here, IPv4 written as IPv6": (connection(("::ffff:127.0.0.1", 1)), 200, 401),
    "here, by a Unix socket": (connection(None, ("/run/gtp.sock", None)), 200, 401),
    "here, as localhost": (connection(host="localhost:30000"), 200, 401),
    "here, as the machine's short name": (connection(host="node7:30000"), 200, 401),
    "here, as an IPv6 host": (connection(host="[::1]:30000"), 200, 401),
    "elsewhere": (connection(ELSEWHERE), 403, 401),
    "elsewhere, by IPv6": (connection(("2001:db8::1", 1)), 403, 401),
    "elsewhere, IPv4 written as IPv6": (connection(("::ffff:10.1.2.3", 1)), 403, 401),
    "elsewhere, claiming to be here": (connection(ELSEWHERE, x_forwarded_for="127.0.0.1"), 403, 401),
    "gone before it was known": (connection(None), 403, 401),
    "no address at all": (connection(None, None), 403, 401),
    "not an address": (connection(("127.0.0.1.evil.example", 1)), 403, 401),
    "through a proxy": (connection(x_forwarded_for="127.0.0.1"), 403, 401),
    "through a proxy, an empty header": (connection(x_forwarded_for=""), 403, 401),
    "through a proxy that writes Forwarded": (connection(forwarded="for=127.0.0.1"), 403, 401),
    "through a proxy that writes Via": (connection(via="1.1 proxy"), 403, 401),
    "through a proxy that writes X-Real-IP": (connection(x_real_ip="127.0.0.1"), 403, 401),
    "through a proxy that hides the rest": (connection(x_forwarded_proto="https"), 403, 401),
    "a web page": (connection(origin="https://evil.example"), 403, 401),
    "a web page without an origin": (connection(sec_fetch_site="cross-site"), 403, 401),
    "a name that was made to point here": (connection(host="evil.example:30000"), 403, 401),
    "with the key": (connection(authorization="Bearer s3cret"), 200, 200),
    "with the key, from elsewhere": (connection(ELSEWHERE, authorization="bearer s3cret"), 403, 200),
    "with the key, through a proxy": (connection(x_forwarded_for="1.2.3.4", authorization="Bearer s3cret"), 403, 200),
    "with a wrong key": (connection(authorization="Bearer s3cre"), 200, 401),
    "with a longer key": (connection(authorization="Bearer s3crets"), 200, 401),
    "with an empty key": (connection(authorization="Bearer "), 200, 401),
    "with a key that is not ASCII": (connection(authorization="Bearer s3cr\xe9t"), 200, 401),
    "with the key in another scheme": (connection(authorization="Basic s3cret"), 200, 401),
    "with nothing but the key": (connection(authorization="s3cret"), 200, 401),
    "with the key in another header": (connection(x_api_key="s3cret"), 200, 401),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_each_kind_of_client_gets_its_answer_with_and_without_a_key(name: str) -> None:
    asked, without, having = CLIENTS[name]
    assert status(AdminGuard(), asked) == without
    assert status(AdminGuard("s3cret"), asked) == having


def test_http_1_0_is_how_a_proxy_speaks() -> None:
    asked = connection()
    asked.scope["http_version"] = "1.0"
    assert status(AdminGuard(), asked) == 403
    asked.scope["http_version"] = "1.1"
    assert status(AdminGuard(), asked) == 200


def test_two_authorization_headers_are_no_key() -> None:
    asked = connection()
    asked.scope["headers"] += [(b"authorization", b"Bearer s3cret"), (b"Authorization", b"Bearer s3cret")]
    assert status(AdminGuard("s3cret"), asked) == 401


def test_a_refusal_says_what_to_send_and_never_what_the_key_is() -> None:
    for guard, asked in (
        (AdminGuard("s3cret"), connection(authorization="Bearer no")),
        (AdminGuard(), connection(ELSEWHERE)),
    ):
        with pytest.raises(RequestRejected) as caught:
            guard.check(asked)
        reply = error_response(caught.value)
        assert b"s3cret" not in reply.body
        assert b"key" in reply.body
        assert ("www-authenticate" in reply.headers) == (reply.status_code == 401)


def test_a1_keys_are_compared_by_digest_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("gtp_serve.server.access.hmac.compare_digest", compare)
    for key in ("s3cret", "x", "s" * 900):
        status(AdminGuard("s3cret"), connection(authorization=f"Bearer {key}"))
    status(AdminGuard("s3cret"), connection())
    assert len(compared) == 4
    assert {len(side) for pair in compared for side in pair} == {32}


@pytest.mark.parametrize("text", ["127.0.0.1", "127.255.0.9", "::1", "::ffff:127.0.0.1", "::1%lo"])
def test_these_addresses_are_this_machine(text: str) -> None:
    assert is_loopback(text)


@pytest.mark.parametrize("text", ["", "localhost", "0.0.0.0", "::", "128.0.0.1", "::2", "::ffff:8.8.8.8", "fe80::1%lo"])
def test_these_are_not(text: str) -> None:
    assert not is_loopback(text)


def test_the_key_comes_from_a_file_an_option_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    named = {KEY_VARIABLE: "from-environment"}
    assert find_admin_key(None, None, {}) is None
    assert find_admin_key(None, None, named) == "from-environment"
    assert find_admin_key("given", None, named) == "given"
    assert find_admin_key(None, str(file), named) == "from-file"


@pytest.mark.parametrize("key", ["", " ", "two words", "schl\xfcssel", "line\nbreak", "x" * 1025])
def test_what_is_no_key_is_refused_wherever_it_is_from(key: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(key + "\n")
    sources: list[tuple[Any, Any, dict[str, str]]] = [
        (key, None, {}),
        (None, str(file), {}),
        (None, None, {KEY_VARIABLE: key}),
    ]
    for given, path, environment in sources:
        with pytest.raises(UsageError):
            find_admin_key(given, path, environment)


def test_two_keys_or_no_such_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude"):
        find_admin_key("a", str(tmp_path), {})
    with pytest.raises(UsageError, match="cannot be read"):
        find_admin_key(None, str(tmp_path / "none"), {})
