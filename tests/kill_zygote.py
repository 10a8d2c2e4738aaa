"""A process that has imported everything once and forks what a test wants: a whole server, or a rank of a trainer.

``python kill_zygote.py FOLDER IN OUT FOLDER IN OUT ...`` makes one for each folder, JSON lines over the descriptors.
What it forks is the product's own code from the command line on; only that a child is forked where the product would
start a new interpreter is different, which saves seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import uvloop  # noqa: F401 - loaded here, once
from kill_board import Board
from kill_points import SILENT_SECONDS, be_impatient, watch_points
from kill_world import GRID, pairs_of

import gtp_serve.server.bringup
import gtp_serve.server.engine_process
import gtp_serve.server.serve
import gtp_serve.server.supervise  # noqa: F401
from gtp_serve.engine import peer, process
from gtp_serve.errors import GtpServeError
from gtp_serve.refit import Publisher
from gtp_serve.server import cli, engine_start

dist: Any = torch.distributed
_SUBREAPER = 36
_MAX_WORDS = 1 << 20


class Stub:
    """A child that was forked before this process had threads, and waits to be told what to be."""

    def __init__(self, be: Callable[[list[str]], int]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        self._ours.close()
        leave(lambda: be(_wait_for_words(theirs)))

    def start(self, words: Sequence[str], descriptors: Sequence[int]) -> None:
        """Its stdin, its stderr and what else it is to have, in the order of the words that name them."""
        socket.send_fds(self._ours, [json.dumps(list(words)).encode()], list(descriptors))
        self._ours.close()


def _wait_for_words(link: socket.socket) -> list[str]:
    """What to be; this process's descriptors are as told."""
    data, descriptors, _, _ = socket.recv_fds(link, _MAX_WORDS, 8)
    if not data:
        os._exit(0)  # whoever forked this is gone
    link.close()
    words: list[str] = json.loads(data)
    for number, descriptor in ((0, descriptors[0]), (2, descriptors[1])):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for name, descriptor in zip(("--link", "--meeting"), descriptors[2:], strict=False):
        words[words.index(name) + 1] = str(descriptor)
    return words


def leave(work: Callable[[], int]) -> None:
    """Do it and end this process, whatever happens."""
    code = 70
    try:
        code = work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 70
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


# -- a server ----------------------------------------------------------------------------------------------


def serve(board: Board, words: list[str]) -> int:
    """Be the HTTP process; the ranks' processes are its descendants, as in the product."""
    rank0 = Stub(lambda argv: _lead(board, argv))
    board.enter("http")
    _replace(process, "asyncio", create_subprocess_exec=lambda *argv, stdin, stderr: _spawn(rank0, argv))
    return cli.main(words)


def _lead(board: Board, argv: list[str]) -> int:
    rank1 = Stub(lambda words: _follow(board, words))
    board.enter("engine0")
    watch_points(board)

    class Forked(subprocess.Popen[bytes]):
        def _execute_child(self, args: Any, *rest: Any) -> None:
            p2cread, _, _, _, _, errwrite = rest[9:15]
            link, meeting = (int(args[args.index(name) + 1]) for name in ("--link", "--meeting"))
            rank1.start(args[1:], [p2cread, errwrite, link, meeting])
            self.pid, self._child_created = rank1.pid, True
            self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]

    _replace(peer, "subprocess", Popen=Forked)
    return engine_start.main(_after_module(argv))


def _replace(module: Any, name: str, **members: Any) -> None:
    """Let a module see another module with other members."""
    setattr(module, name, SimpleNamespace(**{**vars(getattr(module, name)), **members}))


def _follow(board: Board, argv: list[str]) -> int:
    board.enter("engine1")
    watch_points(board)
    return engine_start.main(_after_module(argv))


def _after_module(argv: list[str]) -> list[str]:
    return argv[argv.index("-m") + 2 :]


async def _spawn(stub: Stub, argv: Sequence[str]) -> Any:
    """What ``create_subprocess_exec`` gives, for a process that is there already."""
    loop = asyncio.get_running_loop()
    stdin, lifeline = os.pipe()
    heard, stderr = os.pipe()
    stub.start(list(argv), [stdin, stderr])
    os.close(stdin)
    os.close(stderr)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(heard, "rb"))
    ended: asyncio.Future[int] = loop.create_future()
    handle = os.pidfd_open(stub.pid)

    def note() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        ended.set_result(os.waitstatus_to_exitcode(os.waitpid(stub.pid, 0)[1]))

    loop.add_reader(handle, note)

    def kill() -> None:
        if not ended.done():
            os.kill(stub.pid, signal.SIGKILL)

    return SimpleNamespace(
        pid=stub.pid, stderr=reader, kill=kill, wait=lambda: asyncio.shield(ended), lifeline=lifeline
    )


