"""One rank of a trainer whose model is Megatron's own GPTModel, on a CPU; pushes it to a server and tells its numbers.

``python megatron_gpt_rank.py SPEC``; JSON lines out, and a line in before the second step.  Megatron's code is the
installed megatron-core's, GTP included, and TransformerEngine's linears are its own (``te_cpu``).  What stands in for a
GPU: streams and events of CUDA do nothing (gloo's handles are waited for), the tracker of CUDA's random states forks
nothing (there is no dropout), and attention with the TransformerEngine spec is Megatron's plain one.
"""

from __future__ import annotations

import contextlib
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import te_cpu
import torch
import torch.distributed
from torch import Tensor, nn

from gtp_serve.config import ModelConfig
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.refit import Publisher
from gtp_serve.training.publish import publish_megatron

dist: Any = torch.distributed


class Nothing:
    """A stream or an event of no device."""

    def __init__(self, *args: Any, **keywords: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: None


def stand_in() -> None:
    """What Megatron asks of typing and CUDA."""
    if not hasattr(typing, "override"):
        typing.override = lambda f: f  # type: ignore[attr-defined]
    te_cpu.load()
    # Fused routing of experts, looked up when Megatron is imported and not called here.
    router = "transformer_engine.pytorch.router"
    sys.modules[router] = te_cpu._Hollow(router)
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = Nothing
    cuda.current_stream = lambda *args: Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *args: None
    cuda.current_device = lambda: "cpu"
    from megatron.core.tensor_parallel import random as megatron_random

    @contextlib.contextmanager
    def fork(self: Any, name: str = "") -> Iterator[None]:
        yield

    megatron_random.CudaRNGStatesTracker.fork = fork


def layer_spec(kind: str) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if kind == "local":
        return get_gpt_layer_local_spec(normalization="RMSNorm")
    spec = get_gpt_layer_with_transformer_engine_spec()
    spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    return spec


def build(config: ModelConfig, kind: str, seed: int) -> nn.Module:
    """:param kind: of linears: ``local`` are Megatron's own, ``te`` TransformerEngine's."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.gtp_api import classify_gtp_remat_chains
    from megatron.core.transformer import TransformerConfig

    # Weights of the whole model are drawn on the CPU and sliced.  Not so with TransformerEngine's linears under GTP:
    # there megatron-core 0.19.2 copies the whole weight into the shard (tensor_parallel/layers.py,
    # _initialize_affine_weight_cpu: "weight.data.copy_(cpu_weight)"), which is refused for its size; so each rank
    # draws its own rows.
    whole = kind == "local" or dist.get_world_size() == 1
    torch.manual_seed(seed if whole else seed + dist.get_rank())
    made = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_size,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=whole,
        params_dtype=torch.float32,
    )
    model = GPTModel(
        made,
        layer_spec(kind),
        vocab_size=config.vocab_rows,
        max_sequence_length=config.max_context,
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type="rope",
        rotary_base=int(config.rope.theta),
    ).float()
    classify_gtp_remat_chains(model)
    module: nn.Module = model
    return module.eval()


def sharded(model: nn.Module) -> dict[str, Any]:
    return {name: one for name, one in model.named_parameters() if getattr(one, "is_gtp_weight_remat", False)}


def spoil_padding(model: nn.Module) -> int:
    """Padding becomes NaN: it must go nowhere.  Returns its rows on this rank."""
    found = 0
    for parameter in sharded(model).values():
        rows = parameter.shape[0]
        real = parameter.shape[0] * parameter.gtp_remat_size - parameter.pad_length
        kept = max(0, min(rows, real - parameter.group.rank() * rows))
        parameter.data[kept:] = torch.nan
        found += rows - kept
    return found


@torch.no_grad()
def logprobs(model: nn.Module, ids: Tensor, vocab: int) -> list[float]:
    """Of each token after the first, in float32."""
    length = ids.numel()
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    logits = model(ids[None], torch.arange(length)[None], mask)[0]
    scored = logits[:-1, :vocab].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    values: list[float] = scored.tolist()
    return values


@torch.no_grad()
def step(model: nn.Module) -> None:
    """Every weight changes a little, in place, as by an optimizer."""
    for parameter in model.parameters():
        parameter.data.mul_(0.97).add_(0.01 * parameter.data.sign())


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    stand_in()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.generalized_tensor_parallelism import update_gtp_config

    store = dist.FileStore(spec["meet"], spec["size"])
    dist.init_process_group("gloo", store=store, rank=spec["rank"], world_size=spec["size"])
    update_gtp_config(pad_for_alignment=spec["alignment"])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=spec.get("tp", 1), gtp_remat_size=spec["size"] // spec.get("tp", 1)
    )
    config = open_checkpoint(Path(spec["ckpt"])).config
    model = build(config, spec["kind"], spec["seed"])
    held = sharded(model)
    padding = spoil_padding(model)
    tell(
        "built",
        sharded=sorted(held),
        rows=sum(one.shape[0] for one in held.values()),
        padding=padding,
        types=sorted({type(one).__name__ for one in held.values()}),
        linears=sorted({type(one).__name__ for one in model.modules() if "Linear" in type(one).__name__}),
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    publisher = Publisher(spec["url"])
    ids = torch.tensor(spec["ids"])
    for version in spec["versions"]:
        report = publisher.push(publish_megatron(model, config, groups), version)
        tell("pushed", version=version, sent=report.sent_bytes, logprobs=logprobs(model, ids, config.vocab_size))
        sys.stdin.readline()
        step(model)
        spoil_padding(model)
    dist.destroy_process_group()


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main()
