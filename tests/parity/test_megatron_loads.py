"""Megatron's own code loads what is saved here, weights and moments, bit for bit.

It needs ``pip install --no-deps --ignore-requires-python megatron-core==0.19.2``; a CPU is enough.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_model import dense_config, fill_everything, moe_config, on_grid, truth_of
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.megatron import LAYER_RULES, TOP_RULES, full_rows, logical_names
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.checkpoint_save import save
from gtp_serve.training.shard_map import ShardMap


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _has_megatron(), reason="megatron-core is not installed (0.19.2 is what was tried)"),
]

_TESTS = Path(__file__).parents[1]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")
#: Parameters whose key on disk is another one.
_STORED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@pytest.mark.parametrize(
    ("config", "grid"),
    [
        (dense_config(), Grid(tp=2, gtp=2, alignment=16)),
        (dense_config(tied=True), Grid(gtp=4, alignment=32)),
        (moe_config(), Grid(tp=2, gtp=2, etp=2, egtp=2, alignment=16)),
    ],
    ids=["dense", "tied", "moe"],
)
def test_megatron_loads_every_parameter_of_a_sharded_run(config: ModelConfig, grid: Grid, tmp_path: Path) -> None:
    def act(shards: ShardMap) -> None:
        optimizer = AdamW(shards, lr=0.1)
        fill_everything(shards, optimizer, config)
        save(tmp_path, shards, config=config, grid=grid, iteration=3, optimizer=optimizer)

    on_grid(config, grid, act)
    found = _in_megatron(tmp_path / "iter_0000003", config, tmp_path / "parameters.pt")
    for kind, truth in (
        ("weights", truth_of(config, 1, torch.bfloat16)),
        ("exp_avg", truth_of(config, 1 + sum(map(ord, "exp_avg")), torch.float32)),
    ):
        used = set()
        for name, tensor in found[kind].items():
            wanted, names = _wanted(name, tuple(tensor.shape), config, truth)
            used |= names
            assert torch.equal(tensor, wanted), f"{kind} {name}"
        assert used == set(truth)


def _in_megatron(folder: Path, config: ModelConfig, out: Path) -> dict[str, dict[str, Tensor]]:
    kinds = ["moe" if config.moe else "dense", "tied" if config.tied else "untied"]
    path = os.pathsep.join([str(_TESTS), str(_TESTS.parent), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, str(_TESTS / "megatron_reader.py"), str(folder), str(out), *kinds],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, dict[str, Tensor]] = torch.load(out, weights_only=True)
    return loaded


def _wanted(
    name: str, shape: tuple[int, ...], config: ModelConfig, truth: dict[str, Tensor]
) -> tuple[Tensor, set[str]]:
    """What a parameter of Megatron's model must be, and the logical tensors that it is made of."""
    layer = _LAYER.fullmatch(name)
    block = int(layer[1]) if layer else None
    expert = _EXPERT.fullmatch(layer[2]) if layer else None
    key = f"mlp.experts.experts.{expert[2]}" if expert else layer[2] if layer else name
    rule = LAYER_RULES[_STORED.get(key, key)] if layer else TOP_RULES[key]
    names = logical_names(rule, block, int(expert[1]) if expert else None)
    wanted = torch.full(shape, float("nan"), dtype=next(iter(truth.values())).dtype)
    for rows in full_rows(rule, config, names, shape[0]):
        wanted[rows.start : rows.start + rows.length] = truth[rows.name][rows.target : rows.target + rows.length]
    return wanted, set(names)
