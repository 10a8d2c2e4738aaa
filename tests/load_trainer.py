"""One rank of a GTP=2 trainer that pushes again and again: JSON lines in, what is to be pushed; out, what came of it.

``python load_trainer.py SPEC``; ranks find one another through a file.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transfer_world import trainer_ranks

from gtp_serve.errors import GtpServeError
from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.refit import Publisher

dist: Any = torch.distributed
GRID = Grid(gtp=2, alignment=32)


def main() -> None:
    spec = json.loads(sys.argv[1])
    rank = spec["rank"]
    torch.set_num_threads(1)
    store = dist.FileStore(spec["meet"], GRID.gtp)
    timeout = timedelta(seconds=600)  # between pushes nothing is said
    dist.init_process_group("gloo", store=store, rank=rank, world_size=GRID.gtp, timeout=timeout)
    held = {}
    for name, path in spec["folders"].items():
        checkpoint = open_checkpoint(Path(path))
        held[name] = trainer_ranks(checkpoint.config, GRID, dict(checkpoint.tensors()))[rank]
        checkpoint.close()
    publisher = Publisher(spec["url"], transport="distributed", bucket_bytes=spec.get("bucket_bytes", 8 << 20))
    tell(event="ready")
    for line in sys.stdin:
        push = json.loads(line)
        try:
            report = publisher.push(held[push["weights"]], push["version"], **push["fields"])
        except GtpServeError as error:
            tell(event="failed", code=error.code, message=error.message)
        else:
            tell(event="pushed", sent=report.sent_bytes, seconds=report.seconds, digest=report.digest)
    dist.destroy_process_group()


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
