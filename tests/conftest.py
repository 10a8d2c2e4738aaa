"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gtp_serve.server.cli import main

# torch asks a name server about each address that it connects to, loopback too; one that does not answer would take
# five seconds of every such wait, here and in the processes that tests start.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

DATA = Path(__file__).parent / "data"
_THREADS = 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take one file after another: those with slow tests come first, so that none is left for one at the end.

    ``make test`` asks xdist to keep this order; its own puts files with many tests first, and so one long test last.
    """
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup() -> None:
    """Few threads, so that tests run beside one another; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > _THREADS:
        torch.set_num_threads(_THREADS)


@pytest.fixture
def tokenizer_dir() -> Path:
    """A byte-level tokenizer of 273 ids with a chat template; any text can be spelled."""
    return DATA / "tokenizer"


@pytest.fixture
def tokenizer251_dir() -> Path:
    """The same with exactly 251 ids, for the fixture models."""
    return DATA / "tokenizer251"


@pytest.fixture(scope="session")
def demo_dir(request: pytest.FixtureRequest) -> Path:
    """``hf`` and ``megatron`` of SmolLM2-135M-Instruct, made once by ``gtp-serve demo`` (89 MiB download).

    It is kept in pytest's cache, or in GTP_SERVE_DEMO_DIR.  Tests that use it are marked slow.
    """
    configured = os.environ.get("GTP_SERVE_DEMO_DIR")
    folder = Path(configured) if configured else request.config.cache.mkdir("gtp-serve-demo")
    assert main(["demo", str(folder)]) == 0, "gtp-serve demo failed; its message is above"
    return folder
