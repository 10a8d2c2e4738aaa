"""Megatron's own GPTModel is pushed into a running server, which then gives the log-probabilities of its forward.

One rank without GTP, and two with: Megatron's own linears and TransformerEngine's, real ``GTPShardedParam`` weights,
gathered by Megatron's own code over gloo.  It needs ``pip install --no-deps --ignore-requires-python
megatron-core==0.19.2``; what stands in for a GPU is told in ``megatron_gpt_rank``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import te_cpu
from serve_command import Command

from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders.checkpoint import open_checkpoint


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (_has_megatron() and te_cpu.is_installed()),
        reason="megatron-core (0.19.2 is what was tried) or TransformerEngine is not installed",
    ),
]

ROOT = Path(__file__).parents[2]
CKPT = ROOT / "tests" / "data" / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
IDS = [5, 6, 7, 8, 200, 17, 250, 3, 3, 99, 1, 42]
CLOSE = 1e-4


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = Command("--ckpt", str(CKPT), "--no-tokenizer", "--port", "0", "--max-running", "4", "--dtype", "float32")
    try:
        yield command.url()
    finally:
        command.stop()


class Rank:
    """A process of the trainer; its words are read beside, so that it never waits for its reader."""

    def __init__(self, spec: dict[str, Any]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "megatron_gpt_rank.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._complaints: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self._complaints += self.process.stderr

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                told: dict[str, Any] = json.loads(line)
                return told
        self.process.wait()
        raise AssertionError("".join(self._complaints)[-4000:])

    def close(self) -> None:
        self.process.kill()
        self._listener.join()
        with self.process:  # closes its pipes
            pass

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def scores(url: str) -> tuple[list[float], str]:
    """(the server's log-probabilities of all ids after the first, the weights that gave them)."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    reply = httpx.post(f"{url}/generate", json=body, trust_env=False, timeout=120)
    assert reply.status_code == 200, reply.text
    meta = reply.json()["meta_info"]
    return [value for value, _, _ in meta["input_token_logprobs"][1:]], meta["weight_version"]


@pytest.mark.parametrize(
    ("kind", "size", "alignment"),
    [("local", 1, 16), ("local", 2, 16), ("te", 2, 32)],
    ids=["one rank", "GTP 2, Megatron's linears", "GTP 2, TransformerEngine's linears"],
)
def test_a_server_gives_the_log_probabilities_of_the_megatron_model_that_was_pushed(
    url: str, tmp_path: Path, kind: str, size: int, alignment: int
) -> None:
    first = int(httpx.get(f"{url}/weights", trust_env=False).json()["version"]) + 1
    versions = [str(first), str(first + 1)]
    common = {"size": size, "meet": str(tmp_path / "meet"), "url": url, "ckpt": str(CKPT), "ids": IDS}
    more = {"kind": kind, "alignment": alignment, "seed": 3, "versions": versions}
    ranks = [Rank({"rank": rank, **common, **more}) for rank in range(size)]
    try:
        _check_built([rank.hear() for rank in ranks], kind, size)
        seen = []
        for version in versions:
            told = [rank.hear() for rank in ranks]
            served, weights = scores(url)
            assert weights == version
            for one in told:  # every rank has gathered the same weights
                assert one["logprobs"] == pytest.approx(served, abs=CLOSE)
            assert sum(one["sent"] for one in told) == model_bytes()  # no padding, nothing twice
            seen.append(served)
            for rank in ranks:
                rank.go_on()
        assert max(abs(a - b) for a, b in zip(*seen, strict=True)) > 0.01  # the step has changed something
        assert [rank.process.wait(300) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.close()


def _check_built(told: list[dict[str, Any]], kind: str, size: int) -> None:
    """That it was Megatron's GTP, and padded."""
    linears = set(told[0]["linears"])
    assert ({"TERowParallelLinear", "TELayerNormColumnParallelLinear"} <= linears) == (kind == "te"), linears
    if size == 1:
        assert told[0]["sharded"] == []
        return
    assert told[0]["types"] == ["GTPShardedParam"]
    assert {"embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight"} <= set(told[0]["sharded"])
    assert sum(one["padding"] for one in told) > 0


def model_bytes() -> int:
    """Of every tensor of the model, in float32."""
    checkpoint = open_checkpoint(CKPT)
    shapes = logical_tensors(checkpoint.config).values()
    total = 0
    for shape in shapes:
        size = 4
        for length in shape:
            size *= length
        total += size
    return total
