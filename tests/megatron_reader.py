"""Loads a checkpoint into Megatron's own GPTModel on a CPU and writes its parameters as whole tensors.

Run as a program with megatron-core importable: shims that a CPU (and an older Python) needs stay in this process.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Any

import torch


def shim() -> None:
    """What Megatron asks of typing and CUDA."""
    if not hasattr(typing, "override"):
        typing.override = lambda f: f  # type: ignore[attr-defined]
    # Its package without a GPU's libraries raises something else than the ImportError that Megatron expects.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]

    class Nothing:
        def __init__(self, *_args: Any, **_keywords: Any) -> None: ...

        def __getattr__(self, _name: str) -> Any:
            return lambda *_args, **_keywords: None

        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *_args: Any) -> None: ...

    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = Nothing
    cuda.current_stream = lambda *_args: Nothing()
    cuda.synchronize = lambda *_args: None
    cuda.current_device = lambda: "cpu"


def main(root: Path, out: Path, moe: bool, tied: bool) -> None:
    """Build the model of tests/checkpoint_model.py and load it."""
    shim()
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo", init_method=f"file://{out}.meeting", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    from checkpoint_model import dense_config, moe_config

    config = moe_config(tied=tied) if moe else dense_config(tied=tied)
    sizes: dict[str, Any] = {}
    if config.moe is not None:
        sizes = {
            "num_moe_experts": config.moe.num_experts,
            "moe_ffn_hidden_size": config.moe.ffn_size,
            "moe_router_topk": config.moe.top_k,
            "moe_grouped_gemm": False,
        }
    made = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_size or 4,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        gated_linear_unit=True,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **sizes,
    )
    experts = config.moe.num_experts if config.moe else None
    model = GPTModel(
        made,
        get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm"),
        vocab_size=config.vocab_rows,
        max_sequence_length=64,
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type="rope",
    ).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    wanted = {k: v for k, v in model.sharded_state_dict().items() if "_extra_state" not in k}
    loaded = dist_checkpointing.load({"model": wanted}, str(root))
    missing = model.load_state_dict(loaded["model"], strict=False)
    assert not [key for key in missing.missing_keys if "_extra_state" not in key], missing
    assert not missing.unexpected_keys, missing
    assert loaded["iteration"] == loaded["args"].iteration == 3, "the common state was not read"
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = {name: torch.full(p.shape, float("nan")) for name, p in found.items()}
    places = model.sharded_state_dict()
    state = {
        name: make_sharded_optimizer_tensor(places[name], moment, prefix="optimizer.state.exp_avg")
        for name, moment in moments.items()
    }
    filled = dist_checkpointing.load({"optimizer": state}, str(root))["optimizer"]
    torch.save({"weights": found, "exp_avg": {name: filled[name] for name in found}}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "moe", sys.argv[4] == "tied")
