"""Logits that real Megatron models left on disk, reproduced by the decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity.model_harness import PagedRun, filled_decoder, in_chunks, interleaved
from safetensors.torch import load_file
from torch import Tensor

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.models.decoder import Decoder

TRUTH = Path(__file__).parents[1] / "data" / "truth"
LLAMA = ModelConfig(
    family="llama", num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=176,
    vocab_size=251, vocab_rows=252,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, family="qwen2", num_layers=2, tied=True, qkv_bias=True),
    "tiny": replace(LLAMA, num_layers=2, hidden_size=32, head_dim=8, ffn_size=48),
    "moe": replace(
        LLAMA, family="mixtral", num_layers=2, ffn_size=0, moe=MoeConfig(num_experts=4, top_k=2, ffn_size=96)
    ),
}
TOLERANCE = 1e-5  # ten times closer than what is promised


def logical(stored: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Megatron's stacked tensors under logical names, written out without the spans that the product uses."""
    out = {
        "model.embed_tokens.weight": stored["embedding.word_embeddings.weight"],
        "model.norm.weight": stored["decoder.final_layernorm.weight"],
    }
    if not config.tied:
        out["lm_head.weight"] = stored["output_layer.weight"]
    for layer in range(config.num_layers):
        own = {
            key.removeprefix("decoder.layers."): value[layer]
            for key, value in stored.items()
            if key.startswith("decoder.layers.")
        }
        out |= {f"model.layers.{layer}.{name}": value for name, value in logical_layer(own, config).items()}
    return out


def logical_layer(own: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    out = {
        "input_layernorm.weight": own["self_attention.linear_qkv.layer_norm_weight"],
        "post_attention_layernorm.weight": own["mlp.linear_fc1.layer_norm_weight"],
        "self_attn.o_proj.weight": own["self_attention.linear_proj.weight"],
    }
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        stored = own[f"self_attention.linear_qkv.{kind}"]
        groups = stored.view(config.num_kv_heads, -1, *stored.shape[1:])
        sizes = (groups.shape[1] - 2 * config.head_dim, config.head_dim, config.head_dim)
        for name, part in zip("qkv", torch.split(groups, list(sizes), dim=1), strict=True):
            out[f"self_attn.{name}_proj.{kind}"] = part.flatten(0, 1)
    if config.moe is None:
        return out | feed_forward("mlp", own["mlp.linear_fc1.weight"], own["mlp.linear_fc2.weight"])
    out["mlp.gate.weight"] = own["mlp.router.weight"]
    for expert in range(config.moe.num_experts):
        fc1, fc2 = (own[f"mlp.experts.experts.linear_{name}.weight"][expert] for name in ("fc1", "fc2"))
        out |= feed_forward(f"mlp.experts.{expert}", fc1, fc2)
    return out


def feed_forward(prefix: str, fc1: Tensor, fc2: Tensor) -> dict[str, Tensor]:
    gate, up = fc1.chunk(2)
    return {
        f"{prefix}.gate_proj.weight": gate,
        f"{prefix}.up_proj.weight": up,
        f"{prefix}.down_proj.weight": fc2,
    }


class Recorded:
    def __init__(self, name: str) -> None:
        self.decoder: Decoder = filled_decoder(
            MODELS[name], logical(load_file(TRUTH / f"{name}.safetensors"), MODELS[name])
        )
        record = load_file(TRUTH / f"{name}-logits.safetensors")
        self.tokens: list[int] = record["input_ids"].tolist()
        self.logits = record["logits"]


@pytest.fixture(scope="module", params=MODELS)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    torch.set_num_threads(1)
    return Recorded(request.param)


@pytest.mark.parametrize("chunk", [16, 7, 3, 1])
def test_x4_logits_agree_with_the_model_that_wrote_the_checkpoint(recorded: Recorded, chunk: int) -> None:
    logits = in_chunks(recorded.decoder, recorded.tokens, chunk)
    torch.testing.assert_close(logits, recorded.logits, rtol=0, atol=TOLERANCE)


def test_sequences_of_a_mixed_batch_do_not_touch_one_another(recorded: Recorded) -> None:
    prompts = [recorded.tokens, recorded.tokens[:5], recorded.tokens[:11], recorded.tokens[:1]]
    for prompt, logits in zip(prompts, interleaved(recorded.decoder, prompts, [3, 1, 7, 2]), strict=True):
        torch.testing.assert_close(logits, recorded.logits[: len(prompt)], rtol=0, atol=TOLERANCE)


def test_only_the_wanted_rows_of_logits_are_returned_in_their_order(recorded: Recorded) -> None:
    run = PagedRun(recorded.decoder)
    batch = replace(run.batch([(run.add(), recorded.tokens)]), logit_rows_S=torch.tensor([15, 4]))
    logits = recorded.decoder.forward(batch, run.keys, run.values)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, recorded.logits[[15, 4]], rtol=0, atol=TOLERANCE)
