"""Our server and our ``LLM`` beside other servers and libraries, on the same prompts and the same weights.

Each run is a process of its own; the runs of a round follow one another, and rounds are repeated, so that a machine
that changes its speed changes it for all.  The machine's limits are measured in every round.  What is not installed
is left out (``make bench-peers`` installs it); what fails is reported and not tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_parts.comparison import Outcome, picture, report
from bench_parts.machine import Busy, Limits, gemm_rates, read_bandwidth
from bench_parts.model import Prompts, model_size
from bench_parts.results import Keeper, add_common
from make_peers import FOLDER, HERE, is_ready, model_folder, peer_environment, python_of
from peers.catalogue import PEERS, Peer, find

_STARTS_SECONDS = 45.0
"""What a run may take that was not seen yet."""
_LONGEST_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A peer in one format of the weights."""

    peer: Peer
    dtype: str

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.peer.name}:{self.dtype}"


@dataclass(kw_only=True, slots=True)
class Round:
    """What one round has found."""

    limits: Limits
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep everything; 1 when nothing of ours could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--rounds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--minutes", type=float, help="start no run that would end later: 8, or 2.5 with --quick")
    parser.add_argument("--seconds", type=float, help="of decoding for each number of streams: 2.5, quick 1")
    parser.add_argument("--configs", help="for example llm:bf16,llama-cpp:bf16 (default: all that is installed)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the peers are (build/peers)")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").exists():
        print(f"no model in {args.model}; `gtp-serve demo .demo` makes one", file=sys.stderr)
        return 2
    args.rounds = args.rounds or (1 if args.quick else 3)
    end = time.monotonic() + 60 * (args.minutes or (2.5 if args.quick else 8.0))
    keeper = Keeper("compare", args)
    configs, missing = choose(args.configs, args.folder, quick=args.quick)
    busy = Busy()
    rounds, failures = run_rounds(configs, args, end)
    outcomes = [
        Outcome(
            title=config.peer.title,
            dtype=config.dtype,
            ours=config.peer.ours,
            rounds=[turn.runs.get(config.name) for turn in rounds],
        )
        for config in configs
    ]
    limits = [turn.limits for turn in rounds]
    others = busy.others()
    size = model_size(args.model)
    words = report([outcome for outcome in outcomes if outcome.runs], limits, size, failures | missing, others)
    keeper.keep(
        {
            "limits": [{"read_gbps": one.read_gbps, "gemm_gflops": one.gemm_gflops} for one in limits],
            "runs": {config.name: [turn.runs.get(config.name) for turn in rounds] for config in configs},
            "failures": failures,
            "missing": missing,
            "others_cores": others,
            "versions": versions(args.folder),
        },
        words,
        picture(outcomes, limits, size),
    )
    return 0 if any(outcome.runs and outcome.ours for outcome in outcomes) else 1


def choose(words: str | None, folder: Path, *, quick: bool) -> tuple[list[Config], dict[str, str]]:
    """What to measure, and what is not installed."""
    if words:
        pairs = [word.partition(":") for word in words.split(",")]
        wanted = [Config(peer=find(name), dtype=dtype or find(name).dtypes[0]) for name, _, dtype in pairs]
    else:
        peers = [peer for peer in PEERS if peer.quick or not quick]
        # The formats that hold the checkpoint's own values come first: they are there when the time is over early.
        firsts = [Config(peer=peer, dtype=peer.dtypes[0]) for peer in peers]
        wanted = firsts + [Config(peer=peer, dtype=dtype) for peer in peers for dtype in peer.dtypes[1:] if not quick]
    missing = {config.name: "not installed" for config in wanted if not is_ready(config.peer, folder)}
    return [config for config in wanted if config.name not in missing], missing


