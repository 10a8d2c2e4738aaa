"""The certificate that turns http into https; read before the port answers, so that a bad one is said at once."""

from __future__ import annotations

import ssl
from pathlib import Path

from gtp_serve.errors import EnvironmentFault
from gtp_serve.server.options import ServeOptions


def tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """What connections are wrapped in; None: plain http.

    :raises EnvironmentFault: when certificate and key cannot be used together.
    """
    if options.tls_cert is None or options.tls_key is None:
        return None
    for name, path in (("tls_cert", options.tls_cert), ("tls_key", options.tls_key)):
        _check_readable(name, path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise EnvironmentFault(
            f"{options.tls_cert} and {options.tls_key} are no certificate and its key",
            [("reason", str(getattr(error, "reason", None) or error)), ("needed", "PEM files, a key without password")],
            code="tls",
        ) from error
    return context


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise EnvironmentFault(f"{name} {path} cannot be read: {error.strerror}", code="tls") from error


def _no_password() -> str:
    """Asked for a key that has one: without this, the terminal would be asked."""
    raise ValueError("the key has a password")
