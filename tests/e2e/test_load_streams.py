"""500 clients at once against a real server: no wrong answer, and afterwards nothing that was not there before.

GTP_SERVE_LONG_TESTS=1 adds a soak with an update each minute: GTP_SERVE_SOAK_SECONDS=600 long (7200 before a release).
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoint_files import SMALL, random_tensors, write_hf
from load_storm import KINDS, NEW, Held, Storm, ask_alone, children_of, held_by
from safetensors.torch import save_file
from serve_command import Command

from gtp_serve.layout.huggingface import stored_name

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

CONFIG = replace(SMALL, hidden_size=32, head_dim=8, max_context=256, dtype="float32")
CLIENTS = 500
SOAK_SECONDS = float(os.environ.get("GTP_SERVE_SOAK_SECONDS", "600"))
UPDATE_SECONDS = 60.0
GROWTH = 48 << 20
"""Bytes of memory that a process may have taken since it was warm: allocators keep some of each peak."""
STALLED_SECONDS = 3.0
"""In place of a minute, for the test of a server whose engine stands still."""


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(3, CONFIG.vocab_size) for _ in range(rng.randint(3, 12))) for _ in range(20)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for seed, name in enumerate("ab"):
        found[name] = tmp_path_factory.mktemp(name)
        write_hf(found[name], CONFIG)
        values = {stored_name(key, CONFIG.family): value for key, value in random_tensors(CONFIG, seed).items()}
        save_file(values, found[name] / "model.safetensors")
    return found


def serve(folder: Path, *words: str, **options: Any) -> Command:
    return Command(
        *("--ckpt", str(folder), "--port", "0", "--no-tokenizer", "--device", "cpu", "--deterministic"),
        *("--max-running", "64", "--kv-memory", "4MiB", *words),
        **options,
    )


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Command]:
    command = serve(folders["a"])
    try:
        yield command
    finally:
        command.stop()


def push(url: str, folder: Path, version: str, in_flight: str = "keep") -> None:
    body = {"version": version, "source": {"kind": "disk", "path": str(folder)}, "in_flight": in_flight, "wait": True}
    reply = httpx.post(f"{url}/weights/updates", json=body, trust_env=False, timeout=300)
    assert reply.status_code == 200, reply.text


def settled(command: Command) -> dict[str, Held]:
    """What the server's processes hold once nothing runs."""
    url, deadline = command.url(), time.monotonic() + 120
    while True:
        text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
        busy = [line for line in text.splitlines() if line.split(" ")[0] in _GAUGES and float(line.split(" ")[-1])]
        if not busy:
            break
        assert time.monotonic() < deadline, f"still not idle: {busy}"
        time.sleep(0.2)
    time.sleep(1.0)
    pid = command.process.pid
    return {"http": held_by(pid)} | {f"engine{n}": held_by(child) for n, child in enumerate(children_of(pid))}


_GAUGES = ("gtp_serve_requests_running", "gtp_serve_requests_waiting", "gtp_serve_calls_open")


def check_flat(before: dict[str, Held], after: dict[str, Held], growth: int = GROWTH) -> None:
    assert before.keys() == after.keys()
    for name, held in after.items():
        assert held.threads <= before[name].threads + 1, (name, before, after)
        assert held.descriptors <= before[name].descriptors + 3, (name, before, after)
        assert held.rss <= before[name].rss + growth, (name, before, after)


def test_five_hundred_clients_good_and_bad_get_what_is_theirs_and_leave_nothing(
    server: Command, folders: dict[str, Path]
) -> None:
    url = server.url()
    expected = {"0": ask_alone(url, prompts())}
    assert len({tuple(ids) for ids in expected["0"].values()}) > 10  # or wrong answers would not show

    warm = Storm(url, expected, seed=1).run(CLIENTS, rounds=1)
    before = settled(server)
    tally = Storm(url, expected, seed=2).run(CLIENTS, rounds=3)
    after = settled(server)

    print(json.dumps({"done": tally.done, "tokens": tally.tokens, "before": str(before), "after": str(after)}))
    assert warm.wrong + tally.wrong == []
    assert tally.most_open == CLIENTS
    assert all(tally.done[kind] > 10 for kind in KINDS)
    check_flat(before, after)
    assert ask_alone(url, prompts()[:5]) == dict(list(expected["0"].items())[:5])


