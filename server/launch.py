"""What the serve command tells its engine process: one JSON value on the command line,
or through a pipe where the process was started early (``server.early_engine``).  No torch here."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gtp_serve.config import EngineConfig
from gtp_serve.engine.far import FarRanks
from gtp_serve.loaders.facts import SavedOverrides
from gtp_serve.server.early_engine import engine_command
from gtp_serve.server.options import DEADLINE_SECONDS, SavedGrid


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
    far: FarRanks | None = None
    """Where the ranks come together when somebody else starts them, on one machine or several."""
    first_prompt: tuple[int, ...]
    """Ids of the prompt that proves, before the server is ready, that a token comes out."""


def launch_argv(launch: Launch, *, warnings: bool = False) -> list[str]:
    """The command that starts the engine process; the client adds ``--endpoint``.

    :param warnings: let other packages' warnings through.
    """
    return [*engine_command(warnings=warnings), "--launch", as_text(launch)]


def as_text(launch: Launch) -> str:
    """In ASCII: a path need not be valid text, and ``json`` writes and reads the lone surrogates that stand for its
    bytes, which msgspec refuses.
    """
    return json.dumps(msgspec.to_builtins(launch), separators=(",", ":"))


def read_launch(text: str) -> Launch:
    """The value that ``as_text`` wrote.

    :raises ValueError: when it is no JSON.
    :raises msgspec.ValidationError: when it is another value.
    """
    return msgspec.convert(json.loads(text), type=Launch)


def write_order(launch: Launch, endpoint: str) -> bytes:
    """For an engine process that was started early: what to build, and where the client listens."""
    return json.dumps([endpoint, as_text(launch)]).encode()


def read_order(descriptor: int) -> tuple[Launch, str] | None:
    """What ``write_order`` made, from a pipe: the launch and the endpoint; None when the pipe was closed instead.

    :raises ValueError: when it is something else.
    """
    with os.fdopen(descriptor, "rb") as pipe:
        order = pipe.read()
    if not order:
        return None
    endpoint, launch = msgspec.json.decode(order, type=tuple[str, str])
    return read_launch(launch), endpoint


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
