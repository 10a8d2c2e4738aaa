"""From a checkpoint's path to an engine in this process, ready to take requests.  What ``LLM`` is built on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from gtp_serve.assembly import (
    build_pool,
    check_addresses,
    check_device,
    chooser_of,
    empty_decoder,
    fill_decoder,
    keep_weights,
    rank_weights,
    with_graphs,
)
from gtp_serve.budget import plan_memory
from gtp_serve.config import AttentionBackend, DType, EngineConfig, Quant, RefitMemory
from gtp_serve.engine.all_ranks import News
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.grammar import GrammarCompiler
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.engine.updates import Updates
from gtp_serve.errors import UsageError
from gtp_serve.hardware import find_hardware
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.loaders.tokenizer import Tokenizer, load_tokenizer, model_with_tokenizer
from gtp_serve.loaders.tokenizer_files import read_template, tokenizer_at
from gtp_serve.progress import Bar


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedOptions:
    """What the caller has a say in; None and "auto" mean that it is chosen for the machine.

    :raises UsageError: for a value that cannot be, under the name that ``LLM`` has for it.
    """

    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    context: int | None
    mem_fraction: float | None
    kv_memory: int | None
    max_running: int | None
    prefix_cache: bool
    graphs: bool
    attention: AttentionBackend
    quant: Quant
    deterministic: bool
    refit_memory: Literal["auto", "staged", "inplace"] = "auto"
    tp: int = 1

    def __post_init__(self) -> None:
        _check_word("device", self.device, ("auto", "cpu", "cuda"))
        _check_word("dtype", self.dtype, ("auto", *get_args(DType)))
        _check_word("attention_backend", self.attention, get_args(AttentionBackend))
        _check_word("quant", self.quant, get_args(Quant))
        _check_word("refit_memory", self.refit_memory, ("auto", *get_args(RefitMemory)))
        _check_number("context", self.context, int, 1, 1 << 30)
        _check_number("kv_memory", self.kv_memory, int, 1, 1 << 60)
        _check_number("max_running", self.max_running, int, 1, 4096)
        _check_number("mem_fraction", self.mem_fraction, float, 0.01, 1.0)


def _check_word(name: str, value: object, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise UsageError(f"{name}={value!r} is not possible", [("possible", ", ".join(possible))])


def _check_number(name: str, value: Any, kind: type[int] | type[float], low: float, high: float) -> None:
    if value is None:
        return
    is_one = isinstance(value, int | kind) and not isinstance(value, bool)
    if not (is_one and low <= value <= high):
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name}={value!r} is not possible", [("possible", f"{what} from {low:g} to {high:g}")])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedded:
    """An engine and what belongs to it."""

    engine: Engine
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler | None


def open_engine(
    path: Path,
    options: EmbeddedOptions,
    *,
    tokenizer: str | Path | Literal[False] | None,
    chat_template: str | Path | None,
    iteration: int | None,
    progress: bool,
) -> Embedded:
    """Read, decide, load.

    :param tokenizer: folder with ``tokenizer.json``, by default the checkpoint's; False: none.
    :raises GtpServeError: whatever is wrong with the checkpoint, the memory or the device.
    """
    checkpoint = open_checkpoint(path, iteration=iteration)
    try:
        text = _open_tokenizer(checkpoint, tokenizer, chat_template)
        config = _decide(checkpoint, text, options)
        grammars = _grammars(config, text)
        return Embedded(engine=_build(config, checkpoint, grammars, progress), tokenizer=text, grammars=grammars)
    finally:
        checkpoint.close()


def _open_tokenizer(
    checkpoint: Checkpoint, path: str | Path | Literal[False] | None, template: str | Path | None
) -> Tokenizer | None:
    if path is False:
        return None
    files = checkpoint.tokenizer if path is None else tokenizer_at(Path(path))
    if files is None:
        return None
    return load_tokenizer(files, chat_template=None if template is None else read_template(Path(template)))


def _decide(checkpoint: Checkpoint, tokenizer: Tokenizer | None, options: EmbeddedOptions) -> EngineConfig:
    model = model_with_tokenizer(checkpoint.config, tokenizer)
    return plan_memory(model, logical_tensors(model), options, find_hardware()).engine


def _grammars(config: EngineConfig, tokenizer: Tokenizer | None) -> GrammarCompiler | None:
    if tokenizer is None:
        return None
    model = config.model
    return GrammarCompiler(tokenizer.to_json, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)


def _build(config: EngineConfig, checkpoint: Checkpoint, grammars: GrammarCompiler | None, progress: bool) -> Engine:
    check_device(config)
    decoder = empty_decoder(config)
    store = keep_weights(decoder, config)
    with Bar("loading", None, unit="bytes", wanted=progress) as bar:
        fill_decoder(decoder, checkpoint, threads=torch.get_num_threads(), progress=bar.show)
    store.derive(staged=False)
    pool = build_pool(config, decoder)
    model, between_steps = with_graphs(config, decoder, pool)
    chooser = chooser_of(config, decoder)
    runner = ModelRunner(model, pool, config, grammars=grammars, chooser=chooser)
    engine, news = Engine(config, runner, check=between_steps), News()
    weights = rank_weights(config, decoder, store, pool, news.put)
    Updates(engine, weights, news, memory=config.refit_memory, after_swap=check_addresses(model))
    return engine
