"""``TrainDecoder`` on grids of ranks: losses and gradients against plain torch, bits against the server."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from checkpoint_files import write_hf
from safetensors.torch import save_file
from torch import Tensor
from train_twin import (
    CONFIGS,
    DENSE,
    FULL,
    LENGTHS,
    MOE,
    assemble,
    gradient_pieces,
    ids_of,
    plain_gradients,
    targets_of_ids,
    weights_of,
    worst,
)
from training_ranks import ThreadGroup, on_threads, thread_groups

from gtp_serve import LLM
from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layers.placement import InRankOrder
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.choice import choose_ops
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.plan import build_plan
from gtp_serve.training.decoder import TrainDecoder, build_train_decoder
from gtp_serve.training.fidelity import TensorSource, cold_decoder, sequence_logprobs
from gtp_serve.training.loss import target_logprobs

SOLO = Grid()
GRIDS = {
    "dense": [SOLO, Grid(gtp=2, alignment=4), Grid(gtp=4, alignment=16), Grid(tp=2), Grid(tp=2, gtp=2, alignment=8)],
    "full": [SOLO, Grid(gtp=2), Grid(tp=2), Grid(tp=2, gtp=2, alignment=4)],
    "moe": [SOLO, Grid(gtp=2, ep=2), Grid(gtp=2, egtp=2, alignment=4), Grid(tp=2, etp=2),
            Grid(tp=2, gtp=2, etp=2, ep=2)],
    "plain-moe": [SOLO, Grid(gtp=4, ep=2, egtp=2), Grid(gtp=4, ep=4), Grid(tp=2, gtp=2, etp=2, egtp=2, alignment=8)],
}  # fmt: skip
CASES = [
    *(pytest.param(CONFIGS[name], grid, 1, id=f"{name} {grid}") for name, grids in GRIDS.items() for grid in grids),
    pytest.param(DENSE, Grid(gtp=2), 2, id="dense on twice the ranks"),
    pytest.param(FULL, Grid(tp=2), 2, id="full on twice the ranks"),
    pytest.param(MOE, Grid(gtp=2), 1, id="moe whose experts two ranks hold"),
    pytest.param(MOE, Grid(gtp=2, ep=2), 2, id="moe on twice the ranks"),
]


def model_of(config: ModelConfig, groups: object, alignment: int, **options: Any) -> TrainDecoder:
    options.setdefault("dtype", torch.float32)
    model = build_train_decoder(config, groups=groups, alignment=alignment, **options)
    model.load_weights(TensorSource(weights_of(config)))
    return model


def step(model: TrainDecoder, data_rank: int) -> Tensor:
    """One micro-batch, and its gradients finished; the log-probabilities."""
    config = model.config
    logits = model(ids_of(config, data_rank), LENGTHS)
    found = target_logprobs(logits, targets_of_ids(config, data_rank), config, model.placement)
    torch.autograd.backward(-found.mean())
    model.finish_gradients()
    return found.detach()


@pytest.mark.parametrize(("config", "grid", "replicas"), CASES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_log_probabilities_and_every_gradient_are_those_of_plain_torch(
    config: ModelConfig, grid: Grid, replicas: int, deterministic: bool
) -> None:
    world = grid.tp * grid.gtp * replicas
    groups = thread_groups(grid, world)

    def act(rank: int) -> Any:
        model = model_of(config, groups[rank], grid.alignment, deterministic=deterministic)
        return step(model, rank // grid.tp), gradient_pieces(model)

    got = on_threads(world, act)
    logprobs, gradients = plain_gradients(config, world // grid.tp)

    for rank, (found, _) in enumerate(got):
        torch.testing.assert_close(found.double(), logprobs[rank // grid.tp], rtol=0, atol=2e-5)
    error, where = worst(assemble([pieces for _, pieces in got], config), gradients)
    assert error < 2e-5, where


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_recomputed_layers_change_no_bit_of_a_gradient(config: ModelConfig) -> None:
    grid = Grid(gtp=2)
    kept, again = thread_groups(grid, 2), thread_groups(grid, 2)

    def act(rank: int) -> bool:
        models = [
            model_of(config, groups[rank], 1, recompute=recompute)
            for groups, recompute in ((kept, False), (again, True))
        ]
        for model in models:
            step(model, rank)
            step(model, rank)
        pairs = zip(*(model.named_parameters() for model in models), strict=True)
        return all(torch.equal(one.grad, other.grad) for (_, one), (_, other) in pairs)

    assert on_threads(2, act) == [True, True]


SERVED = [
    *(pytest.param(config, SOLO, id=f"{name} solo") for name, config in CONFIGS.items()),
    pytest.param(DENSE, Grid(gtp=4, alignment=16), id="gtp 4, padded"),
    pytest.param(FULL, Grid(gtp=2), id="full gtp 2"),
    pytest.param(MOE, Grid(gtp=2, ep=2), id="ep 2"),
    pytest.param(MOE, Grid(gtp=4, ep=2, egtp=2), id="ep 2 egtp 2"),
]


@pytest.mark.parametrize(("config", "grid"), SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_server_gives_the_trainers_log_probabilities_to_the_last_bit(
    config: ModelConfig, grid: Grid, dtype: torch.dtype
) -> None:
    groups = thread_groups(grid, grid.gtp)

    def act(rank: int) -> list[float]:
        model = model_of(config, groups[rank], grid.alignment, deterministic=True, dtype=dtype)
        ids = ids_of(config, rank)
        with torch.no_grad():
            return next_logprobs(model, ids).tolist()

    trained = on_threads(grid.gtp, act)
    server = cold_decoder(config, weights_of(config), dtype=dtype, deterministic=True)
    for rank, found in enumerate(trained):
        sequences = [part.tolist() for part in torch.split(ids_of(config, rank), list(LENGTHS)) if len(part) > 1]
        assert found == torch.cat(sequence_logprobs(server, sequences)).tolist()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_engine_generates_has_the_trainers_log_probabilities_to_the_last_bit(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"], deterministic: bool
) -> None:
    """Where a row's results depend on no other, which is always so with the native ops and else on request."""
    if not deterministic and not choose_ops(device="cpu", dtype=getattr(torch, dtype), head_dim=8).normalises:
        deterministic = True
    config = replace(DENSE, vocab_size=DENSE.vocab_rows)
    write_hf(tmp_path, config, max_position_embeddings=config.max_context)
    save_file(weights_of(config), tmp_path / "model.safetensors")
    prompt, sampling = [3, 1, 4], {"max_new_tokens": 9, "ignore_eos": True}
    drawn: list[dict[str, Any]] = [sampling | {"temperature": 0}] + [
        sampling | {"temperature": 1.0, "seed": seed} for seed in range(3)
    ]
    with LLM(tmp_path, tokenizer=False, kv_memory="1MiB", dtype=dtype, deterministic=deterministic) as llm:
        made = llm.generate([prompt] * 4, drawn) + [llm.generate([prompt], one)[0] for one in drawn]
    model = model_of(config, None, 1, deterministic=deterministic, dtype=getattr(torch, dtype))
    for one in made:
        ids = torch.tensor([*prompt, *one.ids])
        rows = torch.arange(len(prompt) - 1, len(ids) - 1)
        logits = model(ids, (len(ids),), rows)
        found = target_logprobs(logits, ids[rows + 1], model.config, model.placement)
        assert found.tolist() == list(one.logprobs)


