"""Megatron's saved arguments as a model description.

Each argument that changes what the model computes is either mapped to a field or checked to have the value
that this server computes; a value that it does not compute is refused by name.  Source: Megatron-LM
``core/transformer/transformer_config.py`` and ``training/arguments.py`` (0.13 to 0.20).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gtp_serve.config import MoeConfig, RopeConfig
from gtp_serve.errors import CheckpointCorrupt, LayoutMismatch, UnsupportedModel
from gtp_serve.loaders.files import shown
from gtp_serve.loaders.limits import MAX_SIZE


class SavedArgs:
    """Saved arguments by name, with checked types.

    :param origin: file (and item) they come from, for messages.
    """

    def __init__(self, values: Mapping[object, object], origin: str) -> None:
        self._values = {name: value for name, value in values.items() if isinstance(name, str)}
        self.origin = origin

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """The value, None when there is none."""
        return self._values.get(name)

    def integer(self, name: str, low: int = 1) -> int | None:
        """A whole number of at least ``low``, or None.

        :raises CheckpointCorrupt: for anything else.
        """
        value = self.number(name)
        if value is None:
            return None
        if value != int(value) or not low <= value <= MAX_SIZE:
            raise self._wrong(name, f"a whole number from {low} to {MAX_SIZE}")
        return int(value)

    def number(self, name: str) -> float | None:
        """A finite number, or None."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30 or value != value:
            raise self._wrong(name, "a number")
        return value

    def flag(self, name: str) -> bool | None:
        """True, False, or None."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Text, or None."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def first(self, *names: str) -> int | None:
        """The first of these whole numbers that is there."""
        return next((value for name in names if (value := self.integer(name)) is not None), None)

    def need(self, name: str) -> int:
        """A whole number that must be there.

        :raises CheckpointCorrupt: naming it and what can replace it.
        """
        value = self.integer(name)
        if value is None:
            raise missing(self.origin, name)
        return value

    def _wrong(self, name: str, needed: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self.origin}: the saved argument {name} is {shown(self.raw(name))}", [("needed", needed)]
        )


def missing(origin: str, name: str) -> CheckpointCorrupt:
    """The error for an argument that is not there and has no usable default."""
    return CheckpointCorrupt(
        f"{origin}: the saved arguments do not say {name}",
        [("try", "--saved-config FILE, a config.json of the model")],
    )


@dataclass(frozen=True, slots=True)
class _Only:
    """An argument that must be absent or have one of these values."""

    name: str
    allowed: tuple[object, ...]
    needed: str


_OFF: tuple[object, ...] = (None, False)


def _off(names: str) -> tuple[_Only, ...]:
    return tuple(_Only(name, _OFF, "off") for name in names.split())


def _none(names: str) -> tuple[_Only, ...]:
    return tuple(_Only(name, (None,), "not set") for name in names.split())


#: What this server does not compute.
_FIXED: tuple[_Only, ...] = (
    *_off(
        "layernorm_zero_centered_gamma apply_layernorm_1p apply_residual_connection_post_layernorm "
        "multi_latent_attention qk_l2_norm attention_output_gate head_wise_attn_gate rotary_interleaved "
        "squared_relu openai_gelu quick_geglu use_mup enable_mhc_connections heterogeneous_block_specs "
        "moe_router_enable_expert_bias moe_apply_probs_on_input moe_router_force_load_balancing"
    ),
    *_none(
        "softmax_scale activation_func_clamp_value experimental_attention_variant linear_attention_freq "
        "window_attn_skip_freq rotary_base_per_layer mrope_section heterogeneous_layers_config_path "
        "heterogeneous_layers_config_encoded_json moe_router_num_groups moe_router_group_topk "
        "moe_router_topk_limited_devices moe_router_force_biased moe_latent_size "
        "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size"
    ),
    _Only("normalization", ("RMSNorm",), "RMSNorm"),
    _Only("swiglu", (True,), "on: a SwiGLU network"),
    _Only("softmax_type", (None, "vanilla"), "vanilla"),
    _Only("glu_linear_offset", (None, 0, 0.0), "0"),
    _Only("rotary_percent", (None, 1, 1.0), "1"),
    _Only("moe_router_score_function", (None, "softmax"), "softmax"),
    _Only("moe_router_topk_scaling_factor", (None, 1, 1.0), "1"),
)
_REQUIRED = ("normalization", "swiglu", "position_embedding_type")
_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}


def check_supported(args: SavedArgs) -> None:
    """Refuse a model that this server would compute differently.

    :raises UnsupportedModel: naming the argument, its value and the value that is computed.
    :raises CheckpointCorrupt: when an argument that decides the architecture is not there.
    """
    for name in _REQUIRED:
        if name not in args:
            raise missing(args.origin, name)
    for rule in _FIXED:
        value = args.raw(rule.name)
        if not any(value is ok or (type(value) is type(ok) and value == ok) for ok in rule.allowed):
            raise unsupported(args, rule.name, rule.needed)
    _check_layer_list(args, "no_rope_freq", 0, "rotary embedding in each layer")
    _check_layer_list(args, "moe_layer_freq", 1, "experts in each layer or in none")
    balancing = args.raw("moe_router_load_balancing_type")
    kinds = balancing if isinstance(balancing, list) else [balancing]
    if args.raw("num_experts") and any(k is not None and k not in _BALANCING for k in kinds):
        raise unsupported(args, "moe_router_load_balancing_type", f"one of {', '.join(sorted(_BALANCING))}")


def unsupported(args: SavedArgs, name: str, needed: str) -> UnsupportedModel:
    """The error for a value that this server does not compute."""
    value = args.raw(name)
    text = shown(value) if not isinstance(value, list | tuple) else shown(str(value)[:60])
    return UnsupportedModel(
        f"{args.origin}: the model was trained with {name} = {text}, which this server does not compute",
        [("needed", needed)],
    )


def _check_layer_list(args: SavedArgs, name: str, wanted: int, needed: str) -> None:
    value = args.raw(name)
    if name == "moe_layer_freq" and not args.raw("num_experts"):
        return
    plain = value is None or (type(value) is int and value == wanted)
    if not plain and not (isinstance(value, list | tuple) and all(type(v) is int and v == wanted for v in value)):
        raise unsupported(args, name, needed)


def attention_sizes(args: SavedArgs) -> tuple[int, int, int]:
    """(query heads, key heads, head size)."""
    heads, hidden = args.need("num_attention_heads"), args.need("hidden_size")
    groups = args.integer("num_query_groups")
    if groups is None or args.flag("group_query_attention") is False:
        groups = heads
    head_dim = args.integer("kv_channels")
    if head_dim is None:
        if hidden % heads:
            raise LayoutMismatch(f"{args.origin}: hidden_size {hidden} is not a multiple of {heads} heads")
        head_dim = hidden // heads
    if heads % groups:
        raise LayoutMismatch(f"{args.origin}: {heads} heads are not a multiple of {groups} query groups")
    return heads, groups, head_dim


def rope_config(args: SavedArgs) -> RopeConfig:
    """Rotary embedding.

    :raises UnsupportedModel: for other position embeddings.
    """
    kind = args.text("position_embedding_type")
    if kind not in ("rope", "yarn") and not args.flag("use_rotary_position_embeddings"):
        raise unsupported(args, "position_embedding_type", "rope or yarn")
    theta = float(args.number("rotary_base") or 10000.0)
    if kind == "yarn":
        return _yarn(args, theta)
    interpolation = args.number("rotary_seq_len_interpolation_factor")
    if args.flag("use_rope_scaling"):
        if interpolation not in (None, 1):
            raise unsupported(args, "rotary_seq_len_interpolation_factor", "not set beside use_rope_scaling")
        factor = float(args.number("rope_scaling_factor") or 8.0)
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context=8192,
        )
    if interpolation not in (None, 1):
        return RopeConfig(theta=theta, scaling="linear", factor=float(interpolation or 1))
    return RopeConfig(theta=theta)


def _yarn(args: SavedArgs, theta: float) -> RopeConfig:
    """Megatron's own defaults stand for what is not set, as its ``argument_utils`` fills them in."""
    if args.flag("yarn_correction_range_round_to_int") is False:
        raise unsupported(args, "yarn_correction_range_round_to_int", "on")
    factor = args.number("rotary_scaling_factor")
    if factor is None:
        raise missing(args.origin, "rotary_scaling_factor")
    mscale, mscale_all = args.number("mscale"), args.number("mscale_all_dim")
    ratio = _mscale(factor, 1.0 if mscale is None else mscale) / _mscale(factor, mscale_all or 0.0)
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=float(factor),
        original_context=args.integer("yarn_original_max_position_embeddings") or 4096,
        beta_fast=float(args.number("yarn_beta_fast") or 32.0),
        beta_slow=float(args.number("yarn_beta_slow") or 1.0),
        attention_factor=ratio,
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def moe_config(args: SavedArgs) -> MoeConfig | None:
    """Routed experts, or None for a dense model.

    Megatron without ``moe_router_pre_softmax`` takes the softmax over the chosen logits, which equals
    dividing the chosen probabilities by their sum.
    """
    experts = args.integer("num_experts", 0) or args.integer("num_moe_experts", 0)
    if not experts:
        return None
    top_k = args.integer("moe_router_topk") or 2
    if top_k > experts:
        raise LayoutMismatch(f"{args.origin}: moe_router_topk {top_k} is more than {experts} experts")
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        ffn_size=args.integer("moe_ffn_hidden_size") or args.need("ffn_hidden_size"),
        normalise_top_k=not args.flag("moe_router_pre_softmax"),
        shared_ffn_size=args.integer("moe_shared_expert_intermediate_size", 0) or 0,
        shared_gate=bool(args.flag("moe_shared_expert_gate")),
    )


