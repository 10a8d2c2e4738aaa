"""An engine process that is started before it is known what it is to build: told, left alone, adopted, dead."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gtp_serve.config import CacheConfig, EngineConfig, ModelConfig
from gtp_serve.engine.process import WorkerProcess
from gtp_serve.server import early_engine
from gtp_serve.server.early_engine import EarlyEngine, can_start_early
from gtp_serve.server.launch import Launch, read_order, write_order
from gtp_serve.server.options import SavedGrid

ECHO = "import os, sys; sys.stderr.write(os.fdopen(int(sys.argv[2]), 'rb').read().decode() or 'nothing'); sys.exit(3)"
MODEL = ModelConfig(
    family="llama", num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=8,
    vocab_size=16, vocab_rows=16,
)  # fmt: skip


def launch() -> Launch:
    engine = EngineConfig(model=MODEL, cache=CacheConfig(num_blocks=4), dtype="float32")
    return Launch(ckpt="/ckpt \udcff", iteration=None, saved=SavedGrid(), engine=engine, threads=1, first_prompt=(1,))


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started is not the engine: it says what it was told, and exits with 3."""
    monkeypatch.setattr(early_engine, "engine_command", lambda *, warnings: [sys.executable, "-c", ECHO])


def test_an_order_goes_through_a_pipe_with_a_path_that_is_no_text() -> None:
    reading, writing = os.pipe()
    os.write(writing, write_order(launch(), "ipc:///x"))
    os.close(writing)
    assert read_order(reading) == (launch(), "ipc:///x")


def test_a_pipe_that_is_closed_is_no_order() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert read_order(reading) is None


def test_a_process_that_was_started_early_is_told_and_adopted(echo: None, capfd: pytest.CaptureFixture[str]) -> None:
    async def adopt() -> tuple[int, str]:
        early = EarlyEngine()
        process = await WorkerProcess.adopt(early.hand_over(b"the order"))
        assert process.pid == early.process.pid
        early.close()  # it is not its own any more
        code = await process.wait()
        return code, str(process.fault(code, "starting"))

    code, fault = asyncio.run(adopt())
    assert code == 3
    assert "exit code 3 while starting" in fault
    assert "the order" in capfd.readouterr().err


def test_a_process_that_nobody_needed_is_gone(echo: None) -> None:
    early = EarlyEngine()
    early.close()
    early.close()
    assert early.process.returncode is not None
    assert not Path(f"/proc/{early.process.pid}").exists()


def test_one_that_died_before_it_was_told_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no torch here')"]
    monkeypatch.setattr(early_engine, "engine_command", lambda *, warnings: words)

    async def adopt() -> tuple[int, Any]:
        early = EarlyEngine()
        early.process.wait(60)
        process = await WorkerProcess.adopt(early.hand_over(b"x" * 1_000_000))
        code = await process.wait()
        return code, process.fault(code, "starting")

    code, fault = asyncio.run(adopt())
    assert code == 1
    assert ("last output", "no torch here") in fault.details


def test_a_process_that_is_killed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(early_engine, "engine_command", lambda *, warnings: words)

    async def adopt() -> int:
        early = EarlyEngine()
        process = await WorkerProcess.adopt(early.hand_over(b""))
        process.kill()
        process.kill()
        return await process.wait()

    assert asyncio.run(adopt()) == -9


def test_the_engines_process_ends_quietly_when_the_pipe_is_closed() -> None:
    early = EarlyEngine()
    os.close(early._writing)
    code = early.process.wait(240)  # its stdin stays open: that is its tie to this process
    _, said = early.process.communicate()
    assert (code, said) == (0, b"")


def test_several_ranks_are_started_in_the_usual_way() -> None:
    assert can_start_early(1)
    assert not can_start_early(2)


def test_decoding_with_recorded_steps_imports_no_compiler(demo_checkpoint: Path) -> None:
    program = (
        "import sys\nfrom gtp_serve.llm import LLM\n"
        "with LLM(sys.argv[1], kv_memory='1MiB', tokenizer=False, device='cpu', progress=False) as llm:\n"
        "    llm.generate([1, 2, 3], max_new_tokens=4, temperature=0, progress=False)\n"
        "print([name for name in sys.modules if name.startswith('torch._dynamo')][:3])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(demo_checkpoint)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.stdout == "[]\n", ran.stderr


@pytest.fixture
def demo_checkpoint() -> Path:
    return Path(__file__).resolve().parents[1] / "data" / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
