"""Requests that stream while weights change, a trainer beside them, and a replay of each answer on its versions."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from parity.model_harness import PagedRun

from gtp_serve.models.decoder import Decoder

_SCRIPT = Path(__file__).with_name("load_trainer.py")
_BLOCK = 4
PATIENCE = 300.0
_CLOCKS = 0.02
"""Seconds by which this process's clock and the engine's may differ: one of them is the sum of two."""


@dataclass
class Answer:
    """One request's tokens, when each came, and whose they are."""

    prompt: tuple[int, ...]
    new: int
    """Tokens asked for."""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Wall clock, of each token."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: str = ""
    trouble: str = ""


class Load(threading.Thread):
    """So many streams at all times, until told to end; then each answer is let finish.

    The first answers are of different lengths: streams that all begin anew in one step would wait for each other's
    prompts, and a gap would say nothing about what else the server does.

    :param new: tokens of each answer but a stream's first.
    :param vocab: prompts are random ids below it.
    """

    def __init__(self, url: str, streams: int, new: int, vocab: int, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.answers: list[Answer] = []
        host, _, port = url.rpartition("//")[2].partition(":")
        self._place, self._streams, self._new = (host, int(port)), streams, new
        self._vocab, self._choose = vocab, random.Random(seed)
        self._over = threading.Event()
        self.start()

    def end(self) -> list[Answer]:
        self._over.set()
        self.join(PATIENCE)
        assert not self.is_alive(), "a request never ended"
        return self.answers

    def wait_for_tokens(self, count: int) -> None:
        """Until each stream has begun."""
        deadline = time.monotonic() + PATIENCE
        while sum(len(answer.tokens) >= count for answer in list(self.answers)) < self._streams:
            assert time.monotonic() < deadline, [answer.trouble for answer in self.answers]
            time.sleep(0.01)

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*(self._again_and_again(number) for number in range(1, self._streams + 1)))

    async def _again_and_again(self, number: int) -> None:
        new = self._new + self._new * number // self._streams
        while not self._over.is_set():
            prompt = tuple(self._choose.randrange(3, self._vocab) for _ in range(self._choose.randint(3, 12)))
            self.answers.append(Answer(prompt, new))
            await self._one(self.answers[-1])
            new = self._new

    async def _one(self, answer: Answer) -> None:
        sampling = {"max_new_tokens": answer.new, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": answer.prompt, "sampling_params": sampling, "stream": "delta"}).encode()
        reader, writer = await asyncio.open_connection(*self._place)
        try:
            head = f"POST /generate HTTP/1.1\r\nhost: {self._place[0]}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            status = (await reader.readline()).split(b" ")[1:2]
            if status != [b"200"]:
                answer.trouble = (await reader.read()).decode(errors="replace")[-300:]
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    _take(json.loads(line[6:]), answer)
        except OSError as error:
            answer.trouble = repr(error)
        finally:
            writer.close()


def _take(part: Any, answer: Answer) -> None:
    if "error" in part:
        answer.trouble = str(part["error"])
        return
    answer.tokens += part["output_ids"]
    answer.times += [time.time()] * len(part["output_ids"])
    answer.spans = [(one["version"], one["start"], one["end"]) for one in part["meta_info"]["weight_versions"]]
    if part["meta_info"]["finish_reason"] is not None:
        answer.finish = part["meta_info"]["finish_reason"]["type"]


class Trainer:
    """Two processes that push what they are told to."""

    def __init__(self, url: str, folders: Mapping[str, Path], folder: Path, **spec: Any) -> None:
        common = {"url": url, "meet": str(folder / "meet"), "folders": {k: str(v) for k, v in folders.items()}}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(_SCRIPT), json.dumps({**common, **spec, "rank": rank})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for rank in range(2)
        ]
        assert [told["event"] for told in self._hear()] == ["ready"] * 2

    def push(self, weights: str, version: str, **fields: Any) -> list[dict[str, Any]]:
        """What each rank says of it."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"weights": weights, "version": version, "fields": fields}) + "\n")
            process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _hear(self) -> list[dict[str, Any]]:
        told = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "a trainer rank has ended"
            told.append(json.loads(line))
        return told


@dataclass
class Replay:
    """Says again what was answered, with the weights that each token is said to be of.

    :param records: of all committed updates, the first one first.
    :param made: which weights each version is.
    :param close: how far below the best logit a chosen token may be, since sums are added in another order.
    """

    decoders: Mapping[str, Decoder]
    records: Sequence[Mapping[str, Any]]
    made: Mapping[str, str]
    close: float
    tokens: int = 0
    wrong: list[tuple[Answer, int]] = field(default_factory=list)

    @torch.inference_mode()
    def check(self, answer: Answer) -> None:
        """Count its tokens and note the wrong ones; ends where it is not certain what was kept and what read again."""
        tokens, first = [*answer.prompt, *answer.tokens], len(answer.prompt) - 1
        run: PagedRun | None = None
        before = ""
        for version, start, end in answer.spans:
            kept = self._kept(before, version) if before else False
            if kept is None:
                return
            decoder = self.decoders[self.made[version]]
            if run is None or not kept:
                run = PagedRun(decoder, num_blocks=-(-len(tokens) // _BLOCK), block_size=_BLOCK)
                sequence = run.add()
                logits = run.step([(sequence, tokens[: first + end])])[0][first + start :]
            else:
                run.decoder = decoder
                logits = run.step([(0, tokens[first + start : first + end])])[0]
            self._compare(answer, logits, start, end)
            before = version

    def _compare(self, answer: Answer, logits: torch.Tensor, start: int, end: int) -> None:
        said = torch.tensor(answer.tokens[start:end])
        short = logits.max(dim=1).values - logits.gather(1, said.unsqueeze(1)).squeeze(1)
        self.wrong += [(answer, start + at) for at in torch.nonzero(short > self.close).flatten().tolist()]
        self.tokens += end - start

    def _kept(self, before: str, version: str) -> bool | None:
        """Whether keys and values were taken along from one version to another; None: some of the way only."""
        order = ["0", *(record["version"] for record in self.records)]
        policies = {record["version"]: record["in_flight"] for record in self.records}
        passed = {policies[one] for one in order[order.index(before) + 1 : order.index(version) + 1]}
        return passed == {"keep"} if len(passed) == 1 else None


def stall_report(answers: Sequence[Answer], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds and decode steps: the usual gap between two tokens, the longest, and the engine's own stalls.

    Of gaps since the first update began: before it, all streams begin at once.
    """
    since = records[0]["began"]
    gaps = [b - a for answer in answers for a, b in itertools.pairwise(answer.times) if b >= since]
    step = statistics.median(gaps)
    stalls = [record["stall_seconds"] for record in records]
    return {
        "step_ms": 1e3 * step,
        "longest_gap_ms": 1e3 * max(gaps),
        "longest_minus_median_steps": (max(gaps) - step) / step,
        "median_stall_ms": 1e3 * statistics.median(stalls),
        "longest_stall_ms": 1e3 * max(stalls),
        "median_stall_steps": statistics.median(stalls) / step,
    }


def check_borders(answers: Sequence[Answer], records: Sequence[Mapping[str, Any]]) -> None:
    """Spans tile each answer in the order of the commits, and no token of a version came before its commit."""
    order = {"0": 0} | {record["version"]: place for place, record in enumerate(records, 1)}
    since = {record["version"]: record["began"] + record["seconds"]["total"] - _CLOCKS for record in records}
    for answer in answers:
        places = [order[version] for version, _, _ in answer.spans]
        assert places == sorted(set(places)), answer
        ends = [end for _, _, end in answer.spans]
        assert [start for _, start, _ in answer.spans] == [0, *ends[:-1]], answer
        assert ends[-1] == len(answer.tokens), answer
        for version, start, _ in answer.spans:
            assert answer.times[start] >= since.get(version, 0.0), (version, answer)


def in_turn(push: Callable[[str, str], None], versions: Sequence[str]) -> dict[str, str]:
    """Push b, a, b, ... as these versions; which weights each is."""
    made = dict(zip(versions, itertools.cycle("ba"), strict=False))
    for version, weights in made.items():
        push(weights, version)
    return made
