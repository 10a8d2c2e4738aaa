from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gtp_serve.budget import BLOCK_SIZE, Budget, block_bytes, plan_memory
from gtp_serve.config import ModelConfig, RopeConfig
from gtp_serve.errors import DoesNotFit, EnvironmentFault, UsageError
from gtp_serve.hardware import (
    Gpu,
    Hardware,
    Memory,
    TorchBuild,
    count_cores,
    count_threads,
    find_torch,
    parse_gpus,
    read_cpu_flags,
    read_memory,
)
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.server.options import ServeOptions

GIB = 1 << 30
BF16 = frozenset({"avx2", "avx512_bf16"})
MODEL = ModelConfig(
    family="llama",
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    vocab_size=128256,
    vocab_rows=128256,
    max_context=8192,
    tied=True,
)


def machine(ram: float = 64, *, gpu: float | None = None, used: float = 0, flags: frozenset[str] = BF16) -> Hardware:
    memory = Memory(total=int(ram * GIB), available=int(ram * GIB))
    gpus: tuple[Gpu, ...] = ()
    if gpu is not None:
        gpus = (Gpu(name="X", memory=Memory(total=int(gpu * GIB), available=int((gpu - used) * GIB))),)
    torch = TorchBuild(version="2.13.0", cuda="13.0" if gpu is not None else None)
    return Hardware(cores=2, ram=memory, cpu_flags=flags, gpus=gpus, torch=torch)


def plan(hardware: Hardware, model: ModelConfig = MODEL, **options: Any) -> Budget:
    given = ServeOptions(ckpt=Path("run"), **options)
    return plan_memory(model, logical_tensors(model), given, hardware)


def test_each_sequence_gets_its_full_context_where_there_is_room() -> None:
    budget = plan(machine(512), max_running=4)
    assert budget.engine.max_context == 8192
    assert budget.kv_tokens == 4 * 8192
    assert budget.kv == 4 * 8192 // BLOCK_SIZE * block_bytes(MODEL, "bfloat16")
    assert budget.weights == pytest.approx(1.24e9 * 2, rel=0.01)


def test_two_sets_of_weights_are_kept_where_they_fit() -> None:
    budget = plan(machine(16))
    assert budget.refit == budget.weights
    assert budget.engine.refit_memory == "staged"
    assert budget.needed == 2 * budget.weights + budget.work + budget.kv


def test_model_that_fits_only_once_is_updated_in_place() -> None:
    budget = plan(machine(5))
    assert budget.refit == 0
    assert budget.engine.refit_memory == "inplace"


def test_second_set_of_weights_never_costs_context() -> None:
    sizes = [4 + step / 8 for step in range(40)]
    budgets = [(plan(machine(ram)), plan(machine(ram), refit_memory="inplace")) for ram in sizes]
    assert all(chosen.engine.max_context == one.engine.max_context for chosen, one in budgets)
    assert {chosen.engine.refit_memory for chosen, _ in budgets} == {"staged", "inplace"}


def test_in_place_can_be_asked_for_and_gives_the_room_to_the_kv_cache() -> None:
    one, two = plan(machine(16), refit_memory="inplace"), plan(machine(16), refit_memory="staged")
    assert (one.refit, one.engine.refit_memory) == (0, "inplace")
    assert one.kv > two.kv


def test_second_set_that_was_asked_for_and_does_not_fit_is_refused_with_what_to_try() -> None:
    with pytest.raises(DoesNotFit, match=r"2\.3 GiB of weights do not fit twice in memory") as caught:
        plan(machine(5), refit_memory="staged")
    assert dict(caught.value.details)["need"].startswith("2.3 GiB weights + 2.3 GiB second set + ")
    assert dict(caught.value.details)["try"] == "--refit-memory inplace, which needs one set of weights"


def test_the_kv_cache_takes_no_more_than_its_share_of_what_is_left() -> None:
    budget = plan(machine(16), mem_fraction=0.25)
    left = 16 * GIB - budget.weights - budget.refit - budget.work
    assert 0.24 * left < budget.kv <= 0.25 * left
    assert plan(machine(16)).kv > budget.kv


def test_a_gpu_share_counts_the_whole_memory_and_what_others_use() -> None:
    free, shared = (plan(machine(gpu=24, used=used), max_running=512) for used in (0, 6))
    assert free.needed <= 0.9 * 24 * GIB
    assert shared.kv <= free.kv - 5.9 * GIB
    assert free.engine.device == "cuda"


