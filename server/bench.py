"""``gtp-serve bench URL``: a load shaped like rollouts, and what it took; optionally with pushes of new weights.  Or,
with ``--parity``, no load but a comparison of log-probabilities.

Closed loop: so many requests at a time, the next when one ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlunsplit

from gtp_serve import __version__
from gtp_serve.errors import EngineFault, EnvironmentFault, UsageError
from gtp_serve.progress import Bar
from gtp_serve.refit.client import WeightsClient
from gtp_serve.server.admin_key import API_KEY_VARIABLE, check_key, find_admin_key, read_key
from gtp_serve.server.bench_http import Connection, parse_url
from gtp_serve.server.bench_load import Job, Sample, Shape, plan_jobs, run_load
from gtp_serve.server.bench_numbers import summarise, timeline
from gtp_serve.server.bench_parity import (
    WORRYING,
    Scored,
    ask_all,
    parity_table,
    read_scores,
    score_with_transformers,
    summarise_parity,
    to_make,
)
from gtp_serve.server.bench_plot import draw
from gtp_serve.server.bench_push import Push, push_repeatedly

_DEFAULTS = {"groups": (64, 16), "inputs": (512, 32), "out": (256, 32)}
"""(of a load, of a comparison)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = "Put a load shaped like rollouts on a server: groups of samples, long-tailed lengths."
    parser.add_argument("url", metavar="URL", help="of the server, for example http://127.0.0.1:30000")
    parser.add_argument("--groups", metavar="N", type=_positive, help="prompts (64; with --parity 16)")
    parser.add_argument("--samples", "--n", metavar="N", type=_positive, default=8, help="replies to each prompt (8)")
    parser.add_argument(
        "--in", metavar="N", dest="inputs", type=_positive, help="tokens of a prompt (512; with --parity 32)"
    )
    parser.add_argument(
        "--out", metavar="N", type=_positive, help="mean tokens of a reply (256; with --parity all have 32)"
    )
    parser.add_argument(
        "--spread", metavar="S", type=_spread, default=0.8, help="of log-normal lengths; 0: equal (0.8)"
    )
    parser.add_argument("--concurrency", metavar="N", type=_positive, default=64, help="requests at a time (64)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of prompts, lengths and sampling (0)")
    parser.add_argument("--timeout", metavar="S", type=_seconds, default=300.0, help="of silence in a reply (300)")
    parser.add_argument(
        "--parity",
        metavar="WHERE",
        help="no load: compare greedy tokens and log-probabilities with transformers on this Hugging Face folder, or"
        " log-probabilities with a trainer's in this JSON-lines file (input_ids, output_ids, logprobs)",
    )
    parser.add_argument("--push", metavar="PATH", help="checkpoint to push meanwhile, as the server's machine sees it")
    parser.add_argument("--every", metavar="S", type=_seconds, default=20.0, help="seconds between pushes (20)")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help=f"file with the server's API key (or {API_KEY_VARIABLE})"
    )
    parser.add_argument("--admin-key-file", metavar="FILE", help="file with its admin key, for --push")
    parser.add_argument("--json", metavar="FILE", help="write everything there as JSON; - prints it instead")
    parser.add_argument("--plot", metavar="FILE", help="write the run as an SVG picture")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to {1 << 20}")
    return int(text)


def _number(text: str, low: float, high: float) -> float:
    with suppress(ValueError):
        if low <= float(text) <= high:
            return float(text)
    raise argparse.ArgumentTypeError(f"'{text}' is not a number from {low:g} to {high:g}")


def _spread(text: str) -> float:
    return _number(text, 0.0, 3.0)


def _seconds(text: str) -> float:
    return _number(text, 0.01, 86400.0)


