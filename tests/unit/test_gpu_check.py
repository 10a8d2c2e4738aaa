"""The GPU check script without a GPU: all of it runs on a small model, and it says what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec.loader.exec_module(module)
    return module


def test_a_small_model_on_the_cpu_goes_through_every_check(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--tiny", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == []
    assert found["facts"]["captured sizes"] == [1, 2, 4]
    assert found["facts"]["decode, 4 rows, replayed"] > 0
    assert found["facts"]["decode, 4 rows, share of copy bandwidth"] > 0
    assert any(line.startswith("recording of steps: ") for line in found["skipped"])
    assert done.stdout.count("  ok     ") == 18
    assert found["facts"]["experts: decode, 4 rows, replayed"] > 0
    reasons = [line for line in found["skipped"] if line.startswith("--attention-backend")]
    assert reasons == [
        f"--attention-backend {name}: --attention-backend {name} needs a GPU, and the device is cpu"
        for name in ("flash-attn", "flashinfer")
    ]
    assert "FAILED" not in done.stdout


def test_without_a_gpu_it_says_so_in_one_sentence_and_exits_with_5() -> None:
    done = run()
    assert done.returncode == 5
    assert done.stdout.count("\n") == 1
    assert "torch sees no CUDA device here" in done.stdout


def test_what_does_not_hold_makes_it_fail(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report = script.Report()
    report.holds("two and two are four", True)
    assert report.finish() == 0
    report.holds("two and two are five", False)
    assert report.finish() == 1
    assert capsys.readouterr().out.endswith("failed: two and two are five\n")


def test_measurements_are_left_out_when_the_time_is_up(script: ModuleType) -> None:
    report = script.run(script.SIZES["tiny"], "cpu", seconds=0.0)
    assert report.failed == []
    assert "speed of 1 rows: the time was up" in report.skipped
    assert not any(name.startswith("decode") for name in report.facts)
