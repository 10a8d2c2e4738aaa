"""What every peer goes through, in its own process: the same prompts, greedy, never stopping by itself.

Standard library only, since it runs in every peer's environment.  An adapter gives ``main`` a function that loads the
model and returns a ``Generate``; one JSON object with all times goes to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Step = Callable[[Sequence[int]], bool]
"""Told how many tokens each sequence has now, whenever that has changed; False: it is enough, stop if you can."""
Generate = Callable[[Prompts, int, Step], Prompts]
"""Prompts and a number of new tokens to the new tokens of each; may give fewer after its ``Step`` said stop."""

_BEGAN = time.time()


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What an adapter is told."""

    dtype: str
    threads: int
    model: Path
    """The Hugging Face folder."""
    converted: Path
    """The same model in the peer's own format, where it has one."""
    streams: int
    """Sequences at once, at most."""
    context: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Some prompts at once.

    ``new`` tokens for each at most; decoding ends early once it has lasted ``seconds`` and made 4 tokens for each.
    """

    name: str
    prompts: Prompts
    new: int
    seconds: float


class Clock:
    """Notes when the tokens of a case came."""

    def __init__(self, case: Case, now: Callable[[], float] = time.perf_counter) -> None:
        self._case = case
        self._now = now
        self._began = now()
        self.first: tuple[float, int] | None = None
        """When every sequence had its first token, in seconds since the start, and how many there were by then."""
        self.last: tuple[float, int] = (0.0, 0)

    def step(self, counts: Sequence[int]) -> bool:
        """The number of tokens of each sequence by now; whether to go on."""
        at = self._now() - self._began
        self.last = (at, sum(counts))
        if self.first is None:
            if len(counts) == len(self._case.prompts) and min(counts) > 0:
                self.first = self.last
            return True
        return at - self.first[0] < self._case.seconds or min(counts) < 4

    def times(self) -> dict[str, float]:
        """Seconds of the first tokens, and the rate of those after them."""
        if self.first is None:
            raise RuntimeError(f"{self._case.name}: not every sequence has got a token")
        spent, tokens = self.last[0] - self.first[0], self.last[1] - self.first[1]
        prompt = sum(map(len, self._case.prompts))
        found = {"first_seconds": self.first[0], "prompt_tokens": float(prompt), "decode_tokens": float(tokens)}
        if tokens > 0:
            found["decode_tps"] = tokens / spent
        return found


def main(load: Callable[[Options], Generate], prepare: Callable[[Options], None] | None = None) -> None:
    """Convert the model, or load it and measure; leaves the process at once, whatever threads still run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--converted", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prepare", action="store_true", help="write the model in this peer's format, and no more")
    parser.add_argument("--work", type=Path, help="JSON: what to measure")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work: dict[str, Any] = json.loads(args.work.read_text(encoding="utf-8")) if args.work else {}
    options = Options(
        dtype=args.dtype,
        threads=args.threads,
        model=args.model,
        converted=args.converted,
        streams=work.get("streams", 1),
        context=work.get("context", 512),
    )
    if args.prepare:
        if prepare is not None:
            prepare(options)
        return
    found = measure(lambda: load(options), work)
    args.out.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def measure(load: Callable[[], Generate], work: dict[str, Any], began: float | None = None) -> dict[str, Any]:
    """Start, first token, then each case.

    :param began: Unix time at which the process was started; by default the variable BENCH_BEGAN tells.
    """
    start = float(os.environ.get("BENCH_BEGAN", _BEGAN)) if began is None else began
    found: dict[str, Any] = {"cases": {}}
    generate = load()
    found["loaded_seconds"] = time.time() - start
    generate([work["warm"]], 1, lambda _: True)
    found["first_token_seconds"] = time.time() - start
    found["start_rss"] = peak_rss()
    generate([work["warm"][::-1]], 8, lambda _: True)
    for given in work["cases"]:
        case = Case(**given)
        clock = Clock(case)
        ids = generate(case.prompts, case.new, clock.step)
        if len(ids) != len(case.prompts) or not all(ids):
            raise RuntimeError(f"{case.name}: {len(ids)} replies to {len(case.prompts)} prompts, or empty ones")
        found["cases"][case.name] = clock.times() | {"ids": [[int(token) for token in reply] for reply in ids]}
    found["peak_rss"] = peak_rss()
    return found


def peak_rss(root: int | None = None) -> int:
    """Bytes: the largest resident sets of a process and its descendants, added up (shared pages count in each)."""
    total = 0
    for pid in descendants(os.getpid() if root is None else root):
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return total


def descendants(root: int) -> list[int]:
    """A process and all that it started, as far as they are still there."""
    found = [root]
    try:
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text(encoding="utf-8").split():
                found += descendants(int(child))
    except OSError:
        pass
    return found