def test_the_context_shrinks_to_what_the_cache_holds_unless_it_was_asked_for() -> None:
    room = 100 * block_bytes(MODEL, "bfloat16")
    assert plan(machine(), kv_memory=room).engine.max_context == 1600
    with pytest.raises(DoesNotFit) as caught:
        plan(machine(), kv_memory=room, context=8192)
    assert caught.value.code == "too-big"
    assert "8,192-token" in caught.value.message
    assert plan(machine(), kv_memory=room, context=1600).kv_tokens == 1600


def test_a_context_beyond_the_models_positions_is_refused_and_one_that_its_rope_is_scaled_to_is_not() -> None:
    with pytest.raises(UsageError, match="a context of 8,193 tokens is more than the model's 8,192 positions"):
        plan(machine(), context=8193)
    assert plan(machine(), context=8192).engine.max_context == 8192

    yarn = replace(MODEL, rope=RopeConfig(scaling="yarn", factor=4.0, original_context=8192))
    assert plan(machine(), yarn, context=32768).engine.max_context == 32768
    with pytest.raises(UsageError, match="32,768 positions"):
        plan(machine(), yarn, context=32769)

    llama3 = replace(MODEL, rope=RopeConfig(scaling="llama3", factor=8.0, original_context=2048))
    with pytest.raises(UsageError, match="8,192 positions"):
        plan(machine(), llama3, context=16384)


def test_weights_that_do_not_fit_are_refused_with_numbers_and_advice() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(machine(2))
    assert caught.value.exit_code == 4
    assert "2.3 GiB of weights do not fit" in caught.value.message
    assert dict(caught.value.details)["memory"] == "2.0 GiB in all, 2.0 GiB free"
    assert "try" in dict(caught.value.details)


def test_ranks_on_a_cpu_share_its_memory_and_hold_whole_norms_each() -> None:
    one, two = plan(machine(64)), plan(machine(64), tp=2)
    assert one.weights < two.weights < 1.001 * one.weights
    assert two.work == 2 * one.work
    assert (two.kv, two.kv_tokens) == (one.kv, one.kv_tokens)
    assert two.engine.tp == 2


def test_a_kv_head_that_several_ranks_hold_counts_as_often() -> None:
    few = replace(MODEL, num_kv_heads=2)
    one, four = (plan(machine(64), few, tp=tp, kv_memory=GIB) for tp in (1, 4))
    assert four.kv_tokens == one.kv_tokens // 2
    assert block_bytes(few, "bfloat16", 4) == block_bytes(few, "bfloat16") // 2


def test_ranks_on_gpus_have_one_each() -> None:
    hardware = replace(machine(gpu=24), gpus=(*machine(gpu=24).gpus, *machine(gpu=24, used=6).gpus))
    one, two = plan(hardware), plan(hardware, tp=2)
    assert 0.5 * one.weights < two.weights < 0.51 * one.weights
    assert two.memory == hardware.gpus[1].memory  # the fuller one decides
    with pytest.raises(EnvironmentFault, match="--tp 4 needs 4 GPUs, and there are 2"):
        plan(hardware, tp=4)


def test_the_cache_is_cut_as_attention_reads_it() -> None:
    usual, paged = plan(machine(gpu=24)), plan(machine(gpu=24), attention="flash-attn")
    assert (usual.engine.cache.block_size, usual.engine.attention) == (BLOCK_SIZE, "auto")
    assert (paged.engine.cache.block_size, paged.engine.attention) == (256, "flash-attn")
    assert paged.kv == paged.engine.cache.num_blocks * block_bytes(MODEL, "bfloat16", 1, 256)
    assert usual.kv_tokens - 256 < paged.kv_tokens <= usual.kv_tokens
    assert plan(machine(gpu=24), attention="flashinfer").work == usual.work + (256 << 20)


def test_a_number_of_ranks_that_the_heads_do_not_allow_is_refused_with_those_that_work() -> None:
    with pytest.raises(UsageError) as caught:
        plan(machine(64), replace(MODEL, num_heads=12, num_kv_heads=3, ffn_size=24576), tp=2)
    assert caught.value.exit_code == 2
    assert dict(caught.value.details)["possible"] == "--tp 1, 3, 6, 12"


def test_a_kv_cache_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(DoesNotFit):
        plan(machine(8), kv_memory=20 * GIB)