def next_logprobs(model: TrainDecoder, ids: Tensor) -> Tensor:
    """Of all tokens but each sequence's first."""
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    rows = torch.cat([torch.arange(first, first + n - 1) for first, n in zip(starts, LENGTHS, strict=True)])
    return target_logprobs(model(ids, LENGTHS, rows), ids[rows + 1], model.config, model.placement)


@dataclass(frozen=True)
class ThreadCollective:
    """A server's ranks as threads."""

    group: ThreadGroup
    capturable: bool = False

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("a deterministic server adds in rank order")

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        self.group.all_gather(out.view(-1), x.contiguous()).wait()
        return torch.cat(list(out), -1)


@pytest.mark.parametrize("config", [DENSE, FULL, MOE], ids=["dense", "full", "moe"])
def test_a_deterministic_server_on_two_ranks_gives_the_bits_of_a_trainer_on_two(config: ModelConfig) -> None:
    grid = Grid(tp=2, etp=2)
    groups, served = thread_groups(grid, 2), thread_groups(grid, 2)

    def act(rank: int) -> tuple[list[float], list[float]]:
        model = model_of(config, groups[rank], 1, deterministic=True)
        ids = ids_of(config, 0)
        with torch.no_grad():
            trained = next_logprobs(model, ids)
        group: Any = served[rank].tp
        ops = choose_ops(device="cpu", dtype=torch.float32, head_dim=config.head_dim, deterministic=True)
        decoder = build_decoder(
            config, dtype=torch.float32, device="cpu", tp_rank=rank, tp_size=2, ops=ops,
            collective=InRankOrder(ThreadCollective(group)),
        )  # fmt: skip
        fill(decoder, config)
        sequences = [part.tolist() for part in torch.split(ids, list(LENGTHS)) if len(part) > 1]
        return trained.tolist(), torch.cat(sequence_logprobs(decoder, sequences)).tolist()

    for trained, told in on_threads(2, act):
        assert trained == told


