"""Options of other servers: those that mean the same here, and what to answer for those that do not.

``ALIASES`` are rewritten in silence.  ``FOREIGN`` are known, have no meaning here, and are refused with ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gtp_serve.errors import UsageError

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


@dataclass(frozen=True, slots=True)
class Foreign:
    """A known option of another server that cannot be honoured: whose it is and what to do."""

    whose: str
    here: str


_FROM_CHECKPOINT = "leave it out: the model is described by the checkpoint"
_NO_LORA = "not supported: merge the adapter into the weights"
_NO_QUANT = "not supported: weights are served as float32, bfloat16 or float16 (--dtype)"
_SAVED_ANY = "leave it out: a checkpoint saved at any parallel layout loads at any --tp"
_AUTO = "leave it out: the server chooses"

FOREIGN: Mapping[str, Foreign] = {
    "--trust-remote-code": Foreign("vLLM's and SGLang's", "leave it out: no code from a model folder is run"),
    "--load-format": Foreign("vLLM's and SGLang's", "leave it out: the format is recognised"),
    "--quantization": Foreign("vLLM's and SGLang's", _NO_QUANT),
    "--kv-cache-dtype": Foreign("vLLM's and SGLang's", "leave it out: the KV cache has the model's --dtype"),
    "--pipeline-parallel-size": Foreign("vLLM's", _SAVED_ANY),
    "--pp-size": Foreign("SGLang's", _SAVED_ANY),
    "--pipeline-model-parallel-size": Foreign("Megatron's", _SAVED_ANY),
    "--expert-model-parallel-size": Foreign("Megatron's", _SAVED_ANY),
    "--expert-tensor-parallel-size": Foreign("Megatron's", "--saved-etp N, if the checkpoint does not say"),
    "--gtp-weight-remat-size": Foreign("Megatron's", "--saved-gtp N, if the checkpoint does not say"),
    "--data-parallel-size": Foreign("vLLM's", "start one server for each replica"),
    "--dp-size": Foreign("SGLang's", "start one server for each replica"),
    "--max-num-batched-tokens": Foreign("vLLM's", _AUTO),
    "--chunked-prefill-size": Foreign("SGLang's", _AUTO),
    "--enable-chunked-prefill": Foreign("vLLM's", _AUTO),
    "--block-size": Foreign("vLLM's", _AUTO),
    "--page-size": Foreign("SGLang's", _AUTO),
    "--swap-space": Foreign("vLLM's", "leave it out: nothing is swapped"),
    "--schedule-policy": Foreign("SGLang's", "leave it out: requests run in order of arrival"),
    "--distributed-executor-backend": Foreign("vLLM's", "leave it out: one engine process, no Ray"),
    "--enable-lora": Foreign("vLLM's and SGLang's", _NO_LORA),
    "--lora-paths": Foreign("SGLang's", _NO_LORA),
    "--lora-modules": Foreign("vLLM's", _NO_LORA),
    "--weight-transfer-config": Foreign("vLLM's", "leave it out: each update says where its weights come from"),
    "--ssl-keyfile": Foreign("vLLM's and SGLang's", 'in the configuration file: tls_key = "FILE"'),
    "--ssl-certfile": Foreign("vLLM's and SGLang's", 'in the configuration file: tls_cert = "FILE"'),
    "--allowed-origins": Foreign("vLLM's", 'in the configuration file: cors = ["https://lab.example"]'),
    "--max-queued-requests": Foreign("SGLang's", "in the configuration file: max_waiting = N"),
    "--seed": Foreign("vLLM's", 'in the request: "sampling_params": {"sampling_seed": 7}'),
    "--random-seed": Foreign("SGLang's", 'in the request: "sampling_params": {"sampling_seed": 7}'),
    "--speculative-algorithm": Foreign("SGLang's", "not in this version"),
    "--speculative-config": Foreign("vLLM's", "not in this version"),
    "--tokenizer-type": Foreign("Megatron's", "--tokenizer PATH to a folder with tokenizer.json"),
    "--tokenizer-mode": Foreign("vLLM's and SGLang's", "leave it out: tokenizer.json is read"),
    "--bf16": Foreign("Megatron's", "--dtype bfloat16"),
    "--fp16": Foreign("Megatron's", "--dtype float16"),
    "--num-layers": Foreign("Megatron's", _FROM_CHECKPOINT),
    "--hidden-size": Foreign("Megatron's", _FROM_CHECKPOINT),
    "--ffn-hidden-size": Foreign("Megatron's", _FROM_CHECKPOINT),
    "--num-attention-heads": Foreign("Megatron's", _FROM_CHECKPOINT),
    "--group-query-attention": Foreign("Megatron's", _FROM_CHECKPOINT),
    "--num-query-groups": Foreign("Megatron's", _FROM_CHECKPOINT),
    "--max-position-embeddings": Foreign("Megatron's", "--context N, or leave it out"),
    "--seq-length": Foreign("Megatron's", "--context N, or leave it out"),
    "--num-experts": Foreign("Megatron's", _FROM_CHECKPOINT),
    "--micro-batch-size": Foreign("Megatron's", "--max-running N"),
    "--ckpt-format": Foreign("Megatron's", "leave it out: the format is recognised"),
    "--dist-ckpt-format": Foreign("Megatron's", "leave it out: the format is recognised"),
    "--no-load-optim": Foreign("Megatron's", "leave it out: optimizer state is never read"),
    "--no-load-rng": Foreign("Megatron's", "leave it out: random state is never read"),
    "--transformer-impl": Foreign("Megatron's", "leave it out"),
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


def refuse_unknown(word: str, known: Iterable[str]) -> UsageError:
    """The error for a word on the command line that is no option of ours."""
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return UsageError(f"unexpected argument '{word}'", [("try", f"gtp-serve --ckpt {word}")])
    foreign = FOREIGN.get(name)
    if foreign is not None:
        return UsageError(
            f"unknown option {name} (that is {foreign.whose})",
            [("here it is" if foreign.here.startswith("-") else "here", foreign.here)],
        )
    near = difflib.get_close_matches(name, [*known, *ALIASES], n=1, cutoff=0.6)
    if near:
        return UsageError(f"unknown option {name}", [("nearest", ALIASES.get(near[0], near[0]))])
    return UsageError(f"unknown option {name}", [("see", "gtp-serve --help")])
