"""``gtp-serve --print-config``: every setting with its value and where it was set, as a configuration file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, TextIO

from gtp_serve.errors import GtpServeError
from gtp_serve.loaders import open_checkpoint
from gtp_serve.server.launch import saved_overrides
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.serve_options import Given, to_options
from gtp_serve.server.settings import SETTINGS, Setting

#: Settings whose field of the options has another name.
_FIELDS = {"attention_backend": "attention"}
_WIDTH = 44
#: What stands for a value that is settled only when the server starts.
_LATER = {
    "device": "cuda where there is a GPU",
    "mem_fraction": "0.9 of a GPU, 0.5 of free RAM",
    "kv_memory": "what fits",
    "max_running": "64",
    "max_waiting": "1024",
    "refit_memory": "staged if it fits",
    "refit_host": "that of host",
}


def run(given: Given, out: TextIO) -> int:
    """Print, and return the exit code.

    :raises UsageError: as the server itself would refuse a value.
    """
    options = to_options(given)
    from_checkpoint = _from_checkpoint(options)
    group = ""
    for setting in SETTINGS:
        if setting.group != group:
            out.write(f"\n# {setting.group}\n" if group else f"# {setting.group}\n")
            group = setting.group
        line, origin = _line(setting, given, options, from_checkpoint)
        out.write(f"{line:<{_WIDTH}}  # {origin}\n")
    return 0


def _line(setting: Setting, given: Given, options: ServeOptions, found: dict[str, Any]) -> tuple[str, str]:
    key = setting.key
    if key in given:
        value = '"..."' if setting.secret else json.dumps(_typed(setting, given.value(key)), ensure_ascii=False)
        return f"{key} = {value}", _origin(given, key)
    if key in found:
        return f"# {key} = {json.dumps(found[key], ensure_ascii=False)}", "checkpoint"
    value = _LATER.get(key, _default(setting, options))
    return f"# {key}" + (f" = {value}" if value else ""), "default"


def _default(setting: Setting, options: ServeOptions) -> str:
    if setting.key in ("verbose", "quiet"):
        return "false"
    value = getattr(options, _FIELDS.get(setting.key, setting.key), None)
    if value is None or value == () or setting.secret:
        return ""
    return json.dumps(value if isinstance(value, bool | int | float | str) else str(value))


def _typed(setting: Setting, value: Any) -> Any:
    """A number as a number: an option's text is one by now."""
    if setting.kind != "number":
        return value
    number = float(value)
    return int(value) if str(value).isdigit() else number


def _origin(given: Given, key: str) -> str:
    source, place = given.source(key), given.place(key)
    if source == "file":
        return place.removeprefix(f"{key} in ")
    return f"{source}: {place}" if source == "environment" else source


def _from_checkpoint(options: ServeOptions) -> dict[str, Any]:
    """What the checkpoint decides where nobody else did; nothing when it cannot be read."""
    try:
        with closing(
            open_checkpoint(options.ckpt, iteration=options.iteration, saved=saved_overrides(options.saved))
        ) as checkpoint:
            return dict(_facts(checkpoint.config.dtype, checkpoint))
    except GtpServeError:
        return {}


def _facts(dtype: str, checkpoint: Any) -> Iterator[tuple[str, Any]]:
    yield "dtype", dtype
    yield "context", checkpoint.config.max_context
    if checkpoint.facts.iteration is not None:
        yield "iteration", checkpoint.facts.iteration
    if checkpoint.tokenizer is not None:
        yield "tokenizer", str(checkpoint.tokenizer.folder)
    for name in ("tp", "gtp", "etp", "egtp"):
        if checkpoint.facts.format == "megatron":
            yield f"saved_{name}", getattr(checkpoint.facts.saved, name)
