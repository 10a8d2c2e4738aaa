"""One rank of a trainer as a process of its own: reads a checkpoint, cuts it as Megatron does, pushes it to a server.

``python trainer_process.py SPEC``; JSON lines out.  Ranks find one another through a file.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from transfer_world import trainer_ranks

from gtp_serve.errors import GtpServeError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.spans import Box
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.refit import Publisher
from gtp_serve.refit.offer import TensorOffer

dist: Any = torch.distributed


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if spec["size"] > 1:
        store = dist.FileStore(spec["meet"], spec["size"])
        dist.init_process_group(
            "gloo", store=store, rank=spec["rank"], world_size=spec["size"], timeout=timedelta(seconds=60)
        )
    checkpoint = open_checkpoint(Path(spec["ckpt"]))
    values = {name: tensor * spec.get("factor", 1) for name, tensor in checkpoint.tensors()}
    pairs = trainer_ranks(checkpoint.config, Grid(**spec["grid"]), values)[spec["rank"]]
    publisher = Publisher(spec["url"], transport=spec["transport"], bucket_bytes=1 << 16)
    slow_down(spec.get("pause", 0.0))
    began = time.time()
    try:
        report = publisher.push(pairs, spec["version"])
    except GtpServeError as error:
        tell("failed", message=error.message, code=error.code, details=error.details, seconds=time.time() - began)
    else:
        tell("pushed", digest=report.digest, sent=report.sent_bytes, transport=report.transport)
    tell("threads", names=[thread.name for thread in threading.enumerate()])
    if spec["size"] > 1 and spec.get("leave", True):
        dist.destroy_process_group()


def slow_down(pause: float) -> None:
    """Makes a middle to be killed in: each piece takes its time, and the fourth is told of."""
    if not pause:
        return
    copy, count = TensorOffer.copy, 0

    def slow(self: TensorOffer, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
        nonlocal count
        copy(self, index, box, out)
        count += 1
        if count == 4:
            tell("sending")
        time.sleep(pause)

    TensorOffer.copy = slow  # type: ignore[method-assign]


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main()