# -- a trainer's rank --------------------------------------------------------------------------------------


def train(board: Board, spec: dict[str, Any]) -> int:
    """Push, and write down what came of it."""
    rank = spec["rank"]
    board.enter(f"trainer{rank}")
    watch_points(board)
    store = dist.FileStore(spec["meet"], GRID.gtp)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=GRID.gtp, timeout=timeout)
    before = {thread.name for thread in threading.enumerate()}
    publisher = Publisher(
        spec["url"], transport="distributed", bucket_bytes=spec["bucket_bytes"], silent_seconds=SILENT_SECONDS
    )
    try:
        report = publisher.push(pairs_of(spec["weights"])[rank], spec["version"], **spec["fields"])
    except GtpServeError as error:
        told: dict[str, Any] = {"event": "failed", "code": error.code, "message": error.message}
    else:
        told = {"event": "pushed", "digest": report.digest}
    told["threads"] = _left(before)
    out = Path(spec["out"])
    out.with_suffix(".part").write_text(json.dumps(told))
    out.with_suffix(".part").rename(out)
    return 0


def _left(before: set[str]) -> list[str]:
    """Threads that do not end; one that waits for a connection ends with torch's own patience."""
    deadline = time.monotonic() + 15
    while (left := {thread.name for thread in threading.enumerate()} - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(left)


# -- the zygote itself -------------------------------------------------------------------------------------


class Zygote:
    """Forks on command, and tells which of its children has ended and how."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._children: dict[int, str] = {}
        self._pending = b""

    def run(self) -> None:
        """Until stdin is closed; then whatever still runs is ended."""
        tell(event="ready", pid=os.getpid())
        try:
            while self._read():
                self._reap()
        finally:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)

    def _read(self) -> bool:
        if not select.select([0], [], [], 0.02)[0]:
            return True
        data = os.read(0, 1 << 16)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._start(json.loads(line))
        return bool(data)

    def _start(self, spec: dict[str, Any]) -> None:
        pid = os.fork()
        if pid:
            self._children[pid] = spec["name"]
            tell(event="started", name=spec["name"], pid=pid)
            return
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        for number, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(descriptor, number)
        if spec["run"] == "server":
            leave(lambda: serve(self._board, spec["words"]))
        leave(lambda: train(self._board, spec))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._children.pop(pid, "")
            tell(event="ended", name=name, pid=pid, code=os.waitstatus_to_exitcode(status))


def tell(**fields: Any) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def be_zygote(folder: Path, orders: int, told: int, others: Sequence[int]) -> int:
    """Until its orders end.

    :param others: descriptors of other zygotes, which would seem to live on while this one has them.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans come here, and are seen
    os.dup2(orders, 0)
    os.dup2(told, 1)
    for number in (orders, told, *others):
        os.close(number)
    os.environ["TMPDIR"] = str(folder / "t")
    tempfile.tempdir = None
    Zygote(Board(folder / "board")).run()
    return 0


def main() -> None:
    torch.set_num_threads(1)
    be_impatient()
    for weights in ("a", "b"):
        pairs_of(weights)
    assert len(os.listdir("/proc/self/task")) == 1, "it forks: it must have no thread but this one"
    gc.collect()
    gc.freeze()  # a child's collector would look through all of this, and so copy it
    lanes = [(Path(folder), int(orders), int(told)) for folder, orders, told in batched(sys.argv[1:])]
    for lane in lanes:
        others = [number for other in lanes if other is not lane for number in other[1:]]
        if os.fork() == 0:
            leave(lambda lane=lane, others=others: be_zygote(*lane, others))  # type: ignore[misc, call-arg]
    for _, orders, told in lanes:
        os.close(orders)
        os.close(told)
    for _ in lanes:
        os.wait()


def batched(words: Sequence[str]) -> list[Sequence[str]]:
    return [words[at : at + 3] for at in range(0, len(words), 3)]


if __name__ == "__main__":
    main()
