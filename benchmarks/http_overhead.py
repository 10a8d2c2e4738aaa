"""What HTTP and scheduling cost beside the model: the same decode step in the engine, and through the server.

At 32 streams: wall time of a step over HTTP and in ``LLM``, and within the latter of the recorded step alone, which so
has the same memory, and with tokens that are drawn; the best of interleaved rounds.  The rest is overhead, and so is
the processor time of the HTTP process.  At 200 streams, all sent at the same moment with text to be tokenised: the
longest time that the server's event loop did not come round.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from bench_parts.machine import Busy
from bench_parts.model import Prompts
from bench_parts.numbers import significant
from bench_parts.results import ROOT, Keeper, add_common
from bench_parts.table import table
from peers import ours_llm
from peers.ours_http import ask_all, drain, start, stop
from peers.protocol import Case, Clock, Options

_STREAMS, _MANY = 32, 200
_PROMPT, _CONTEXT = 32, 512
_MOST_SHARE, _MOST_SECONDS = 0.10, 0.100
_LOOK_SECONDS = 0.5
_DRAWN = {"temperature 1": {"temperature": 1.0}, "temperature 1 and top_p 0.9": {"temperature": 1.0, "top_p": 0.9}}
"""What is drawn instead of the most probable token."""
HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 when a limit was passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--seconds", type=float, help="of decoding: 5, or 2 with --quick")
    parser.add_argument("--profile", action="store_true", help="print where the engine's own time goes (slower)")
    parser.add_argument("--part", choices=("llm",), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.seconds = args.seconds or (2.0 if args.quick else 5.0)
    if args.part:
        print(json.dumps(llm_step(args)), flush=True)
        os._exit(0)
    keeper, busy = Keeper("http_overhead", args), Busy()
    rounds = [one_round(args) for _ in range(1 if args.quick else 4)]
    found = undisturbed(rounds)
    keeper.keep(found | {"rounds": rounds, "others_cores": busy.others()}, report(found))
    return 0 if found["loop"]["busy_seconds"] <= _MOST_SECONDS and share(found) <= _MOST_SHARE else 1


def one_round(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All parts, one after the other."""
    return serve(args) | {"llm": in_process("llm", args)}


