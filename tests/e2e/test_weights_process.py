"""New weights for the real command: real engine process, real updates, requests running meanwhile."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from runpy import run_path
from typing import Any

import httpx
import pytest
import torch
import xxhash
from checkpoint_files import SMALL, random_tensors, write_hf
from safetensors.torch import save, save_file
from serve_command import Command

from gtp_serve.server import cli

pytestmark = pytest.mark.e2e

CONFIG = replace(SMALL, max_context=8192, dtype="float32")
PROMPT = [3, 1, 4, 1, 5]
LONG = 4000
"""Tokens of a request that runs while weights change: a second, where a token takes a quarter of a millisecond."""
NORM = "model.norm.weight"


@dataclass(frozen=True)
class Served:
    """A running server and checkpoints that fit its model."""

    http: httpx.Client
    url: str
    command: Command
    folders: dict[str, Path]

    def get(self, path: str) -> Any:
        return self.http.get(path).json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def disk(self, version: str, weights: str, **fields: Any) -> httpx.Response:
        source = {"kind": "disk", "path": str(self.folders[weights])}
        return self.post("/weights/updates", version=version, source=source, wait=True, **fields)

    def stream(self, version: str, data: bytes, **fields: Any) -> httpx.Response:
        params = {"version": version, "wait": "true", **fields}
        headers = {"content-type": "application/octet-stream"}
        return self.http.post("/weights/updates", params=params, content=data, headers=headers)

    def version(self) -> str:
        return str(self.get("/weights")["version"])

    def digest(self) -> str:
        """Computed anew from every parameter."""
        return str(self.get("/weights/checksum")["digest"])

    def generate(self, ids: Sequence[int] = PROMPT, count: int = 8) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        reply = self.post("/generate", input_ids=list(ids), sampling_params=sampling, return_logprob=True)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def fresh(self, *labels: str) -> list[str]:
        """Labels that have not been served yet, in order."""
        version = self.version()
        last = int(version) if version.isdecimal() else 0
        used = [int(one["version"]) for one in self.get("/weights")["history"] if one["version"].isdecimal()]
        start = max([last, *used])
        return [str(start + 1 + index) for index in range(len(labels) or 1)]


def checkpoints(root: Path) -> dict[str, Path]:
    """Three sets of weights of one model, and some that must not be taken."""
    folders = {name: root / name for name in ("a", "b", "c", "nan", "other", "misshapen", "missing", "short")}
    for seed, (name, folder) in enumerate(folders.items()):
        config = replace(CONFIG, hidden_size=32, head_dim=8) if name == "other" else CONFIG
        write_hf(folder, config, max_position_embeddings=CONFIG.max_context)
        tensors = random_tensors(config, seed)
        if name == "nan":
            tensors[NORM][3] = float("nan")
        if name == "misshapen":
            tensors[NORM] = torch.ones(CONFIG.hidden_size + 1)
        if name == "missing":
            del tensors[NORM]
        save_file(tensors, folder / "model.safetensors")
    whole = (folders["short"] / "model.safetensors").read_bytes()
    (folders["short"] / "model.safetensors").write_bytes(whole[:-64])
    return folders


def start(root: Path, *words: str) -> Iterator[Served]:
    folders = checkpoints(root)
    command = Command(
        *("--ckpt", str(folders["a"]), "--no-tokenizer", "--port", "0", "--max-running", "8", "--deterministic"), *words
    )
    try:
        url = command.url()
        with httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as http:
            yield Served(http, url, command, folders)
    finally:
        command.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from start(tmp_path_factory.mktemp("staged"))


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from start(tmp_path_factory.mktemp("inplace"), "--refit-memory", "inplace")


@pytest.fixture
def run() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def file_of(server: Served, weights: str) -> bytes:
    return (server.folders[weights] / "model.safetensors").read_bytes()


def spans(reply: Any) -> list[tuple[str, int, int]]:
    return [(one["version"], one["start"], one["end"]) for one in reply["meta_info"]["weight_versions"]]


def begun(server: Served, count: int = 1) -> None:
    """Until so many requests run."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        match = re.search(r"^gtp_serve_requests_running (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
        if match is not None and float(match.group(1)) >= count:
            return
        time.sleep(0.005)
    raise AssertionError("the requests do not run")


def error_of(reply: httpx.Response) -> tuple[int, str, str]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["message"]


def test_a_push_from_disk_serves_what_a_cold_start_would(server: Served) -> None:
    (version,) = server.fresh()
    reply = server.disk(version, "b")
    record = reply.json()
    assert (reply.status_code, record["state"], record["version"], record["kind"]) == (
        200,
        "committed",
        version,
        "disk",
    )
    assert record["digest"] == server.digest() == server.get("/weights")["digest"]
    assert server.get("/model_info")["weight_version"] == version
    after = server.generate()
    assert spans(after) == [(version, 0, 8)]
    # The same weights from the other source give the same bits.
    (again,) = server.fresh()
    data = file_of(server, "b")
    streamed = server.stream(again, data, digest=xxhash.xxh3_128_hexdigest(data))
    assert (streamed.status_code, streamed.json()["digest"]) == (200, record["digest"])
    repeat = server.generate()
    assert repeat["output_ids"] == after["output_ids"]
    assert repeat["meta_info"]["output_token_logprobs"] == after["meta_info"]["output_token_logprobs"]


def test_w6_streams_go_on_over_a_push_and_say_which_weights_made_which_tokens(
    server: Served, run: Callable[..., Future[Any]]
) -> None:
    before, (version,) = server.version(), server.fresh()
    running = [run(server.generate, [7 + index, 2], LONG) for index in range(3)]
    begun(server, 3)
    assert server.disk(version, "c").status_code == 200
    replies = [one.result() for one in running]
    for reply in replies:
        assert reply["meta_info"]["finish_reason"]["type"] == "length"
        (first, start, middle), (second, _, end) = spans(reply)
        assert (first, second, start, end) == (before, version, 0, LONG)
        assert 0 < middle < LONG


def test_recomputed_requests_go_on_as_if_the_new_weights_had_read_them(
    server: Served, run: Callable[..., Future[Any]]
) -> None:
    before, (version,) = server.version(), server.fresh()
    old = server.generate(PROMPT, LONG)
    running = run(server.generate, PROMPT, LONG)
    begun(server)
    assert server.disk(version, "a", in_flight="recompute").status_code == 200
    reply = running.result()
    (_, _, middle), (_, _, _) = spans(reply)
    assert [span[0] for span in spans(reply)] == [before, version]
    ids = reply["output_ids"]
    assert ids[:middle] == old["output_ids"][:middle]
    assert ids[middle:] == server.generate([*PROMPT, *ids[:middle]], LONG - middle)["output_ids"]


def test_waiting_and_aborting_do_as_they_say(server: Served, run: Callable[..., Future[Any]]) -> None:
    before, (waited, aborted) = server.version(), server.fresh("waited", "aborted")
    running = run(server.generate, PROMPT, LONG)
    begun(server)
    assert server.disk(waited, "b", in_flight="wait").status_code == 200
    assert spans(running.result()) == [(before, 0, LONG)]
    running = run(server.generate, PROMPT, LONG)
    begun(server)
    assert server.disk(aborted, "c", in_flight="abort").status_code == 200
    reply = running.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert [span[0] for span in spans(reply)] == [waited]
    assert len(reply["output_ids"]) < LONG


def test_rollback_is_the_version_before_bit_for_bit(server: Served) -> None:
    (version,) = server.fresh()
    label, digest, text = server.version(), server.digest(), server.generate()
    assert server.disk(version, "a").status_code == 200
    assert server.digest() != digest
    rolled = server.post("/weights/rollback")
    assert (rolled.status_code, rolled.json()["state"], rolled.json()["kind"]) == (200, "committed", "rollback")
    assert (server.version(), server.digest(), server.get("/weights")["rollback_version"]) == (label, digest, version)
    again = server.generate()
    assert again["output_ids"] == text["output_ids"]
    assert again["meta_info"]["output_token_logprobs"] == text["meta_info"]["output_token_logprobs"]


def test_a_dry_run_finds_out_and_changes_nothing(server: Served) -> None:
    (version,) = server.fresh()
    label, digest = server.version(), server.digest()
    reply = server.disk(version, "a", dry_run=True)
    assert (reply.status_code, reply.json()["state"], reply.json()["dry_run"]) == (200, "verified", True)
    assert (server.version(), server.digest()) == (label, digest)
    assert server.disk(version, "nan", dry_run=True).status_code == 422


def test_a_manual_commit_waits_to_be_told(server: Served) -> None:
    (version, other) = server.fresh("manual", "other")
    before = server.version()
    source = {"kind": "disk", "path": str(server.folders["b"])}
    path = server.post("/weights/updates", version=version, source=source, commit="manual").headers["location"]
    deadline = time.monotonic() + 20
    while server.get(path)["state"] == "staging" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (server.get(path)["state"], server.version()) == ("verified", before)
    assert error_of(server.disk(other, "a"))[:2] == (409, "update-under-way")
    assert server.post(f"{path}/commit", wait=True).json()["state"] == "committed"
    assert server.version() == version
    assert error_of(server.post(f"{path}/abort"))[:2] == (409, "update-committed")


BAD: list[tuple[str, str]] = [
    # the folder, and a word that the refusal must have
    ("nan", NORM),
    ("other", "hidden_size"),
    ("misshapen", NORM),
    ("missing", NORM),
    ("short", "model.safetensors"),
]


@pytest.mark.parametrize(("weights", "word"), BAD)
def test_bad_weights_on_disk_are_refused_by_name_and_the_old_ones_serve(
    server: Served, weights: str, word: str
) -> None:
    (version,) = server.fresh()
    label, digest, text = server.version(), server.digest(), server.generate()["output_ids"]
    status, _, message = error_of(server.disk(version, weights))
    assert status == 422
    assert word in message
    assert (server.version(), server.digest(), server.generate()["output_ids"]) == (label, digest, text)
    assert server.http.get("/ready").status_code == 200


def altered(server: Served, **changed: torch.Tensor | None) -> bytes:
    tensors = random_tensors(CONFIG, 1)
    for name, value in changed.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    return save(tensors)


def test_bad_streams_are_refused_by_name_and_the_old_weights_serve(server: Served) -> None:
    good = file_of(server, "b")
    flipped = good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]
    infinite = torch.ones(CONFIG.hidden_size)
    infinite[0] = float("inf")
    bodies: list[tuple[bytes, dict[str, Any], str, str]] = [
        # the body, fields of the query, the code, a word of the message
        (altered(server, model__norm__weight=None), {}, "ckpt-layout", NORM),
        (altered(server, model__extra__weight=torch.ones(1)), {}, "ckpt-unknown-key", "model.extra.weight"),
        (altered(server, model__norm__weight=torch.ones(3)), {}, "ckpt-layout", NORM),
        (altered(server, model__norm__weight=torch.ones(16, dtype=torch.int64)), {}, "wrong-dtype", NORM),
        (altered(server, model__norm__weight=infinite), {}, "not-finite", NORM),
        (flipped, {"digest": xxhash.xxh3_128_hexdigest(good)}, "digest-mismatch", "xxh3-128"),
        (good[:-1], {}, "cut-off", "bytes"),
        (good + b"x", {}, "too-long", "bytes"),
        (b"PK\x03\x04" + bytes(100), {}, "bad-stream", "safetensors"),
    ]
    label, digest = server.version(), server.digest()
    (version,) = server.fresh()
    for data, fields, code, word in bodies:
        status, told, message = error_of(server.stream(version, data, **fields))
        assert (status, told) == (422, code), message
        assert word in message
    for fields, code in (({"base": "7777"}, "base-mismatch"), ({"version": label}, "version-repeated")):
        status, told, _ = error_of(server.stream(fields.pop("version", version), good, **fields))
        assert (status, told) == (409, code)
    assert (server.version(), server.digest()) == (label, digest)
    assert server.stream(version, good).status_code == 200


