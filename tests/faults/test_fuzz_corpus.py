"""Hostile bytes at every border, drawn by Hypothesis, and every input that is kept from long runs of the fuzzer.

``fuzz/README.md`` tells of the targets and of the long runs.  FUZZ_EXAMPLES=10000 draws that many for each target.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz_files import Check, Seeds
from fuzz_targets import kept_inputs, make_targets, mutate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
NAMES = {
    # target: inputs drawn in CI; the slower a target, the fewer
    "safetensors": 120,
    "index": 80,
    "config": 120,
    "metadata": 120,
    "common": 80,
    "pickle": 300,
    "gguf": 100,
    "tokenizer": 40,
    "tokenizer_config": 40,
    "template": 150,
    "request": 200,
    "tokens": 200,
    "frame": 300,
    "manifest": 200,
    "beats": 150,
    "memory": 150,
    "stream": 150,
}
SECONDS = 20.0
"""Of processor time, for one input."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Check, Seeds]]:
    return make_targets(tmp_path_factory.mktemp("fuzz"))


def timed(check: Check) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        started = time.thread_time()
        check(data)
        assert time.thread_time() - started < SECONDS, "an input took too long"

    return run


def test_the_table_names_every_target(targets: dict[str, tuple[Check, Seeds]]) -> None:
    assert set(targets) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_kept_and_first_inputs_end_well(name: str, targets: dict[str, tuple[Check, Seeds]]) -> None:
    check, seeds = targets[name]
    kept = kept_inputs(name)
    assert kept, f"fuzz/corpus/{name} is empty"
    for title, data in [*seeds.items(), *kept.items()]:
        try:
            timed(check)(data)
        except BaseException as error:
            error.add_note(f"input {title} of {name}")
            raise


@pytest.mark.parametrize("name", NAMES)
def test_changed_inputs_end_well(name: str, targets: dict[str, tuple[Check, Seeds]]) -> None:
    check, seeds = targets[name]
    inputs = [*seeds.values(), *kept_inputs(name).values()]

    @settings(
        max_examples=EXAMPLES or NAMES[name], deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(seed=st.integers(0, 2**32 - 1))
    def draw(seed: int) -> None:
        rng = random.Random(seed)
        timed(check)(mutate(rng.choice(inputs), rng, inputs))

    draw()


def test_a_target_that_is_at_fault_is_found(tmp_path: Path) -> None:
    """The harness itself: a check that breaks on a large number is found within its draws."""
    rng, found = random.Random(0), 0
    for _ in range(2000):
        data = mutate(b'{"a": [1, 2], "b": {"c": 3}}', rng, [b"x"])
        found += b"9223372036854775808" in data
    assert found > 5