def sliding_window(args: SavedArgs) -> int | None:
    """Positions that a token attends to, itself included.  Megatron's (left, right) counts those before it.

    :raises UnsupportedModel: for a window that looks ahead.
    """
    window = args.raw("window_size")
    if window is None:
        return None
    ok = (
        isinstance(window, list | tuple)
        and len(window) == 2
        and all(type(w) is int and -1 <= w < MAX_SIZE for w in window)
    )
    if not ok or not isinstance(window, list | tuple) or window[1] > 0:
        raise unsupported(args, "window_size", "(left, 0)")
    left = int(window[0])
    return None if left == -1 else left + 1


def hybrid_blocks(args: SavedArgs) -> int | None:
    """Decoder blocks of a HybridModel whose layers alternate attention and MLP (or experts); None for other
    models.

    :raises UnsupportedModel: for state-space layers and other patterns.
    """
    name = next((n for n in ("hybrid_layer_pattern", "hybrid_override_pattern") if args.raw(n)), None)
    if name is None:
        return None
    pattern = (args.text(name) or "").split("/")[0].replace("|", "")
    blocks = pattern.count("*")
    if pattern not in ("*-" * blocks, "*E" * blocks):
        raise unsupported(args, name, "attention and MLP layers in turn, *-*-...")
    return blocks
