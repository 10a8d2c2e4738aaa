"""Options of other servers that have no meaning here: whose each is, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """A known option of another server that cannot be honoured: whose it is and what to do."""

    whose: str
    here: str


_BOTH = "vLLM's and SGLang's"
#: What to do instead: whose options that answers, by name.
_ANSWERS: Mapping[str, Mapping[str, str]] = {
    "leave it out: no code from a model folder is run": {
        _BOTH: "--trust-remote-code",
    },
    "leave it out: the format is recognised": {
        _BOTH: "--load-format",
        "Megatron's": "--ckpt-format --dist-ckpt-format",
    },
    "--quant int8 on a CPU; else weights are served as float32, bfloat16 or float16 (--dtype)": {
        _BOTH: "--quantization",
    },
    "leave it out: the KV cache has the model's --dtype": {
        _BOTH: "--kv-cache-dtype",
    },
    "leave it out: a checkpoint saved at any parallel layout loads at any --tp": {
        "vLLM's": "--pipeline-parallel-size -pp --enable-expert-parallel",
        "SGLang's": "--pp-size --ep-size --ep",
        "Megatron's": (
            "--pipeline-model-parallel-size --expert-model-parallel-size --context-parallel-size --sequence-parallel"
        ),
    },
    "--saved-etp N, if the checkpoint does not say": {
        "Megatron's": "--expert-tensor-parallel-size",
    },
    "--saved-gtp N, if the checkpoint does not say": {
        "Megatron's": "--gtp-weight-remat-size --generalized-tensor-parallel-size --gtp-remat-size",
    },
    "start one server for each replica, or gtp-serve cluster": {
        "vLLM's": "--data-parallel-size -dp",
        "SGLang's": "--dp-size --dp --enable-dp-attention",
    },
    "leave it out: the server chooses": {
        "vLLM's": (
            "--max-num-batched-tokens --enable-chunked-prefill --block-size --max-seq-len-to-capture "
            "--cuda-graph-sizes --compilation-config --async-scheduling --use-v2-block-manager "
            "--scheduling-policy --cpu-offload-gb"
        ),
        "SGLang's": (
            "--chunked-prefill-size --page-size --max-prefill-tokens --cuda-graph-max-bs --cuda-graph-bs "
            "--sampling-backend --schedule-conservativeness --enable-torch-compile --enable-mixed-chunk "
            "--enable-p2p-check --moe-a2a-backend --moe-runner-backend"
        ),
        "Megatron's": (
            "--cuda-graph-impl --enable-cuda-graph --cuda-graph-scope --flash-decode --use-flash-attn "
            "--inference-rng-tracker --moe-grouped-gemm --distributed-backend"
        ),
    },
    "leave it out: nothing is swapped": {
        "vLLM's": "--swap-space",
    },
    "leave it out: requests run in order of arrival": {
        "SGLang's": "--schedule-policy",
    },
    "leave it out: one engine process; several replicas on Ray are gtp-serve cluster": {
        "vLLM's": "--distributed-executor-backend",
    },
    "not supported: merge the adapter into the weights": {
        _BOTH: "--enable-lora --max-lora-rank",
        "SGLang's": "--lora-paths --max-loras-per-batch",
        "vLLM's": "--lora-modules --max-loras",
    },
    "leave it out: each update says where its weights come from": {
        "vLLM's": "--weight-transfer-config",
    },
    'in the configuration file: tls_key = "FILE"': {
        _BOTH: "--ssl-keyfile",
    },
    'in the configuration file: tls_cert = "FILE"': {
        _BOTH: "--ssl-certfile",
    },
    'in the configuration file: cors = ["https://lab.example"]': {
        "vLLM's": "--allowed-origins",
    },
    "in the configuration file: max_waiting = N": {
        "SGLang's": "--max-queued-requests",
    },
    'in the request: "sampling_params": {"sampling_seed": 7}': {
        "vLLM's": "--seed",
        "SGLang's": "--random-seed",
    },
    "not in this version": {
        "SGLang's": (
            "--speculative-algorithm --disaggregation-mode --speculative-num-steps --speculative-eagle-topk "
            "--speculative-num-draft-tokens --speculative-draft-model-path"
        ),
        "vLLM's": "--speculative-config --kv-transfer-config --headless",
    },
    "--tokenizer PATH to a folder with tokenizer.json": {
        "Megatron's": "--tokenizer-type",
    },
    "leave it out: tokenizer.json is read": {
        _BOTH: "--tokenizer-mode",
    },
    "--dtype bfloat16": {
        "Megatron's": "--bf16",
    },
    "--dtype float16": {
        "Megatron's": "--fp16",
    },
    "leave it out: the model is described by the checkpoint": {
        "Megatron's": (
            "--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention "
            "--num-query-groups --num-experts --swiglu --untie-embeddings-and-output-weights "
            "--disable-bias-linear --add-qkv-bias --normalization --norm-epsilon --position-embedding-type "
            "--rotary-base --rotary-percent --rotary-scaling-factor --use-rope-scaling "
            "--make-vocab-size-divisible-by --padded-vocab-size --vocab-size --qk-layernorm --kv-channels "
            "--moe-router-topk --moe-ffn-hidden-size --moe-layer-freq"
        ),
    },
    "--context N, or leave it out": {
        "Megatron's": "--max-position-embeddings --seq-length",
    },
    "--max-running N": {
        "Megatron's": "--micro-batch-size --inference-max-batch-size",
    },
    "leave it out: optimizer state is never read": {
        "Megatron's": "--no-load-optim",
    },
    "leave it out: random state is never read": {
        "Megatron's": "--no-load-rng",
    },
    "leave it out": {
        "Megatron's": "--transformer-impl --attention-softmax-in-fp32",
    },
    "leave it out: calls in JSON are recognised, any other form stays text": {
        _BOTH: "--tool-call-parser",
    },
    "leave it out: what a model thinks stays in its text": {
        _BOTH: "--reasoning-parser",
        "vLLM's": "--enable-reasoning",
    },
    "leave it out: grammars are carried out by llguidance": {
        "vLLM's": "--guided-decoding-backend --structured-outputs-config",
        "SGLang's": "--grammar-backend --constrained-json-whitespace-pattern",
    },
    'leave it out: log-probabilities are raw, or "processed" as /generate\'s sampling_logprobs_mode says': {
        "vLLM's": "--logprobs-mode",
    },
    "leave it out: a request may ask for up to 128": {
        "vLLM's": "--max-logprobs",
    },
    'in the request: "return_tokens_as_token_ids": true': {
        "vLLM's": "--return-tokens-as-token-ids",
    },
    'in the request: "stream": "delta"': {
        "SGLang's": "--incremental-streaming-output",
    },
    "leave it out: each step is streamed": {
        "SGLang's": "--stream-interval",
    },
    "not supported: text and token ids only": {
        "vLLM's": "--limit-mm-per-prompt --mm-processor-kwargs",
    },
    "not supported: it makes text, not embeddings": {
        "SGLang's": "--is-embedding",
    },
    "leave it out: nothing is downloaded": {
        _BOTH: "--download-dir --revision",
    },
    "--kv-memory SIZE": {
        "SGLang's": "--max-total-tokens",
        "Megatron's": "--inference-dynamic-batching-buffer-size-gb",
    },
    "-v for more, -q for warnings only": {
        "vLLM's": "--uvicorn-log-level",
    },
    "leave it out: a line for each request, never its text": {
        _BOTH: "--enable-log-requests --log-requests",
    },
    "leave it out: a line every 10 s, when something changed": {
        "SGLang's": "--decode-log-interval",
    },
    "leave it out: put a proxy that strips the prefix in front": {
        "vLLM's": "--root-path",
    },
    "not supported: code is not loaded by name": {
        "vLLM's": "--middleware --worker-extension-cls",
        "SGLang's": "--custom-weight-loader",
    },
    "leave it out: replies are the assistant's": {
        "vLLM's": "--response-role",
    },
    "leave it out: end tokens are read, sampling is the request's to say": {
        "vLLM's": "--generation-config --override-generation-config",
    },
    "--saved-config FILE": {
        "vLLM's": "--hf-overrides",
        "SGLang's": "--json-model-override-args",
    },
    "leave it out: /v1/loads and /metrics tell the load": {
        "vLLM's": "--enable-server-load-tracking",
    },
    "several machines: gtp-serve cluster": {
        "SGLang's": "--nnodes --node-rank --dist-init-addr",
    },
    "set CUDA_VISIBLE_DEVICES": {
        "SGLang's": "--base-gpu-id --gpu-id-step",
    },
    "leave it out: weights are read anew, or rolled back where they lie": {
        "SGLang's": "--enable-weights-cpu-backup",
    },
    "leave it out: start-up makes one token": {
        "SGLang's": "--skip-server-warmup",
    },
    "leave it out: /health tells when no step is made": {
        "SGLang's": "--watchdog-timeout",
    },
    "--otlp URL": {
        "SGLang's": "--enable-trace",
    },
    "--deterministic": {
        "SGLang's": "--rl-on-policy-target",
    },
    "leave it out: it begins at 0; each update brings its own": {
        "SGLang's": "--weight-version",
    },
    "leave it out: nothing is stored": {
        "SGLang's": "--file-storage-path",
    },
    "leave it out: every tensor is checked": {
        "Megatron's": "--dist-ckpt-strictness",
    },
}

FOREIGN: Mapping[str, Foreign] = {
    name: Foreign(whose, here)
    for here, owners in _ANSWERS.items()
    for whose, names in owners.items()
    for name in names.split()
}
"""By name."""
