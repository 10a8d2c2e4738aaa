"""Decoders in plain torch on whole weights: what a training model must compute, gradients included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from training_model import slices

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Box
from gtp_serve.ops.rope import inverse_frequencies
from gtp_serve.training.decoder import TrainDecoder
from gtp_serve.training.init import stream
from gtp_serve.training.layer import parameters_with_targets

DENSE = ModelConfig(
    family="llama", num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=20, vocab_size=21,
    vocab_rows=23, tied=True, max_context=64, dtype="float32",
)  # fmt: skip
FULL = replace(
    DENSE, family="qwen3", tied=False, qk_norm=True, qkv_bias=True, proj_bias=True, mlp_bias=True, sliding_window=5
)
MOE = replace(
    DENSE,
    family="qwen3_moe",
    ffn_size=0,
    moe=MoeConfig(num_experts=4, top_k=2, ffn_size=12, shared_ffn_size=8, shared_gate=True),
)
PLAIN_MOE = replace(
    MOE, family="mixtral", moe=MoeConfig(num_experts=4, top_k=3, ffn_size=12, normalise_top_k=False), tied=False
)
CONFIGS = {"dense": DENSE, "full": FULL, "moe": MOE, "plain-moe": PLAIN_MOE}
LENGTHS = (7, 1, 12, 4)


def weights_of(config: ModelConfig, seed: int = 5) -> dict[str, Tensor]:
    """Weights that are large enough for every part to matter; norms are not 1."""
    drawn = {}
    for name, shape in logical_tensors(config).items():
        values = torch.randn(shape, generator=stream(seed, name))
        drawn[name] = 1 + 0.2 * values if name.endswith("norm.weight") else 0.3 * values
    return drawn


def ids_of(config: ModelConfig, data_rank: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (sum(LENGTHS),), generator=stream(data_rank, "ids"))


def targets_of_ids(config: ModelConfig, data_rank: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (sum(LENGTHS),), generator=stream(data_rank, "targets"))


def plain_logprobs(w: Mapping[str, Tensor], config: ModelConfig, ids: Tensor, targets: Tensor) -> Tensor:
    """Of every row's target, by torch's own functions."""
    x = F.embedding(ids, w["model.embed_tokens.weight"])
    for n in range(config.num_layers):
        p = f"model.layers.{n}."
        h = norm(x, w[f"{p}input_layernorm.weight"], config)
        x = x + attention(w, p, config, h)
        h = norm(x, w[f"{p}post_attention_layernorm.weight"], config)
        x = x + (mlp(w, f"{p}mlp.", h) if config.moe is None else experts(w, f"{p}mlp.", config.moe, h))
    head = w["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    logits = F.linear(norm(x, w["model.norm.weight"], config), head)[:, : config.vocab_size]
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, config.norm_eps)


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def attention(w: Mapping[str, Tensor], p: str, config: ModelConfig, h: Tensor) -> Tensor:
    q, k, v = (linear(w, f"{p}self_attn.{n}_proj", h).view(h.shape[0], -1, config.head_dim) for n in "qkv")
    if config.qk_norm:
        q, k = (norm(x, w[f"{p}self_attn.{n}_norm.weight"], config) for n, x in (("q", q), ("k", k)))
    parts = [torch.split(x, list(LENGTHS)) for x in (q, k, v)]
    mixed = [one_sequence(a, b, c, config) for a, b, c in zip(parts[0], parts[1], parts[2], strict=True)]
    return linear(w, f"{p}self_attn.o_proj", torch.cat(mixed).flatten(1))


def one_sequence(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
    at = torch.arange(q.shape[0])
    angles = at[:, None] * inverse_frequencies(config.rope, config.head_dim)
    turned = [turn(x, angles[:, None]) for x in (q, k)]
    seen = (at <= at[:, None]) & (at > at[:, None] - (config.sliding_window or 99))
    repeat = config.num_heads // config.num_kv_heads
    q, k, v = turned[0], turned[1].repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return mixed.transpose(0, 1)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def mlp(w: Mapping[str, Tensor], p: str, h: Tensor) -> Tensor:
    return linear(w, f"{p}down_proj", F.silu(linear(w, f"{p}gate_proj", h)) * linear(w, f"{p}up_proj", h))


def experts(w: Mapping[str, Tensor], p: str, moe: MoeConfig, h: Tensor) -> Tensor:
    shares = linear(w, f"{p}gate", h).softmax(-1)
    top, chosen = shares.topk(moe.top_k)
    top = top / top.sum(-1, keepdim=True) if moe.normalise_top_k else top
    mask = torch.zeros_like(shares).scatter(1, chosen, top)
    out = sum(mask[:, e, None] * mlp(w, f"{p}experts.{e}.", h) for e in range(moe.num_experts))
    if moe.shared_ffn_size:
        shared = mlp(w, f"{p}shared_expert.", h)
        out = out + (torch.sigmoid(linear(w, f"{p}shared_expert_gate", h)) * shared if moe.shared_gate else shared)
    assert isinstance(out, Tensor)
    return out


def plain_gradients(config: ModelConfig, data_ranks: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(each data rank's log-probabilities, gradient of the mean over data ranks of their mean loss), in float64."""
    w = {name: x.double().requires_grad_() for name, x in weights_of(config).items()}
    found = [plain_logprobs(w, config, ids_of(config, r), targets_of_ids(config, r)) for r in range(data_ranks)]
    loss = torch.stack([-x.mean() for x in found]).mean()
    grads = torch.autograd.grad(loss, list(w.values()))
    return [x.detach() for x in found], dict(zip(w, grads, strict=True))


def gradient_pieces(model: TrainDecoder) -> dict[str, list[tuple[Box, Tensor]]]:
    """Every parameter's gradient by its spans; padding must have got none."""
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for parameter, target in parameters_with_targets(model):
        assert parameter.grad is not None, target.shard.key
        rest = parameter.grad.clone()
        for span in target.shard.spans:
            found.setdefault(span.name, []).append((span.logical, rest[slices(span.local)].clone()))
            rest[slices(span.local)] = 0
        assert not rest.any(), f"the padding of {target.shard.key} has a gradient"
    return found


def assemble(everyone: Sequence[Mapping[str, list[tuple[Box, Tensor]]]], config: ModelConfig) -> dict[str, Tensor]:
    """Whole gradients from all ranks' pieces; an element that nobody has is NaN, and those who share one agree."""
    whole = {}
    for name, shape in logical_tensors(config).items():
        whole[name] = torch.full(shape, torch.nan, dtype=torch.float64)
        for pieces in everyone:
            for box, piece in pieces.get(name, []):
                there = whole[name][slices(box)]
                torch.testing.assert_close(
                    torch.where(there.isnan(), piece.double(), there), piece.double(), rtol=1e-4, atol=1e-7, msg=name
                )
                there.copy_(piece)
    return whole


def worst(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest difference of a gradient, relative to the largest of its tensor, and where."""
    return max(
        ((got[name] - x).abs().max().item() / (x.abs().max().item() or 1.0), name)
        if got[name].isfinite().all()
        else (float("inf"), name)
        for name, x in wanted.items()
    )