def undisturbed(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """The least of all rounds: neighbours of a virtual machine take memory's time for seconds; but the worst of the
    loop.
    """
    found: dict[str, Any] = {}
    for part, numbers in rounds[0].items():
        pick = max if part == "loop" else min
        found[part] = {name: pick(turn[part][name] for turn in rounds) for name in numbers}
    return found


def share(found: dict[str, Any]) -> float:
    """Of a step over HTTP, what is not the model's."""
    return float(1 - found["llm"]["program_seconds"] / found["http"]["step_seconds"])


def report(found: dict[str, Any]) -> str:
    """All of it as a table."""
    bare, llm, http = found["llm"]["program_seconds"], found["llm"]["step_seconds"], found["http"]["step_seconds"]
    loop = found["loop"]
    rows = [
        [f"a decode step of {_STREAMS} sequences alone", f"{significant(bare * 1e3)} ms"],
        ["the same in LLM: scheduling, sampling, results", f"{significant(llm * 1e3)} ms, {1 - bare / llm:.1%} of it"],
        *([f"the same with {name}", f"{significant(found['llm'][f'{name}_seconds'] * 1e3)} ms"] for name in _DRAWN),
        ["the greedy step over HTTP", f"{significant(http * 1e3)} ms, {share(found):.1%} of it not the model's"],
        ["processor time of the HTTP process, each step", f"{significant(found['http']['http_cpu_seconds'] * 1e3)} ms"],
        [
            f"{_MANY} prompts at one moment: the loop computed at a stretch, at most",
            f"{loop['busy_seconds'] * 1e3:.0f} ms",
        ],
        [f"{_MANY} prompts at one moment: the loop came late, at most", f"{loop['late_seconds'] * 1e3:.0f} ms"],
    ]
    return table(["at the server", "seen"], rows)


def in_process(part: str, args: argparse.Namespace) -> dict[str, float]:
    """One part in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--model", str(args.model), "--threads", str(args.threads)]
    command += ["--seconds", str(args.seconds), *(["--profile"] if args.profile else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads)}
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def llm_step(args: argparse.Namespace) -> dict[str, float]:
    """The engine in-process, and what of a step is the recorded program's."""
    from gtp_serve.ops.cpu.recording import Program  # only in this process

    options = Options(
        dtype="bf16",
        threads=args.threads,
        model=args.model,
        converted=args.model,
        streams=_STREAMS,
        context=_CONTEXT,
    )
    llm = ours_llm.open_llm(options)
    generate = ours_llm.by(llm, temperature=0)
    prompts = Prompts(args.model)
    generate(prompts.take(_STREAMS, _PROMPT), 4, lambda _: True)
    case = Case(name="32", prompts=prompts.take(_STREAMS, _PROMPT), new=400, seconds=args.seconds)
    programs: list[float] = []
    plain = Program.run

    def run(self: Program, *rows: int) -> None:
        began = time.perf_counter()
        plain(self, *rows)
        if rows[0] == _STREAMS:
            programs.append(time.perf_counter() - began)

    Program.run = run  # type: ignore[method-assign]
    clock, profile = Clock(case), cProfile.Profile()
    if args.profile:
        profile.enable()
    generate(case.prompts, case.new, clock.step)
    if args.profile:
        profile.disable()
        words = io.StringIO()
        pstats.Stats(profile, stream=words).sort_stats("tottime").print_stats(25)
        print(words.getvalue(), file=sys.stderr)
    found = {"step_seconds": _STREAMS / clock.times()["decode_tps"], "program_seconds": statistics.fmean(programs)}
    for name, sampling in _DRAWN.items():
        clock = Clock(case)
        ours_llm.by(llm, **sampling)(case.prompts, case.new, clock.step)
        found[f"{name}_seconds"] = _STREAMS / clock.times()["decode_tps"]
    return found


def serve(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Both measurements over HTTP, on one server."""
    from gtp_serve.server.bench_http import parse_url

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "beats.json"
        words = [sys.executable, "-m", "bench_parts.watched_server", str(out), "--ckpt", str(args.model)]
        words += ["--device", "cpu", "--context", str(_CONTEXT), "--max-running", str(_MANY), "--no-prefix-cache"]
        words += ["--port", "0", "--log", "json"]
        os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE), str(ROOT)))
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
        server, url = start(words)
        try:
            drain(server)
            where = parse_url(url)
            prompts = Prompts(args.model)
            http = asyncio.run(at_32(where, server.pid, prompts, args.seconds))
            out.with_suffix(".begin").touch()
            time.sleep(0.3)
            asyncio.run(at_200(where, prompts))
            loop: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
        finally:
            stop(server)
    return {"http": http, "loop": loop}


async def at_32(where: SplitResult, pid: int, prompts: Prompts, seconds: float) -> dict[str, float]:
    """Wall time of a step, and the HTTP process's processor time in it."""
    await ask_all(where, prompts.take(_STREAMS, _PROMPT), 4, lambda _: True)
    case = Case(name="32", prompts=prompts.take(_STREAMS, _PROMPT), new=400, seconds=seconds)
    clock = Clock(case)
    used: list[tuple[float, float]] = []
    looked = [0.0]

    def step(counts: Sequence[int]) -> bool:
        going_on = clock.step(counts)
        # Seldom: whoever measures takes the same cores.
        if clock.first is not None and (not going_on or not used or clock.last[0] - looked[0] > _LOOK_SECONDS):
            looked[0] = clock.last[0]
            used.append((process_seconds(pid), sum(counts)))
        return going_on

    await ask_all(where, case.prompts, case.new, step)
    steps = (used[-1][1] - used[0][1]) / _STREAMS
    return {
        "step_seconds": _STREAMS / clock.times()["decode_tps"],
        "http_cpu_seconds": (used[-1][0] - used[0][0]) / steps,
    }


async def at_200(where: SplitResult, prompts: Prompts) -> None:
    """Texts of about a thousand characters, all at one moment; a few tokens for each."""
    from gtp_serve.server.bench_http import Connection

    texts = prompts.texts(_MANY, 1000)
    body = {"stream": "delta", "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}

    async def ask(text: str) -> None:
        connection = Connection(where, None, 600.0)
        try:
            async for event in connection.events("/generate", body | {"text": text}):
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
        finally:
            connection.close()

    await asyncio.gather(*(ask(text) for text in texts))


def process_seconds(pid: int) -> float:
    """Processor time of one process so far."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
