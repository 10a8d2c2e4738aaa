"""No memory: in a load, a prefill, a decode step.  What was asked for is lost with a clear error, nothing else is.

An update without memory is in ``test_nth_failure``; steps without it beside all else are in ``tests/simulation``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL, write_hf
from fakes import TINY_MODEL, engine_config, request
from nth_failure import Point, every_failure

from gtp_serve.config import CacheConfig
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.errors import EngineFault
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder

torch.set_num_threads(1)

MODEL = replace(TINY_MODEL, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48)
PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7, 8, 9], "b": [3, 1], "c": [5] * 3}
BLOCKS = 40


def no_memory() -> RuntimeError:
    """As torch says it."""
    return RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


POINTS = [
    Point(Decoder, "forward", no_memory),
    *(Point(torch, name, no_memory) for name in ("tensor", "empty", "zeros", "full", "cat", "stack", "from_numpy")),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    decoder = build_decoder(MODEL, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    for target in decoder.targets():
        target.tensor.copy_(torch.randn(target.tensor.shape, generator=generator) * 0.3)
    config = replace(
        engine_config(max_running=4, max_step_tokens=8), model=MODEL, cache=CacheConfig(num_blocks=BLOCKS, block_size=4)
    )
    pool = KVPool(
        num_layers=MODEL.num_layers,
        num_blocks=BLOCKS,
        block_size=4,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=MODEL.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    return Engine(config, ModelRunner(decoder, pool, config), log=lambda text: None)


def generate(engine: Engine) -> dict[str, tuple[list[int], str, str]]:
    """Tokens, type and code of the end of each request."""
    tokens: dict[str, list[int]] = {rid: [] for rid in PROMPTS}
    ends: dict[str, tuple[list[int], str, str]] = {}
    for rid, prompt in PROMPTS.items():
        engine.add(request(rid, prompt, max_new_tokens=3, temperature=0.0, ignore_eos=True))
    while engine.has_work():
        for event in engine.step():
            assert event.rid not in ends, "it ended twice"
            tokens[event.rid] += event.token_ids
            if event.finish is not None:
                ends[event.rid] = (tokens[event.rid], event.finish.type, event.finish.code)
        engine.check_invariants()
    assert engine.stats().kv_blocks_used == 0
    return ends


@pytest.mark.timeout(600)
def test_no_memory_in_a_step_costs_the_requests_in_it_and_no_others(engine: Engine) -> None:
    truth = generate(engine)
    found: list[Any] = []
    lost = 0

    def run() -> None:
        engine.forget_prefixes()  # or later rounds would compute less
        engine._failed_in_a_row = 0
        found.append(generate(engine))

    def judge(where: str, error: BaseException | None) -> None:
        nonlocal lost
        if "all after" in where and error is not None:  # three steps in a row: the engine ends, and says so
            assert isinstance(error, EngineFault), (where, error)
            assert error.code == "engine-error"
            engine.abort_all("the test goes on", "aborted")
            while engine.has_work():
                engine.step()
            assert engine.stats().kv_blocks_used == 0
            return
        assert error is None, (where, error)
        assert found[-1].keys() == truth.keys()
        for rid, (tokens, end, code) in found[-1].items():
            if end == "abort":
                lost += 1
                assert code == "engine-error", (where, rid)
                assert tokens == truth[rid][0][: len(tokens)], (where, rid)
            else:
                assert (tokens, end, code) == truth[rid], (where, rid)

    assert every_failure(POINTS, run, judge, most=600) > 10
    assert lost > 10
    assert found[-1] == truth


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mebibytes", [300, 450])
def test_a_server_that_finds_no_memory_ends_with_a_known_code_and_one_error(mebibytes: int, tmp_path: Path) -> None:
    write_hf(tmp_path, replace(SMALL, dtype="float32"))
    words = ["--ckpt", str(tmp_path), "--port", "0", "--no-tokenizer", "--device", "cpu", "--log", "json"]
    limit = f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({mebibytes << 20},) * 2); "
    program = f"{limit}from gtp_serve.server.cli import main; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    events = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
    failed = [event for event in events if event["event"] == "failed"]
    assert result.returncode in (4, 5, 6), result.stderr
    assert len(failed) == 1, result.stderr
    assert failed[0]["code"] in ("worker-died", "too-big", "environment", "engine")
    assert "ready" not in [event["event"] for event in events]
