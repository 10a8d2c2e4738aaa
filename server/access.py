"""Who may change what is served: the admin key, or, where none was set, a client on this machine.

The one guard of all weight routes.  It looks at the connection and its headers only, before a body is read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.requests import HTTPConnection

from gtp_serve.errors import RequestRejected
from gtp_serve.server.admin_key import KEY_VARIABLE

_FORWARDED = frozenset(
    {
        b"forwarded",
        b"via",
        b"x-real-ip",
        b"x-client-ip",
        b"x-cluster-client-ip",
        b"true-client-ip",
        b"cf-connecting-ip",
        b"fastly-client-ip",
        b"x-envoy-external-address",
        b"x-original-forwarded-for",
    }
)
"""Besides everything that begins with ``x-forwarded``: what a proxy adds, whose clients may be anywhere."""
_BROWSER = frozenset({b"origin", b"sec-fetch-site"})
"""What a browser adds: a page from anywhere can make a browser on this machine send requests here."""


class KeyMissing(RequestRejected):
    """The admin key is needed and is not there, or is another one."""

    default_code = "admin-key-needed"
    http_status = 401


class NotFromHere(RequestRejected):
    """No admin key is set, and the client is not certain to be on this machine."""

    default_code = "admin-only-local"
    http_status = 403


class AdminGuard:
    """Lets a request through or refuses it.

    :param key: None: clients on this machine are let through, and nobody else.
    """

    def __init__(self, key: str | None = None) -> None:
        # Digests are compared, so that neither the time nor the length tells of the key.
        self._digest = None if key is None else _digest(key.encode("utf-8"))

    @property
    def has_key(self) -> bool:
        """Whether a key is asked for."""
        return self._digest is not None

    def check(self, request: HTTPConnection, *, own_page: bool = False) -> None:
        """Refuse whoever may not change what is served.

        :param own_page: the server's own page may ask too, also without a key: for routes that only read.
        :raises KeyMissing: 401, when a key is set and the request has none or another.
        :raises NotFromHere: 403, when none is set and the client is elsewhere, or hidden by a proxy or a browser.
        """
        headers: list[tuple[bytes, bytes]] = request.scope["headers"]
        if self._digest is not None:
            self._check_key(headers)
            return
        names = {name.lower() for name, _ in headers}
        # HTTP/1.0 is what a well-known proxy speaks to servers by default, without a header that tells of it.
        proxied = request.scope.get("http_version") == "1.0" or any(_is_forwarded(name) for name in names)
        if proxied or not _is_local(request):
            raise NotFromHere(
                "without an admin key this route answers only clients on the server's own machine",
                [("try", f"start the server with --admin-key-file FILE or {KEY_VARIABLE} set, and send the key")],
            )
        foreign = names & _BROWSER and not (own_page and _is_own_page(request))
        if foreign or not _is_plain_host(request.headers.get("host", "")):
            raise NotFromHere(
                "without an admin key this route answers no web pages and no foreign host names",
                [("try", "a program other than a browser, and 127.0.0.1 or localhost as the host")],
            )

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> None:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        same = hmac.compare_digest(_digest(key.strip()), self._digest or b"")
        if scheme.lower() != b"bearer" or not same:
            raise KeyMissing(
                "the admin key is missing" if not given else "the admin key is wrong",
                [("send", "authorization: Bearer KEY")],
            )


def _is_own_page(request: HTTPConnection) -> bool:
    """By what a browser alone can write; a page of another origin is told as such, and its name is no plain host."""
    return request.headers.getlist("sec-fetch-site") == ["same-origin"] and "origin" not in request.headers


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_forwarded(name: bytes) -> bool:
    return name in _FORWARDED or name.startswith(b"x-forwarded")


def _is_local(request: HTTPConnection) -> bool:
    """By the socket's own peer; a Unix socket has none, and whoever may open its file is on this machine."""
    client, server = request.scope.get("client"), request.scope.get("server")
    if client is None:
        return server is not None and server[1] is None
    return is_loopback(client[0])


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, also one of IPv4 written as IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _is_plain_host(header: str) -> bool:
    """An address, or a name that no public name server can give: a page's own domain can be made to point here."""
    name = header.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if "." not in name.removesuffix(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
