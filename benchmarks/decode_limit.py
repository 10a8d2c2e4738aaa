"""One stream beside memory: tokens a second in ``LLM``, and in the same process, every quarter of a second in turn, how
fast memory is read.

A step of one stream can do no more than read all weights.  What memory gives on a virtual machine changes by half from
one minute to the next, so a limit that was measured before or after says little; in turns both meet the same memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_parts.machine import Busy, ReadSpeed
from bench_parts.model import Prompts, model_size
from bench_parts.numbers import significant
from bench_parts.results import ROOT, Keeper, add_common
from bench_parts.table import table
from peers import ours_llm
from peers.protocol import Options

_DTYPES = ("bf16", "int8")
_PROMPT, _TOKENS = 128, 32
HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each format in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--turns", type=int, help="40, or 10 with --quick")
    parser.add_argument("--dtype", choices=_DTYPES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.turns = args.turns or (10 if args.quick else 40)
    if args.dtype:
        print(json.dumps(in_turns(args)), flush=True)
        os._exit(0)
    keeper, busy = Keeper("decode_limit", args), Busy()
    found = {dtype: in_process(dtype, args) for dtype in _DTYPES}
    keeper.keep({"turns": found, "others_cores": busy.others()}, report(found))
    return 0


def in_process(dtype: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """All turns of one format."""
    command = [sys.executable, __file__, "--dtype", dtype, "--model", str(args.model), "--threads", str(args.threads)]
    command += ["--turns", str(args.turns)]
    path = os.pathsep.join((str(HERE), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(args.threads)}
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    found: list[dict[str, float]] = json.loads(said.splitlines()[-1])
    return found


def in_turns(args: argparse.Namespace) -> list[dict[str, float]]:
    """Of each turn the read bandwidth around it, in GB/s, the tokens a second, and their share of what that allows."""
    options = Options(
        dtype=args.dtype, threads=args.threads, model=args.model, converted=args.model, streams=1, context=512
    )
    generate = ours_llm.load(options)
    weight_bytes = model_size(args.model).weight_bytes(args.dtype)
    prompts = Prompts(args.model).take(1, _PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        memory = ReadSpeed(args.threads, Path(folder))
    generate(prompts, _TOKENS, lambda _: True)
    found: list[dict[str, float]] = []
    before = memory.gbps()
    for _ in range(args.turns):
        rate = tokens_a_second(generate, prompts)
        after = memory.gbps()
        read = (before + after) / 2
        found.append({"read_gbps": read, "tokens_per_second": rate, "share": rate * weight_bytes / read / 1e9})
        before = after
    memory.close()
    return found


def tokens_a_second(generate: Any, prompts: list[list[int]]) -> float:
    """From the first new token to the last one."""
    times: list[float] = []

    def step(counts: Sequence[int]) -> bool:
        times.append(time.perf_counter())
        return True

    generate(prompts, _TOKENS, step)
    return (len(times) - 1) / (times[-1] - times[0])


def report(found: dict[str, list[dict[str, float]]]) -> str:
    """The middle half of all turns."""
    rows = []
    for dtype, turns in found.items():
        cells = [dtype]
        for name, form in (("read_gbps", significant), ("tokens_per_second", significant), ("share", "{:.2f}".format)):
            low, middle, high = statistics.quantiles([turn[name] for turn in turns], n=4)
            cells.append(f"{form(middle)} ({form(low)} to {form(high)})")
        rows.append([*cells, str(len(turns))])
    header = ["one stream in LLM", "memory is read, GB/s", "tokens a second", "share of the limit", "turns"]
    return table(header, rows) + "\n\nMedian (quartiles) of all turns."


if __name__ == "__main__":
    sys.exit(main())