@pytest.mark.parametrize(
    ("saved", "flags", "device", "asked", "dtype"),
    [
        ("bfloat16", BF16, "cpu", "auto", "bfloat16"),
        ("bfloat16", frozenset({"amx_bf16"}), "cpu", "auto", "bfloat16"),
        ("bfloat16", frozenset({"avx2", "avx512f"}), "cpu", "auto", "float32"),
        ("float16", BF16, "cpu", "auto", "float32"),
        ("float32", BF16, "cpu", "auto", "float32"),
        ("bfloat16", frozenset(), "cuda", "auto", "bfloat16"),
        ("bfloat16", frozenset(), "cpu", "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_is_as_saved_but_where_the_cpu_has_no_instructions_for_it(
    saved: Any, flags: frozenset[str], device: str, asked: str, dtype: str
) -> None:
    hardware = machine(gpu=24 if device == "cuda" else None, flags=flags)
    assert plan(hardware, replace(MODEL, dtype=saved), dtype=asked).engine.dtype == dtype


def test_the_device_is_a_gpu_only_where_there_is_one() -> None:
    assert plan(machine(), device="auto").engine.device == "cpu"
    assert plan(machine(gpu=24), device="cpu").engine.device == "cpu"
    with pytest.raises(EnvironmentFault) as caught:
        plan(machine(), device="cuda")
    assert dict(caught.value.details)["saw"] == "the installed torch is built without CUDA"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       8388608 kB\nMemFree:  1 kB\nMemAvailable:   4194304 kB\n"


def test_memory_is_the_hosts_cut_to_the_tightest_group(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": "0::/a/b\n"})
    assert read_memory(proc=proc, cgroup=tmp_path / "none") == Memory(total=8 * GIB, available=4 * GIB)
    group = {
        "memory.max": "max\n",
        "a/memory.max": f"{3 * GIB}\n",
        "a/memory.current": f"{2 * GIB}\n",
        "a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "a/b/memory.max": f"{6 * GIB}\n",
    }
    cgroup = tree(tmp_path / "cgroup", group)
    assert read_memory(proc=proc, cgroup=cgroup) == Memory(total=3 * GIB, available=2 * GIB)
    old = {"memory/memory.limit_in_bytes": str(GIB), "memory/memory.usage_in_bytes": str(GIB // 2)}
    old["memory/memory.stat"] = "total_inactive_file 0\n"
    assert read_memory(proc=proc, cgroup=tree(tmp_path / "old", old)) == Memory(total=GIB, available=GIB // 2)


def test_cores_are_cut_to_the_quota_and_never_none(tmp_path: Path) -> None:
    everything = count_cores(cgroup=tmp_path)
    assert everything >= 1
    assert count_cores(cgroup=tree(tmp_path / "a", {"cpu.max": "100000 100000\n"})) == 1
    assert count_cores(cgroup=tree(tmp_path / "b", {"cpu.max": "1000 100000\n"})) == 1
    assert count_cores(cgroup=tree(tmp_path / "c", {"cpu.max": "max 100000\n"})) == everything


def test_threads_are_the_cores_unless_the_user_says_otherwise() -> None:
    assert count_threads(8, environment={}) == 8
    assert count_threads(8, environment={"OMP_NUM_THREADS": "2"}) == 2
    assert count_threads(8, environment={"OMP_NUM_THREADS": "many"}) == 8


def test_cpu_flags_are_read_on_both_architectures(tmp_path: Path) -> None:
    x86 = tree(tmp_path / "x86", {"cpuinfo": "model name\t: X\nflags\t\t: fpu avx512_bf16\n\nflags\t: fpu\n"})
    arm = tree(tmp_path / "arm", {"cpuinfo": "processor : 0\nFeatures\t: fp asimd bf16\n"})
    assert read_cpu_flags(proc=x86) == {"fpu", "avx512_bf16"}
    assert read_cpu_flags(proc=arm) == {"fp", "asimd", "bf16"}
    assert read_cpu_flags(proc=tmp_path / "none") == frozenset()


def test_gpus_are_read_from_the_drivers_lines() -> None:
    text = "NVIDIA H200, 143771, 143000\nOdd, Name, 100, 50\n[N/A], x, y\n\n"
    found = [(gpu.name, gpu.memory.total >> 20, gpu.memory.available >> 20) for gpu in parse_gpus(text)]
    assert found == [("NVIDIA H200", 143771, 143000), ("Odd, Name", 100, 50)]


def test_torchs_version_is_found_without_importing_it() -> None:
    found = find_torch()
    assert found is not None
    assert found.version[0].isdigit()