PATCHED = (
    "import sys\n"
    "from gtp_serve.server import state\n"
    f"state.STALLED_SECONDS = {STALLED_SECONDS}\n"
    "from gtp_serve.server.cli import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


def health(url: str) -> int:
    return httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code


def wait_for_health(url: str, status: int, seconds: float) -> float:
    started = time.monotonic()
    while health(url) != status:
        assert time.monotonic() - started < seconds, f"/health was never {status}"
        time.sleep(0.1)
    return time.monotonic() - started


def test_health_is_red_while_the_engine_stands_still_and_green_again_afterwards(folders: dict[str, Path]) -> None:
    command = serve(folders["a"], script=PATCHED)
    try:
        url = command.url()
        expected = ask_alone(url, prompts()[:1])
        (engine,) = children_of(command.process.pid)
        assert health(url) == 200
        os.kill(engine, signal.SIGSTOP)
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(ask_alone(url, prompts()[:1])))
        asking.start()
        try:
            assert wait_for_health(url, 503, 60) >= STALLED_SECONDS - 1
            assert httpx.get(f"{url}/model_info", trust_env=False, timeout=60).status_code == 200  # it answers still
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for_health(url, 200, 60)
        asking.join(120)
        assert answers == [expected]
    finally:
        command.stop()


@pytest.mark.skipif("GTP_SERVE_LONG_TESTS" not in os.environ, reason="ten minutes or more: GTP_SERVE_LONG_TESTS=1")
@pytest.mark.timeout(5 * SOAK_SECONDS + 1200)
def test_a_soak_with_an_update_each_minute_changes_nothing_but_the_version(
    server: Command, folders: dict[str, Path]
) -> None:
    url = server.url()
    expected = {"0": ask_alone(url, prompts())}
    push(url, folders["b"], "first")
    expected["first"] = ask_alone(url, prompts())
    Storm(url, expected, seed=3).run(CLIENTS, rounds=2)
    samples, over, updates = [settled(server)], threading.Event(), 0

    def update_each_minute() -> None:
        nonlocal updates
        while not over.wait(UPDATE_SECONDS):
            updates += 1
            version, which = f"soak-{updates}", "ab"[updates % 2 == 0]
            expected[version] = expected["0" if which == "a" else "first"]
            push(url, folders[which], version, ("keep", "recompute", "wait")[updates % 3])

    updating = threading.Thread(target=update_each_minute)
    updating.start()
    tallies, end, seed = [], time.monotonic() + SOAK_SECONDS, 10
    try:
        while time.monotonic() < end:
            seed += 1
            tallies.append(Storm(url, expected, seed=seed).run(CLIENTS, seconds=min(120, SOAK_SECONDS / 5)))
            samples.append(settled(server))
            line = {"at": seed - 10, "done": sum(tallies[-1].done.values()), "wrong": len(tallies[-1].wrong)}
            print(
                json.dumps(line | {"held": {k: str(v) for k, v in samples[-1].items()}, "updates": updates}), flush=True
            )
    finally:
        over.set()
        updating.join(300)
    assert [wrong for tally in tallies for wrong in tally.wrong][:5] == []
    assert updates >= int(SOAK_SECONDS / UPDATE_SECONDS / 3)
    check_flat(samples[0], samples[-1])
    half = samples[len(samples) // 2]
    check_flat(half, samples[-1], GROWTH // 2)  # it does not go on growing


def test_the_oracle_knows_a_wrong_answer() -> None:
    prompt, other = prompts()[:2]
    storm = Storm("http://127.0.0.1:1", {"0": {prompt: list(range(NEW)), other: [9] * NEW}}, seed=0)
    meta = {"weight_versions": [{"version": "0", "start": 0, "end": 4}], "finish_reason": {"type": "length"}}
    good = json.dumps({"output_ids": [0, 1, 2, 3], "meta_info": meta}).encode()
    for raw, wrong in ((good, False), (good.replace(b"[0, 1", b"[0, 2"), True)):
        storm.tally.wrong.clear()
        storm._judge("whole", prompt, 4, b"HTTP/1.1 200 OK\r\n\r\n" + raw)
        assert bool(storm.tally.wrong) == wrong
