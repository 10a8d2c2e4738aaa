"""Logits of transformers' own models, built small and random, reproduced by the decoder."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from parity.model_harness import filled_decoder, in_chunks, interleaved
from torch import Tensor

from gtp_serve.config import ModelConfig, MoeConfig, RopeConfig
from gtp_serve.models.decoder import Decoder

VOCAB, CONTEXT, TOLERANCE = 97, 128, 2e-5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
OURS = ModelConfig(
    family="llama", num_layers=3, hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=8, ffn_size=80,
    vocab_size=VOCAB, vocab_rows=VOCAB, norm_eps=1e-5, max_context=CONTEXT,
)  # fmt: skip
LLAMA3 = RopeConfig(
    theta=5000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32
)
YARN = RopeConfig(theta=10000.0, scaling="yarn", factor=4.0, original_context=32)
MOE = MoeConfig(num_experts=5, top_k=2, ffn_size=24)


@dataclass(frozen=True)
class Case:
    config_class: str
    model_class: str
    theirs: dict[str, Any]
    ours: ModelConfig


CASES = {
    "llama": Case("LlamaConfig", "LlamaForCausalLM", {}, OURS),
    "llama with every bias": Case(
        "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True},
        replace(OURS, qkv_bias=True, proj_bias=True, mlp_bias=True),
    ),
    "llama with a tied head": Case(
        "LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}, replace(OURS, tied=True)
    ),
    "llama with llama3 scaling": Case(
        "LlamaConfig", "LlamaForCausalLM",
        {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }},
        replace(OURS, rope=LLAMA3),
    ),
    "llama with linear scaling": Case(
        "LlamaConfig", "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
        replace(OURS, rope=RopeConfig(scaling="linear", factor=2.5)),
    ),
    "mistral": Case(
        "MistralConfig", "MistralForCausalLM", {"sliding_window": 9, "head_dim": 8},
        replace(OURS, family="mistral", sliding_window=9),
    ),
    "qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", {}, replace(OURS, family="qwen2", qkv_bias=True)),
    "qwen2 with yarn scaling": Case(
        "Qwen2Config", "Qwen2ForCausalLM",
        {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        }},
        replace(OURS, family="qwen2", qkv_bias=True, rope=YARN),
    ),
    "qwen3": Case(
        "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16},
        replace(OURS, family="qwen3", qk_norm=True, head_dim=16),
    ),
    "mixtral": Case(
        "MixtralConfig", "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24},
        replace(OURS, family="mixtral", ffn_size=0, moe=MOE),
    ),
    "qwen3 moe": Case(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
         "head_dim": 8},
        replace(OURS, family="qwen3_moe", qk_norm=True, ffn_size=0, moe=MOE),
    ),
    "qwen3 moe without normalised weights": Case(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False,
         "head_dim": 8},
        replace(OURS, family="qwen3_moe", qk_norm=True, ffn_size=0,
                moe=replace(MOE, top_k=3, normalise_top_k=False)),
    ),
    "qwen2 moe with a gated shared expert": Case(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False,
         "shared_expert_intermediate_size": 40},
        replace(OURS, family="qwen3_moe", qkv_bias=True, ffn_size=0,
                moe=replace(MOE, normalise_top_k=False, shared_ffn_size=40, shared_gate=True)),
    ),
}  # fmt: skip


def per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers keeps experts in two stacks; logical names have one tensor for each."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        found = re.fullmatch(r"(.*\.mlp)\.experts\.(gate_up_proj|down_proj)", name)
        if not found:
            out[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            prefix = f"{found[1]}.experts.{expert}"
            if found[2] == "down_proj":
                out[f"{prefix}.down_proj.weight"] = weight
            else:
                out[f"{prefix}.gate_proj.weight"], out[f"{prefix}.up_proj.weight"] = weight.chunk(2)
    return out


class Pair:
    """Their model with random weights, ours with the same."""

    def __init__(self, case: Case) -> None:
        config = getattr(transformers, case.config_class)(**(SIZES | case.theirs))
        config._attn_implementation = "eager"
        torch.manual_seed(1)
        self.model: Any = getattr(transformers, case.model_class)(config).eval()
        for name, parameter in self.model.named_parameters():
            # Norms away from 1, biases away from 0, weights large enough that attention is not flat.
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.15)
        state: dict[str, Tensor] = dict(self.model.state_dict())
        if case.ours.tied:
            del state["lm_head.weight"]
        self.ours: Decoder = filled_decoder(case.ours, per_expert(state))
        self.tokens = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(2)).tolist()
        self.logits = self.theirs(self.tokens)

    def theirs(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0].float()
        return logits


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> Pair:
    torch.set_num_threads(1)
    return Pair(CASES[request.param])


@pytest.mark.parametrize("chunk", [60, 7, 1])
def test_logits_agree_with_transformers(pair: Pair, chunk: int) -> None:
    torch.testing.assert_close(in_chunks(pair.ours, pair.tokens, chunk), pair.logits, rtol=0, atol=TOLERANCE)


def test_sequences_that_share_steps_agree_with_transformers(pair: Pair) -> None:
    prompts = [pair.tokens[:33], pair.tokens[40:], pair.tokens[7:20]]
    for prompt, logits in zip(prompts, interleaved(pair.ours, prompts, [5, 1, 8]), strict=True):
        torch.testing.assert_close(logits, pair.theirs(prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_single(dtype: torch.dtype) -> None:
    case = CASES["qwen3"]
    pair = Pair(case)
    logits = in_chunks(filled_decoder(case.ours, pair.model.state_dict(), dtype), pair.tokens, 7)
    error = (logits - pair.logits).abs().max() / pair.logits.abs().max()
    assert error < (0.06 if dtype == torch.bfloat16 else 0.01)


def dynamic_pair() -> tuple[Decoder, Any]:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    case = Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": rope, "max_position_embeddings": 16},
        replace(OURS, rope=RopeConfig(scaling="dynamic", factor=2.0, original_context=16)),
    )
    pair = Pair(case)
    return pair.ours, pair.model


def decode_with_cache(model: Any, tokens: list[int]) -> Tensor:
    """One token at a time, with transformers' own cache."""
    cache = transformers.DynamicCache(config=model.config)
    rows = []
    with torch.no_grad():
        for token in tokens:
            rows.append(model(torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, 0])
    return torch.stack(rows)


def test_dynamic_scaling_agrees_with_decoding_in_transformers_past_the_original_context() -> None:
    ours, model = dynamic_pair()
    tokens = list(range(5, 45))
    expected = decode_with_cache(model, tokens)
    for chunk in (1, 11, 40):
        torch.testing.assert_close(in_chunks(ours, tokens, chunk), expected, rtol=0, atol=TOLERANCE)
