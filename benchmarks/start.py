"""From the start of the process to the first token, and the memory that it takes: the server as a user starts it.

The first start is not counted: it reads the files of checkpoint and packages into the page cache.  A token counts when
a client has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_parts.machine import Busy
from bench_parts.model import model_size
from bench_parts.numbers import spread
from bench_parts.results import Keeper, add_common
from bench_parts.table import table
from peers.ours_http import stop
from peers.protocol import peak_rss

_KV_BYTES = 64 << 20
_ALLOWED = 350
"""MiB beyond weights and KV cache."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when more memory was taken than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--runs", type=int, help="3, or 2 with --quick")
    args = parser.parse_args(argv)
    keeper, busy = Keeper("start", args), Busy()
    runs = [run(args.model) for _ in range((args.runs or (2 if args.quick else 3)) + 1)][1:]
    weights = model_size(args.model).bytes >> 20
    rows = [[name, *(words(runs, name),)] for name in runs[0] if name.endswith("seconds")]
    most = max(one["peak_mib"] for one in runs)
    over = most - weights - (_KV_BYTES >> 20)
    rows.append(["peak resident, all processes, MiB", words(runs, "peak_mib")])
    rows.append([f"of it beyond weights ({weights}) and KV cache ({_KV_BYTES >> 20}), at most", f"{over:.0f}"])
    keeper.keep(
        {"runs": runs, "others_cores": busy.others()},
        table(["gtp-serve, start to first token", "median (lowest to highest)"], rows),
    )
    return 0 if over <= _ALLOWED else 1


def words(runs: Sequence[dict[str, float]], name: str) -> str:
    """The spread of one number."""
    found = spread(one[name] for one in runs)
    return "" if found is None else found.words()


def run(model: Path) -> dict[str, float]:
    """One start."""
    command = [sys.executable, "-m", "gtp_serve.server", "--ckpt", str(model), "--device", "cpu", "--port", "0"]
    command += ["--kv-memory", str(_KV_BYTES), "--log", "json"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        found: dict[str, float] = {}
        assert process.stderr is not None
        for line in process.stderr:
            said: dict[str, Any] = json.loads(line) if line.startswith("{") else {"event": ""}
            if said["event"] == "phase" and said["state"] == "ok":
                name = "port" if said["phase"].startswith("port") else said["phase"]
                found[f"{name}: done after seconds"] = time.perf_counter() - began
            if said["event"] == "ready":
                ask(said["url"])
                found["first token at a client: after seconds"] = time.perf_counter() - began
                break
        else:
            raise RuntimeError("the server ended before it was ready")
        found["peak_mib"] = peak_rss(process.pid) / 2**20
        return found
    finally:
        stop(process)


def ask(url: str) -> None:
    """One token."""
    body = json.dumps({"text": "2+2=", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        json.loads(answer.read())


if __name__ == "__main__":
    sys.exit(main())
