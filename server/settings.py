"""Every setting of ``serve``: its key in the file, its option, its help; and from which source each value comes.

A setting ``max_running`` is the option ``--max-running``, the variable ``GTP_SERVE_MAX_RUNNING`` and the key
``max_running`` of the configuration file.  The first of these that says something wins.  Standard library only.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gtp_serve.errors import UsageError

ENVIRONMENT_PREFIX = "GTP_SERVE_"
CONFIG_VARIABLE = "GTP_SERVE_CONFIG"
"""Names the configuration file."""
Kind = Literal["text", "path", "number", "switch", "list"]
Shown = Literal["help", "all", "file"]
"""In --help and --help-all, in --help-all only, or without an option."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that a user may set."""

    key: str
    group: str
    words: str
    """For the help; the default in brackets."""
    value: str = ""
    """What the help calls the value; empty for a switch."""
    kind: Kind = "text"
    shown: Shown = "help"
    off: bool = False
    """A switch that is on unless it is turned off: its option is ``--no-KEY``."""
    secret: bool = False

    @property
    def option(self) -> str:
        """As on the command line."""
        return ("--no-" if self.off else "--") + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in the environment."""
        return ENVIRONMENT_PREFIX + self.key.upper()


_MODEL, _MEMORY, _HTTP, _OTHER = "model", "device and memory", "http", "configuration and log"
_WEIGHTS, _SAVED = "new weights while serving", "only if the checkpoint does not say how it was saved"
_FILE = "in the configuration file only"

SETTINGS: tuple[Setting, ...] = (
    Setting("ckpt", _MODEL, "Megatron torch_dist, Hugging Face or GGUF checkpoint", "PATH", "path"),
    Setting("iteration", _MODEL, "which Megatron iteration (newest)", "N", "number"),
    Setting("manifest", _MODEL, "sha256sum's list of its files, compared before loading", "FILE", "path", shown="all"),
    Setting("tokenizer", _MODEL, "folder with tokenizer.json (the checkpoint's)", "PATH", "path"),
    Setting("no_tokenizer", _MODEL, "token ids only", kind="switch"),
    Setting("chat_template", _MODEL, "Jinja chat template (the tokenizer's)", "FILE", "path"),
    Setting("name", _MODEL, "model name in replies (folder name)", "NAME"),
    Setting("dtype", _MODEL, "auto, float32, bfloat16, float16 (as saved)", "TYPE"),
    Setting("context", _MODEL, "most tokens of prompt plus reply (the model's)", "N", "number"),
    Setting("tp", _MEMORY, "tensor parallel size: processes, GPUs (1)", "N", "number"),
    Setting("device", _MEMORY, "auto, cpu, cuda (auto)", "DEVICE"),
    Setting("mem_fraction", _MEMORY, "share of memory to use (0.9 of a GPU, 0.5 of free RAM)", "F", "number"),
    Setting("kv_memory", _MEMORY, "KV cache, for example 4GiB (what fits)", "SIZE"),
    Setting("max_running", _MEMORY, "sequences in one step (64)", "N", "number"),
    Setting("threads", _MEMORY, "of each process that computes (one for each core)", "N", "number", shown="all"),
    Setting("quant", _MEMORY, "int8: products read smaller weights, on a CPU (none)", "FORM", shown="all"),
    Setting("prefix_cache", _MEMORY, "compute shared prompt beginnings anew", kind="switch", off=True),
    Setting("graphs", _MEMORY, "run each decode step eagerly", kind="switch", off=True),
    Setting("deterministic", _MEMORY, "same bits whatever runs beside it; slower", kind="switch"),
    Setting(
        "attention_backend",
        _MEMORY,
        "on a GPU: auto, torch, triton, flashinfer, flash-attn (auto)",
        "NAME",
        shown="all",
    ),
    Setting("host", _HTTP, "address to listen on (127.0.0.1)", "HOST"),
    Setting("port", _HTTP, "0 picks a free one (30000)", "PORT", "number"),
    Setting("api_key", _HTTP, "key of all routes but pages and probes; better --api-key-file", "KEY", secret=True),
    Setting("api_key_file", _HTTP, "file that holds it, seen in no process list", "FILE", "path", shown="all"),
    Setting("admin_key", _HTTP, "key of the weight routes (none: this machine only)", "KEY", secret=True),
    Setting("admin_key_file", _HTTP, "file that holds it, seen in no process list", "FILE", "path", shown="all"),
    Setting("page", _HTTP, "neither the page at / nor /docs", kind="switch", off=True),
    Setting("drain_timeout", _HTTP, "seconds for running requests at exit (30)", "S", "number"),
    Setting("otlp", _OTHER, "send trace spans there (extra otel)", "URL"),
    Setting("metrics_aliases", _OTHER, "also as vllm: or sglang: metrics (neither)", "NAMES", shown="all"),
    Setting("log", _OTHER, "text or json (text)", "FORM"),
    Setting("verbose", _OTHER, "debug lines, warnings and stacks", kind="switch"),
    Setting("quiet", _OTHER, "warnings and errors only", kind="switch"),
    Setting("refit_memory", _WEIGHTS, "staged or inplace (staged if it fits)", "HOW", shown="all"),
    Setting("refit_timeout", _WEIGHTS, "seconds for an update (120)", "S", "number", shown="all"),
    Setting("refit_host", _WEIGHTS, "address where trainers meet the engine (--host's)", "HOST", shown="all"),
    Setting("saved_tp", _SAVED, "tensor parallel size of the trainer", "N", "number", shown="all"),
    Setting("saved_gtp", _SAVED, "GTP size of the trainer", "N", "number", shown="all"),
    Setting("saved_etp", _SAVED, "expert tensor parallel size of the trainer", "N", "number", shown="all"),
    Setting("saved_egtp", _SAVED, "expert GTP size of the trainer", "N", "number", shown="all"),
    Setting("saved_config", _SAVED, "a config.json that describes the model", "FILE", "path", shown="all"),
    Setting(
        "tls_cert", _FILE, "PEM file of the certificate and its chain: https instead of http", "FILE", "path", "file"
    ),
    Setting("tls_key", _FILE, "PEM file of the certificate's key", "FILE", "path", "file"),
    Setting("cors", _FILE, "web origins whose pages may call the server", "[ORIGIN, ...]", "list", "file"),
    Setting("max_waiting", _FILE, "requests that may wait before queue-full (1024)", "N", "number", "file"),
)
BY_KEY: Mapping[str, Setting] = {setting.key: setting for setting in SETTINGS}
SHORT = {"verbose": "-v", "quiet": "-q"}


class Value(NamedTuple):
    """A value as text (or a bool, or a list of texts) and where it was set."""

    value: Any
    source: Literal["command line", "environment", "file"]
    place: str
    """As an error names it: ``--tp``, ``GTP_SERVE_TP``, ``tp in gtp-serve.toml``."""


def add_setting(parser: argparse._ActionsContainer, setting: Setting, *, hidden: bool) -> None:
    """The setting's option; a switch also has its opposite, which never shows."""
    words = argparse.SUPPRESS if hidden else setting.words
    names = [*([SHORT[setting.key]] if setting.key in SHORT else []), setting.option]
    if setting.kind != "switch":
        parser.add_argument(*names, dest=setting.key, metavar=setting.value, help=words)
        return
    parser.add_argument(*names, dest=setting.key, action="store_const", const=not setting.off, help=words)
    plain = setting.key.replace("_", "-")
    opposite = f"--{plain}" if setting.off else f"--no-{plain}"
    if not setting.key.startswith("no_") and setting.key not in SHORT:
        parser.add_argument(opposite, dest=setting.key, action="store_const", const=setting.off, help=argparse.SUPPRESS)


