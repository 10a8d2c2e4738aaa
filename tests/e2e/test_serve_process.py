"""The whole command as a user runs it: real checkpoint, real engine process, real signals."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from golden_file import same_as_golden
from serve_command import Command

pytestmark = pytest.mark.e2e

DATA = Path(__file__).parents[1] / "data"
CKPT = DATA / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
TOKENIZER = DATA / "tokenizer251"


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    running: list[Command] = []
    yield running
    for command in running:
        command.stop()


def serve(commands: list[Command], *words: str) -> Command:
    command = Command("--ckpt", str(CKPT), "--tokenizer", str(TOKENIZER), "--port", "0", "--max-running", "8", *words)
    commands.append(command)
    return command


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    command = Command(
        "--ckpt",
        str(CKPT),
        "--tokenizer",
        str(TOKENIZER),
        "--port",
        "0",
        "--max-running",
        "8",
        "--dtype",
        "float32",
    )
    try:
        with httpx.Client(base_url=command.url(), timeout=60, trust_env=False, verify=False) as http:
            yield http
    finally:
        command.stop()


def post(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(http: httpx.Client, **body: Any) -> list[Any]:
    with http.stream("POST", "/generate", json={"stream": "delta", **body}) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def gauge(http: httpx.Client, name: str) -> float:
    match = re.search(rf"^gtp_serve_{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert match is not None
    return float(match.group(1))


def until(holds: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def test_a_padded_megatron_checkpoint_answers_the_same_whole_streamed_and_by_ids(
    server: httpx.Client,
) -> None:
    whole = post(server, text="hello there", sampling_params=GREEDY, return_logprob=True, return_prompt_token_ids=True)
    parts = streamed(server, text="hello there", sampling_params=GREEDY, return_logprob=True)
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["output_ids"]] == whole["output_ids"]
    assert len(whole["output_ids"]) == 12
    by_ids = post(server, input_ids=whole["prompt_token_ids"], sampling_params=GREEDY, return_logprob=True)
    assert by_ids["output_ids"] == whole["output_ids"]
    assert all(logprob < 0 for logprob, _, _ in by_ids["meta_info"]["output_token_logprobs"])


def test_a_seeded_request_is_the_same_alone_and_in_company(server: httpx.Client) -> None:
    body = {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": True},
    }
    alone = post(server, **body)["output_ids"]
    noise = {"text": "there", "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda n: post(server, **(body if n % 2 else noise)), range(16)))
    assert [reply["output_ids"] for reply in replies[1::2]] == [alone] * 8


def test_sixty_four_at_once_answer_as_they_do_alone_and_no_block_is_lost(server: httpx.Client) -> None:
    prompts = [f"{'ab ' * (n % 5)}number {n % 8}" for n in range(64)]
    alone = {prompt: post(server, text=prompt, sampling_params=GREEDY)["text"] for prompt in set(prompts)}

    def one(number: int) -> str:
        if number % 2:
            return "".join(part["text"] for part in streamed(server, text=prompts[number], sampling_params=GREEDY))
        return str(post(server, text=prompts[number], sampling_params=GREEDY)["text"])

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(one, range(64)))
    assert texts == [alone[prompt] for prompt in prompts]
    until(lambda: gauge(server, "kv_usage_ratio") == 0 and gauge(server, "requests_running") == 0)


def test_l1_clients_that_leave_free_their_blocks(server: httpx.Client) -> None:
    params = {"max_new_tokens": 40, "ignore_eos": True}

    def leave(number: int) -> None:
        with (
            contextlib.suppress(httpx.ReadTimeout),
            server.stream(
                "POST",
                "/generate",
                json={"text": "a", "sampling_params": params, "stream": number % 2 == 0},
                timeout=0.05,
            ) as response,
        ):
            for _ in response.iter_raw():
                raise httpx.ReadTimeout("enough")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(32)))
    until(lambda: gauge(server, "kv_usage_ratio") == 0 and gauge(server, "requests_waiting") == 0)
    assert post(server, text="hello", sampling_params=GREEDY)["meta_info"]["completion_tokens"] == 12


def test_a_hidden_special_token_stops_and_the_probes_are_green(server: httpx.Client) -> None:
    reply = post(server, text="a", sampling_params={"stop": "<|im_end|>", "max_new_tokens": 4})
    assert "<|im_end|>" not in reply["text"]
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/health").json() == {"status": "healthy"}
    info = server.get("/model_info").json()
    assert (info["served_model_name"], info["model_type"], info["vocab_size"]) == (CKPT.name, "llama", 251)


def test_the_port_answers_within_a_second_and_no_phase_is_silent(commands: list[Command]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = time.monotonic()
    command = Command("--ckpt", str(CKPT), "--no-tokenizer", "--port", str(port))
    commands.append(command)
    while True:
        try:
            reply = httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False, verify=False)
            break
        except httpx.ConnectError:
            time.sleep(0.01)
    assert time.monotonic() - started < 1.5  # one second on a machine with nothing else to do
    assert reply.status_code == 503
    assert reply.json()["phase"]
    assert reply.json()["error"]["code"] == "not-ready"
    ready = command.wait_for("ready")
    assert ready["weight_version"] == "0"
    phases = [line["phase"] for line in command.lines if line["event"] == "phase" and line["state"] == "ok"]
    names = [
        "read_checkpoint_index",
        "read_tokenizer",
        "start_engine",
        "load_weights",
        "allocate_kv_cache",
        "first_token",
    ]
    assert phases[1:] == names
    assert not [line for line in command.lines if line["event"] == "other"]
    started = time.monotonic()
    command.process.send_signal(signal.SIGINT)
    code, seconds = command.end()
    assert (code, seconds < 4) == (0, True)


def test_f6_a_checkpoint_is_compared_with_a_list_of_its_files_or_it_is_said_that_it_was_not(
    commands: list[Command], tmp_path: Path
) -> None:
    folder = next(CKPT.glob("iter_*"))
    files = sorted(one for one in folder.iterdir() if one.is_file())
    lines = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}" for one in files]
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("\n".join(lines))
    bad.write_text("\n".join([*lines[:-1], f"{'0' * 64}  {files[-1].name}"]))

    refused = serve(commands, "--manifest", str(bad))
    assert refused.end()[0] == 3
    failed = next(line for line in refused.lines if line["event"] == "failed")
    assert (failed["code"], failed["message"]) == ("ckpt-corrupt", f"{files[-1]} is not the file that {bad} lists")
    assert failed["details"]["listed"] == "0" * 64

    verified = serve(commands, "--manifest", str(good))
    verified.url()
    size = sum(one.stat().st_size for one in files)
    assert verified.wait_for("phase", phase="verify_files", state="ok")["detail"].startswith(f"{size / 2**30:.2f} GiB")
    assert not [line for line in verified.lines if line["event"] == "files"]
    unlisted = serve(commands)
    assert unlisted.wait_for("files")["is"] == "not verified (no --manifest)"


def test_l2_sigterm_lets_running_requests_finish_and_refuses_new_ones(commands: list[Command]) -> None:
    command = serve(commands, "--drain-timeout", "30", "--max-running", "1")
    url = command.url()
    with (
        httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        params = {"max_new_tokens": 50, "ignore_eos": True}
        running = [pool.submit(post, http, text=["a"] * 32, sampling_params=params) for _ in range(2)]
        # Both have arrived, and have work for 3,200 steps.
        until(lambda: gauge(http, "requests_running") + gauge(http, "requests_waiting") > 32)
        command.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(http))
        lengths = [len(one["output_ids"]) for reply in running for one in reply.result()]
        assert lengths == [50] * 64
    code, seconds = command.end()
    assert (code, seconds < 5) == (0, True)


def refuses(http: httpx.Client) -> bool:
    """Whether the server has begun to stop (or has stopped); then ready and generate must agree."""
    try:
        ready = http.get("/ready")
        if ready.status_code == 200:
            return False
        new = http.post("/generate", json={"text": "a"})
    except httpx.TransportError:
        return True
    assert ready.json()["status"] == "stopping"
    assert (new.status_code, new.json()["error"]["code"]) == (503, "shutting-down")
    return True


def test_a_second_signal_ends_at_once_and_tells_the_clients(commands: list[Command]) -> None:
    command = serve(commands, "--drain-timeout", "60", "--context", "64")
    url = command.url()
    body = {"text": ["a"] * 32, "stream": True, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    with (
        httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as http,
        http.stream("POST", "/generate", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        command.process.send_signal(signal.SIGTERM)
        command.process.send_signal(signal.SIGINT)
        rest = "".join(lines)
    code, seconds = command.end()
    assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert seconds < 3
    assert "shutting-down" in rest or "[DONE]" not in rest


def test_a_worker_that_is_killed_ends_the_server_within_two_seconds(commands: list[Command]) -> None:
    command = serve(commands, "--max-running", "1")  # so that the requests last
    url = command.url()
    worker = child_of(command.process.pid)
    with (
        httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        body = {"text": ["a"] * 64, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        running = pool.submit(http.post, "/generate", json=body)
        until(lambda: gauge(http, "requests_running") > 0)
        os.kill(worker, signal.SIGKILL)
        code, seconds = command.end()
        assert running.result().json()["error"]["code"] == "worker-died"
    assert code == 6
    assert seconds < 2.5
    failed = command.wait_for("failed")
    assert failed["code"] == "worker-died"
    assert "signal 9 while serving" in failed["message"]


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])


def test_the_engine_ends_when_the_server_is_killed(commands: list[Command]) -> None:
    command = serve(commands)
    command.url()
    worker = child_of(command.process.pid)
    command.process.kill()
    until(
        lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2],
        5,
    )


def fail(*words: str) -> tuple[int, str]:
    """(exit code, what a user sees), with this machine's names and numbers taken out."""
    ran = subprocess.run(
        [sys.executable, "-m", "gtp_serve.server", *words, "-q"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
    text = ran.stderr
    for word in words:
        if word.startswith("/"):
            text = text.replace(word, "/PATH")
    return ran.returncode, re.sub(r"\d+(\.\d+)? [GM]iB", "N GiB", re.sub(r"pid \d+ \(.*\)", "pid N (WHO)", text))


def test_each_failure_to_start_reads_as_committed(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            "wrong folder": ("--ckpt", str(empty), "--port", "0"),
            "no such folder": ("--ckpt", str(tmp_path / "none"), "--port", "0"),
            "port in use": ("--ckpt", str(CKPT), "--no-tokenizer", "--port", str(port)),
            "no tokenizer": ("--ckpt", str(CKPT), "--port", "0"),
            "tokenizer is elsewhere": ("--ckpt", str(CKPT), "--port", "0", "--tokenizer", str(empty)),
            "too big": (
                "--ckpt",
                str(CKPT),
                "--no-tokenizer",
                "--port",
                "0",
                "--kv-memory",
                "1KiB",
                "--context",
                "64",
            ),
            "longer than the model": ("--ckpt", str(CKPT), "--no-tokenizer", "--port", "0", "--context", "9999"),
            "no such iteration": ("--ckpt", str(CKPT), "--no-tokenizer", "--port", "0", "--iteration", "7"),
            "grid is said wrongly": (
                "--ckpt",
                str(CKPT),
                "--no-tokenizer",
                "--port",
                "0",
                "--saved-gtp",
                "8",
            ),
        }
        written = []
        for name, words in cases.items():
            code, text = fail(*words)
            text = text.replace(str(port + 1), "PORT+1").replace(str(port), "PORT").replace(str(tmp_path), "/TMP")
            written.append(f"# {name}: exit {code}\n{text}")
    same_as_golden("start-failures.txt", "\n".join(written))
