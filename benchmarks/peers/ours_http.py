"""This project's server, asked over HTTP by a client on the same cores: server-sent events, a line for each token."""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import subprocess
import sys
import threading
from typing import Any
from urllib.parse import SplitResult

from peers.protocol import Generate, Options, Prompts, Step, main

_SILENCE_SECONDS = 300.0
_PR_SET_PDEATHSIG = 1


def serve_command(options: Options) -> list[str]:
    """The server, on a port that is free."""
    formats = [] if options.dtype == "bf16" else ["--quant", options.dtype]
    words = ["--ckpt", str(options.model), "--device", "cpu", "--dtype", "bf16", *formats, "--no-tokenizer"]
    words += ["--no-prefix-cache", "--context", str(options.context), "--max-running", str(options.streams)]
    words += ["--refit-memory", "inplace", "--port", "0", "--log", "json"]
    return [sys.executable, "-m", "gtp_serve.server", *words]


def start(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server that is ready, and its address.

    :raises RuntimeError: it ended instead; its last words are in the message.
    """
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_end_with_parent)
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("{") and (said := json.loads(line))["event"] == "ready":
            return process, said["url"]
    raise RuntimeError(f"the server ended with {process.wait()}: {''.join(lines[-3:])}")


def _end_with_parent() -> None:
    """Told to stop when whoever started it is gone, be it killed because its time was over."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def load(options: Options) -> Generate:
    """A running server.  It ends with this process."""
    from gtp_serve.server.bench_http import parse_url

    process, url = start(serve_command(options))
    drain(process)
    where = parse_url(url)

    def generate(prompts: Prompts, new: int, step: Step) -> Prompts:
        return asyncio.run(ask_all(where, prompts, new, step))

    return generate


def drain(process: subprocess.Popen[str]) -> None:
    """Its log goes nowhere from here on; a full pipe would stop it."""
    assert process.stderr is not None
    threading.Thread(target=process.stderr.read, daemon=True).start()


def stop(process: subprocess.Popen[str]) -> None:
    """Ask it to end, and see to it that it does."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def ask_all(where: SplitResult, prompts: Prompts, new: int, step: Step) -> Prompts:
    """All prompts at once, each on a connection of its own, until the first one that has had enough."""
    from gtp_serve.server.bench_http import Connection

    replies: Prompts = [[] for _ in prompts]
    enough = asyncio.Event()
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}

    async def ask(number: int) -> None:
        connection = Connection(where, None, _SILENCE_SECONDS)
        body = {"input_ids": prompts[number], "stream": "delta", "sampling_params": sampling}
        try:
            async for event in connection.events("/generate", body):
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                replies[number].extend(event["output_ids"])
                if not step([len(reply) for reply in replies]):
                    enough.set()
        finally:
            connection.close()

    asking = asyncio.gather(*(ask(number) for number in range(len(prompts))))
    stopping = asyncio.create_task(enough.wait())
    everybody: list[asyncio.Future[Any]] = [asking, stopping]
    await asyncio.wait(everybody, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not asking.done():
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    else:
        await asking
    return replies


if __name__ == "__main__":
    main(load)
