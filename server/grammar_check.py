"""Whether a request's grammar is served: asked of a child process that is given little time, and remembered.

A grammar that is too large, not valid, or takes longer than COMPILE_SECONDS is refused with 400; nothing of this
happens in the process that answers requests or in the one that runs the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gtp_serve.engine.limits import MAX_GRAMMAR_CHARS
from gtp_serve.errors import EngineFault, QueueFull, RequestRejected
from gtp_serve.request import Grammar

COMPILE_SECONDS = 3.0
START_SECONDS = 60.0
MAX_WAITING = 32
"""Grammars that wait for their turn; one more is answered 503."""
MAX_REMEMBERED = 256
_MODULE = "gtp_serve.server.grammar_process"
_LONGEST_LINE = 16 * MAX_GRAMMAR_CHARS


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The child's answer to one grammar: ``grammar`` in plain form, or why not."""

    grammar: Grammar | None = None
    message: str = ""
    details: tuple[tuple[str, str], ...] = ()


def checker_argv(tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> list[str]:
    """The command of the child process.

    :param tokenizer: a ``tokenizer.json`` or its folder.
    """
    flags = ["-P"] if sys.flags.safe_path else []
    eos = "[" + ",".join(map(str, eos_token_ids)) + "]"
    options = ["--tokenizer", tokenizer, "--vocab-size", str(vocab_size), "--eos", eos]
    return [sys.executable, *flags, "-m", _MODULE, *options]


class GrammarChecker:
    """Asks the child, which is started by the first question and again after it was ended."""

    def __init__(self, argv: Sequence[str], *, seconds: float = COMPILE_SECONDS) -> None:
        self._argv = list(argv)
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        self._child: _Child | None = None
        self._known: dict[Grammar, Verdict] = {}
        self._waiting = 0
        self._children: list[_Child] = []
        """What must be ended with this."""
        self._stop = weakref.finalize(self, _end, self._children)

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar in plain form.

        :raises RequestRejected: code ``bad-grammar``, with the reason; QueueFull when too many wait.
        """
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise RequestRejected(
                f"the {grammar.kind} has {len(grammar.text)} characters",
                [("possible", f"up to {MAX_GRAMMAR_CHARS}")],
                code="bad-grammar",
            )
        verdict = self._known.get(grammar)
        if verdict is None:
            verdict = await self._ask(grammar)
        if verdict.grammar is None:
            raise RequestRejected(verdict.message, verdict.details, code="bad-grammar")
        return verdict.grammar

    async def _ask(self, grammar: Grammar) -> Verdict:
        if self._waiting >= MAX_WAITING:
            raise QueueFull(f"{self._waiting} grammars are waiting to be compiled", [("try", "again in a while")])
        self._waiting += 1
        try:
            # A client that leaves must not leave the child in the middle of an answer.
            verdict = await asyncio.shield(
                asyncio.get_running_loop().run_in_executor(self._thread, self._judge, grammar)
            )
        finally:
            self._waiting -= 1
        self._known[grammar] = verdict
        if len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        return verdict

    def _judge(self, grammar: Grammar) -> Verdict:
        if self._child is None or not self._child.alive:
            self._child = _Child(self._argv)
            self._children[:] = [self._child]
            if self._child.read_line(START_SECONDS) != b"ready":
                self._child.end()
                raise EngineFault("the process that compiles grammars did not start", code="internal")
        self._child.write(msgspec.json.encode(grammar) + b"\n")
        line = self._child.read_line(self._seconds)
        if line is None:
            self._child.end()
            too_long = f"the {grammar.kind} takes longer than {self._seconds:g} s, or too much memory, to compile"
            return Verdict(message=too_long)
        return msgspec.json.decode(line, type=Verdict)

    def close(self) -> None:
        """End the child."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stop()


def _end(children: list[_Child]) -> None:
    for child in children:
        child.end()


class _Child:
    """The process and its two pipes."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._ending = threading.Lock()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def write(self, line: bytes) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(OSError):  # if it has ended there will be no answer
                pipe.write(line)
                pipe.flush()

    def read_line(self, seconds: float) -> bytes | None:
        """Without its end; None when the process ends, or none comes in time."""
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            return None
        until = time.monotonic() + seconds
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left = until - time.monotonic()
                if left <= 0 or len(line) > _LONGEST_LINE or not selector.select(left):
                    return None
                part = pipe.read1(1 << 16)  # type: ignore[attr-defined]
                if not part:
                    return None
                line += part
        return line[:-1]

    def end(self) -> None:
        """At once."""
        with self._ending:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None and not pipe.closed:
                    with contextlib.suppress(OSError):
                        pipe.close()
