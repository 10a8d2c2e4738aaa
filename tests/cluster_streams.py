"""Streams without end over one front, each token held against what it must be: for replicas that come and go."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any, Self

from cluster_world import Front

PROMPTS = ([3, 7, 11], [5, 1, 2, 9], [8, 8, 4], [2, 6])
LONGEST = 1500
SHORTEST = 300


class Streams:
    """Readers that each follow one stream after another."""

    def __init__(self, front: Front) -> None:
        self.whole = 0
        """Streams that have given every token they should."""
        self.tokens = 0
        self.wrong: list[str] = []
        """Whatever else a stream did."""
        self._front = front
        self._right = [front.generate(prompt, LONGEST)["output_ids"] for prompt in PROMPTS]
        self._wanted = 0
        self._threads: dict[int, threading.Thread] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.want(0)
        self.join()

    def want(self, count: int) -> None:
        """So many at a time from now on; those that are too many end with the stream that they follow."""
        self._wanted = count
        for place in range(count):
            thread = self._threads.get(place)
            if thread is None or not thread.is_alive():
                self._threads[place] = threading.Thread(target=self._read, args=(place, random.Random(place)))
                self._threads[place].start()

    def join(self, seconds: float = 300) -> None:
        """Until all have ended that are not wanted any more."""
        deadline = time.monotonic() + seconds
        for place, thread in self._threads.items():
            if place >= self._wanted:
                thread.join(max(0.0, deadline - time.monotonic()))
                assert not thread.is_alive(), "a stream does not end"

    def _read(self, place: int, chance: random.Random) -> None:
        while place < self._wanted:
            which, tokens = chance.randrange(len(PROMPTS)), chance.randrange(SHORTEST, LONGEST)
            try:
                self._follow(which, tokens)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _follow(self, which: int, tokens: int) -> None:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": PROMPTS[which], "sampling_params": sampling, "stream": True}
        request = urllib.request.Request(
            self._front.url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        had: list[int] = []
        try:
            with urllib.request.urlopen(request, timeout=150) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        had = self._next(had, json.loads(line[6:]), self._right[which])
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read()[:300]!r}") from None
        assert len(had) == tokens, f"{len(had)} of {tokens} tokens came"
        self.whole += 1
        self.tokens += tokens

    def _next(self, had: list[int], event: Any, right: list[int]) -> list[int]:
        """What an event says in all, which must go on where the one before had ended."""
        assert "error" not in event, f"after {len(had)} tokens: {event['error']}"
        ids: list[int] = event["output_ids"]
        assert len(ids) >= len(had), f"{len(ids)} tokens after {len(had)}"
        assert ids == right[: len(ids)], f"other tokens than alone, after {len(had)}"
        return ids
