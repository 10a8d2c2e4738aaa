"""Checkpoints that Megatron wrote, against the full tensors they were written from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import open_checkpoint

DATA = Path(__file__).resolve().parents[1] / "data"
#: Another directory of fixtures (with ``truth`` in it or beside it) to run the same test over.
EXTRA = os.environ.get("GTP_SERVE_FIXTURES")

torch.set_num_threads(1)


def fixture_folders() -> list[Path]:
    roots = [DATA / "megatron", *([Path(EXTRA)] if EXTRA else [])]
    return [p for root in roots for p in sorted(root.iterdir()) if (p / "manifest.json").exists()]


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return manifest


def truth_of(folder: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    name = Path(manifest["truth"]).name
    places = (folder.parent / "truth" / name, folder.parent.parent / "truth" / name)
    return load_file(next(place for place in places if place.exists()))


def logical_truth(stored: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Hugging Face's names and shapes, by plain slicing and no code of the project."""
    result = dict(top_tensors(stored))
    for layer in range(config["num_layers"]):
        parts = {
            key.removeprefix("decoder.layers."): value[layer] for key, value in stored.items() if ".layers." in key
        }
        for name, value in layer_tensors(parts, config):
            result[f"model.layers.{layer}.{name}"] = value
    return result


def top_tensors(stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    for key, name in names.items():
        if key in stored:
            yield name, stored[key]


def layer_tensors(parts: dict[str, Tensor], config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", parts["self_attention.linear_qkv.layer_norm_weight"]
    yield "post_attention_layernorm.weight", parts["mlp.linear_fc1.layer_norm_weight"]
    yield "self_attn.o_proj.weight", parts["self_attention.linear_proj.weight"]
    for kind in ("weight", "bias"):
        if f"self_attention.linear_qkv.{kind}" in parts:
            yield from qkv(parts[f"self_attention.linear_qkv.{kind}"], config, kind)
    if "mlp.router.weight" in parts:
        yield "mlp.gate.weight", parts["mlp.router.weight"]
        for expert in range(config["num_experts"]):
            fc1 = parts["mlp.experts.experts.linear_fc1.weight"][expert]
            fc2 = parts["mlp.experts.experts.linear_fc2.weight"][expert]
            yield from gated(f"mlp.experts.{expert}.", fc1, fc2)
    else:
        yield from gated("mlp.", parts["mlp.linear_fc1.weight"], parts["mlp.linear_fc2.weight"])


def gated(prefix: str, fc1: Tensor, fc2: Tensor) -> Iterator[tuple[str, Tensor]]:
    gate, up = fc1.chunk(2)
    yield f"{prefix}gate_proj.weight", gate
    yield f"{prefix}up_proj.weight", up
    yield f"{prefix}down_proj.weight", fc2


def qkv(fused: Tensor, config: dict[str, Any], kind: str) -> Iterator[tuple[str, Tensor]]:
    groups, size = config["num_query_groups"], config["kv_channels"]
    per_group = fused.reshape(groups, -1, size, *fused.shape[1:])
    q, k, v = per_group[:, :-2], per_group[:, -2], per_group[:, -1]
    yield f"self_attn.q_proj.{kind}", q.flatten(0, 2)
    yield f"self_attn.k_proj.{kind}", k.flatten(0, 1)
    yield f"self_attn.v_proj.{kind}", v.flatten(0, 1)


@pytest.mark.parametrize("folder", fixture_folders(), ids=lambda folder: folder.name)
def test_every_fixture_loads_bit_for_bit_equal_to_its_truth(folder: Path) -> None:
    manifest = read_manifest(folder)
    expected = logical_truth(truth_of(folder, manifest), manifest["config"])

    checkpoint = open_checkpoint(folder)
    loaded = dict(checkpoint.tensors())
    checkpoint.close()

    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value.to(loaded[name].dtype)), name


@pytest.mark.parametrize("folder", fixture_folders(), ids=lambda folder: folder.name)
def test_every_fixture_is_described_as_its_manifest_says(folder: Path) -> None:
    manifest = read_manifest(folder)
    said = manifest["config"]

    checkpoint = open_checkpoint(folder)
    config, facts = checkpoint.config, checkpoint.facts
    checkpoint.close()

    assert facts.layout == manifest["layout"]
    assert facts.fc1_permuted == manifest["fc1_permuted"]
    assert (facts.saved.tp, facts.saved.pp, facts.saved.gtp, facts.saved.egtp) == tuple(
        manifest[name] for name in ("tp", "pp", "gtp", "egtp")
    )
    assert facts.saved.ep == (manifest["ep"] or 1)
    padded = {unnumbered(p.key): p.stored_rows - p.real_rows for p in facts.padding}
    said_padded = {
        unnumbered(key): rows * (1 if key.endswith(("linear_proj.weight", "linear_fc2.weight")) else manifest["tp"])
        for key, rows in manifest["pad_rows_per_tp_rank"].items()
    }
    assert said_padded.items() <= padded.items()
    # A hybrid model's manifest names the first layer only, which has no MLP.
    assert padded == said_padded or manifest["hybrid_layer_pattern"]
    assert (config.num_layers, config.hidden_size) == (said["num_layers"], said["hidden_size"])
    assert (config.num_heads, config.num_kv_heads) == (said["num_attention_heads"], said["num_query_groups"])
    assert (config.head_dim, config.tied) == (said["kv_channels"], said["tie_word_embeddings"])
    assert (config.vocab_size, config.vocab_rows) == (said["vocab_size"], said["padded_vocab_size"])
    assert config.qkv_bias == said["qkv_bias"]
    assert (config.moe.num_experts if config.moe else None) == said["num_experts"]
    assert facts.num_tensors == len(logical_tensors(config))
    assert not facts.warnings


def unnumbered(key: str) -> str:
    """The manifest names parameters of the first layer and expert; files stack them or number each."""
    key = re.sub(r"\.layers\.\d+\.", ".layers.", key)
    return re.sub(r"experts\.(local_experts\.\d+|experts)\.", "experts.experts.", key)
