"""https on a real socket: the porch while the server is imported, then the server."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from self_signed import OPENSSL, write_certificate

from gtp_serve.errors import EnvironmentFault
from gtp_serve.server import cli
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.app import build_app
from gtp_serve.server.http_server import build_server
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.porch import Porch
from gtp_serve.server.ports import bind, url_of
from gtp_serve.server.state import ServerState
from gtp_serve.server.tls import tls_context

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes the certificate, is not installed")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_certificate(tmp_path_factory.mktemp("tls"))


def context_of(cert: Path, key: Path) -> ssl.SSLContext:
    context = tls_context(ServeOptions(ckpt=Path("run"), tls_cert=cert, tls_key=key))
    assert context is not None
    return context


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


def test_the_porch_and_the_server_answer_https_on_one_socket(certificate: tuple[Path, Path]) -> None:
    context = context_of(*certificate)
    listener = bind("127.0.0.1", 0)
    url = url_of(listener, tls=True)
    assert url.startswith("https://127.0.0.1:")
    trust = trusting(certificate[0])
    porch = Porch(listener, context)
    early = httpx.get(f"{url}/ready", verify=trust, trust_env=False)
    assert (early.status_code, early.json()["phase"]) == (503, "import")
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http"), trust_env=False, timeout=5)
    porch.close()

    async def check() -> None:
        state = ServerState()
        app = build_app(state, Metrics(state), logging.getLogger("test-tls"), guard=AdminGuard())
        server = build_server(app, context)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.up.wait()
        async with httpx.AsyncClient(base_url=url, verify=trust, trust_env=False) as http:
            assert (await http.get("/ready")).json()["status"] == "starting"
        server.should_exit = True
        await serving

    with listener:
        asyncio.run(check())


@pytest.mark.parametrize("what", ["another key", "no PEM", "no file", "password"])
def test_a_certificate_that_cannot_be_used_is_said_before_the_port_is_taken(
    what: str, certificate: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = certificate
    bad = tmp_path / "bad.pem"
    if what == "another key":
        subprocess.run([str(OPENSSL), "genrsa", "-out", str(bad), "2048"], check=True, capture_output=True)
    elif what == "password":
        words = ["ec", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(bad)]
        subprocess.run([str(OPENSSL), *words], check=True, capture_output=True)
    elif what == "no PEM":
        bad.write_text("nothing")
    with pytest.raises(EnvironmentFault) as caught:
        context_of(cert, bad)
    assert caught.value.code == "tls"

    (tmp_path / "c.toml").write_text(f"ckpt = 'run'\ntls_cert = '{cert}'\ntls_key = '{bad}'\n")
    assert cli.main(["--config", str(tmp_path / "c.toml"), "--port", "0"]) == 5
    assert capsys.readouterr().err.startswith("error[tls] ")


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_context(ServeOptions(ckpt=Path("run"))) is None
