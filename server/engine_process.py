"""The engine process: puts checkpoint, decoder, KV cache and engine together, phase by phase, and runs them.

The composition root of all that needs torch; ``server.engine_start`` hands over to it.  With ``--tp N`` it is one
of N ranks: rank 0, whose engine schedules, or one that follows.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from gtp_serve.assembly import (
    RankWork,
    build_pool,
    check_addresses,
    check_device,
    chooser_of,
    empty_decoder,
    fill_decoder,
    first_token,
    keep_weights,
    rank_weights,
    with_graphs,
)
from gtp_serve.config import EngineConfig
from gtp_serve.engine.all_ranks import News
from gtp_serve.engine.collective import GroupCollective, join_group
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.far import Store
from gtp_serve.engine.follower import Follower, Work, run_follower
from gtp_serve.engine.grammar import GrammarCompiler
from gtp_serve.engine.messages import Phase
from gtp_serve.engine.ranks import Leader, Meeting
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.engine.updates import Updates
from gtp_serve.engine.worker import run_worker
from gtp_serve.kv.pool import KVPool
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.tokenizer_files import tokenizer_at
from gtp_serve.models.decoder import Decoder
from gtp_serve.refit import orders
from gtp_serve.refit.rank import RankWeights
from gtp_serve.refit.store import WeightStore
from gtp_serve.server.early_memory import NOTHING_TAKEN, TakenMemory
from gtp_serve.server.launch import Launch, saved_overrides
from gtp_serve.sizes import format_gib

Report = Callable[[Phase], None]

_PROGRESS_SECONDS = 0.1
_GRAMMARS_SECONDS = 1.0
"""After the first token: whoever waited for the server comes first."""


def lead(launch: Launch, endpoint: str, leader: Leader | None, memory: TakenMemory = NOTHING_TAKEN) -> int:
    """Be rank 0 until told to stop; returns the exit code.

    :param endpoint: where the client listens.
    :param leader: the other ranks, if there are any.
    :param memory: what was taken on a CPU already.
    """
    _set_up(launch)
    return run_worker(endpoint, lambda report: build_engine(launch, report, leader, memory))


def follow(launch: Launch, rank: int, link: int, meeting: int, store: Store | None = None) -> int:
    """Be another rank until told to stop; returns the exit code.

    :param link: descriptor of the socket to rank 0.
    :param meeting: descriptor of the file where the ranks meet; -1 when they meet in ``store``.
    """
    _set_up(launch)
    return run_follower(
        link, meeting, rank, launch.engine.tp, lambda follower: build_follower(launch, follower), store=store
    )


def _set_up(launch: Launch) -> None:
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # other people's warnings are not our user's business
    torch.set_num_threads(launch.threads)


def build_engine(launch: Launch, report: Report, leader: Leader | None, memory: TakenMemory = NOTHING_TAKEN) -> Engine:
    """Everything from the open checkpoint to the first token.

    :raises GtpServeError: whatever is wrong with checkpoint, memory, device or another rank.
    """
    config = launch.engine
    with _Phase("start engine", report) as phase:
        check_device(config, rank=0)
        decoder = empty_decoder(config, None if leader is None else leader.join(_connect(config)))
        store = keep_weights(decoder, config, memory.weights)
        phase.done(_engine_words(launch, decoder))
    grammars = _build_grammars(launch)
    with _Phase("load weights", report) as phase:
        read = _load_with_others(launch, decoder, leader, phase)
        store.derive(staged=False)
        phase.done(f"{format_gib(read)} at {format_gib(int(read / max(phase.seconds, 1e-6)))}/s")
    with _Phase("allocate KV cache", report) as phase:
        pool = build_pool(config, decoder, memory.cache)
        others = 0 if leader is None else leader.wait_built()
        phase.done(format_gib(pool.num_bytes + others))
    engine, after_swap = _build_engine(config, decoder, pool, leader, grammars)
    news = News() if leader is None else leader.news
    Updates(
        engine,
        _rank_weights(launch, decoder, store, pool, news.put),
        news,
        others=leader,
        memory=config.refit_memory,
        deadline_seconds=launch.refit_seconds,
        after_swap=after_swap,
    )
    with _Phase("first token", report) as phase:
        phase.done(str(first_token(engine, launch.first_prompt)))
    if grammars is not None:
        grammars.warm_after(_GRAMMARS_SECONDS)
    return engine


def build_follower(launch: Launch, rank: Follower) -> Work:
    """What carries out rank 0's words on a rank that does not sample, with its weights loaded.

    :raises GtpServeError: whatever is wrong with checkpoint, memory, device or another rank.
    """
    config = launch.engine
    check_device(config, rank=rank.rank if launch.far is None else 0)  # far ranks each see the one GPU they have
    decoder = empty_decoder(config, rank.join(_connect(config)))
    store = keep_weights(decoder, config)
    read = _load_weights(launch, decoder, rank.note_loading)
    store.derive(staged=False)
    pool = build_pool(config, decoder)
    model, _ = with_graphs(config, decoder, pool)
    rank.weights = _rank_weights(launch, decoder, store, pool, rank.report)
    rank.note_built(read, pool.num_bytes)
    return RankWork(config, model, pool)


def _rank_weights(
    launch: Launch, decoder: Decoder, store: WeightStore, pool: KVPool, report: Callable[[orders.Report], None]
) -> RankWeights:
    saved = saved_overrides(launch.saved)
    return rank_weights(launch.engine, decoder, store, pool, report, saved=saved, meeting_host=launch.refit_host)


def _connect(config: EngineConfig) -> Callable[[Meeting], GroupCollective]:
    return lambda meeting: join_group(meeting, config.device)


def _build_engine(
    config: EngineConfig,
    decoder: Decoder,
    pool: KVPool,
    leader: Leader | None,
    grammars: GrammarCompiler | None,
) -> tuple[Engine, Callable[[], None]]:
    """The engine, and what makes sure that captured steps still read the memory where the weights are."""
    chooser = chooser_of(config, decoder)
    if leader is None:
        model, between_steps = with_graphs(config, decoder, pool)
        runner = ModelRunner(model, pool, config, grammars=grammars, chooser=chooser)
        return Engine(config, runner, check=between_steps), check_addresses(model)
    model, capture_one = with_graphs(config, decoder, pool, together=leader.capture)
    runner = ModelRunner(model, pool, config, together=leader.step, grammars=grammars, chooser=chooser)

    def check() -> None:
        leader.check()
        capture_one()

    return Engine(config, runner, check=check), check_addresses(model)


def _build_grammars(launch: Launch) -> GrammarCompiler | None:
    """What compiles grammars."""
    if launch.tokenizer is None:
        return None
    path, model = Path(launch.tokenizer), launch.engine.model
    return GrammarCompiler(
        lambda: _tokenizer_json(path),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def _tokenizer_json(path: Path) -> str:
    from gtp_serve.loaders.tokenizer import load_tokenizer  # with templates, which a start can do without

    return load_tokenizer(tokenizer_at(path)).to_json()


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


def _engine_words(launch: Launch, decoder: Decoder) -> str:
    config = launch.engine
    ranks = f"{config.tp} ranks of " if config.tp > 1 else ""
    device, ops = _device_name(config.device), decoder.placement.ops.name
    return f"torch {torch.__version__}, {device}, {ranks}{launch.threads} threads, {ops}"


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def _load_with_others(launch: Launch, decoder: Decoder, leader: Leader | None, phase: _Phase) -> int:
    """Bytes that this rank read; what is shown meanwhile is the slowest rank's progress."""
    if leader is None:
        return _load_weights(launch, decoder, phase.progress)
    read = _load_weights(
        launch,
        decoder,
        lambda done, total: phase.progress(min(done, int(leader.slowest_share() * total)), total),
    )
    leader.wait_loaded(lambda share: phase.progress(int(share * read), read))
    return read


def _load_weights(launch: Launch, decoder: Decoder, progress: Callable[[int, int], None]) -> int:
    """Fill this rank's parameters from the checkpoint; bytes read.

    :param progress: told the bytes done and in all.
    """
    checkpoint = open_checkpoint(Path(launch.ckpt), iteration=launch.iteration, saved=saved_overrides(launch.saved))
    try:
        return fill_decoder(decoder, checkpoint, threads=launch.threads, progress=progress)
    finally:
        checkpoint.close()
