"""Megatron's names and layouts as data: which stored tensor holds which rows of which logical tensors.

A rule names a stored key below its layer, the axis that tensor parallelism cuts, whether GTP cuts its rows as
well, and how its rows are made of logical tensors.  ``full`` rows below are the rows of the unsharded Megatron
tensor (qkv interleaved per query group, fc1 = [gate; up]); ``file`` rows are those of the padded layout.

Source: Megatron-LM ``core/dist_checkpointing`` and ``core/transformer`` (0.16 to 0.20), checked against files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.huggingface import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, logical_tensors
from gtp_serve.layout.rows import RowMap, Rows, compose, merge, whole
from gtp_serve.layout.spans import Shape

Cut = Literal["column", "row", "none"]
Parts = Literal["one", "qkv", "gate_up"]

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of stored tensor is cut and made.

    ``cut``: TP cuts rows (``column`` parallel), columns (``row`` parallel) or nothing; ``gtp``: rows are cut further
    over the GTP group; ``names``: logical names below the layer, in the order of ``parts``; ``{e}`` is the expert.
    """

    key: str
    cut: Cut
    gtp: bool
    parts: Parts
    names: tuple[str, ...]
    space: Literal["dense", "expert"] = "dense"


def _gated(key: str, name: str, space: Literal["dense", "expert"]) -> tuple[Rule, Rule]:
    return (
        Rule(
            f"{key}.linear_fc1.weight",
            "column",
            True,
            "gate_up",
            (f"{name}.gate_proj.weight", f"{name}.up_proj.weight"),
            space,
        ),
        Rule(f"{key}.linear_fc2.weight", "row", True, "one", (f"{name}.down_proj.weight",), space),
    )


def _plain(key: str, name: str) -> Rule:
    return Rule(key, "none", False, "one", (name,))


def _qkv(kind: str, *, gtp: bool) -> Rule:
    names = tuple(f"self_attn.{n}_proj.{kind}" for n in ("q", "k", "v"))
    return Rule(f"self_attention.linear_qkv.{kind}", "column", gtp, "qkv", names)


_EXPERTS = "mlp.experts.experts"

