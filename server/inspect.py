"""``gtp-serve inspect PATH``: what a checkpoint holds, how it was saved, whether it runs here.

Reads headers, metadata and small files only, and imports no torch.  Exit code 3 when it cannot be served.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gtp_serve.budget import Budget, plan_memory
from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointError, DoesNotFit, EnvironmentFault, GtpServeError
from gtp_serve.hardware import Hardware, find_hardware
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.ranks import possible_ranks
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.loaders.facts import Facts, SavedGrid
from gtp_serve.server.failures import one_line
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.saved_arguments import SIZES, add_saved_arguments, saved_of
from gtp_serve.sizes import format_gib

_FORMATS = {"megatron": "megatron-torch_dist", "huggingface": "huggingface", "gguf": "gguf"}
_SHOWN_PADDING = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = "Say what a checkpoint holds, how it was saved, and whether it runs here."
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="Megatron root or iter_* folder, Hugging Face folder, GGUF file",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_saved_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report and return the exit code: 0, or 3 when the checkpoint cannot be served."""
    saved = saved_of(args)
    try:
        checkpoint = open_checkpoint(args.path, iteration=args.iteration, saved=saved)
    except CheckpointError as error:
        _print(args.json, failed_report(args.path, error), _failed_lines(args.path, error))
        return error.exit_code
    try:
        hardware = find_hardware()
        budget = _budget(checkpoint.config, args.path, hardware)
        _print(args.json, report(checkpoint, budget), _lines(checkpoint, budget, args.path))
    finally:
        checkpoint.close()
    return 0


def _print(as_json: bool, value: Mapping[str, Any], lines: list[tuple[str, str]]) -> None:
    if as_json:
        sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")
        return
    for label, text in lines:
        sys.stdout.write(f"{label:<12}{one_line(text)}".rstrip() + "\n")


def _budget(config: ModelConfig, path: Path, hardware: Hardware) -> Budget | GtpServeError:
    try:
        return plan_memory(config, logical_tensors(config), ServeOptions(ckpt=path), hardware)
    except (DoesNotFit, EnvironmentFault) as error:
        return error


def report(checkpoint: Checkpoint, budget: Budget | GtpServeError) -> dict[str, Any]:
    """The whole report as JSON values."""
    facts, tokenizer = checkpoint.facts, checkpoint.tokenizer
    return {
        "path": str(checkpoint.path),
        "format": _FORMATS[facts.format],
        "layout": facts.layout,
        "saved": asdict(facts.saved),
        "fc1_permuted": facts.fc1_permuted,
        "model": asdict(checkpoint.config),
        "padding": [asdict(padding) for padding in facts.padding],
        "tokenizer": None
        if tokenizer is None
        else {"folder": str(tokenizer.folder), "chat_template": tokenizer.chat_template is not None},
        "supported": True,
        "reason": None,
        "iteration": facts.iteration,
        "iterations": list(facts.iterations),
        "dtype": checkpoint.config.dtype,
        "parameters": facts.parameters,
        "weight_bytes": facts.weight_bytes,
        "weight_bytes_by_dtype": dict(facts.dtypes),
        "optimizer_bytes": facts.optimizer_bytes,
        "saved_tokenizer": facts.saved_tokenizer,
        "possible_tp": possible_ranks(checkpoint.config),
        "memory": _memory(budget),
        "warnings": list(facts.warnings),
        "notes": list(facts.notes),
    }


def failed_report(path: Path, error: CheckpointError) -> dict[str, Any]:
    """The same keys for a checkpoint that cannot be served."""
    return {
        "path": str(path),
        "format": None,
        "layout": None,
        "saved": dict.fromkeys(SIZES),
        "fc1_permuted": None,
        "model": None,
        "padding": [],
        "tokenizer": None,
        "supported": False,
        "reason": str(error),
        "code": error.code,
    }


def _memory(budget: Budget | GtpServeError) -> dict[str, Any]:
    if isinstance(budget, GtpServeError):
        return {"fits": False, "reason": str(budget)}
    return {
        "fits": True,
        "device": budget.engine.device,
        "dtype": budget.engine.dtype,
        "weights": budget.weights,
        "refit": budget.refit,
        "work": budget.work,
        "kv": budget.kv,
        "kv_tokens": budget.kv_tokens,
        "needed": budget.needed,
        "available": budget.memory.available,
        "total": budget.memory.total,
    }


def _failed_lines(path: Path, error: CheckpointError) -> list[tuple[str, str]]:
    details = [(label, text) for label, text in error.details]
    return [
        ("path", str(path)),
        ("supported", "no"),
        ("reason", f"error[{error.code}] {error.message}"),
        *details,
    ]


