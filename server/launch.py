"""What the serve command tells its engine process: one JSON value on the command line.  No torch here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gtp_serve.config import EngineConfig
from gtp_serve.loaders.facts import SavedOverrides
from gtp_serve.server.options import DEADLINE_SECONDS, SavedGrid

ENGINE_MODULE = "gtp_serve.server.engine_start"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the engine process needs to build its engine."""

    ckpt: str
    iteration: int | None
    saved: SavedGrid
    engine: EngineConfig
    threads: int
    """Of torch, and of the weight reader."""
    tokenizer: str | None = None
    """A ``tokenizer.json``; grammars need it."""
    refit_seconds: float = DEADLINE_SECONDS
    refit_host: str = "127.0.0.1"
    """Address of this machine on which trainers meet the engine."""
    first_prompt: tuple[int, ...]
    """Ids of the prompt that proves, before the server is ready, that a token comes out."""


def launch_argv(launch: Launch, *, warnings: bool = False) -> list[str]:
    """The command that starts the engine process; the client adds ``--endpoint``.

    :param warnings: let other packages' warnings through.
    """
    flags = ["-P"] if sys.flags.safe_path else []
    flags += ["-O"] * sys.flags.optimize
    flags += ["-W", "default"] if warnings else []
    return [sys.executable, *flags, "-m", ENGINE_MODULE, "--launch", msgspec.json.encode(launch).decode()]


def read_launch(text: str) -> Launch:
    """The value that ``launch_argv`` wrote.

    :raises msgspec.DecodeError: when it is none.
    """
    return msgspec.json.decode(text, type=Launch)


def saved_overrides(saved: SavedGrid) -> SavedOverrides:
    """What the options say of how a Megatron checkpoint was saved, as the loaders take it."""
    config = None if saved.config is None else Path(saved.config)
    return SavedOverrides(tp=saved.tp, gtp=saved.gtp, etp=saved.etp, egtp=saved.egtp, config=config)


def absolute(path: Path) -> str:
    """A path that means the same in another process."""
    return str(path.absolute())


def first_prompt_ids(encoded: Sequence[int], vocab_size: int, bos: int | None) -> tuple[int, ...]:
    """Ids for the first token: the encoded text if there is a tokenizer, else the begin token or id 0."""
    ids = tuple(token for token in encoded if token < vocab_size)
    return ids or ((bos,) if bos is not None and bos < vocab_size else (0,))
