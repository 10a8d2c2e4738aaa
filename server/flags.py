"""Options of other servers: those that mean the same here, and what to answer for those that do not.

``ALIASES`` are rewritten in silence; those of ``foreign_flags`` have no meaning here and are refused with ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from gtp_serve.errors import UsageError
from gtp_serve.server.foreign_flags import FOREIGN

ALIASES: Mapping[str, str] = {
    "--model": "--ckpt",
    "--model-path": "--ckpt",
    "--load": "--ckpt",
    "--checkpoint": "--ckpt",
    "--ckpt-step": "--iteration",
    "--tokenizer-path": "--tokenizer",
    "--tokenizer-model": "--tokenizer",
    "--skip-tokenizer-init": "--no-tokenizer",
    "--max-model-len": "--context",
    "--context-length": "--context",
    "--inference-max-seq-length": "--context",
    "--served-model-name": "--name",
    "-tp": "--tp",
    "--tp-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--tensor-model-parallel-size": "--tp",
    "--gpu-memory-utilization": "--mem-fraction",
    "--mem-fraction-static": "--mem-fraction",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--enforce-eager": "--no-graphs",
    "--disable-cuda-graph": "--no-graphs",
    "--disable-radix-cache": "--no-prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--enable-prefix-caching": "--prefix-cache",
    "--enable-deterministic-inference": "--deterministic",
    "--max-num-seqs": "--max-running",
    "--max-running-requests": "--max-running",
    "--inference-max-requests": "--max-running",
    "--server-port": "--port",
    "--shutdown-timeout": "--drain-timeout",
    "--admin-api-key": "--admin-key",
    "--otlp-traces-endpoint": "--otlp",
}
"""Option of another server: ours, with the same value."""

SILENT = frozenset(
    {
        "--enable-metrics",
        "--use-checkpoint-args",
        "--disable-log-requests",
        "--disable-log-stats",
        "--no-enable-log-requests",
        "--enable-auto-tool-choice",
        "--enable-prompt-tokens-details",
        "--enable-return-routed-experts",
        "--enable-sleep-mode",
        "--enable-memory-saver",
        "--enable-offline-docs",
        "--inference-dynamic-batching",
    }
)
"""Options without a value that ask for what this version does anyway."""

LOG_LEVELS: Mapping[str, tuple[str, ...]] = {
    "trace": ("-v",),
    "debug": ("-v",),
    "info": (),
    "warning": ("-q",),
    "warn": ("-q",),
    "error": ("-q",),
    "critical": ("-q",),
}


def rewrite_aliases(argv: Sequence[str]) -> list[str]:
    """The same command line in our own words; unknown options are left for the parser to refuse."""
    result: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in SILENT and not equals:
            continue
        if name == "--log-level":
            level = value if equals else next(words, "")
            result += _log_level(level)
            continue
        result.append(ALIASES.get(name, name) + equals + value)
    return result


def _log_level(level: str) -> tuple[str, ...]:
    flags = LOG_LEVELS.get(level.lower())
    if flags is None:
        raise UsageError(f"--log-level '{level}' is not a level", [("here it is", "-v for more, -q for warnings only")])
    return flags


def refuse_unknown(word: str, known: Iterable[str], commands: Sequence[str]) -> UsageError:
    """The error for a word on the command line that is no option of ours.

    :param commands: what the first word may be.
    """
    name = word.partition("=")[0]
    if not name.startswith("-"):
        command = difflib.get_close_matches(word, commands, n=1, cutoff=0.75)
        if command:
            return UsageError(f"there is no command '{word}'", [("nearest", f"gtp-serve {command[0]}")])
        return UsageError(f"unexpected argument '{word}'", [("try", f"gtp-serve --ckpt {word}")])
    foreign = FOREIGN.get(name)
    if foreign is not None:
        return UsageError(
            f"unknown option {name} (that is {foreign.whose})",
            [("here it is" if foreign.here.startswith("-") else "here", foreign.here)],
        )
    near = difflib.get_close_matches(name, [*known, *ALIASES], n=1, cutoff=0.7)
    if near:
        return UsageError(f"unknown option {name}", [("nearest", ALIASES.get(near[0], near[0]))])
    return UsageError(f"unknown option {name}", [("see", "gtp-serve --help")])
