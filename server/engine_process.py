"""The engine process: puts checkpoint, decoder, KV cache and engine together, phase by phase, and runs them.

The composition root of all that needs torch; ``engine.client`` starts it with ``--launch JSON --endpoint URL``.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gtp_serve.config import EngineConfig
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.messages import Phase
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.engine.worker import run_worker
from gtp_serve.errors import EngineFault, EnvironmentFault
from gtp_serve.kv.pool import KVPool
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.facts import SavedOverrides
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.plan import build_plan
from gtp_serve.request import Request, SamplingParams, TokenEvent
from gtp_serve.server.launch import Launch, read_launch
from gtp_serve.server.options import format_gib

Report = Callable[[Phase], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROGRESS_SECONDS = 0.1
_FIRST_TOKEN_STEPS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gtp-serve-engine")
    parser.add_argument("--launch", required=True)
    parser.add_argument("--endpoint", required=True)
    args = parser.parse_args(argv)
    launch = read_launch(args.launch)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # other people's warnings are not our user's business
    torch.set_num_threads(launch.threads)
    return run_worker(args.endpoint, lambda report: build_engine(launch, report))


def build_engine(launch: Launch, report: Report) -> Engine:
    """Everything from the open checkpoint to the first token.

    :raises GtpServeError: whatever is wrong with checkpoint, memory or device.
    """
    config = launch.engine
    with _Phase("start engine", report) as phase:
        _check_device(config)
        decoder = build_decoder(config.model, dtype=_DTYPES[config.dtype], device=config.device)
        phase.done(f"torch {torch.__version__}, {_device_name(config.device)}, {launch.threads} threads")
    _load_weights(launch, decoder, report)
    with _Phase("allocate KV cache", report) as phase:
        pool = _build_pool(config)
        phase.done(format_gib(pool.num_bytes))
    engine = Engine(config, ModelRunner(decoder, pool, config))
    with _Phase("first token", report) as phase:
        phase.done(str(first_token(engine, launch.first_prompt)))
    return engine


class _Phase:
    """Reports that a phase runs, then that it is done (with seconds) or failed."""

    def __init__(self, name: str, report: Report) -> None:
        self.name = name
        self._report = report
        self._started = time.monotonic()
        self._detail = ""
        self._reported = self._started

    @property
    def seconds(self) -> float:
        """Since the phase began."""
        return time.monotonic() - self._started

    def __enter__(self) -> _Phase:
        self._report(Phase(name=self.name, state="running"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, stack: object) -> None:
        state: str = "ok" if error is None else "failed"
        self._report(
            Phase(
                name=self.name,
                state="ok" if state == "ok" else "failed",
                detail=self._detail,
                seconds=self.seconds,
            )
        )

    def done(self, detail: str) -> None:
        """What to say when the phase ends well."""
        self._detail = detail

    def progress(self, done: int, total: int) -> None:
        """At most ten times a second."""
        now = time.monotonic()
        if now - self._reported >= _PROGRESS_SECONDS:
            self._reported = now
            self._report(Phase(name=self.name, state="running", seconds=self.seconds, done=done, total=total))


def _check_device(config: EngineConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault(
            "torch finds no usable GPU", [("torch", torch.__version__), ("try", "--device cpu")]
        )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def _load_weights(launch: Launch, decoder: Decoder, report: Report) -> None:
    with _Phase("load weights", report) as phase:
        checkpoint = open_checkpoint(
            Path(launch.ckpt),
            iteration=launch.iteration,
            saved=SavedOverrides(
                tp=launch.saved.tp, gtp=launch.saved.gtp, etp=launch.saved.etp, egtp=launch.saved.egtp
            ),
        )
        try:
            targets = decoder.targets()
            plan = build_plan(
                checkpoint.source.shards(),
                [target.shard for target in targets],
                logical_tensors(launch.engine.model),
            )
            total, done = checkpoint.facts.weight_bytes, 0

            def advance(count: int) -> None:
                nonlocal done
                done += count
                phase.progress(done, total)

            read = apply_plan(plan, checkpoint.source, targets, threads=launch.threads, progress=advance)
        finally:
            checkpoint.close()
        phase.done(f"{format_gib(read)} at {format_gib(int(read / max(phase.seconds, 1e-6)))}/s")


def _build_pool(config: EngineConfig) -> KVPool:
    model, cache = config.model, config.cache
    return KVPool(
        num_layers=model.num_layers,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=_DTYPES[config.dtype],
        device=config.device,
    )


def first_token(engine: Engine, prompt: Sequence[int]) -> int:
    """One greedy token through the whole engine, as a client's request would go.

    :raises EngineFault: when none comes out.
    """
    room = max(1, engine.config.max_context - 1)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    engine.add(Request(rid="first-token", input_ids=tuple(prompt[:room]), sampling=sampling))
    events: list[TokenEvent] = []
    for _ in range(_FIRST_TOKEN_STEPS):
        if not engine.has_work():
            break
        events += engine.step()
    tokens = [token for event in events for token in event.token_ids]
    if not tokens:
        reasons = [event.finish.message for event in events if event.finish is not None]
        raise EngineFault("the engine made no first token", [("engine", reasons[0])] if reasons else ())
    return tokens[0]


if __name__ == "__main__":
    sys.exit(main())
