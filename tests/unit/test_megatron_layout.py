"""Megatron's layouts against the numbers measured on real files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.gtp import Grid, alignment_for, pad_rows, shard_rows
from gtp_serve.layout.megatron import LAYER_RULES, full_rows, number_layers, padded_rows, parse_key
from gtp_serve.layout.megatron_grid import DeclaredGrid, StoredTensor, detect_layout
from gtp_serve.layout.megatron_read import map_tensors, parse_keys
from gtp_serve.layout.megatron_save import plan_save
from gtp_serve.layout.rows import Rows
from gtp_serve.layout.spans import Box

LLAMA = ModelConfig(
    family="llama",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=176,
    vocab_size=251,
    vocab_rows=252,
)
FC1 = LAYER_RULES["mlp.linear_fc1.weight"]
QKV = LAYER_RULES["self_attention.linear_qkv.weight"]


def stored(config: ModelConfig, grid: Grid, layout: str = "padded") -> dict[str, StoredTensor]:
    plan = plan_save(config, grid, layout)  # type: ignore[arg-type]
    return {t.key: StoredTensor(t.shape, "bfloat16", tuple(c.box for c in t.chunks)) for t in plan}


def test_recipes_give_their_alignment_and_an_explicit_value_wins() -> None:
    assert [alignment_for(r) for r in ("bf16", "fp8", "mxfp8", "nvfp4")] == [16, 16, 32, 16]
    assert alignment_for("mxfp8", 128) == 128
    with pytest.raises(UsageError, match="unknown recipe 'int3'"):
        alignment_for("int3")
    with pytest.raises(UsageError, match="alignment 0 is below 1"):
        alignment_for("bf16", 0)


@pytest.mark.parametrize(
    ("local", "gtp", "alignment", "shard", "pad"),
    [(252, 2, 16, 128, 4), (64, 4, 32, 32, 64), (352, 4, 32, 96, 32), (176, 2, 16, 96, 16), (126, 2, 16, 64, 2)],
)
def test_shard_and_pad_rows_are_those_of_real_files(local: int, gtp: int, alignment: int, shard: int, pad: int) -> None:
    assert (shard_rows(local, gtp, alignment), pad_rows(local, gtp, alignment)) == (shard, pad)


def test_qkv_rows_interleave_per_query_group() -> None:
    assert full_rows(QKV, LLAMA, ("q", "k", "v"), 128) == (
        Rows(0, 32, "q", 0),
        Rows(32, 16, "k", 0),
        Rows(48, 16, "v", 0),
        Rows(64, 32, "q", 32),
        Rows(96, 16, "k", 16),
        Rows(112, 16, "v", 16),
    )


def test_fc1_is_permuted_by_gtp_even_where_nothing_is_padded() -> None:
    """TP1 GTP2: the file holds gate[0:88], up[0:88], gate[88:176], up[88:176] where [gate; up] was meant."""
    assert padded_rows(FC1, 352, 1, 2, 176) == (
        Rows(0, 88, "", 0),
        Rows(88, 88, "", 176),
        Rows(176, 88, "", 88),
        Rows(264, 88, "", 264),
    )


def test_fc1_at_tp2_gtp2_has_the_measured_pieces() -> None:
    """Second cuts hold the rest of the gate rows, then up rows, then padding (chunks of 48 rows)."""
    rows = padded_rows(FC1, 352, 2, 2, 96)

    assert rows == (
        Rows(0, 48, "", 0),
        Rows(48, 48, "", 184),
        Rows(96, 48, "", 88),
        Rows(144, 48, "", 272),
        Rows(192, 40, "", 48),
        Rows(232, 8, "", 176),
        Rows(240, 32, "", 232),
        Rows(288, 40, "", 136),
        Rows(328, 8, "", 264),
        Rows(336, 32, "", 320),
    )


def test_padding_of_a_column_parallel_weight_lies_in_the_middle_at_tp2() -> None:
    rule = parse_key("embedding.word_embeddings.weight")

    assert rule is not None
    assert padded_rows(rule.rule, 252, 2, 2, 64) == (Rows(0, 126, "", 0), Rows(128, 126, "", 126))


def test_keys_are_understood_stacked_per_layer_and_per_expert() -> None:
    stacked = parse_key("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    single = parse_key("decoder.layers.7.mlp.experts.experts.3.linear_fc1.weight")
    moe = replace(LLAMA, moe=MoeConfig(num_experts=5, top_k=2, ffn_size=96))

    assert stacked is not None
    assert single is not None
    assert (stacked.lead(moe), stacked.place((2, 3))) == ((4, 5), (2, 3))
    assert (single.lead(moe), single.place(())) == ((), (7, 3))
    assert parse_key("decoder.layers.0.mlp.fc1.weight") is None
    assert parse_key("decoder.layers.0.0.mlp.linear_fc1.weight") is None


def test_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(LayoutMismatch, match=r"1 weight key\(s\).*decoder.layers.1.mlp.fc1.weight"):
        parse_keys(["decoder.final_layernorm.weight", "decoder.layers.1.mlp.fc1.weight"])


def test_hybrid_layers_become_blocks_in_order() -> None:
    kinds = ("self_attention.linear_proj", "mlp.linear_fc2")
    keys = [f"decoder.layers.{n}.{kinds[n % 2]}.weight" for n in range(4)]

    assert number_layers(parse_keys(keys).values()) == {0: 0, 1: 0, 2: 1, 3: 1}
    with pytest.raises(LayoutMismatch, match="do not alternate"):
        number_layers(parse_keys([*keys, "decoder.layers.5.mlp.linear_fc2.weight"]).values())


@pytest.mark.parametrize("layout", ["padded", "logical"])
def test_the_chunk_grid_tells_the_layout_and_the_sizes(layout: str) -> None:
    tensors = stored(LLAMA, Grid(tp=2, gtp=2, alignment=16), layout)

    saved = detect_layout(tensors, parse_keys(tensors), LLAMA, DeclaredGrid())

    assert (saved.dense.tp, saved.dense.gtp, saved.kind) == (2, 2, layout)
    assert saved.fc1_permuted == (layout == "padded")


def test_arguments_that_contradict_the_grid_are_refused() -> None:
    tensors = stored(LLAMA, Grid(tp=2, gtp=2, alignment=16))
    names = parse_keys(tensors)

    with pytest.raises(LayoutMismatch, match=r"saved arguments say TP 4, but .* is cut into 2 column"):
        detect_layout(tensors, names, LLAMA, DeclaredGrid(tp=4))
    with pytest.raises(LayoutMismatch, match=r"saved arguments say GTP 1, but .* is cut into 2 row shards"):
        detect_layout(tensors, names, LLAMA, DeclaredGrid(gtp=1))
    with pytest.raises(LayoutMismatch, match=r"linear_fc1.weight is cut into 8 row pieces"):
        detect_layout(tensors, names, LLAMA, DeclaredGrid(gtp=4))


def test_a_shape_that_padding_does_not_explain_names_both_shapes() -> None:
    tensors = stored(LLAMA, Grid(gtp=2, alignment=16))
    names = parse_keys(tensors)
    other = replace(LLAMA, ffn_size=208)
    saved = detect_layout(tensors, names, other, DeclaredGrid())

    with pytest.raises(LayoutMismatch, match=r"shape \[4, 352, 64\], the model has \[4, 416, 64\]"):
        map_tensors(tensors, names, other, saved)


def test_two_alignments_in_one_checkpoint_are_refused() -> None:
    config = replace(LLAMA, vocab_rows=100, vocab_size=100)
    tensors = stored(config, Grid(gtp=4, alignment=32))
    tensors["output_layer.weight"] = stored(config, Grid(gtp=4, alignment=26))["output_layer.weight"]
    names = parse_keys(tensors)

    with pytest.raises(LayoutMismatch, match="no alignment at GTP 4 explains"):
        map_tensors(tensors, names, config, detect_layout(tensors, names, config, DeclaredGrid()))


def test_a_layer_beyond_the_model_is_refused() -> None:
    tensors = {
        t.key: StoredTensor(t.shape, "bfloat16", tuple(c.box for c in t.chunks))
        for t in plan_save(LLAMA, Grid(), "padded", per_layer_keys=True)
    }
    names = parse_keys(tensors)
    two = replace(LLAMA, num_layers=2)

    with pytest.raises(LayoutMismatch, match="belongs to layer 2, but the model has 2 layers"):
        map_tensors(tensors, names, two, detect_layout(tensors, names, two, DeclaredGrid()))


def test_odd_fc1_shards_cannot_be_saved_in_the_padded_layout() -> None:
    with pytest.raises(UsageError, match="shards of 59 rows cannot be halved"):
        plan_save(LLAMA, Grid(tp=2, gtp=3, alignment=1), "padded")


def test_an_all_padding_shard_of_the_logical_layout_is_an_empty_chunk_once() -> None:
    tensors = {t.key: t for t in plan_save(LLAMA, Grid(gtp=4, alignment=32), "logical")}

    boxes = [c.box for c in tensors["decoder.layers.self_attention.linear_proj.weight"].chunks if c.box.start[0] == 0]

    assert [(b.start[1], b.shape[1]) for b in boxes] == [(0, 32), (32, 32), (64, 0)]
    assert Box((0, 64, 0), (1, 0, 64)) in boxes


def test_dense_weights_that_fit_both_layouts_follow_the_experts() -> None:
    """At alignment 1 nothing dense is padded here, and without a gated projection the grid is the same in both."""
    moe = replace(LLAMA, ffn_size=0, moe=MoeConfig(num_experts=2, top_k=1, ffn_size=96))
    grid = Grid(gtp=2, egtp=2, alignment=1)

    for layout in ("padded", "logical"):
        tensors = stored(moe, grid, layout)
        saved = detect_layout(tensors, parse_keys(tensors), moe, DeclaredGrid())

        assert (saved.dense.kind, saved.kind, saved.fc1_permuted) == (layout, layout, layout == "padded")
    alone = detect_layout(tensors := stored(moe, replace(grid, egtp=1)), parse_keys(tensors), moe, DeclaredGrid(egtp=1))
    assert not alone.fc1_permuted
