"""One rank of a small model whose decode steps are "captured" on a CPU; run as a script it is a rank that follows.

Arguments of the script: ``--log FILE --fail WORDS``, then what ``Leader`` adds.  The log gets a line for each step (the
bucket that it ran in) and each capture.  WORDS are those of ``Failing``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from fakes import TINY_MODEL, engine_config
from torch import Tensor

from gtp_serve.assembly import RankWork, with_graphs
from gtp_serve.config import CacheConfig, EngineConfig, MoeConfig
from gtp_serve.engine.capture import EagerCapture, EagerStep
from gtp_serve.engine.collective import join_group
from gtp_serve.engine.follower import Follower, run_follower
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.engine.step import StepPlan
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.layers.placement import Collective
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.table import PLAIN_PAGED
from gtp_serve.refit.apply import Target

SIZE = 2
MODEL = replace(
    TINY_MODEL, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=0,
    moe=MoeConfig(num_experts=4, top_k=2, ffn_size=16),
)  # fmt: skip
BLOCKS, BLOCK = 48, 16


def config_of(tp: int) -> EngineConfig:
    config: EngineConfig = replace(
        engine_config(max_running=4, max_step_tokens=16),
        model=MODEL,
        cache=CacheConfig(num_blocks=BLOCKS, block_size=BLOCK),
        tp=tp,
        max_context=40,
    )
    return config


def small_decoder(collective: Collective | None = None) -> Decoder:
    """With the same random logical weights on any number of ranks."""
    rank, size = (0, 1) if collective is None else (collective.rank, collective.size)
    decoder = build_decoder(
        MODEL,
        dtype=torch.float32,
        device="cpu",
        tp_rank=rank,
        tp_size=size,
        collective=collective,
        ops=PLAIN_PAGED,
    )
    whole = build_decoder(MODEL, dtype=torch.float32, device="cpu", ops=PLAIN_PAGED)
    generator = torch.Generator().manual_seed(3)
    logical: dict[str, Tensor] = {}
    for target in whole.targets():
        target.tensor.copy_(torch.randn(target.tensor.shape, generator=generator) * 0.4)
        for span in target.shard.spans:
            logical[span.name] = target.tensor[slices(span.local.start, span.local.shape)]
    for target in decoder.targets():
        fill(target, logical)
    return decoder


def slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


def fill(target: Target, logical: dict[str, Tensor]) -> None:
    for span in target.shard.spans:
        part = logical[span.name][slices(span.logical.start, span.logical.shape)]
        target.tensor[slices(span.local.start, span.local.shape)] = part


def small_pool(decoder: Decoder) -> KVPool:
    return KVPool(
        num_layers=2,
        num_blocks=BLOCKS + SCRATCH_BLOCKS,
        block_size=BLOCK,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=8,
        dtype=torch.float32,
        device="cpu",
    )


class Failing(EagerCapture):
    """Steps that are run and not recorded.

    :param fail: ``record N`` or ``warm-up N``: what fails, and for which size.
    """

    def __init__(self, fail: str = "") -> None:
        self._fail = fail

    def warm_up(self, step: Callable[[], Tensor]) -> None:
        output = step() if not self._fail.startswith("warm-up") else torch.zeros(int(self._fail.split()[1]))
        if self._fail == f"warm-up {len(output)}":
            raise torch.OutOfMemoryError("no memory to warm up in")

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> EagerStep:
        recorded = super().record(step, inputs)
        if self._fail == f"record {len(recorded.output)}":
            raise torch.OutOfMemoryError("no memory to record in")
        return recorded


class NotingWork(RankWork):
    def __init__(self, log: Path, config: EngineConfig, model: DecodeGraphs, pool: KVPool) -> None:
        super().__init__(config, model, pool)
        self._log = log

    def follow(self, plan: StepPlan, bucket: int | None) -> Tensor:
        self._note(f"step {bucket}")
        return super().follow(plan, bucket)

    def capture(self, size: int) -> str:
        self._note(f"capture {size}")
        return super().capture(size)

    def _note(self, line: str) -> None:
        with self._log.open("a") as file:
            file.write(line + "\n")


def main() -> int:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path)
    parser.add_argument("--fail")
    for name in ("rank", "link", "meeting"):
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args()

    def build(follower: Follower) -> RankWork:
        decoder = small_decoder(follower.join(lambda meeting: join_group(meeting, "cpu")))
        pool, config = small_pool(decoder), config_of(SIZE)
        model, _ = with_graphs(config, decoder, pool, Failing(args.fail))
        assert isinstance(model, DecodeGraphs)
        follower.note_built(0, 0)
        return NotingWork(args.log, config, model, pool)

    return run_follower(args.link, args.meeting, args.rank, SIZE, build)


if __name__ == "__main__":
    sys.exit(main())
