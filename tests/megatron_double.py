"""Megatron models as one rank holds them: its module tree, parameter names and attributes, with known weights.

Written from Megatron's layout and from none of this package's: qkv interleaved per query group, fc1 as gate above up
of each tensor-parallel rank, rows over the GTP group with padding at the tail.  Padding is NaN: it must go nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid


@dataclass(frozen=True)
class Group:
    """A process group, as far as sizes go."""

    ranks: int
    mine: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.mine


@dataclass(frozen=True)
class Place:
    """One rank of a grid."""

    grid: Grid
    rank: int
    stage: int

    @property
    def groups(self) -> Any:
        """With Megatron's field names; an axis of one rank is a group of one, as there."""
        r, g = self.rank, self.grid
        return SimpleNamespace(
            tp=Group(g.tp, r % g.tp),
            gtp_remat=Group(g.gtp, r // g.tp % g.gtp),
            expt_tp=Group(g.etp, r % g.etp),
            ep=Group(g.ep, r // g.etp % g.ep),
            expt_gtp_remat=Group(g.egtp, r // (g.etp * g.ep) % g.egtp),
            pp=Group(g.pp, self.stage),
        )


def places(grid: Grid) -> list[Place]:
    """All ranks."""
    return [Place(grid, rank, stage) for stage in range(grid.pp) for rank in range(grid.tp * grid.gtp)]


def megatron_model(w: Mapping[str, Tensor], config: ModelConfig, place: Place, *, te_experts: bool = True) -> nn.Module:
    """The model of one rank, inside a wrapper such as Megatron's DistributedDataParallel.

    :param te_experts: experts as weight0, weight1, .. of one module; otherwise as a list of modules.
    """
    grid, groups = place.grid, place.groups
    root = nn.Module()
    each = config.num_layers // grid.pp
    if place.stage == 0:
        put(root, "embedding.word_embeddings.weight", column(w["model.embed_tokens.weight"], groups, grid))
    for local in range(each):
        prefix = f"decoder.layers.{local}"
        layer(root, prefix, w, config, place, place.stage * each + local, te_experts)
        root.get_submodule(prefix).layer_number = place.stage * each + local + 1  # type: ignore[assignment]
    if place.stage == grid.pp - 1:
        put(root, "decoder.final_layernorm.weight", whole(w["model.norm.weight"]))
        head = w["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
        if not config.tied or grid.pp > 1:
            put(root, "output_layer.weight", column(head, groups, grid))
    wrapper = nn.Module()
    wrapper.module = nn.Module()
    wrapper.module.module = root
    return wrapper


def layer(
    root: nn.Module, at: str, w: Mapping[str, Tensor], config: ModelConfig, place: Place, n: int, te_experts: bool
) -> None:
    p, grid, groups = f"model.layers.{n}.", place.grid, place.groups
    attention = f"{at}.self_attention"
    put(root, f"{attention}.linear_qkv.layer_norm_weight", whole(w[f"{p}input_layernorm.weight"]))
    put(root, f"{attention}.linear_qkv.weight", column(qkv(w, p, "weight", config), groups, grid))
    put(root, f"{attention}.linear_proj.weight", row(w[f"{p}self_attn.o_proj.weight"], groups, grid))
    if config.qkv_bias:
        put(root, f"{attention}.linear_qkv.bias", cut_bias(qkv(w, p, "bias", config), groups))
    if config.qk_norm:
        for mine, theirs in (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")):
            put(root, f"{attention}.{theirs}.weight", whole(w[f"{p}self_attn.{mine}.weight"]))
    norm = whole(w[f"{p}post_attention_layernorm.weight"])
    if config.moe is None:
        put(root, f"{at}.mlp.linear_fc1.layer_norm_weight", norm)
        put(root, f"{at}.mlp.linear_fc1.weight", gated(w, f"{p}mlp.", groups, grid))
        put(root, f"{at}.mlp.linear_fc2.weight", row(w[f"{p}mlp.down_proj.weight"], groups, grid))
        return
    put(root, f"{at}.pre_mlp_layernorm.weight", norm)
    put(root, f"{at}.mlp.router.weight", whole(w[f"{p}mlp.gate.weight"]))
    each = config.moe.num_experts // groups.ep.size()
    for local in range(each):
        expert = f"{p}mlp.experts.{groups.ep.rank() * each + local}."
        fc1 = gated(w, expert, groups, grid, expert=local)
        fc2 = row(w[f"{expert}down_proj.weight"], groups, grid, expert=local)
        for name, parameter in (("linear_fc1", fc1), ("linear_fc2", fc2)):
            listed = f"local_experts.{local}.{name}.weight"
            put(root, f"{at}.mlp.experts." + (f"{name}.weight{local}" if te_experts else listed), parameter)


def put(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *modules, last = name.split(".")
    for word in modules:
        if not hasattr(root, word):
            root.add_module(word, nn.Module())
        root = root.get_submodule(word)
    root.register_parameter(last, parameter)


def qkv(w: Mapping[str, Tensor], p: str, kind: str, config: ModelConfig) -> Tensor:
    """Each query group's query heads, its key head, its value head."""
    q, k, v = (w[f"{p}self_attn.{n}_proj.{kind}"] for n in "qkv")
    groups = config.num_kv_heads
    rest = q.shape[1:]
    parts = [x.view(groups, -1, *rest) for x in (q, k, v)]
    return torch.cat(parts, 1).reshape(-1, *rest)


def gated(w: Mapping[str, Tensor], p: str, groups: Any, grid: Grid, expert: int | None = None) -> nn.Parameter:
    tp = groups.tp if expert is None else groups.expt_tp
    halves = [w[f"{p}{n}_proj.weight"].chunk(tp.size())[tp.rank()] for n in ("gate", "up")]
    return sharded(torch.cat(halves), groups, grid, expert, dim=0, stride=2)


def column(full: Tensor, groups: Any, grid: Grid) -> nn.Parameter:
    held = -(-full.shape[0] // groups.tp.size())
    return sharded(full[groups.tp.rank() * held :][:held], groups, grid, None, dim=0)


def row(full: Tensor, groups: Any, grid: Grid, expert: int | None = None) -> nn.Parameter:
    tp = groups.tp if expert is None else groups.expt_tp
    return sharded(full.chunk(tp.size(), 1)[tp.rank()], groups, grid, expert, dim=1)


def cut_bias(full: Tensor, groups: Any) -> nn.Parameter:
    return attributes(nn.Parameter(full.chunk(groups.tp.size())[groups.tp.rank()].clone()), groups.tp, 0, 1)


def whole(full: Tensor) -> nn.Parameter:
    return nn.Parameter(full.clone())


def sharded(local: Tensor, groups: Any, grid: Grid, expert: int | None, *, dim: int, stride: int = 1) -> nn.Parameter:
    tp, gtp = (groups.tp, groups.gtp_remat) if expert is None else (groups.expt_tp, groups.expt_gtp_remat)
    if gtp.size() == 1:
        return attributes(nn.Parameter(local.clone()), tp, dim, stride)
    unit = grid.alignment * gtp.size()
    padding = -local.shape[0] % unit
    padded = torch.cat((local, local.new_full((padding, local.shape[1]), torch.nan)))
    parameter: Any = attributes(nn.Parameter(padded.chunk(gtp.size())[gtp.rank()].clone()), tp, dim, stride)
    parameter.is_gtp_weight_remat = True
    parameter.group, parameter.gtp_remat_size, parameter.pad_length = gtp, gtp.size(), padding
    parameter.is_routed_expert, parameter.expert_idx = expert is not None, expert
    made: nn.Parameter = parameter
    return made


def attributes(parameter: nn.Parameter, tp: Group, dim: int, stride: int) -> nn.Parameter:
    held: Any = parameter
    held.tensor_model_parallel, held.partition_dim, held.partition_stride = tp.size() > 1, dim, stride
    return parameter
