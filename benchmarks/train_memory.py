"""Memory of a trainer's weights, gradients and optimizer state on each rank, by the GTP size; prints a table.

    python benchmarks/train_memory.py --gtp 1 2 4 8

Each size runs one training step in so many gloo processes.  ``state`` is what the tensors take; ``resident`` is by how
much the largest process has grown since before it built its model, gathered weights and activations included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.decoder import build_train_decoder
from gtp_serve.training.gradients import gradient_of
from gtp_serve.training.groups import build_training_groups
from gtp_serve.training.loss import cross_entropy, target_logprobs

DIST: Any = torch.distributed
MIB = 1 << 20
TOKENS = 64


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Trainer memory by GTP size.")
    parser.add_argument("--gtp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    print("GTP  weights  gradients  optimizer  state  of GTP 1  resident   (MiB on the rank that has most)")
    first = 0.0
    for size in args.gtp:
        weights, gradients, optimizer, resident = measure(size, args)
        state = weights + gradients + optimizer
        first = first or state
        print(
            f"{size:3d}  {weights:7.1f}  {gradients:9.1f}  {optimizer:9.1f}  {state:5.0f}  {state / first:8.3f}"
            f"  {resident:8.0f}",
            flush=True,
        )
    return 0


def measure(size: int, args: argparse.Namespace) -> list[float]:
    """The largest rank's MiB of each kind."""
    context = multiprocessing.get_context("spawn")
    told: SimpleQueue[list[float]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, size, args, f"{folder}/meet", told)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank has failed; its message is above")
    return [max(column) for column in zip(*(told.get() for _ in ranks), strict=True)]


def run_rank(rank: int, size: int, args: argparse.Namespace, meet: str, told: SimpleQueue[list[float]]) -> None:
    """One step; what this rank holds."""
    torch.set_num_threads(1)
    DIST.init_process_group("gloo", store=DIST.FileStore(meet, size), rank=rank, world_size=size)
    config = ModelConfig(
        family="llama", num_layers=args.layers, hidden_size=args.hidden, num_heads=8, num_kv_heads=4,
        head_dim=args.hidden // 8, ffn_size=3 * args.hidden, vocab_size=8192, vocab_rows=8192, tied=True,
    )  # fmt: skip
    before = resident()
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    model = build_train_decoder(config, dtype=dtype, groups=build_training_groups(Grid(gtp=size)))
    model.initialise(seed=0)
    optimizer = AdamW(model, lr=1e-3)
    ids = torch.randint(0, config.vocab_size, (TOKENS,))
    logprobs = target_logprobs(model(ids, [TOKENS]), ids.roll(-1), config, model.placement)
    torch.autograd.backward(cross_entropy(logprobs))
    model.finish_gradients()
    optimizer.step()
    parameters = list(model.parameters())
    gradients = [gradient_of(parameter) for parameter in parameters]
    told.put(
        [
            sum(parameter.nbytes for parameter in parameters) / MIB,
            sum(grad.nbytes for grad in gradients if grad is not None) / MIB,
            sum(tensor.nbytes for slots in optimizer.state.values() for tensor in slots.values()) / MIB,
            resident() - before,
        ]
    )
    DIST.destroy_process_group()


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


if __name__ == "__main__":
    sys.exit(main())
