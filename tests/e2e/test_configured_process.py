"""An https server that is configured by file and environment, with keys, under the load of ``bench`` with pushes."""

from __future__ import annotations

import json
import signal
import ssl
from pathlib import Path

import httpx
import pytest
from self_signed import OPENSSL, write_certificate
from serve_command import Command

from gtp_serve.server import cli

pytestmark = pytest.mark.e2e

CKPT = Path(__file__).parents[1] / "data" / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"


@pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes the certificate, is not installed")
def test_a_configured_server_asks_for_its_keys_and_serves_through_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, key in (("api", "for-everybody"), ("admin", "for-trainers")):
        (tmp_path / name).write_text(f"{key}\n")
    cert, key_file = write_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    config = tmp_path / "serve.toml"
    config.write_text(
        f'ckpt = "{CKPT}"\nno_tokenizer = true\nport = 0\nmax_running = 8\nname = "tiny"\n'
        'api_key_file = "api"\nadmin_key_file = "admin"\ncors = ["https://lab.example"]\n'
        f'tls_cert = "{cert}"\ntls_key = "{key_file.name}"\n'
    )
    monkeypatch.setenv("GTP_SERVE_NAME", "from-environment")
    command = Command("--config", str(config), "--dtype", "float32")
    try:
        url = command.url()
        assert url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, timeout=60, trust_env=False, verify=trust) as http:
            body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
            refused = http.post(
                "/generate", json=body, headers={"x-request-id": "one", "origin": "https://lab.example"}
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "api-key-needed")
            assert refused.headers["x-request-id"] == "one"
            assert refused.headers["access-control-allow-origin"] == "https://lab.example"
            assert [http.get(path).status_code for path in ("/ready", "/health", "/", "/metrics")] == [200] * 3 + [401]
            for key in ("for-everybody", "for-trainers"):
                allowed = http.post("/generate", json=body, headers={"authorization": f"Bearer {key}"})
                assert len(allowed.json()["output_ids"]) == 4
            named = {"authorization": "Bearer for-everybody", "x-request-id": "run-7"}
            http.post("/generate", json=body, headers=named)
            assert command.wait_for("request", request_id="run-7")["tokens"] == 4
            told = http.get("/model_info", headers={"authorization": "Bearer for-everybody"}).json()
            assert told["served_model_name"] == "from-environment"
            weights = http.get("/weights", headers={"authorization": "Bearer for-everybody"})
            assert weights.json()["error"]["code"] == "admin-key-needed"

        keys = ("--api-key-file", str(tmp_path / "api"), "--admin-key-file", str(tmp_path / "admin"))
        load = ("--groups", "24", "--samples", "4", "--in", "20", "--out", "12", "--concurrency", "8")
        capsys.readouterr()
        code = cli.main(["bench", url, *load, *keys, "--push", str(CKPT), "--every", "0.05", "--json", "-"])
        told = json.loads(capsys.readouterr().out)
        assert code == 0, told
        assert (told["requests"], told["failed"]) == (96, 0)
        assert told["pushes"][0]["version"] == "1"
        assert {push["error"] for push in told["pushes"]} == {None}

        command.process.send_signal(signal.SIGTERM)
        assert command.end()[0] == 0
    finally:
        command.stop()
