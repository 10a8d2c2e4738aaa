"""Small checkpoints that tests may damage: real files, made by the project's writer and by safetensors."""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors, stored_name
from gtp_serve.loaders.megatron_writer import write_checkpoint

COMMON_KEY = "common_state/shard_0_1"

SMALL = ModelConfig(
    family="llama",
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    vocab_size=21,
    vocab_rows=22,
    max_context=64,
)
SMALL_MOE = replace(
    SMALL,
    family="mixtral",
    ffn_size=0,
    moe=MoeConfig(num_experts=3, top_k=2, ffn_size=12, normalise_top_k=True),
)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in logical_tensors(config).items()}


def write_megatron(
    root: Path, config: ModelConfig = SMALL, grid: Grid | None = None, **options: Any
) -> tuple[Path, dict[str, Tensor]]:
    """A Megatron root with one iteration; returns the iteration's folder and what it holds."""
    tensors = random_tensors(config)
    return write_checkpoint(root, config, tensors, grid or Grid(), **options), tensors


def edit_metadata(folder: Path, edit: Callable[[Any], None]) -> None:
    """Change the unpickled ``.metadata`` in place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


def rename_key(metadata: Any, old: str, new: str) -> None:
    """Give a stored tensor another key."""
    metadata.state_dict_metadata = {
        (new if key == old else key): value for key, value in metadata.state_dict_metadata.items()
    }
    metadata.storage_data = {
        (replace(index, fqn=new) if index.fqn == old else index): info for index, info in metadata.storage_data.items()
    }


def drop_key(metadata: Any, key: str) -> None:
    """Forget a stored tensor or byte item."""
    del metadata.state_dict_metadata[key]
    metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != key}


def append_item(folder: Path, key: str, data: bytes) -> None:
    """Put a byte item at the end of the first file, in place of one of the same key."""
    file = folder / "__0_0.distcp"
    offset = file.stat().st_size
    with file.open("ab") as out:
        out.write(data)

    def edit(metadata: Any) -> None:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != key}
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file.name, offset, len(data))

    edit_metadata(folder, edit)


def saved(value: object) -> bytes:
    """What ``torch.save`` writes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def common_args(folder: Path) -> dict[str, Any]:
    """The saved arguments of a checkpoint that the project's writer made."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex(COMMON_KEY)]
    data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    with torch.serialization.safe_globals([argparse.Namespace]):
        return dict(vars(torch.load(io.BytesIO(data), weights_only=True)[0]["args"]))


def set_args(folder: Path, **changes: Any) -> None:
    """Change saved arguments; ``...`` takes one away."""
    values = {k: v for k, v in {**common_args(folder), **changes}.items() if v is not ...}
    state = {"args": argparse.Namespace(**values), "checkpoint_version": 3.0, "iteration": 1}
    append_item(folder, COMMON_KEY, saved([state]))


def hf_config(config: ModelConfig = SMALL, **changes: Any) -> dict[str, Any]:
    """A ``config.json`` for a small model."""
    values: dict[str, Any] = {
        "model_type": config.family,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.moe.ffn_size if config.moe else config.ffn_size,
        "vocab_size": config.vocab_rows,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_context,
        "eos_token_id": 2,
    }
    if config.moe:
        values |= {
            "num_local_experts": config.moe.num_experts,
            "num_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.top_k,
            "moe_intermediate_size": config.moe.ffn_size,
            "norm_topk_prob": config.moe.normalise_top_k,
            "sliding_window": None,
        }
    return {key: value for key, value in {**values, **changes}.items() if value is not ...}


def write_hf(
    folder: Path,
    config: ModelConfig = SMALL,
    *,
    shards: int = 1,
    extra: Mapping[str, Tensor] | None = None,
    drop: tuple[str, ...] = (),
    **changes: Any,
) -> dict[str, Tensor]:
    """A Hugging Face folder, with an index when ``shards`` is above 1; returns its logical tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config)
    (folder / "config.json").write_text(json.dumps(hf_config(config, **changes)), encoding="utf-8")
    stored = {stored_name(name, config.family): value for name, value in tensors.items() if name not in drop}
    stored |= extra or {}
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return tensors
    names = sorted(stored)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: stored[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return tensors


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text(encoding="utf-8"))
    edit(value)
    path.write_text(json.dumps(value), encoding="utf-8")
