"""The whole loop, by the example that users run: build, generate, refit, train, on a tiny model with two GTP ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import random_tensors, write_hf, write_megatron
from torch import Tensor

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors, stored_name

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]

ROOT = Path(__file__).parents[2]
TINY = ModelConfig(
    family="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, vocab_size=32,
    vocab_rows=32, max_context=64, dtype="float32", tied=True,
)  # fmt: skip
TINY_MOE = replace(
    TINY, family="mixtral", ffn_size=0, moe=MoeConfig(num_experts=4, top_k=2, ffn_size=24), dtype="bfloat16"
)
NO_ERROR = "1.000000"


def write_tiny(folder: Path, config: ModelConfig) -> Path:
    """Near to even: every token has a chance."""
    smaller = {stored_name(name, config.family): small(name, x) for name, x in random_tensors(config).items()}
    write_hf(folder, config, extra=smaller)
    return folder


def small(name: str, x: Tensor) -> Tensor:
    return 0.1 * x + 1 if name.endswith("norm.weight") else 0.15 * x


def loop(ckpt: Path, steps: int, *words: str) -> list[dict[str, Any]]:
    """The example's lines."""
    command = [sys.executable, str(ROOT / "examples" / "grpo.py"), "--ckpt", str(ckpt), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, "--steps", str(steps), *words], capture_output=True, text=True, timeout=240, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def check_refit(split: dict[str, Any]) -> None:
    """The weights that serve and the trainer's, loaded cold, give the same numbers."""
    equal, tokens = map(int, split["refit_same_bits"].split("/"))
    assert equal == tokens > 0
    assert split["refit"] == NO_ERROR


def test_reward_rises_in_twenty_steps_and_no_probability_differs_in_a_bit(tmp_path: Path) -> None:
    ckpt = write_tiny(tmp_path / "tiny", TINY)

    *steps, split = loop(
        ckpt, 20, "--task", "7", "--dtype", "float32", "--learning-rate", "0.02", "--max-new-tokens", "8"
    )

    assert [line["step"] for line in steps] == list(range(1, 21))
    rewards = [line["reward"] for line in steps]
    assert sum(rewards[:2]) / 2 < 0.25
    assert sum(rewards[-3:]) / 3 > 0.75
    for line in steps:
        told, tokens = map(int, line["same_bits"].split("/"))
        assert told == tokens > 0
        assert line["token_mult_prob_error"] == NO_ERROR
        assert line["bytes"] == 4 * sum(map(prod, logical_tensors(TINY).values()))
    assert [line["version"] for line in steps] == [f"0+{step}" for step in range(1, 21)]
    # At least one of twenty requests was caught in the middle, and went on with the new weights.
    assert any(len(line["in_flight"]) == 2 for line in steps)
    check_refit(split)
    assert split["total"] == split["kernel"] == split["precision"] == NO_ERROR


def test_a_dozen_steps_in_bfloat16_differ_in_no_bit(tmp_path: Path) -> None:
    ckpt = write_tiny(tmp_path / "tiny", replace(TINY, dtype="bfloat16"))

    *steps, split = loop(
        ckpt, 12, "--task", "7", "--dtype", "bfloat16", "--learning-rate", "0.02", "--max-new-tokens", "8"
    )

    assert len(steps) == 12
    for line in steps:
        told, tokens = map(int, line["same_bits"].split("/"))
        assert told == tokens > 0
        assert line["token_mult_prob_error"] == NO_ERROR
        assert line["bytes"] == 2 * sum(map(prod, logical_tensors(TINY).values()))
    check_refit(split)
    assert split["total"] == split["kernel"] == split["precision"] == NO_ERROR


def test_experts_in_bfloat16_over_the_network_path_differ_in_no_bit_either(tmp_path: Path) -> None:
    ckpt = write_tiny(tmp_path / "moe", TINY_MOE)

    *steps, split = loop(
        ckpt, 2, "--task", "3", "--dtype", "bfloat16", "--learning-rate", "0.02", "--transport", "distributed"
    )

    assert len(steps) == 2
    for line in steps:
        told, tokens = map(int, line["same_bits"].split("/"))
        assert told == tokens > 0
        assert line["token_mult_prob_error"] == NO_ERROR
        assert line["transport"] == "distributed"
        assert line["bytes"] == 2 * sum(map(prod, logical_tensors(TINY_MOE).values()))
    check_refit(split)
    assert split["total"] == split["kernel"] == split["precision"] == NO_ERROR


def test_a_trainer_of_higher_precision_than_the_server_has_a_precision_error_and_nothing_else(tmp_path: Path) -> None:
    config = replace(TINY, tied=False, dtype="bfloat16")
    write_megatron(tmp_path / "run", config, Grid(gtp=2, alignment=16))

    first, second, split = loop(
        tmp_path / "run", 2, "--task", "3", "--dtype", "float32", "--server-dtype", "bfloat16",
        "--learning-rate", "0.01",
    )  # fmt: skip

    assert [first["step"], second["step"]] == [1, 2]
    check_refit(split)
    assert split["kernel"] == NO_ERROR
    assert float(split["precision"]) > 1
    assert split["precision"] == split["total"]