def run(args: argparse.Namespace) -> int:
    """Run the load and print what came of it; exit code 1 when some requests failed, or a push, or there was none.

    :raises EngineFault: when every request failed.
    """
    url = parse_url(args.url)
    for name, (load, parity) in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, load if args.parity is None else parity)
    shape = Shape(
        groups=args.groups,
        samples=args.samples,
        input_tokens=args.inputs,
        output_tokens=args.out,
        spread=0.0 if args.parity is not None else args.spread,
        concurrency=args.concurrency,
        seed=args.seed,
    )
    _check_writable([path for path in (args.json, args.plot) if path not in (None, "-")])
    if args.plot not in (None, "-") and Path(args.plot).suffix.lower() != ".svg":
        raise UsageError(f"--plot writes an SVG picture, and {args.plot} is no name of one", [("name it", "FILE.svg")])
    key = _api_key(args.api_key_file)
    if args.parity is not None:
        return _run_parity(args, url, key, shape)
    pusher = _pusher(args, url, key)
    info, samples, pushes, seconds = asyncio.run(_measure(args, url, key, shape, pusher))
    numbers = summarise(samples, pushes, seconds)
    fits = info["max_context"] - 1
    notes = []
    if shape.input_tokens > fits:
        notes.append(f"prompts have {fits:,} tokens, not {shape.input_tokens:,}: more do not fit the context")
        shape = replace(shape, input_tokens=fits)
    if pusher is not None and not pushes:
        when = f"after {args.every:g} s (--every)"
        notes.append(f"nothing was pushed: the run was over before the first push, {when}")
    if numbers["failed"] == numbers["requests"]:
        raise EngineFault(
            "no request was answered in full", [("first", numbers["first_failure"] or "?")], code="bench-failed"
        )
    _write(args, info, shape, numbers, samples, pushes)
    if notes and args.json != "-":
        sys.stdout.write("".join(f"\n  note: {note}" for note in notes) + "\n")
    unpushed = pusher is not None and not pushes
    return 1 if numbers["failed"] or unpushed or any(push.error for push in pushes) else 0


def _run_parity(args: argparse.Namespace, url: SplitResult, key: str | None, shape: Shape) -> int:
    for option, given in (("--push", args.push), ("--plot", args.plot)):
        if given is not None:
            raise UsageError(f"{option} belongs to a load, and --parity puts none on the server")
    place = Path(args.parity)
    if not place.exists():
        raise UsageError(f"--parity {place} is neither a folder nor a file")

    theirs = None if place.is_dir() else read_scores(place)

    async def measure() -> tuple[dict[str, Any], list[Scored]]:
        info = await _model_info(url, key, args.timeout)
        scored = theirs or [to_make(job) for job in _plan(replace(shape, samples=1), info)]
        await ask_all(url, key, args.timeout, scored, shape.concurrency)
        return info, scored

    info, scored = asyncio.run(measure())
    if theirs is None:
        score_with_transformers(place, info["dtype"], scored)
    numbers = summarise_parity(scored)
    if args.json is not None:
        _save(
            args.json, json.dumps({"bench_version": __version__, "server": _server(info), "parity": numbers}, indent=1)
        )
    if args.json != "-":
        sys.stdout.write("\n".join(parity_table(info, place, numbers)) + "\n")
    return 1 if numbers["token_mult_prob_error"] > WORRYING else 0


async def _model_info(url: SplitResult, key: str | None, seconds: float) -> dict[str, Any]:
    first = Connection(url, key, seconds)
    try:
        found: dict[str, Any] = await first.get_json("/model_info")
        return found
    finally:
        first.close()


def _plan(shape: Shape, info: dict[str, Any]) -> list[Job]:
    return plan_jobs(shape, vocab_size=info["vocab_size"], max_context=info["max_context"], never=info["eos_token_ids"])


def _check_writable(paths: Sequence[str]) -> None:
    """Before minutes of load are spent on them."""
    for path in paths:
        if not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no such folder")


def _api_key(file: str | None) -> str | None:
    if file is not None:
        return check_key("--api-key-file", read_key("--api-key-file", file))
    named = os.environ.get(API_KEY_VARIABLE)
    return None if not named else check_key(API_KEY_VARIABLE, named)


def _pusher(args: argparse.Namespace, url: SplitResult, api_key: str | None) -> WeightsClient | None:
    if args.push is None:
        return None
    return WeightsClient(urlunsplit(url), find_admin_key(None, args.admin_key_file, os.environ) or api_key)


async def _measure(
    args: argparse.Namespace, url: SplitResult, key: str | None, shape: Shape, pusher: WeightsClient | None
) -> tuple[dict[str, Any], list[Sample], list[Push], float]:
    info = await _model_info(url, key, args.timeout)
    jobs = _plan(shape, info)
    pushes: list[Push] = []
    began = time.monotonic()
    with Bar("requests", len(jobs), unit="requests") as bar:
        stop = asyncio.Event()
        pushing = None
        if pusher is not None:
            pushing = asyncio.create_task(push_repeatedly(pusher, args.push, args.every, began, pushes, stop))
        samples = await run_load(
            url,
            key,
            jobs,
            concurrency=shape.concurrency,
            seconds=args.timeout,
            began=began,
            done=lambda sample: bar.advance("failed" if sample.error else ""),
        )
        seconds = time.monotonic() - began
        stop.set()
        if pushing is not None:
            await pushing
    return info, samples, pushes, seconds