def _lines(checkpoint: Checkpoint, budget: Budget | GtpServeError, path: Path) -> list[tuple[str, str]]:
    config, facts = checkpoint.config, checkpoint.facts
    lines = [("path", str(checkpoint.path)), ("format", _format_text(facts))]
    if facts.format == "megatron":
        lines += [("saved with", _saved_text(facts, config)), ("layout", _layout_text(facts))]
    lines += [
        ("model", model_text(config)),
        ("size", _size_text(facts)),
        ("padding", _padding_text(config, facts)),
        ("tokenizer", _tokenizer_text(checkpoint)),
        ("here", _here_text(budget)),
        ("ranks", "--tp " + ", ".join(map(str, possible_ranks(config)))),
        *(("warning", warning) for warning in facts.warnings),
        *(("note", note) for note in facts.notes),
        ("supported", f"yes          try: gtp-serve --ckpt {path} --tp 1"),
    ]
    return lines


def _format_text(facts: Facts) -> str:
    steps = ", steps " + " ".join(map(str, facts.iterations[-8:])) if facts.iterations else ""
    return facts.format_text + steps


def _saved_text(facts: Facts, config: ModelConfig) -> str:
    experts = ("ep", "etp", "egtp")
    sizes = " ".join(
        f"{name.upper()}{size}"
        for name, size in asdict(facts.saved).items()
        if name in ("tp", "pp") or (size > 1 and (config.moe is not None or name not in experts))
    )
    return sizes + (f", step {facts.iteration}" if facts.iteration is not None else "")


def _layout_text(facts: Facts) -> str:
    if facts.saved == SavedGrid() or facts.layout == "plain":
        return "plain"
    order = "fc1 rows permuted, put back while loading" if facts.fc1_permuted else "fc1 rows in order"
    return f"{facts.layout} ({order})"


def model_text(config: ModelConfig) -> str:
    """One line on a model, for example ``qwen3: 36 layers, hidden 4096, 32/8 heads, ffn 12288, qk-norm``."""
    parts = [
        f"{config.num_layers} layers",
        f"hidden {config.hidden_size}",
        f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}",
    ]
    if config.moe is None:
        parts.append(f"ffn {config.ffn_size}")
    else:
        parts.append(f"{config.moe.num_experts} experts of {config.moe.ffn_size}, {config.moe.top_k} per token")
    flags = {
        "tied": config.tied,
        "qkv-bias": config.qkv_bias,
        "qk-norm": config.qk_norm,
        f"rope {config.rope.scaling}": config.rope.scaling != "none",
        f"window {config.sliding_window}": config.sliding_window is not None,
    }
    return f"{config.family}: " + ", ".join([*parts, *(name for name, on in flags.items() if on)])


def _size_text(facts: Facts) -> str:
    kinds = ", ".join(f"{format_gib(count)} {name}" for name, count in facts.dtypes)
    optimizer = f" (+ {format_gib(facts.optimizer_bytes)} optimizer, ignored)" if facts.optimizer_bytes else ""
    return f"{_count_text(facts.parameters)} params in {facts.num_tensors} tensors, {kinds}{optimizer}"


def _count_text(count: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def _padding_text(config: ModelConfig, facts: Facts) -> str:
    parts = []
    if config.vocab_rows > config.vocab_size:
        parts.append(f"vocab {config.vocab_size} -> {config.vocab_rows} rows")
    parts += [f"{_short(p.key)} {p.real_rows} -> {p.stored_rows}" for p in facts.padding[:_SHOWN_PADDING]]
    if len(facts.padding) > _SHOWN_PADDING:
        parts.append(f"and {len(facts.padding) - _SHOWN_PADDING} more tensors")
    return ", ".join(parts) or "none"


def _short(key: str) -> str:
    return key.removesuffix(".weight").rpartition(".")[2]


def _tokenizer_text(checkpoint: Checkpoint) -> str:
    found, saved = checkpoint.tokenizer, checkpoint.facts.saved_tokenizer
    if found is not None:
        chat = "chat template found" if found.chat_template is not None else "no chat template"
        return f"{found.folder}   ({found.tokenizer_json.name}, {chat})"
    return "none here" + (f", saved as {saved}" if saved else "") + "   (--tokenizer PATH, or --no-tokenizer)"


def _here_text(budget: Budget | GtpServeError) -> str:
    if isinstance(budget, GtpServeError):
        return f"does not fit: {budget.message}"
    free = format_gib(budget.memory.available)
    return (
        f"{budget.engine.device}, {free} free: {format_gib(budget.weights)} weights ({budget.engine.dtype}) "
        f"fit at --tp 1, KV {budget.kv_tokens:,} tokens"
    )
