"""Writes the demo's two checkpoints: a Hugging Face folder from the GGUF file, a Megatron folder from that.

Imports torch, because it rounds weights to bf16 and because Megatron's files are torch archives; so only
``gtp-serve demo`` and tests import this module, and only when they run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.loaders.gguf_header import read_gguf_header
from gtp_serve.loaders.gguf_tokenizer import TokenizerDocuments, tokenizer_documents
from gtp_serve.loaders.megatron_writer import write_checkpoint

#: 9 heads in 3 groups: tensor parallel sizes 1 and 3 are the ones that can be.
DEMO_GRID = Grid(tp=3, gtp=4, alignment=32)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def write_huggingface(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write config, bf16 weights and tokenizer of a GGUF file into an empty folder.

    Values are dequantised to float32 and rounded to bf16, to nearest even.
    """
    fields = read_gguf_header(gguf, gguf.resolve().parent).fields
    documents = tokenizer_documents(fields)
    with closing(open_checkpoint(gguf)) as checkpoint:
        config = checkpoint.config
        total = _weight_bytes(config)
        tensors: dict[str, torch.Tensor] = {}
        done = 0
        for name, tensor in checkpoint.tensors():
            tensors[name] = tensor.to(torch.bfloat16).contiguous()
            done += tensors[name].nbytes
            progress(done, total)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_documents(documents, folder)
    _write_json(folder / "config.json", huggingface_config(config, documents.generation_config))
    # The library makes its file readable for the owner only; a checkpoint folder is shared like any other.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def write_megatron(source: Path, folder: Path, progress: Progress) -> None:
    """Write a Hugging Face folder's weights as a trainer on `DEMO_GRID` leaves them, the tokenizer beside."""
    with closing(open_checkpoint(source)) as checkpoint:
        config = checkpoint.config
    tensors = load_file(source / "model.safetensors")
    total = _weight_bytes(config)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(min(done, total), total)

    write_checkpoint(folder, config, tensors, DEMO_GRID, progress=advance)
    (folder / "tokenizer").mkdir()
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, folder / "tokenizer" / name)


def write_documents(documents: TokenizerDocuments, folder: Path) -> None:
    """Write tokenizer files into a folder."""
    _write_json(folder / "tokenizer.json", documents.tokenizer)
    _write_json(folder / "tokenizer_config.json", documents.tokenizer_config)
    _write_json(folder / "generation_config.json", documents.generation_config)
    if documents.chat_template is not None:
        (folder / "chat_template.jinja").write_text(documents.chat_template, encoding="utf-8")


def huggingface_config(config: ModelConfig, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Llama model.

    :param special_ids: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": config.proj_bias,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.hidden_size**-0.5,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_context,
        "mlp_bias": config.mlp_bias,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.dtype,
        "use_cache": True,
        "vocab_size": config.vocab_rows,
    } | dict(special_ids)


def _weight_bytes(config: ModelConfig) -> int:
    return 2 * sum(prod(shape) for shape in logical_tensors(config).values())


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=None if path.name == "tokenizer.json" else 2)
    path.write_text(text + "\n", encoding="utf-8")