def test_a_raw_request_as_curl_writes_it_is_enough(server: Served) -> None:
    (version,) = server.fresh()
    data = file_of(server, "c")
    head = (
        f"POST /weights/updates?version={version}&wait=true HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8\r\n"
        f"Accept: */*\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(data)}\r\n"
        "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as sock:
        sock.sendall(head.encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(data)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["state"] == "committed"


def test_pause_holds_the_streams_and_resume_lets_them_go(server: Served, run: Callable[..., Future[Any]]) -> None:
    alone = server.generate(PROMPT, LONG)["output_ids"]
    running = run(server.generate, PROMPT, LONG)
    begun(server)
    assert server.http.post("/pause", params={"mode": "keep"}).json()["status"] == "paused"
    waiting = run(server.generate, PROMPT, 4)
    time.sleep(1.0)
    assert not running.done()
    assert not waiting.done()
    assert server.get("/weights")["state"] == "paused"
    assert server.get("/ready") == {"status": "ready", "paused": True}
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/resume").json()["status"] == "resumed"
    assert running.result()["output_ids"] == alone
    assert waiting.result()["output_ids"] == alone[:4]


def test_log_and_metrics_tell_of_each_update(server: Served) -> None:
    (version,) = server.fresh()
    assert server.disk(version, "b").status_code == 200
    line = server.command.wait_for("weights", version=version)
    assert (line["state"], line["kind"], line["level"]) == ("committed", "disk", "INFO")
    text = server.http.get("/metrics").text
    assert f'gtp_serve_weight_version_info{{source="disk",version="{version}"}} 1.0' in text
    committed = re.search(
        r'^gtp_serve_weight_updates_total\{kind="disk",result="committed"\} (\S+)$', text, re.MULTILINE
    )
    assert committed is not None
    history = server.get("/weights")["history"]
    assert float(committed.group(1)) == sum(r["kind"] == "disk" and r["state"] == "committed" for r in history)
    assert 'gtp_serve_weight_update_seconds_count{phase="transfer"}' in text


def test_the_commands_push_and_show(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--stream",)):
        assert cli.main(["push", server.url, "--ckpt", str(server.folders["a"]), *words]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"version {server.version()} serves")
        assert server.digest() in out
    assert cli.main(["push", server.url, "--ckpt", str(server.folders["missing"]), "--stream"]) == 3
    assert NORM in capsys.readouterr().err
    assert cli.main(["push", server.url, "--ckpt", str(server.folders["nan"])]) == 7
    assert f"serves  version {server.version()}, as before" in capsys.readouterr().err
    assert cli.main(["weights", server.url]) == 0
    out = capsys.readouterr().out
    assert f"version   {server.version()}\n" in out
    assert "not-finite" in out


def test_in_place_a_failed_update_leaves_nothing_that_serves_and_a_good_one_heals(in_place: Served) -> None:
    text = in_place.generate()["output_ids"]
    assert in_place.get("/weights")["memory"] == "inplace"
    status, code, message = error_of(in_place.disk("1", "nan"))
    assert (status, code) == (422, "not-finite")
    assert NORM in message
    assert in_place.get("/weights")["state"] == "torn"
    for body in ({"input_ids": PROMPT}, {"input_ids": PROMPT, "stream": True}):
        assert error_of(in_place.post("/generate", **body))[:2] == (503, "weights_torn")
    ready = in_place.http.get("/ready")
    assert (ready.status_code, ready.json()["status"], error_of(ready)[1]) == (503, "torn", "weights_torn")
    assert in_place.http.get("/health").status_code == 200
    healed = in_place.disk("2", "a")
    assert (healed.status_code, in_place.get("/weights")["state"]) == (200, "idle")
    assert in_place.generate()["output_ids"] == text
    assert error_of(in_place.post("/weights/rollback"))[0] == 409


def test_the_example_trains_on_what_it_samples_and_its_weights_serve(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    main = run_path(str(Path(__file__).parents[2] / "examples" / "train_and_push.py"))["main"]
    words = ("--steps", "2", "--samples", "2", "--max-new-tokens", "6")
    assert server.disk("loop", "a").status_code == 200
    assert main([server.url, "3,1,4", "2,7", "--ckpt", str(server.folders["a"]), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
    # Both the first samples and those after a push have the probabilities that the trainer's own weights give.
    assert all(float(re.findall(r"against trainer (\S+),", line)[0]) < 1.0005 for line in lines)
    assert server.version() == "loop+2"
    assert [one["kind"] for one in server.get("/weights")["history"][:2]] == ["memory", "memory"]
    assert main([server.url, "3,1,4", "--ckpt", str(server.folders["a"]), "--key", "a\nb", *words]) == 2
