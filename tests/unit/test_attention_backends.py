"""What FlashInfer and flash-attn are told of a step, and who may choose them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_doubles import FLASHINFER, FlashAttnDouble, FlashInferDouble
from attention_steps import BLOCKS, cache_of, random_step, step_of
from fakes import TINY_MODEL
from torch import Tensor

from gtp_serve.engine.capture import EagerCapture, EagerStep
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.errors import EnvironmentFault, GtpServeError, UsageError
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops import choice, reference
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.flash_attn import FlashAttn
from gtp_serve.ops.flashinfer import FlashInfer, pages_of
from gtp_serve.ops.table import PLAIN_PAGED, REFERENCE, Ops


def check_steps(ops: Ops, block: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        batch = random_step(rng, block, decode=seed % 3 == 0)
        window = rng.choice([None, None, 1, block + 3])
        kv_heads = rng.choice([1, 2, 3])
        heads = kv_heads * rng.choice([1, 3, 4])
        keys, values = cache_of(batch, block, kv_heads, 16, seed)
        q = torch.randn(len(batch.token_ids_T), heads, 16, generator=torch.Generator().manual_seed(seed))
        expected = reference.attend(q, keys, values, reference.plan_attention(batch, block, window), 0.3)
        assert torch.isfinite(expected).all()
        plan = ops.plan_attention(batch, block, window)
        for _ in range(2):  # layers share a plan
            torch.testing.assert_close(plan.attend(q, keys, values, 0.3), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("version", FLASHINFER)
def test_flashinfer_is_told_the_blocks_and_lengths_of_random_steps(version: str) -> None:
    library = FlashInferDouble(version)
    check_steps(FlashInfer(library, workspace_bytes=64).table(PLAIN_PAGED), 4)
    assert [kind for kind, _ in library.wrappers] == ["decode", "prefill"]
    workspaces = {made.float_workspace_buffer.data_ptr() for _, made in library.wrappers}
    assert len(workspaces) == 1
    assert library.plans == 40  # once a step, not once a layer


def test_flash_attn_is_told_the_blocks_and_lengths_of_random_steps() -> None:
    library = FlashAttnDouble()
    ops = FlashAttn(library.flash_attn_with_kvcache, library.flash_attn_varlen_func).table(PLAIN_PAGED)
    check_steps(ops, 256)
    assert {*library.calls} == {"kvcache", "varlen"}


def test_pages_of_lengths_around_the_ends_of_blocks() -> None:
    tables = torch.tensor([[7, 8, 9], [3, 4, 5], [1, 2, 6]])
    pages = pages_of((1, 4, 9), tables, 4)
    assert pages.starts_S.tolist() == [0, 1, 2, 5]
    assert pages.blocks_I.tolist() == [7, 3, 1, 2, 6]
    assert pages.last_lengths_S.tolist() == [1, 4, 1]


MODEL = replace(TINY_MODEL, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48)


class StrictCapture(EagerCapture):
    """After the warm-up, the library is told that the host has no say any more."""

    def __init__(self, library: FlashInferDouble) -> None:
        self.library = library

    def warm_up(self, step: Callable[[], Tensor]) -> None:
        step()

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> EagerStep:
        def recorded() -> Tensor:
            self.library.recording = True
            try:
                return step()
            finally:
                self.library.recording = False

        return super().record(recorded, inputs)


def model_with(ops: Ops, block: int) -> tuple[Decoder, KVPool]:
    decoder = build_decoder(MODEL, dtype=torch.float32, device="cpu", ops=ops)
    pool = KVPool(
        num_layers=2,
        num_blocks=BLOCKS + SCRATCH_BLOCKS,
        block_size=block,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(3)
    for tensor in (*(target.tensor for target in decoder.targets()), *pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return decoder, pool


def check_buckets(ops: Ops, capture: EagerCapture, block: int) -> None:
    """Steps of 1 to 4 rows in buckets of 1, 2 and 4, so that some are padded, give the logits of the reference."""
    decoder, pool = model_with(ops, block)
    plain, plain_pool = model_with(REFERENCE, block)
    graphs = DecodeGraphs(decoder, pool, capture, sizes=(1, 2, 4), max_blocks=8)
    while graphs.capture_next():
        pass
    assert graphs.failures == {}
    rng = random.Random(0)
    for count in (4, 3, 1, 2, 3, 4, 1):
        batch = step_of(rng, [(1, rng.randint(1, 6 * block)) for _ in range(count)], block)
        expected = plain.forward(batch, plain_pool.keys, plain_pool.values)
        torch.testing.assert_close(graphs.replay(batch), expected, rtol=0, atol=2e-5)
        for mine, other in zip(pool.keys, plain_pool.keys, strict=True):
            torch.testing.assert_close(mine[:BLOCKS], other[:BLOCKS], rtol=0, atol=2e-5)
    assert graphs.replayed == 7


@pytest.mark.parametrize("version", FLASHINFER)
def test_a_recorded_step_of_flashinfer_reads_buffers_that_are_planned_before_each_replay(version: str) -> None:
    library = FlashInferDouble(version)
    check_buckets(FlashInfer(library, workspace_bytes=64).table(PLAIN_PAGED), StrictCapture(library), 4)
    assert [len(made.paged_kv_last_page_len_buffer) for _, made in library.wrappers] == [4, 2, 1]
    assert all(made.use_cuda_graph and made.use_tensor_cores for _, made in library.wrappers)
    assert library.plans == 3 + 7


def test_a_recorded_step_of_flash_attn_needs_nothing_from_the_host() -> None:
    library = FlashAttnDouble()
    ops = FlashAttn(library.flash_attn_with_kvcache, library.flash_attn_varlen_func).table(PLAIN_PAGED)
    assert ops.fix_attention is None
    check_buckets(ops, EagerCapture(), 256)
    assert {*library.calls} == {"kvcache"}


def choose(attention: Any, **changes: Any) -> Ops:
    usual: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64, "block_size": 256}
    return choose_ops(attention=attention, **(usual | changes))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both packages are there, and so is an H100."""
    doubles = SimpleNamespace(flashinfer=FlashInferDouble("0.7.4"), flash_attn=FlashAttnDouble())
    monkeypatch.setitem(sys.modules, "flashinfer", doubles.flashinfer)
    monkeypatch.setitem(sys.modules, "flash_attn", doubles.flash_attn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return doubles


@pytest.mark.usefixtures("installed")
def test_each_backend_is_chosen_by_its_name_and_none_of_the_extras_without_it() -> None:
    assert choose("flashinfer").name == "Triton kernels, attention by FlashInfer 0.7.4"
    assert choose("flash-attn").name == "Triton kernels, attention by flash-attn 2.8.4"
    assert choose("torch").name == "Triton kernels, attention by plain torch, slow"
    assert choose("torch").plan_attention is PLAIN_PAGED.plan_attention
    assert choose("triton").name == "Triton kernels, prompts through the paged kernel"
    assert choose("auto").name.startswith("Triton kernels, prompts through")
    assert choose("torch", device="cpu") is REFERENCE
    for name in ("flashinfer", "flash-attn"):
        ops = choose(name)
        assert ops.capturable
        assert ops.captures_experts
        assert ops.rms_norm is choose("auto").rms_norm


@pytest.mark.usefixtures("installed")
def test_without_triton_the_extras_stand_on_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert choose("flashinfer").name == "plain torch, attention by FlashInfer 0.7.4"
    with pytest.raises(EnvironmentFault, match="needs Triton, which is not installed"):
        choose("triton")


REFUSED: dict[str, tuple[str, dict[str, Any], type[GtpServeError], str]] = {
    "float32": ("flashinfer", {"dtype": torch.float32}, UsageError,
        "FlashInfer does not serve heads of 64 elements in float32; serves: heads of 64, 128, 256"),
    "heads": ("flashinfer", {"head_dim": 80}, UsageError, "FlashInfer does not serve heads of 80 elements in bfloat16"),
    "blocks": ("flash-attn", {"block_size": 16}, UsageError,
        "flash-attn does not serve a KV cache in blocks of 16 positions; needed: a block size that 256 divides"),
    "large heads": ("flash-attn", {"head_dim": 264}, UsageError, "flash-attn does not serve heads of 264 elements"),
    "odd heads": ("flash-attn", {"head_dim": 60}, UsageError, "flash-attn does not serve heads of 60 elements"),
    "cpu": ("flashinfer", {"device": "cpu"}, UsageError,
        "--attention-backend flashinfer needs a GPU, and the device is cpu; try: --attention-backend auto"),
    "triton on a cpu": ("triton", {"device": "cpu"}, UsageError, "--attention-backend triton needs a GPU"),
    "deterministic": ("flash-attn", {"deterministic": True}, UsageError,
        "--deterministic computes attention in an order of its own, not by --attention-backend flash-attn"),
}  # fmt: skip


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("why", REFUSED)
def test_what_a_backend_does_not_serve_is_refused_by_name(why: str) -> None:
    attention, changes, kind, words = REFUSED[why]
    with pytest.raises(kind) as caught:
        choose(attention, **changes)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(("attention", "module"), [("flashinfer", "flashinfer"), ("flash-attn", "flash_attn")])
def test_a_package_that_is_not_there_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, attention: str, module: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvironmentFault) as caught:
        choose(attention)
    assert caught.value.message.startswith(f"--attention-backend {attention} needs ")
    assert f"try: pip install 'gtp-serve[{attention}]'" in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_an_old_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(UsageError, match="--attention-backend flashinfer does not serve Tesla T4"):
        choose("flashinfer")


def test_a_package_without_its_functions_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, installed: SimpleNamespace
) -> None:
    """The name flash_attn is shared by several distributions."""
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__version__="4"))
    with pytest.raises(EnvironmentFault, match="needs flash-attn, which cannot be imported"):
        choose("flash-attn")