def fill(decoder: Decoder, config: ModelConfig) -> None:
    source, targets = TensorSource(weights_of(config)), decoder.targets()
    apply_plan(
        build_plan(source.shards(), [target.shard for target in targets], logical_tensors(config)), source, targets
    )


def test_rows_that_are_not_wanted_are_not_computed_and_change_nothing() -> None:
    model = model_of(DENSE, None, 1, deterministic=True)
    ids = ids_of(DENSE, 0)
    rows = torch.tensor([3, 9, 20])

    with torch.no_grad():
        assert torch.equal(model(ids, LENGTHS, rows), model(ids, LENGTHS)[rows])


def test_a_far_negative_gate_has_a_gradient_that_is_a_number() -> None:
    """``exp(-gate)`` is infinite there, and autograd's quotient of infinities would be none."""
    model = model_of(DENSE, None, 1, deterministic=True)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.mul_(100)
    step(model, 0)

    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "grid", "words"),
    [
        (DENSE, Grid(pp=2), "pp"),
        (replace(DENSE, num_kv_heads=1), Grid(tp=2), "KV heads"),
        (MOE, Grid(tp=2), "1 tensor-parallel ranks and the rest over 2"),
        (replace(DENSE, ffn_size=21), Grid(tp=2), "21 rows"),
    ],
)
def test_a_grid_that_the_model_cannot_be_cut_for_is_refused(config: ModelConfig, grid: Grid, words: str) -> None:
    groups = thread_groups(grid, grid.tp * grid.pp)

    with pytest.raises(UsageError, match=words):
        build_train_decoder(config, dtype=torch.float32, groups=groups[0])


@pytest.mark.parametrize("lengths", [[23], [20, 0, 4], [24, 1]])
def test_lengths_that_are_not_those_of_the_ids_are_refused(lengths: Sequence[int]) -> None:
    model = model_of(DENSE, None, 1)

    with pytest.raises(UsageError, match="no sequences of"):
        model(ids_of(DENSE, 0), lengths)


@pytest.mark.parametrize(("position", "bad"), [(0, -1), (23, DENSE.vocab_size)])
def test_an_id_that_does_not_exist_is_refused_and_no_row_of_zeros(position: int, bad: int) -> None:
    model, ids, targets = model_of(DENSE, None, 1), ids_of(DENSE, 0), targets_of_ids(DENSE, 0)
    logits = model(ids, LENGTHS)
    ids[position] = targets[position] = bad

    with pytest.raises(UsageError, match=f"ids_T has {bad}, which is no token id"):
        model(ids, LENGTHS)
    with pytest.raises(UsageError, match=f"targets_S has {bad}, which is no token id"):
        target_logprobs(logits, targets, DENSE, model.placement)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deep_copy_computes_the_same_and_is_trained_alone(config: ModelConfig, deterministic: bool) -> None:
    """What a reference policy and averaged weights are made by."""
    model = model_of(config, None, 1, deterministic=deterministic)
    twin = copy.deepcopy(model)

    before = step(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)

    assert all(parameter.grad is None for parameter in twin.parameters())
    assert torch.equal(step(twin, 0), before)
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert not torch.equal(step(model, 0), before)
