"""The model that a Megatron checkpoint holds: saved arguments, checked against the tensors that are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, cast

from gtp_serve.config import DTYPE_BYTES, DType, ModelConfig
from gtp_serve.errors import CheckpointCorrupt, LayoutMismatch, UnsupportedModel
from gtp_serve.layout.gtp import alignments
from gtp_serve.layout.megatron import OUTPUT_LAYER, WORD_EMBEDDINGS, StoredName
from gtp_serve.layout.megatron_grid import SavedLayout
from gtp_serve.loaders.limits import check_limits
from gtp_serve.loaders.megatron_args import (
    SavedArgs,
    attention_sizes,
    check_supported,
    hybrid_blocks,
    missing,
    moe_config,
    rope_config,
    sliding_window,
)
from gtp_serve.loaders.torch_dist import IndexedTensor

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "normalization",
    "swiglu",
    "position_embedding_type",
)
_CAPACITY = "moe_expert_capacity_factor"


@dataclass(frozen=True, slots=True)
class Described:
    """A model description that may still change in ``vocab_rows``, and what to tell the user about it."""

    config: ModelConfig
    warnings: tuple[str, ...]
    vocab_stated: bool
    """Whether anything says how many tokens there are; else all rows are taken for tokens."""
    vocab_doubt: str = ""
    """What else the arguments say of the vocabulary rows."""


def describe(
    args: SavedArgs | None,
    given: ModelConfig | None,
    names: Mapping[str, StoredName],
    tensors: Mapping[str, IndexedTensor],
    where: str,
) -> Described:
    """The model's description.

    :param args: saved arguments, if the checkpoint has them.
    :param given: the user's description, used where the checkpoint says nothing.
    :param names: weight keys that are there.
    :raises CheckpointCorrupt: when neither says what the model is.
    :raises LayoutMismatch: when they contradict each other or the tensors.
    :raises UnsupportedModel: for a model that is not computed here.
    """
    if args is None and given is None:
        raise CheckpointCorrupt(
            f"{where} has no saved arguments, so nothing says what the model is",
            [
                (
                    "looked for",
                    "a common_state item in the .distcp files (megatron-core 0.19 on), or common.pt",
                ),
                ("try", "--saved-config FILE, a config.json of the model"),
            ],
        )
    if args is not None and (given is None or all(name in args for name in _REQUIRED)):
        config = _from_args(args, names)
        if given is not None:
            _check_agree(config, given, args.origin)
    else:
        config = cast(ModelConfig, given)
        if args is not None:
            _check_sizes(config, args)
    check_limits(config, where)
    _check_head(config, names, where)
    config = replace(config, dtype=_dtype(tensors, names), vocab_rows=_declared_rows(args, config, tensors))
    stated = args is None or "vocab_size" in args
    return Described(config, tuple(_warnings(args, config, names)), stated, _vocab_doubt(args))


def _vocab_doubt(args: SavedArgs | None) -> str:
    """How the padded vocabulary that is saved differs from what Megatron pads the vocabulary to."""
    if args is None:
        return ""
    names = ("vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size", "padded_vocab_size")
    tokens, multiple, tp, padded = (args.integer(name) for name in names)
    if tokens is None or multiple is None or padded is None:
        return ""
    multiple *= tp or 1
    usual = -(-tokens // multiple) * multiple
    return (
        "" if usual == padded else f"padded_vocab_size is {padded}, and by make_vocab_size_divisible_by it is {usual}"
    )


def settle_vocabulary(described: Described, tensors: Mapping[str, IndexedTensor], saved: SavedLayout) -> Described:
    """Fix the number of vocabulary rows: the tensors decide, saved arguments explain padding.

    :raises LayoutMismatch: when embedding and head differ, or rows of real tokens are missing.
    """
    config, where = described.config, saved.dense
    if WORD_EMBEDDINGS not in tensors:
        raise LayoutMismatch(f"{WORD_EMBEDDINGS} is missing", [("needed", "a decoder's weights, embedding included")])
    stored = _rows(tensors[WORD_EMBEDDINGS])
    if not config.tied and _rows(tensors[OUTPUT_LAYER]) != stored:
        raise LayoutMismatch(
            f"{WORD_EMBEDDINGS} and {OUTPUT_LAYER} differ",
            [(key, str(list(tensors[key].shape))) for key in (WORD_EMBEDDINGS, OUTPUT_LAYER)],
        )
    rows, warnings = config.vocab_rows, list(described.warnings)
    if where.kind != "padded":
        rows = stored
    elif not _explained(rows, stored, where.tp, where.gtp):
        if where.tp > 1:
            raise LayoutMismatch(
                f"{WORD_EMBEDDINGS} has {stored} rows, which padding of {rows} rows at TP {where.tp} "
                f"GTP {where.gtp} does not explain",
                [("needed", "saved arguments whose padded_vocab_size is that of the tensors")],
            )
        rows = stored
    if rows != config.vocab_rows:
        warnings.append(
            f"the saved arguments say {config.vocab_rows} vocabulary rows, the tensors have {rows}; "
            "the tensors are right"
        )
    if where.kind == "padded" and where.tp > 1 and described.vocab_doubt:
        # Where each rank's rows end is told by nothing else in this layout.
        warnings.append(f"{described.vocab_doubt}; {rows} is used, and if that is wrong, most tokens are other tokens")
    if not described.vocab_stated:
        config = replace(config, vocab_size=rows)
    if rows < config.vocab_size:
        raise LayoutMismatch(
            f"{WORD_EMBEDDINGS} has {rows} rows, fewer than the {config.vocab_size} tokens of the vocabulary"
        )
    return replace(described, config=replace(config, vocab_rows=rows), warnings=tuple(warnings))


def _explained(rows: int, stored: int, tp: int, gtp: int) -> bool:
    shards = tp * gtp
    return rows % tp == 0 and stored % shards == 0 and bool(alignments(rows // tp, gtp, stored // shards))


def _rows(tensor: IndexedTensor) -> int:
    return tensor.shape[0] if tensor.shape else 0


def _from_args(args: SavedArgs, names: Mapping[str, StoredName]) -> ModelConfig:
    check_supported(args)
    heads, groups, head_dim = attention_sizes(args)
    moe = moe_config(args)
    blocks = hybrid_blocks(args)
    linear_bias = args.flag("add_bias_linear")
    if moe is not None and linear_bias:
        raise UnsupportedModel(
            f"{args.origin}: the model has experts with biases (add_bias_linear), which is not supported"
        )
    qkv_bias = _said_or_seen(
        args.flag("add_qkv_bias") or linear_bias if "add_qkv_bias" in args else linear_bias or None,
        names,
        "linear_qkv.bias",
    )
    qk_norm = _said_or_seen(args.flag("qk_layernorm"), names, "q_layernorm.weight")
    tied = not _said_or_seen(args.flag("untie_embeddings_and_output_weights"), names, OUTPUT_LAYER)
    window = sliding_window(args)
    epsilon = args.number("layernorm_epsilon")
    vocab = args.integer("vocab_size") or args.integer("padded_vocab_size")
    if vocab is None:
        raise missing(args.origin, "vocab_size or padded_vocab_size")
    return ModelConfig(
        family=_family(moe=moe is not None, qkv_bias=qkv_bias, qk_norm=qk_norm, window=window),
        num_layers=args.need("num_layers") if blocks is None else blocks,
        hidden_size=args.need("hidden_size"),
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        ffn_size=0 if moe is not None else args.need("ffn_hidden_size"),
        vocab_size=vocab,
        vocab_rows=vocab,
        norm_eps=1e-5 if epsilon is None else float(epsilon),
        rope=rope_config(args),
        tied=tied,
        qkv_bias=qkv_bias,
        proj_bias=bool(linear_bias),
        mlp_bias=bool(linear_bias),
        qk_norm=qk_norm,
        sliding_window=window,
        max_context=args.first("max_position_embeddings", "seq_length") or 2048,
        moe=moe,
    )


def _said_or_seen(said: bool | None, names: Mapping[str, StoredName], ending: str) -> bool:
    """What the arguments say; where they say nothing, whether such a tensor is there."""
    return any(name.endswith(ending) for name in names) if said is None else said


def _family(*, moe: bool, qkv_bias: bool, qk_norm: bool, window: int | None) -> str:
    if moe:
        return "qwen3_moe" if qk_norm or qkv_bias else "mixtral"
    if qk_norm:
        return "qwen3"
    return "qwen2" if qkv_bias else "mistral" if window is not None else "llama"


#: Fields in which the user's description may differ from the checkpoint's: they do not change the
#: computation.
_LOOSE = frozenset({"family", "vocab_size", "vocab_rows", "max_context", "dtype", "eos_token_ids", "bos_token_id"})


def _check_agree(config: ModelConfig, given: ModelConfig, origin: str) -> None:
    for name in ModelConfig.__dataclass_fields__:
        have, want = getattr(config, name), getattr(given, name)
        if name not in _LOOSE and have != want:
            raise LayoutMismatch(
                f"--saved-config contradicts the checkpoint in {name}: {want} against {have}",
                [("saved arguments", origin), ("try", "leave --saved-config out")],
            )


def _check_sizes(config: ModelConfig, args: SavedArgs) -> None:
    """The few arguments that an incomplete set has must still agree."""
    sizes = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.ffn_size if config.moe is None else None,
        "num_experts": config.moe.num_experts if config.moe else None,
    }
    for name, size in sizes.items():
        said = args.integer(name, 0)
        if said is not None and size is not None and said != size:
            raise LayoutMismatch(f"--saved-config says {name} {size}, {args.origin} says {said}")


def _check_head(config: ModelConfig, names: Mapping[str, StoredName], where: str) -> None:
    if not config.tied and OUTPUT_LAYER not in names:
        raise LayoutMismatch(
            f"{where} says that the output head is not the embedding, but {OUTPUT_LAYER} is missing",
            [("needed", f"{OUTPUT_LAYER}, or arguments of a tied model")],
        )


def _dtype(tensors: Mapping[str, IndexedTensor], names: Mapping[str, StoredName]) -> DType:
    """The element type of most weight elements."""
    sizes: Counter[str] = Counter()
    for key in names:
        tensor = tensors[key]
        if tensor.dtype not in DTYPE_BYTES:
            raise UnsupportedModel(
                f"{key} has the element type {tensor.dtype}, which is not supported",
                [("supported", ", ".join(DTYPE_BYTES))],
            )
        sizes[tensor.dtype] += prod(tensor.shape)
    return cast(Literal["float32", "bfloat16", "float16"], sizes.most_common(1)[0][0]) if sizes else "bfloat16"


def _declared_rows(args: SavedArgs | None, config: ModelConfig, tensors: Mapping[str, IndexedTensor]) -> int:
    """Vocabulary rows without GTP padding as far as anything says, else as many as there are tokens."""
    padded = args.integer("padded_vocab_size") if args is not None else None
    if padded is not None or args is None:
        return padded or config.vocab_rows
    multiple = args.integer("make_vocab_size_divisible_by")
    if multiple is None:
        return _rows(tensors[WORD_EMBEDDINGS]) if WORD_EMBEDDINGS in tensors else config.vocab_rows
    multiple *= args.integer("tensor_model_parallel_size") or 1
    return -(-config.vocab_size // multiple) * multiple


def _warnings(args: SavedArgs | None, config: ModelConfig, names: Mapping[str, StoredName]) -> list[str]:
    warnings = []
    if config.tied and OUTPUT_LAYER in names:
        warnings.append(f"{OUTPUT_LAYER} is ignored: the model's head is its embedding (tied)")
    if args is not None and config.moe is not None and _CAPACITY in args:
        factor = args.number(_CAPACITY)
        if factor is not None and factor >= 0:
            warnings.append(f"trained with {_CAPACITY} {factor}, which drops tokens; the server drops none")
    return warnings
