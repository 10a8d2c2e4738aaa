"""How cost grows: sequences in a step, positions of each, shards in a plan, replicas; each curve with its exponent.

Exponent 1: twice as much costs twice as much.  For a decode step it is near 0 while reading the weights is all that
costs, and near 1 once each sequence costs its own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_parts.decode_step import DecodeStep
from bench_parts.model import Prompts
from bench_parts.numbers import fit_power, significant
from bench_parts.plot import Curve, draw_curves
from bench_parts.results import Keeper, add_common
from bench_parts.table import table
from peers.ours_http import ask_all, drain, start, stop

from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.plan import build_plan
from gtp_serve.server.bench_http import parse_url

Points = list[tuple[float, float]]

_ROWS, _COLUMNS = 64, 8
"""Of a shard in a made-up plan."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all curves that the time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--minutes", type=float, help="start nothing after this: 3, or 0.8 with --quick")
    parser.add_argument("--replicas", help="for example 1,2 (default: 1,2 where Ray is installed; none with --quick)")
    args = parser.parse_args(argv)
    end = time.monotonic() + 60 * (args.minutes or (0.8 if args.quick else 3.0))
    keeper = Keeper("scaling", args)
    curves: dict[str, Points] = {}
    curves["shards in a plan: seconds"] = plan_curve(end, quick=args.quick)
    curves |= step_curves(args.model, args.threads, end, quick=args.quick)
    wanted = replicas_wanted(args.replicas, quick=args.quick)
    if wanted and time.monotonic() < end:
        curves["replicas: tokens a second"] = replica_curve(args, wanted, end)
    found = {name: points for name, points in curves.items() if points}
    picture = draw_curves(
        "How cost grows", "how many", "as named", [Curve(label=name, points=points) for name, points in found.items()]
    )
    keeper.keep({"curves": found}, report(found), picture)
    return 0


def report(curves: dict[str, Points]) -> str:
    """A row for each curve."""
    rows = []
    for name, points in curves.items():
        exponent = fit_power(*zip(*points, strict=True)).words() if len({x for x, _ in points}) > 1 else ""
        words = ", ".join(f"{x:,.0f}: {significant(y)}" for x, y in points)
        rows.append([name, words, exponent])
    return table(["curve", "measured", "exponent"], rows)


def step_curves(ckpt: Path, threads: int, end: float, *, quick: bool) -> dict[str, Points]:
    """A decode step over the number of sequences, and over the positions of each."""
    import torch  # the other curves need none

    torch.set_num_threads(threads)
    step = DecodeStep(ckpt, rows=256, context=8192, tokens=16384)
    print(f"decode steps by {step.ops}", flush=True)
    budget = 0.2 if quick else 1.0
    batches = (1, 4, 16, 64, 256) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts = (128, 1024, 8192) if quick else (128, 256, 512, 1024, 2048, 4096, 8192)
    by_rows = _while_time(end, batches, lambda rows: step.seconds(rows, 128, budget) * 1e3)
    by_context = _while_time(end, contexts, lambda context: step.seconds(4, context, budget) * 1e3)
    return {"sequences of 128 in a step: ms": by_rows, "positions of 4 sequences: ms": by_context}


def _while_time(end: float, xs: Sequence[int], measure: Callable[[int], float]) -> Points:
    points: Points = []
    for x in xs:
        if time.monotonic() > end:
            break
        points.append((float(x), measure(x)))
        print(f"  {x}: {significant(points[-1][1])}", flush=True)
    return points


def plan_curve(end: float, *, quick: bool) -> Points:
    """Seconds to decide a plan over so many shards."""
    counts = (100, 1_000, 10_000) if quick else (100, 1_000, 10_000, 100_000, 1_000_000)
    return _while_time(end, counts, plan_seconds)


def plan_seconds(shards: int, tensors_each: int = 100) -> float:
    """A trainer's shards, so many rows each, for a server's tensors of a hundred shards."""
    rows = _ROWS * tensors_each
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(-(-shards // tensors_each))]
    shapes = dict.fromkeys(names, (rows, _COLUMNS))
    have = [_shard(name, start, _ROWS) for name in names for start in range(0, rows, _ROWS)]
    want = [_shard(name, 0, rows) for name in names]
    began = time.perf_counter()
    plan = build_plan(have, want, shapes)
    seconds = time.perf_counter() - began
    if len(plan.copies) != len(have):
        raise RuntimeError(f"{len(plan.copies)} copies of {len(have)} shards")
    return seconds


def _shard(name: str, start: int, rows: int) -> Shard:
    local = Box((0, 0), (rows, _COLUMNS))
    logical = Box((start, 0), (rows, _COLUMNS))
    return Shard(f"{name}@{start}", (rows, _COLUMNS), "bfloat16", (Span(name, local, logical),))


def replicas_wanted(words: str | None, *, quick: bool) -> list[int]:
    """How many replicas to measure, in turn."""
    if words is None:
        words = "" if quick or importlib.util.find_spec("ray") is None else "1,2"
    return [int(word) for word in words.split(",") if word]


def replica_curve(args: argparse.Namespace, counts: Sequence[int], end: float) -> Points:
    """Tokens a second of 16 streams, with a thread for each replica."""
    prompts = Prompts(args.model)
    points: Points = []
    for count in counts:
        if time.monotonic() > end:
            break
        words = [
            sys.executable,
            "-m",
            "gtp_serve.server",
            "cluster",
            "--ckpt",
            str(args.model),
            "--replicas",
            str(count),
            "--address",
            "local",
        ]
        words += [
            "--device",
            "cpu",
            "--threads",
            "1",
            "--context",
            "512",
            "--no-tokenizer",
            "--port",
            "0",
            "--log",
            "json",
        ]
        try:
            server, url = start(words)
        except RuntimeError as failure:
            print(f"  {count} replicas: {failure}", flush=True)
            break
        try:
            drain(server)
            where = parse_url(url)
            asyncio.run(ask_all(where, prompts.take(count, 16), 4, lambda _: True))
            began = time.perf_counter()
            replies = asyncio.run(ask_all(where, prompts.take(16, 16), 32, lambda _: True))
            rate = sum(map(len, replies)) / (time.perf_counter() - began)
        finally:
            stop(server)
        points.append((float(count), rate))
        print(f"  {count} replicas: {rate:.1f} tokens a second", flush=True)
    return points


if __name__ == "__main__":
    sys.exit(main())
