"""One participant of a transfer as a process of its own: ``python transfer_process.py``; JSON lines in and out."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transfer_world import MODELS, engine_ranks, same, state_dict, trainer_ranks

from gtp_serve.errors import GtpServeError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Box
from gtp_serve.refit.offer import TensorOffer
from gtp_serve.refit.orders import GroupOrder
from gtp_serve.refit.transports.group import GroupReceiver
from gtp_serve.refit.transports.send import send
from gtp_serve.refit.transports.stores import MeetingStore, Terms, open_store


def main() -> None:
    torch.set_num_threads(1)
    open_store("127.0.0.1", time.monotonic() + 10)  # torch makes a pipe for good with the first store of a process
    before = held()
    tell("ready")
    for line in sys.stdin:
        spec = json.loads(line)
        try:
            result = (trainer if spec["side"] == "trainer" else engine)(spec)
        except GtpServeError as error:
            result = {"error": error.message, "code": error.code, "at": time.time()}
        tell("end", **result, leaked=leaked(before))


def die_with_address() -> None:
    """End when the others know where this participant listens, and before it is connected with them."""
    put = MeetingStore.set

    def last(self: MeetingStore, key: str, value: Any) -> None:
        put(self, key, value)
        os.kill(os.getpid(), signal.SIGKILL)

    MeetingStore.set = last  # type: ignore[method-assign]


def trainer(spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("dies"):
        die_with_address()
    config, values = MODELS[spec["model"]], state_dict(MODELS[spec["model"]], spec["seed"])
    pairs = trainer_ranks(config, Grid(**spec["grid"]), values, spec["replicas"])[spec["rank"]]
    if spec["devices"]:
        torch.cuda.set_device(spec["rank"] % torch.cuda.device_count())
        pairs = [(shard, tensor.cuda()) for shard, tensor in pairs]
    terms = Terms(
        host="127.0.0.1",
        port=spec["port"],
        update=spec["update"],
        trainers=spec["trainers"],
        engines=spec["engines"],
        backend=spec["backend"],
        bucket_bytes=spec["bucket_bytes"],
        silent_seconds=2.0,
        deadline=time.monotonic() + 60,
    )
    sent = send(terms, spec["rank"], Slow(pairs, spec.get("pause", 0.0)))
    return {"payload": sent.payload_bytes, "wire": sent.wire_bytes}


def engine(spec: dict[str, Any]) -> dict[str, Any]:
    config, rank, size = MODELS[spec["model"]], spec["rank"], spec["engines"]
    receiver = GroupReceiver(rank=rank, size=size)
    device = f"cuda:{(spec['trainers'] + rank) % torch.cuda.device_count()}" if spec["devices"] else "cpu"
    targets = engine_ranks(config, size, device=device)[rank]
    order = GroupOrder(
        trainers=spec["trainers"],
        backend=spec["backend"],
        bucket_bytes=spec["bucket_bytes"],
        host="127.0.0.1",
        port=spec.get("port", 0),
    )
    if rank == 0:
        order = receiver.open(order, "127.0.0.1", time.monotonic() + 60)
        tell("port", port=order.port)
    reported = False

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if done and not reported:
            reported = True
            tell("receiving")

    received = receiver.receive(
        order,
        update=spec["update"],
        targets=targets,
        shapes=logical_tensors(config),
        deadline=time.monotonic() + 60,
        cancelled=lambda: False,
        progress=progress,
    )
    wrong = same(targets, engine_ranks(config, size, seed=spec["seed"])[rank])
    return {"received": received.source_bytes, "wrong": wrong}


class Slow(TensorOffer):
    """Takes its time, so that there is a middle to be killed in."""

    def __init__(self, pairs: Any, pause: float) -> None:
        super().__init__(pairs)
        self._pause, self._count = pause, 0

    def copy(self, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
        super().copy(index, box, out)
        self._count += 1
        if self._pause and self._count >= 4:
            if self._count == 4:
                tell("sending")
            time.sleep(self._pause)


def held() -> Counter[str]:
    """Threads and open descriptors by kind."""
    kinds = Counter(thread_name(task) for task in os.listdir("/proc/self/task"))
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
        except OSError:
            continue
    return kinds


def thread_name(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return f"thread {file.read().strip()}"
    except OSError:
        return "thread that has just ended"


def leaked(before: Counter[str]) -> dict[str, int]:
    """What is there now and was not; a thread that is about to end gets a moment."""
    for _ in range(100):
        more = {kind: count for kind, count in (held() - before).items() if count}
        if not more:
            break
        time.sleep(0.02)
    return more


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main()