def _write(
    args: argparse.Namespace,
    info: dict[str, Any],
    shape: Shape,
    numbers: dict[str, Any],
    samples: Sequence[Sample],
    pushes: Sequence[Push],
) -> None:
    if args.json is not None:
        _save(args.json, json.dumps(_document(info, shape, numbers), indent=1))
    if args.plot is not None:
        _save(args.plot, _picture(info, shape, numbers, samples, pushes))
    if args.json != "-":
        sys.stdout.write("\n".join(table(info, shape, numbers)) + "\n")


def _save(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(f"{error.filename} cannot be written: {error.strerror}") from error


def _server(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info.get(name) for name in ("served_model_name", "server_version", "device", "dtype")}


def _document(info: dict[str, Any], shape: Shape, numbers: dict[str, Any]) -> dict[str, Any]:
    asked = {name: getattr(shape, name) for name in Shape.__slots__}
    return {"bench_version": __version__, "server": _server(info), "load": asked, **numbers}


def _picture(
    info: dict[str, Any], shape: Shape, numbers: dict[str, Any], samples: Sequence[Sample], pushes: Sequence[Push]
) -> str:
    title = f"{info['served_model_name']}: {shape.groups} x {shape.samples} replies, {shape.concurrency} at a time"
    bands = [(push.began, push.ended, f"push {push.version}", not push.error) for push in pushes]
    return draw(timeline(samples, numbers["seconds"]), bands, numbers["seconds"], title)


def table(info: dict[str, Any], shape: Shape, numbers: dict[str, Any]) -> list[str]:
    """The run for a person."""
    lines = [
        f"{info['served_model_name']} on {info['device']}, {info['dtype']}, gtp-serve {info['server_version']}",
        f"{shape.groups} groups x {shape.samples} samples, {shape.concurrency} at a time: {numbers['seconds']:.1f} s",
        "",
        f"  output       {numbers['output_tokens_per_second']:>12,.1f} tokens/s   {numbers['output_tokens']:,} tokens",
        f"  input        {numbers['input_tokens_per_second']:>12,.1f} tokens/s   "
        f"{numbers['input_tokens']:,} tokens, {numbers['cached_share']:.0%} from the prefix cache",
        f"  tail         {numbers['tail_share']:>12.0%} of the time after 90% of the replies had ended",
        "",
        f"  {'':<13}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    for name, label, scale, unit in (
        ("ttft", "first token", 1000, "ms"),
        ("itl", "next token", 1000, "ms"),
        ("e2e", "whole reply", 1, "s"),
        ("output_length", "length", 1, "tokens"),
    ):
        lines.append(_row(label, numbers[name], scale, unit))
    lines += _push_lines(numbers)
    if numbers["failed"]:
        lines += ["", f"  failed       {numbers['failed']} of {numbers['requests']}: {numbers['first_failure']}"]
    return lines


def _row(label: str, spread: dict[str, float] | None, scale: float, unit: str) -> str:
    if spread is None:
        return f"  {label:<13}{'none':>10}"
    digits = 2 if unit == "s" else 1
    values = "".join(f"{scale * spread[name]:>10,.{digits}f}" for name in ("mean", "p50", "p90", "p99", "max"))
    return f"  {label:<13}{values} {unit}"


def _push_lines(numbers: dict[str, Any]) -> list[str]:
    lines = [""] if numbers["pushes"] else []
    for push in numbers["pushes"]:
        if push["error"]:
            lines.append(f"  push {push['version']}: not taken after {push['seconds']:.1f} s: {push['error']}")
            continue
        before, during = push["tokens_per_second_before"], push["tokens_per_second_during"]
        change = f" ({during / before - 1:+.0%})" if before else ""
        lines.append(
            f"  push {push['version']}: {push['seconds']:.1f} s, no step for {1000 * push['stall_seconds']:.0f} ms, "
            f"{before:,.1f} -> {during:,.1f} tokens/s{change}"
        )
    if numbers["pushes"]:
        lines.append(f"  {numbers['mixed_samples']} replies hold tokens of more than one version")
    return lines
