"""What new weights cost a server that is busy: longest gap of a stream, stall, throughput meanwhile, bytes a second.

Starts ``gtp-serve`` on a checkpoint (a synthetic one of about 90 MB unless told otherwise), keeps 16 streams running
and pushes the same weights again and again: from disk, then over gloo from two trainer processes that hold half the
rows each.  Beside each rate stands what the same machine does bare, measured in the same run under the same streams:
reading the files into memory, and two processes sending the same bytes to a third one over gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.loaders import open_checkpoint
from gtp_serve.refit import Publisher

MIB = 1 << 20
_MESSAGE = 32 * MIB
_RECEIVER = 2
_PHASES = ("open", "plan", "transfer", "verify")
dist: Any = torch.distributed


def main() -> int:
    """Print one line of numbers for each way."""
    parser = argparse.ArgumentParser(description="new weights for a busy server")
    parser.add_argument("--ckpt", type=Path, help="a Hugging Face folder; by default one is made up")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--updates", type=int, default=5, help="of each kind")
    parser.add_argument("--quiet-seconds", type=float, default=5.0, help="of decoding before the first update")
    parser.add_argument("--max-rate", type=int, help="bytes a second that updates from disk may read")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        return be_process(json.loads(args.process))
    with tempfile.TemporaryDirectory() as folder:
        ckpt = args.ckpt or made_up(Path(folder) / "model")
        server = subprocess.Popen(
            [sys.executable, "-m", "gtp_serve.server", "--ckpt", str(ckpt), "--no-tokenizer", "--port", "0",
             "--max-running", str(args.streams), "--context", "512", "--log", "json"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes: list[subprocess.Popen[str]] = []
        try:
            url = ready(server)
            threading.Thread(target=lambda: [None for _ in server.stderr or ()], daemon=True).start()
            processes = [start_process(rank, url, ckpt, Path(folder)) for rank in range(3)]
            for process in processes:
                hear(process)
            measure(url, ckpt, processes, args.streams, args.updates, args.quiet_seconds, args.max_rate)
        finally:
            for process in [*processes, server]:
                process.kill()
                process.wait()
    return 0


def made_up(folder: Path) -> Path:
    """A checkpoint of a small Llama."""
    config = ModelConfig(
        family="llama", num_layers=6, hidden_size=768, num_heads=12, num_kv_heads=4, head_dim=64, ffn_size=2048,
        vocab_size=4096, vocab_rows=4096,
    )  # fmt: skip
    described = {
        "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 768, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "vocab_size": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "max_position_embeddings": 2048, "hidden_act": "silu",
    }  # fmt: skip
    folder.mkdir()
    values = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in logical_tensors(config).items()}
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def ready(server: subprocess.Popen[str]) -> str:
    """Where it serves, once it does."""
    assert server.stderr is not None
    for line in server.stderr:
        if line.startswith("{") and (told := json.loads(line))["event"] == "ready":
            return str(told["url"])
    raise SystemExit("the server did not start")


# -- what is measured ------------------------------------------------------------------------------


def measure(
    url: str,
    ckpt: Path,
    processes: list[subprocess.Popen[str]],
    streams: int,
    updates: int,
    quiet: float,
    max_rate: int | None,
) -> None:
    """Undisturbed, from disk, over gloo; printed."""
    load = Streams(url, streams)
    files = sorted(ckpt.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    read(files)  # into the page cache
    load.wait()
    began = time.time()
    time.sleep(quiet)
    while len((alone := load.between(began, time.time())).gaps) < 5 * streams:
        time.sleep(0.5)
    step = statistics.median(alone.gaps)
    print(f"{'undisturbed':12s} {alone.rate:.1f} tok/s, {streams} streams, step {1e3 * step:.1f} ms")

    bare = statistics.median(size / read(files) for _ in range(updates))
    report("disk", load, step, alone.rate, bare, size, [push_disk(url, ckpt, n, max_rate) for n in range(updates)])
    bare = statistics.median(size / raw_gloo(processes, size) for _ in range(updates))
    report("gloo", load, step, alone.rate, bare, size, [push_gloo(processes, n) for n in range(updates)])
    load.end()


def report(
    name: str, load: Streams, step: float, rate: float, bare: float, size: int, records: Sequence[dict[str, Any]]
) -> None:
    """One line."""
    windows = [(one["began"], one["began"] + one["seconds"]["total"]) for one in records]
    gaps = [gap for begin, end in windows for gap in load.between(begin - 2 * step, end + 2 * step).gaps]
    meanwhile = sum(load.made(*window) for window in windows) / sum(end - begin for begin, end in windows)
    stalls = [one["stall_seconds"] for one in records]
    seconds = [one["seconds"]["total"] for one in records]
    speed = statistics.median(size / one["seconds"]["transfer"] for one in records)
    phases = {phase: statistics.median(one["seconds"].get(phase, 0.0) for one in records) for phase in _PHASES}
    print(
        f"{name:12s} {len(records)} updates of {size / MIB:.0f} MiB, {statistics.median(seconds):.2f} s each"
        f" ({', '.join(f'{phase} {1e3 * took:.0f} ms' for phase, took in phases.items())});"
        f" longest gap {1e3 * max(gaps):.0f} ms = median + {(max(gaps) - step) / step:.1f} steps,"
        f" stall {1e3 * max(stalls):.2f} ms = {max(stalls) / step:.3f} steps;"
        f" throughput meanwhile {meanwhile / rate:.2f} of undisturbed;"
        f" {speed / MIB:.0f} MiB/s = {speed / bare:.2f} x bare ({bare / MIB:.0f} MiB/s)",
        flush=True,
    )


def push_disk(url: str, ckpt: Path, number: int, max_rate: int | None) -> dict[str, Any]:
    """The record of one update."""
    source = {"kind": "disk", "path": str(ckpt.absolute()), "max_bytes_per_second": max_rate}
    body = {"version": f"disk-{number}", "source": source, "wait": True}
    request = urllib.request.Request(
        f"{url}/weights/updates", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        record: dict[str, Any] = json.load(reply)
    return record


def push_gloo(processes: Sequence[subprocess.Popen[str]], number: int) -> dict[str, Any]:
    """The record of one update."""
    for process in processes[:_RECEIVER]:
        say(process, do="push", version=f"gloo-{number}")
    record, _ = (hear(process) for process in processes[:_RECEIVER])
    return dict(record)


def raw_gloo(processes: Sequence[subprocess.Popen[str]], size: int) -> float:
    """Seconds in which two processes send half of it each to a third one, and nothing else is done."""
    for process in processes:
        say(process, do="raw", bytes=size // 2)
    return max(float(hear(process)["seconds"]) for process in processes)


def read(files: Sequence[Path]) -> float:
    """Seconds to read the files into memory that is there."""
    buffer = memoryview(bytearray(max(file.stat().st_size for file in files)))
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as source:
            at = 0
            while count := source.readinto(buffer[at : at + _MESSAGE]):
                at += count
    return time.perf_counter() - began


class Window:
    """What came in some span of time."""

    def __init__(self, tokens: int, gaps: list[float], seconds: float) -> None:
        self.tokens, self.gaps, self.rate = tokens, gaps, tokens / seconds


class Streams(threading.Thread):
    """So many streamed requests at all times."""

    def __init__(self, url: str, count: int) -> None:
        super().__init__(daemon=True)
        host, _, port = url.rpartition("//")[2].partition(":")
        self._place, self._count = (host, int(port)), count
        self._times: list[list[float]] = []
        self._over = False
        self.start()

    def wait(self) -> None:
        """Until all run."""
        while sum(len(times) > 2 for times in list(self._times)) < self._count:
            time.sleep(0.05)

    def end(self) -> None:
        """Cut them."""
        self._over = True

    def between(self, begin: float, end: float) -> Window:
        """Tokens, and gaps that lie in it."""
        inside = [[moment for moment in list(times) if begin <= moment <= end] for times in list(self._times)]
        gaps = [b - a for times in inside for a, b in itertools.pairwise(times)]
        return Window(sum(map(len, inside)), gaps, max(end - begin, 1e-6))

    def made(self, begin: float, end: float) -> float:
        """Tokens made in it: each was, evenly, since the one before it.  To count those that arrive would favour one
        side, since an update begins and ends between two steps.
        """
        return sum(
            max(0.0, min(b, end) - max(a, begin)) / max(b - a, 1e-6)
            for times in list(self._times)
            for a, b in itertools.pairwise(times)
        )

    def run(self) -> None:
        """In the thread."""
        asyncio.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*(self._again(number) for number in range(self._count)))

    async def _again(self, number: int) -> None:
        choose = random.Random(number)
        while not self._over:
            self._times.append([])
            with suppress(OSError):  # the server ends before its streams
                await self._one([choose.randrange(3, 1000) for _ in range(8)], self._times[-1])

    async def _one(self, prompt: list[int], times: list[float]) -> None:
        sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": "delta"}).encode()
        reader, writer = await asyncio.open_connection(*self._place)
        head = f"POST /generate HTTP/1.1\r\nhost: {self._place[0]}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        while not self._over and (line := await reader.readline()):
            if line.startswith(b"data: {"):
                times += [time.time()] * len(json.loads(line[6:]).get("output_ids", ()))
        writer.close()


# -- the other processes ---------------------------------------------------------------------------


def start_process(rank: int, url: str, ckpt: Path, folder: Path) -> subprocess.Popen[str]:
    """Two trainer ranks, and one that only receives when gloo itself is measured."""
    spec = {"rank": rank, "url": url, "ckpt": str(ckpt), "meet": str(folder / "meet")}
    return subprocess.Popen(
        [sys.executable, __file__, "--process", json.dumps(spec)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def say(process: subprocess.Popen[str], **words: Any) -> None:
    """A line to it."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(words) + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> Any:
    """A line from it."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("one of the processes has ended")
    return json.loads(line)


def be_process(spec: dict[str, Any]) -> int:
    """Do as the lines say."""
    rank = spec["rank"]
    torch.set_num_threads(1)
    store = dist.FileStore(spec["meet"], _RECEIVER + 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RECEIVER + 1, timeout=timedelta(minutes=10))
    trainers = dist.new_group([0, 1])
    held: list[tuple[Shard, Tensor]] = []
    if rank < _RECEIVER:
        checkpoint = open_checkpoint(Path(spec["ckpt"]))
        held = [piece for name, tensor in checkpoint.tensors() for piece in half(name, tensor, rank)]
        checkpoint.close()
        publisher = Publisher(spec["url"], transport="distributed", group=trainers)
    print("{}", flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        if words["do"] == "raw":
            print(json.dumps({"seconds": raw(rank, words["bytes"])}), flush=True)
        else:
            record = publisher.push(held, words["version"]).record
            fields = {"began": record.began, "seconds": record.seconds, "stall_seconds": record.stall_seconds}
            print(json.dumps(fields), flush=True)
    return 0


def half(name: str, tensor: Tensor, rank: int) -> list[tuple[Shard, Tensor]]:
    """The rows that a rank holds; what has one dimension is the first rank's."""
    if tensor.dim() < 2:
        rows = (0, tensor.shape[0]) if rank == 0 else (0, 0)
    else:
        middle = tensor.shape[0] // 2
        rows = (0, middle) if rank == 0 else (middle, tensor.shape[0])
    if rows[0] == rows[1]:
        return []
    mine = tensor[rows[0] : rows[1]].contiguous()
    start = (rows[0], *(0 for _ in mine.shape[1:]))
    shape, dtype = tuple(mine.shape), str(mine.dtype).removeprefix("torch.")
    return [(Shard(f"{name} of rank {rank}", shape, dtype, (Span(name, Box.whole(shape), Box(start, shape)),)), mine)]


def raw(rank: int, size: int) -> float:
    """Seconds to send or to receive, two messages of each sender under way."""
    senders = [rank] if rank < _RECEIVER else list(range(_RECEIVER))
    sizes = [min(_MESSAGE, size - at) for at in range(0, size, _MESSAGE)]
    buffers = {(one, turn): torch.empty(_MESSAGE, dtype=torch.uint8).fill_(1) for one in senders for turn in (0, 1)}
    dist.barrier()
    began = time.perf_counter()
    under_way: list[Any] = []
    for number, count in enumerate(sizes):
        if number >= 2:
            for _ in senders:
                under_way.pop(0).wait()
        for one in senders:
            buffer = buffers[one, number % 2][:count]
            under_way.append(dist.isend(buffer, _RECEIVER) if rank < _RECEIVER else dist.irecv(buffer, one))
    for one in under_way:
        one.wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
