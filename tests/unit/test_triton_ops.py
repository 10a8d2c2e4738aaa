"""Triton's kernels without a GPU: in Triton's interpreter against their twins, and through its compiler.

Both run in processes of their own: whether a kernel is interpreted is settled when it is imported.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gtp_serve.ops import choice
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.table import PLAIN_PAGED, REFERENCE, SegmentPlan

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [ROOT / "tests" / "gpu" / name for name in ("kernel_checks.py", "expert_checks.py")]
COMPILES = ROOT / "tests" / "gpu" / "kernel_compiles.py"


def run_script(script: Path, **environment: str) -> Any:
    """What it printed, as JSON."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> Any:
    assert find_spec("triton"), "Triton is missing; it belongs to the development packages"
    found: dict[str, Any] = {"ran": [], "failures": {}}
    for script in CHECKS:
        report = run_script(script, TRITON_INTERPRET="1")
        found = {"ran": found["ran"] + report["ran"], "failures": found["failures"] | report["failures"]}
    return found


def check_names() -> list[str]:
    nodes = [node for script in CHECKS for node in ast.parse(script.read_text()).body]
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


@pytest.mark.parametrize("name", check_names())
def test_in_the_interpreter(interpreted: Any, name: str) -> None:
    assert name in interpreted["ran"]
    assert interpreted["failures"].get(name, "") == ""


@pytest.mark.slow
def test_all_kernels_compile_for_two_generations_of_gpus(tmp_path: Path) -> None:
    compiled = run_script(COMPILES, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    kernels = {
        node.name
        for path in (ROOT / "gtp_serve" / "ops").glob("triton_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "kernel" for d in node.decorator_list)
    }
    assert {name for name, *_ in compiled} == kernels
    assert {capability for _, _, capability, _ in compiled} == {80, 90}
    # What one program may take of the on-chip memory, on the smaller of the two.
    assert max(shared for *_, shared in compiled) <= 99 * 1024


def test_a_cpu_gets_the_native_ops_or_what_was_asked_for_or_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    native = choose_ops(device="cpu", dtype=torch.bfloat16, head_dim=64)
    assert native.name.startswith("native ops (")
    assert choose_ops(device="cpu", dtype=torch.bfloat16, head_dim=64, deterministic=True).name == native.name
    assert choose_ops(device="cpu", dtype=torch.float32, head_dim=64, attention="torch") is REFERENCE
    half = choose_ops(device="cpu", dtype=torch.float16, head_dim=64)
    assert half.name == "plain torch, slow: the native CPU ops do not compute in float16"
    monkeypatch.setattr("gtp_serve.ops.choice.find_library", lambda: "the native CPU ops were not built")
    without = choose_ops(device="cpu", dtype=torch.float32, head_dim=64, deterministic=True)
    assert without.name == "plain torch, deterministic, slow: the native CPU ops were not built"


def test_a_gpu_without_triton_gets_plain_torch_and_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    ops = choose_ops(device="cuda", dtype=torch.bfloat16, head_dim=64)
    assert ops.name == "plain torch, slow: Triton is not installed"
    assert ops.plan_attention is PLAIN_PAGED.plan_attention
    assert ops.capturable


def test_plain_torch_cuts_prompts_on_the_host_and_single_tokens_not() -> None:
    def batch(starts: tuple[int, ...], contexts: tuple[int, ...]) -> Batch:
        count = starts[-1]
        return Batch(
            token_ids_T=torch.zeros(count, dtype=torch.int64),
            positions_T=torch.arange(count),
            slots_T=torch.arange(count),
            query_starts=starts,
            context_lens=contexts,
            block_tables_SB=torch.zeros(len(contexts), 1, dtype=torch.int64),
            logit_rows_S=torch.arange(len(contexts)),
        )

    assert isinstance(PLAIN_PAGED.plan_attention(batch((0, 3), (3,)), 4, None), SegmentPlan)
    assert not isinstance(PLAIN_PAGED.plan_attention(batch((0, 1, 2), (1, 2)), 4, None), SegmentPlan)
