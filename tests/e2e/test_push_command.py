"""``gtp-serve push`` and ``gtp-serve weights`` against a server whose engine begins and ends updates by a script."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from fakes_server import FakeClient, serving
from golden_file import same_as_golden

from gtp_serve.errors import GtpServeError, UpdateRefused
from gtp_serve.refit.orders import AbortUpdate, Begin, DiskOrder, UpdateRecord, UpdateRequest, WeightsStatus
from gtp_serve.server import cli
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.push import default_version

pytestmark = pytest.mark.e2e

CKPT = Path(__file__).parents[1] / "data" / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
SECONDS = {"open": 0.01, "plan": 0.02, "transfer": 0.5, "verify": 0.1, "wait": 0.003, "total": 0.64}
GOOD: dict[str, Any] = {"source_bytes": 540 << 20, "target_bytes": 540 << 20, "digest": "ab" * 16, "seconds": SECONDS}


class ScriptedClient(FakeClient):
    """Ends each update as soon as it has begun."""

    end: dict[str, Any]

    async def control(self, command: Any) -> Any:
        body = await super().control(command)
        if isinstance(command, Begin):
            self.end_update(**{"dry_run": command.request.dry_run, **self.end})
        return body


def scripted(state: str = "committed", **fields: Any) -> ScriptedClient:
    client = ScriptedClient(weights=WeightsStatus(version="step-1"))
    client.end = {"state": state, **fields}
    return client


def command(client: FakeClient, *words: str, guard: AdminGuard | None = None) -> int:
    """Run a command against a server; ``URL`` stands for its address."""

    async def go() -> int:
        async with serving(client, guard=guard) as server:
            return await asyncio.to_thread(cli.main, [server.url if word == "URL" else word for word in words])

    return asyncio.run(asyncio.wait_for(go(), 30))


def asked(client: FakeClient) -> UpdateRequest:
    command = next(one for one in client.commands if isinstance(one, Begin))
    return command.request


def shown(text: str) -> str:
    """Without what changes from run to run."""
    return re.sub(r"127\.0\.0\.1:\d+", "HOST", text)


def test_what_push_prints_is_the_committed_text(capsys: pytest.CaptureFixture[str]) -> None:
    late: dict[str, Any] = {
        "code": "update-deadline",
        "message": "not all of the weights were there within 2 s; late: tp1",
    }
    runs: list[tuple[FakeClient, tuple[str, ...]]] = [
        (scripted(**GOOD, stall_seconds=0.00031), ("--ckpt", "/ckpts/run")),
        (scripted("verified", **GOOD), ("--ckpt", "/ckpts/run", "--dry-run")),
        (scripted("aborted", **late, details=(("tp1", "transfer, 3 of 9 bytes"),)), ("--ckpt", "/ckpts/run")),
        (scripted("torn", code="not-finite", message="model.norm.weight has a NaN"), ("--ckpt", "/ckpts/run")),
        (FakeClient(refuse=UpdateRefused("version 'a' serves, not 'b'", code="base-mismatch")), ("--ckpt", "/a")),
        (FakeClient(), ("--ckpt", "/a", "--version", "two words")),
        (FakeClient(), ("--ckpt", "/a", "--in-flight", "drop")),
        (FakeClient(), ("--ckpt", "/a", "--stream", "--max-rate", "1MiB")),
        (FakeClient(), ()),
    ]
    written = []
    for client, words in runs:
        code = command(client, "push", "URL", *words)
        out, err = capsys.readouterr()
        written.append(shown(f"$ gtp-serve push URL {' '.join(words)}\n{out}{err}exit {code}\n"))
    same_as_golden("push.txt", "\n".join(written))


def test_what_weights_prints_is_the_committed_text(capsys: pytest.CaptureFixture[str]) -> None:
    def record(number: int, state: Any, **fields: Any) -> UpdateRecord:
        return UpdateRecord(
            id=f"u{number}", version=str(number), base=str(number - 1), state=state, began=1.7e9 + number, **fields
        )

    history = (
        record(4, "verified", kind="disk", dry_run=True, source_bytes=540 << 20, seconds={"total": 1.5}),
        record(
            3, "aborted", kind="memory", code="digest-mismatch", message="w: its bytes differ", seconds={"total": 0.1}
        ),
        record(2, "committed", kind="distributed", source_bytes=540 << 20, seconds=SECONDS, stall_seconds=0.0003),
        record(1, "committed", kind="disk", source_bytes=540 << 20, seconds=SECONDS, stall_seconds=0.0004),
    )
    begun = record(5, "staging", kind="safetensors")
    statuses = [
        WeightsStatus(version="0"),
        WeightsStatus(version="2", digest="ab" * 16, rollback_version="1", update=begun, history=history),
        WeightsStatus(version="2", torn="rank tp1 failed", paused=True, sleeping=("kv_cache",), history=history[:1]),
    ]
    written = []
    for status in statuses:
        code = command(FakeClient(weights=status), "weights", "URL", "--last", "4")
        out, err = capsys.readouterr()
        written.append(f"$ gtp-serve weights URL --last 4\n{out}{err}exit {code}\n")
    same_as_golden("weights.txt", "\n".join(written))


def test_json_is_the_servers_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    client = scripted(**GOOD)
    assert command(client, "push", "URL", "--ckpt", "/a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["digest"] == "ab" * 16
    assert command(client, "weights", "URL", "--json") == 0
    assert json.loads(capsys.readouterr().out)["version"] == "step-2"


def test_each_option_of_push_arrives() -> None:
    client = scripted()
    words = (
        "--iteration",
        "7",
        "--version",
        "v",
        "--base",
        "step-1",
        "--in-flight",
        "recompute",
        "--memory",
        "inplace",
    )
    assert command(client, "push", "URL", "--ckpt", "/a", *words, "--deadline", "9", "--max-rate", "1MiB") == 0
    order = DiskOrder(path="/a", iteration=7, max_bytes_per_second=1 << 20)
    assert asked(client) == UpdateRequest(
        order=order, version="v", base="step-1", in_flight="recompute", memory="inplace", deadline_seconds=9.0
    )


@pytest.mark.parametrize(
    ("path", "iteration", "live", "version"),
    [
        ("/run", None, "3", "4"),
        ("/run", None, "step-9", "step-10"),
        ("/run", None, "base", "base-1"),
        ("/run/iter_0000200", None, "0", "200"),
        ("/run/iter_0000200", None, "300", "301"),
        ("/run/iter_0000200", None, "base", "200"),
        ("/run", 12, "0", "12"),
    ],
)
def test_a_version_that_is_not_told_follows_the_one_that_serves(
    path: str, iteration: int | None, live: str, version: str
) -> None:
    assert default_version(path, iteration, live) == version


def test_the_key_opens_a_server_that_has_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    guard = AdminGuard("s3cret")
    for words in (("--admin-key-file", str(file)), ("--key", "s3cret"), ("--admin-key", "s3cret")):
        assert command(scripted(), "push", "URL", "--ckpt", "/a", *words, guard=guard) == 0
    monkeypatch.setenv("GTP_SERVE_ADMIN_KEY", "s3cret")
    assert command(FakeClient(), "weights", "URL", guard=guard) == 0
    monkeypatch.setenv("GTP_SERVE_ADMIN_KEY", "wrong")
    assert command(FakeClient(), "weights", "URL", guard=guard) == 7
    assert "error[admin-key-needed] the admin key is wrong" in capsys.readouterr().err


def test_no_server_or_another_one_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights", "http://127.0.0.1:9"]) == 5
    assert "error[server-unreachable] the server at 127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert cli.main(["weights", "ftp://x"]) == 2


def test_a_push_that_is_interrupted_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    client = FakeClient()
    assert command(client, "push", "URL", "--ckpt", "/a") == 130
    assert isinstance(client.commands[-1], AbortUpdate)
    assert "interrupted" in client.commands[-1].reason


def test_a_stream_of_another_model_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    client = scripted()
    assert command(client, "push", "URL", "--ckpt", str(CKPT), "--stream") == 7
    assert "model.layers.2.input_layernorm" in capsys.readouterr().err
    assert client.commands == []


def test_an_engine_that_refuses_everything_is_told_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    error: GtpServeError = UpdateRefused("update u is under way", code="update-under-way")
    assert command(FakeClient(refuse=error), "push", "URL", "--ckpt", "/a") == 7
    assert "error[update-under-way] update u is under way" in capsys.readouterr().err