def run_rounds(configs: Sequence[Config], args: argparse.Namespace, end: float) -> tuple[list[Round], dict[str, str]]:
    """All rounds that the time allows, and why what failed did."""
    rounds: list[Round] = []
    failures: dict[str, str] = {}
    took: dict[str, float] = {}
    prompts = Prompts(args.model)
    for number in range(args.rounds):
        began = time.monotonic()
        turn = Round(limits=measure_limits(args.threads, quick=args.quick))
        rounds.append(turn)
        facts = f"{turn.limits.read_gbps:.1f} GB/s, {turn.limits.gemm_gflops:.0f} GFLOP/s"
        print(f"round {number + 1}: the machine {facts} ({time.monotonic() - began:.0f} s)", flush=True)
        work = make_work(prompts, args)
        for config in configs:
            left = end - time.monotonic()
            if config.name in failures or left < took.get(config.name, _STARTS_SECONDS if number else 10.0):
                continue
            began = time.monotonic()
            try:
                before, _ = read_bandwidth(args.threads, 3)
                run = run_one(config, work, args, min(left + 30.0, _LONGEST_SECONDS))
                after, _ = read_bandwidth(args.threads, 3)
                # A virtual machine's neighbours take from what memory gives.
                turn.runs[config.name] = run | {"read_gbps": (before + after) / 2}
                state = _short(turn.runs[config.name])
            except subprocess.TimeoutExpired as late:
                failures[config.name] = state = f"not done after {late.timeout:.0f} s"
            except RuntimeError as failure:
                failures[config.name] = state = str(failure)
            took[config.name] = time.monotonic() - began
            print(f"  {config.name}: {state} ({took[config.name]:.0f} s)", flush=True)
    return rounds, failures


def measure_limits(threads: int, *, quick: bool) -> Limits:
    """As they are now."""
    gbps, _ = read_bandwidth(threads, 5 if quick else 9)
    return Limits(read_gbps=gbps, gemm_gflops=max(gemm_rates(threads, 0.2 if quick else 0.6).values()))


def make_work(prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    """The same for all in a round, other prompts in every round."""
    seconds = args.seconds or (1.0 if args.quick else 2.5)
    new = 128
    cases = [
        {"name": "1", "prompts": prompts.take(1, 128), "new": new, "seconds": seconds},
        {"name": "8", "prompts": prompts.take(8, 64), "new": new, "seconds": seconds},
        {"name": "32", "prompts": prompts.take(32, 32), "new": new, "seconds": seconds},
        {"name": "prefill", "prompts": prompts.take(1, 512 if args.quick else 1024), "new": 1, "seconds": 0.0},
    ]
    return {"streams": 32, "context": 1280, "warm": prompts.take(1, 32)[0], "cases": cases}


def run_one(config: Config, work: dict[str, Any], args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """One process of a peer, from its start to its last case.

    :raises RuntimeError: it failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work.json").write_text(json.dumps(work), encoding="utf-8")
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [str(python_of(config.peer, args.folder)), "-m", config.peer.module, "--dtype", config.dtype]
        command += ["--model", str(args.model.absolute()), "--threads", str(args.threads), "--out", str(out)]
        command += ["--converted", str(model_folder(config.peer, config.dtype, args.folder))]
        command += ["--work", str(Path(folder) / "work.json")]
        busy = Busy()
        environment = peer_environment(args.threads) | {"BENCH_BEGAN": str(time.time())}
        if config.peer.ours:
            environment["PYTHONPATH"] = os.pathsep.join((str(HERE), str(HERE.parent)))
        with log.open("wb") as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, env=environment, cwd=folder, timeout=seconds, check=False
            )
        if done.returncode or not out.exists():
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["no words"]
            raise RuntimeError(f"exited with {done.returncode}: {last[0][:300]}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found | {"others_cores": busy.others()}


def _short(run: dict[str, Any]) -> str:
    rates = {name: case.get("decode_tps") for name, case in run["cases"].items()}
    words = [f"{name} streams {rate:.1f}/s" for name, rate in rates.items() if rate]
    return f"first token after {run['first_token_seconds']:.1f} s, {', '.join(words)}"


def versions(folder: Path) -> dict[str, list[str]]:
    """What is installed for each peer."""
    return {
        peer.name: (folder / peer.name / "installed.txt").read_text(encoding="utf-8").split()
        for peer in PEERS
        if not peer.ours and is_ready(peer, folder)
    }


if __name__ == "__main__":
    sys.exit(main())
