"""Geometry of saved checkpoints, for any model and grid: tiling, round trips, and wrong grids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.gtp import Grid, alignments, pad_rows, real_rows, shard_rows
from gtp_serve.layout.huggingface import logical_name, logical_tensors, stored_name
from gtp_serve.layout.megatron_grid import DeclaredGrid, StoredTensor, detect_layout
from gtp_serve.layout.megatron_read import Padding, Piece, map_tensors, parse_keys
from gtp_serve.layout.megatron_save import SavedTensor, plan_save
from gtp_serve.layout.spans import Box, Shard, check_coverage

PAD = -1


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    groups = draw(st.sampled_from([1, 2, 4]))
    moe = draw(st.booleans())
    ffn = 4 * draw(st.integers(1, 9))
    rows = 4 * draw(st.integers(2, 17))
    return ModelConfig(
        family="llama",
        num_layers=draw(st.sampled_from([1, 2])),
        hidden_size=4 * draw(st.integers(1, 5)),
        num_heads=groups * draw(st.sampled_from([1, 2, 3])),
        num_kv_heads=groups,
        head_dim=4 * draw(st.sampled_from([1, 2])),
        ffn_size=0 if moe else ffn,
        vocab_size=rows - draw(st.integers(0, 2)),
        vocab_rows=rows,
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        proj_bias=draw(st.booleans()),
        mlp_bias=not moe and draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        moe=MoeConfig(
            num_experts=draw(st.integers(1, 3)),
            top_k=1,
            ffn_size=ffn,
            shared_ffn_size=draw(st.sampled_from([0, 8])),
            shared_gate=draw(st.booleans()),
        )
        if moe
        else None,
    )


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    return Grid(
        tp=draw(st.sampled_from([1, 2, 4])),
        gtp=draw(st.sampled_from([1, 2, 3, 4, 8])),
        etp=draw(st.sampled_from([1, 2])),
        egtp=draw(st.sampled_from([1, 2, 3])),
        alignment=draw(st.sampled_from([1, 2, 8, 16, 32, 128])),
    )


layouts = st.sampled_from(["padded", "logical"])


def numbered(config: ModelConfig) -> dict[str, np.ndarray]:
    """Each element of the whole model has a number of its own, so any misplaced one shows."""
    out, start = {}, 0
    for name, shape in logical_tensors(config).items():
        size = int(np.prod(shape))
        out[name] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
        start += size
    return out


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def fill(shard: Shard, model: dict[str, np.ndarray]) -> np.ndarray:
    out = np.full(shard.shape, PAD, dtype=np.int64)
    for span in shard.spans:
        out[slices(span.local)] = model[span.name][slices(span.logical)]
    return out


def save(config: ModelConfig, grid: Grid, layout: str, per_layer_keys: bool) -> list[SavedTensor]:
    try:
        return plan_save(config, grid, layout, per_layer_keys=per_layer_keys)  # type: ignore[arg-type]
    except UsageError:
        assume(False)
        raise


def stored(plan: list[SavedTensor]) -> dict[str, StoredTensor]:
    return {t.key: StoredTensor(t.shape, "int64", tuple(c.box for c in t.chunks)) for t in plan}


def read(
    config: ModelConfig, tensors: dict[str, StoredTensor], declared: DeclaredGrid
) -> tuple[list[Piece], list[Padding]]:
    names = parse_keys(tensors)
    return map_tensors(tensors, names, config, detect_layout(tensors, names, config, declared))


def assemble(config: ModelConfig, plan: list[SavedTensor], pieces: list[Piece], model: dict[str, np.ndarray]) -> None:
    """Put every piece where its spans say and compare with the model that was saved."""
    data = {(t.key, i): fill(c.shard, model) for t in plan for i, c in enumerate(t.chunks)}
    out = {name: np.full(a.shape, PAD, dtype=np.int64) for name, a in model.items()}
    covered: dict[str, list[tuple[Box, str]]] = {name: [] for name in model}
    for piece in pieces:
        assert piece.ordinal == 0
        chunk = data[piece.key, piece.chunk]
        assert chunk.shape == piece.shard.shape
        for span in piece.shard.spans:
            out[span.name][slices(span.logical)] = chunk[slices(span.local)]
            covered[span.name].append((span.logical, piece.key))
    for name, shape in logical_tensors(config).items():
        check_coverage(name, shape, covered[name])
        np.testing.assert_array_equal(out[name], model[name], err_msg=name)


def declared(grid: Grid, config: ModelConfig) -> DeclaredGrid:
    return DeclaredGrid(tp=grid.tp, gtp=grid.gtp, etp=grid.etp, egtp=grid.egtp)


@given(st.integers(1, 3000), st.integers(1, 16), st.integers(1, 128))
def test_gtp_shards_tile_a_block_and_its_alignment_can_be_found_again(rows: int, gtp: int, alignment: int) -> None:
    shard = shard_rows(rows, gtp, alignment)

    pieces = [real_rows(rows, shard, rank) for rank in range(gtp)]

    assert shard % alignment == 0
    assert 0 <= pad_rows(rows, gtp, alignment) < alignment * gtp
    assert sum(count for _, count in pieces) == rows
    assert [first for first, _ in pieces] == [min(rank * shard, rows) for rank in range(gtp)]
    assert alignment in alignments(rows, gtp, shard)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(configs(), grids(), layouts, st.booleans())
def test_what_a_trainer_saves_is_read_back_element_for_element(
    config: ModelConfig, grid: Grid, layout: str, per_layer_keys: bool
) -> None:
    model = numbered(config)
    plan = save(config, grid, layout, per_layer_keys)

    pieces, padding = read(config, stored(plan), declared(grid, config))

    assemble(config, plan, pieces, model)
    assert layout == "padded" or not padding


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(configs(), grids(), st.booleans())
def test_stored_chunks_tile_every_tensor_of_a_padded_checkpoint(
    config: ModelConfig, grid: Grid, per_layer_keys: bool
) -> None:
    plan = save(config, grid, "padded", per_layer_keys)

    for tensor in plan:
        check_coverage(tensor.key, tensor.shape, [(c.box, str(c.rank)) for c in tensor.chunks])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(configs(), grids(), layouts, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4, 8]))
def test_a_wrong_grid_is_refused_or_changes_no_element(
    config: ModelConfig, grid: Grid, layout: str, tp: int, gtp: int
) -> None:
    assume((tp, gtp) != (grid.tp, grid.gtp))
    model = numbered(config)
    plan = save(config, grid, layout, per_layer_keys=False)

    try:
        pieces, _ = read(config, stored(plan), replace(declared(grid, config), tp=tp, gtp=gtp))
    except LayoutMismatch:
        return

    assert tp == grid.tp
    assemble(config, plan, pieces, model)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(configs(), grids(), st.data())
def test_a_changed_row_count_is_refused_or_changes_no_element(
    config: ModelConfig, grid: Grid, data: st.DataObject
) -> None:
    plan = save(config, grid, "padded", per_layer_keys=False)
    tensors = stored(plan)
    key = data.draw(st.sampled_from(sorted(tensors)))
    axis = data.draw(st.integers(0, len(tensors[key].shape) - 1))
    shape = list(tensors[key].shape)
    shape[axis] += data.draw(st.sampled_from([-1, 1, 2, 16, 32]))
    tensors[key] = StoredTensor(tuple(shape), "int64", tensors[key].chunks)

    try:
        pieces, _ = read(config, tensors, declared(grid, config))
    except LayoutMismatch:
        return

    assemble(config, plan, pieces, numbered(config))


@given(configs(), st.sampled_from(["mixtral", "llama", "qwen3_moe"]))
def test_hugging_face_names_round_trip(config: ModelConfig, family: str) -> None:
    for name in logical_tensors(config):
        assert logical_name(stored_name(name, family)) == name


@given(configs(), grids(), layouts, st.booleans())
def test_every_key_that_is_written_is_understood(
    config: ModelConfig, grid: Grid, layout: str, per_layer_keys: bool
) -> None:
    plan = save(config, grid, layout, per_layer_keys)

    names = parse_keys(t.key for t in plan)

    for key, name in names.items():
        assert key.endswith(name.rule.key)
        assert (name.layer is not None) == (per_layer_keys and name.in_layer)