def from_command_line(args: argparse.Namespace) -> dict[str, Value]:
    """What the options set."""
    given = ((setting, getattr(args, setting.key, None)) for setting in SETTINGS)
    return {s.key: Value(value, "command line", s.option) for s, value in given if value is not None}


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """What ``GTP_SERVE_*`` variables set.

    Kubernetes sets ``GTP_SERVE_PORT=tcp://...`` in every pod beside a service of this name; that is not ours.
    """
    found: dict[str, Value] = {}
    for setting in SETTINGS:
        text = environment.get(setting.variable)
        if not text or setting.shown == "file" or (setting.key == "port" and text.startswith("tcp://")):
            continue
        value: Any = _switch(setting.variable, text) if setting.kind == "switch" else text
        found[setting.key] = Value(value, "environment", setting.variable)
    return found


def unknown_variables(environment: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """Variables that look like settings and are none, with the nearest that is; the server itself passes them over.

    Kubernetes names a service's address ``GTP_SERVE_SERVICE_HOST``, ``GTP_SERVE_PORT_80_TCP`` and the like.
    """
    known = {setting.variable for setting in SETTINGS if setting.shown != "file"} | {CONFIG_VARIABLE}
    foreign = (f"{ENVIRONMENT_PREFIX}SERVICE_", f"{ENVIRONMENT_PREFIX}PORT_")
    odd = [n for n in environment if n.startswith(ENVIRONMENT_PREFIX) and n not in known and not n.startswith(foreign)]
    return [(name, next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None)) for name in sorted(odd)]


def _switch(place: str, text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"{place} '{text}' is not possible", [("possible", "true or false")])
    return text.lower() in _TRUE


def from_file(values: Mapping[str, Any], path: Path) -> dict[str, Value]:
    """What a configuration file's keys set; paths in it start from its folder.

    :raises UsageError: for a key that is none, naming the nearest, or a value of the wrong kind.
    """
    found: dict[str, Value] = {}
    for key, value in values.items():
        if key not in BY_KEY:
            raise UsageError(f"{path}: unknown key '{key}'", _nearest(key))
        place = f"{key} in {path}"
        found[key] = Value(_checked(BY_KEY[key], value, place, path.parent), "file", place)
    return found


def _checked(setting: Setting, value: Any, place: str, folder: Path) -> Any:
    kind, possible = setting.kind, "a text in quotes"
    if kind == "switch":
        good, possible = isinstance(value, bool), "true or false"
    elif kind == "number":
        good, possible = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif kind == "list":
        good, possible = isinstance(value, list) and all(isinstance(x, str) for x in value), 'texts: ["a", "b"]'
    else:
        good = isinstance(value, str) and bool(value)
    if not good:
        raise UsageError(f"{place} is {value!r}", [("possible", possible)])
    if kind == "path":
        return str(folder / Path(value).expanduser())
    return value if kind in ("switch", "list") else str(value)


def _nearest(key: str) -> list[tuple[str, str]]:
    plain = key.lower().replace("-", "_")
    near = difflib.get_close_matches(plain, BY_KEY, n=1, cutoff=0.6)
    return [("nearest", near[0])] if near else [("possible", ", ".join(BY_KEY))]


def merge(layers: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """The first layer that says something wins."""
    merged: dict[str, Value] = {}
    for layer in layers:
        for key, value in layer.items():
            merged.setdefault(key, value)
    return merged
