"""What ``gtp-serve serve`` was asked to do, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gtp_serve.config import AttentionBackend, Quant

Flavour = Literal["vllm", "sglang"]

DEADLINE_SECONDS = 120.0
"""Of a weight update that says nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedGrid:
    """How the trainer saved, for checkpoints that do not say; None means: as the checkpoint says."""

    tp: int | None = None
    gtp: int | None = None
    etp: int | None = None
    egtp: int | None = None
    config: str | None = None
    """Path of a config.json that describes the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """One field for each option of ``serve``; None means that the server chooses."""

    ckpt: Path
    iteration: int | None = None
    manifest: Path | None = None
    tokenizer: Path | None = None
    no_tokenizer: bool = False
    chat_template: Path | None = None
    name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    context: int | None = None
    tp: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    mem_fraction: float | None = None
    kv_memory: int | None = None
    """Bytes."""
    max_running: int | None = None
    max_waiting: int | None = None
    prefix_cache: bool = True
    graphs: bool = True
    attention: AttentionBackend = "auto"
    quant: Quant = "none"
    threads: int | None = None
    """Of each process that computes; None: one for each core that it may use."""
    deterministic: bool = False
    host: str = "127.0.0.1"
    port: int = 30000
    drain_timeout: float = 30.0
    page: bool = True
    """Whether ``/`` and ``/docs`` are there."""
    log: Literal["text", "json"] = "text"
    verbosity: int = 0
    """-1 warnings only, 0 normal, 1 debug and stacks."""
    metrics_aliases: tuple[Flavour, ...] = ()
    """Other servers under whose names ``/metrics`` tells its numbers a second time."""
    otlp: str | None = None
    """Where spans go; None: where OpenTelemetry's variables say, if they say it."""
    api_key: str | None = field(default=None, repr=False)
    """None: routes other than those of weights ask for no key."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """Both or neither."""
    cors: tuple[str, ...] = ()
    """Web origins whose pages may call the server."""
    admin_key: str | None = field(default=None, repr=False)
    """None: weight routes answer clients on this machine only."""
    refit_memory: Literal["auto", "staged", "inplace"] = "auto"
    refit_timeout: float = DEADLINE_SECONDS
    refit_host: str | None = None
    """Address of this machine on which trainers meet the engine; None: the one that ``host`` names."""
    saved: SavedGrid = SavedGrid()