#: Keys below ``decoder.layers.`` (stacked) or ``decoder.layers.N.`` (one layer).  Biases and norms are not GTP-sharded.
LAYER_RULES: Mapping[str, Rule] = {
    rule.key: rule
    for rule in (
        _plain("input_layernorm.weight", "input_layernorm.weight"),
        _plain("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        _qkv("weight", gtp=True),
        _qkv("bias", gtp=False),
        _plain("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        _plain("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
        Rule("self_attention.linear_proj.weight", "row", True, "one", ("self_attn.o_proj.weight",)),
        _plain("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
        _plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        _plain("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        *_gated("mlp", "mlp", "dense"),
        Rule("mlp.linear_fc1.bias", "column", False, "gate_up", ("mlp.gate_proj.bias", "mlp.up_proj.bias")),
        _plain("mlp.linear_fc2.bias", "mlp.down_proj.bias"),
        _plain("mlp.router.weight", "mlp.gate.weight"),
        *_gated(_EXPERTS, "mlp.experts.{e}", "expert"),
        *_gated("mlp.shared_experts", "mlp.shared_expert", "dense"),
        _plain("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    )
}

#: Keys outside the layers, with their whole logical name.
TOP_RULES: Mapping[str, Rule] = {
    rule.key: rule
    for rule in (
        Rule(WORD_EMBEDDINGS, "column", True, "one", (EMBEDDING,)),
        Rule(OUTPUT_LAYER, "column", True, "one", (HEAD,)),
        _plain("decoder.final_layernorm.weight", FINAL_NORM),
        _plain("decoder.final_norm.weight", FINAL_NORM),
    )
}

_LAYER_KEY = re.compile(r"decoder\.layers\.(?:(\d{1,6})\.)?(.+)")
_EXPERT_KEY = re.compile(re.escape(_EXPERTS) + r"\.(\d{1,6})\.(linear_fc[12]\.weight)")


@dataclass(frozen=True, slots=True)
class StoredName:
    """A stored key, understood.

    ``layer`` and ``expert`` are the numbers in the key; None where the key has none, and then a layer (or expert)
    rule means that the tensor is stacked over a leading axis of all of them.
    """

    key: str
    rule: Rule
    layer: int | None
    expert: int | None

    @property
    def in_layer(self) -> bool:
        """Whether the tensor belongs to a layer."""
        return self.rule.key in LAYER_RULES

    def lead(self, config: ModelConfig) -> Shape:
        """Sizes of the leading stack axes: layers, then experts."""
        layers = (config.num_layers,) if self.in_layer and self.layer is None else ()
        experts = config.moe.num_experts if config.moe else 0
        return (*layers, experts) if self.rule.space == "expert" and self.expert is None else layers

    def place(self, lead: tuple[int, ...]) -> tuple[int | None, int | None]:
        """(layer number as stored, expert) of one position on the leading axes."""
        rest = list(lead)
        layer = rest.pop(0) if self.in_layer and self.layer is None else self.layer
        expert = rest.pop(0) if self.rule.space == "expert" and self.expert is None else self.expert
        return layer, expert


def parse_key(key: str) -> StoredName | None:
    """The rule of a stored key, or None when no rule knows it."""
    if key in TOP_RULES:
        return StoredName(key, TOP_RULES[key], None, None)
    match = _LAYER_KEY.fullmatch(key)
    if match is None:
        return None
    layer = None if match[1] is None else int(match[1])
    single = _EXPERT_KEY.fullmatch(match[2])
    if single is not None:
        return StoredName(key, LAYER_RULES[f"{_EXPERTS}.{single[2]}"], layer, int(single[1]))
    rule = LAYER_RULES.get(match[2])
    return None if rule is None else StoredName(key, rule, layer, None)


def number_layers(names: Iterable[StoredName]) -> dict[int, int]:
    """Stored layer number -> decoder block.

    HybridModel stores each block as two layers (attention ``2b``, MLP ``2b + 1``); every other model stores one.

    :raises LayoutMismatch: when attention and MLP layers do not alternate.
    """
    attention, mlp = set[int](), set[int]()
    for name in names:
        if name.layer is not None:
            (attention if _is_attention(name.rule) else mlp).add(name.layer)
    if attention & mlp or not mlp or not attention:
        return {layer: layer for layer in attention | mlp}
    blocks = list(zip(sorted(attention), sorted(mlp), strict=False))
    if len(attention) != len(mlp) or any((a, m) != (2 * b, 2 * b + 1) for b, (a, m) in enumerate(blocks)):
        raise LayoutMismatch(
            "attention and MLP layers of the hybrid model do not alternate",
            [
                ("found", f"attention layers {sorted(attention)}, MLP layers {sorted(mlp)}"),
                ("needed", "pattern *-*-..."),
            ],
        )
    return {layer: block for block, pair in enumerate(blocks) for layer in pair}


def _is_attention(rule: Rule) -> bool:
    return rule.names[0].startswith("self_attn.") or rule.names[0] == "input_layernorm.weight"


def logical_names(rule: Rule, block: int | None, expert: int | None) -> tuple[str, ...]:
    """Whole logical names of a rule's parts in decoder block ``block``."""
    prefix = "" if block is None else layer_prefix(block)
    return tuple(prefix + (name if expert is None else name.format(e=expert)) for name in rule.names)


def full_shape(rule: Rule, config: ModelConfig) -> Shape | None:
    """Shape of the unsharded, unpadded Megatron tensor; None when the model has no such tensor."""
    expected = _expected(config)
    in_layer = rule.key in LAYER_RULES
    names = logical_names(rule, 0 if in_layer else None, 0 if rule.space == "expert" else None)
    shapes = [expected.get(name) for name in names]
    if any(shape is None for shape in shapes):
        return None
    found = [shape for shape in shapes if shape is not None]
    return (sum(shape[0] for shape in found), *found[0][1:])


@lru_cache(maxsize=4)
def _expected(config: ModelConfig) -> Mapping[str, Shape]:
    """Shapes of one layer's tensors and of those outside the layers: all layers are alike, and models are large."""
    return logical_tensors(replace(config, num_layers=1))


def full_rows(rule: Rule, config: ModelConfig, names: tuple[str, ...], total: int) -> RowMap:
    """Which rows of which logical tensors the ``total`` rows of the unsharded tensor are."""
    if rule.parts == "one":
        return whole(names[0], total)
    if rule.parts == "gate_up":
        half = total // 2
        return (Rows(0, half, names[0], 0), Rows(half, half, names[1], 0))
    return _interleave(config, names)


def _interleave(config: ModelConfig, names: tuple[str, ...]) -> RowMap:
    """qkv per query group: the group's query heads, then its key head, then its value head."""
    groups, d = config.num_kv_heads, config.head_dim
    q = config.num_heads // groups * d
    size = q + 2 * d
    rows: list[Rows] = []
    for g in range(groups):
        start = g * size
        rows += [
            Rows(start, q, names[0], g * q),
            Rows(start + q, d, names[1], g * d),
            Rows(start + q + d, d, names[2], g * d),
        ]
    return tuple(rows)


def padded_rows(rule: Rule, total: int, tp: int, gtp: int, shard: int) -> RowMap:
    """File rows of the padded layout -> full rows, for shards of ``shard`` rows on a ``tp`` x ``gtp`` grid."""
    if rule.cut == "row":
        return whole("", total)
    local = total // tp
    if rule.parts != "gate_up":
        return merge(Rows(t * gtp * shard, local, "", t * local) for t in range(tp))
    return merge(
        row for t in range(tp) for row in compose(_permuted(t, tp, gtp, shard), _halves(t, total // 2, local // 2))
    )


def _halves(t: int, half: int, piece: int) -> RowMap:
    """Rows of TP rank t's [gate_t; up_t] -> full rows of [gate; up]."""
    return (Rows(0, piece, "", t * piece), Rows(piece, piece, "", half + t * piece))


def _permuted(t: int, tp: int, gtp: int, shard: int) -> RowMap:
    """File rows of fc1 -> rows of TP rank t's padded block.

    Megatron cuts each GTP shard in two, as if it were [gate; up], and stores all first cuts before all second
    ones, so a shard's rows lie at two places half a file apart.
    """
    half, count = shard // 2, tp * gtp
    return tuple(
        Rows((cut * count + t * gtp + g) * half, half, "", g * shard + cut * half) for cut in (0, 1) for g in range(gtp)
    )
