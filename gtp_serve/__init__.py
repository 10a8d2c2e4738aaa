"""gtp-serve: serve Megatron GTP checkpoints and swap their weights while serving."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gtp_serve.completion import Completion, Delta, Score
    from gtp_serve.llm import LLM
    from gtp_serve.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Delta", "SamplingParams", "Score", "__version__"]

_FROM = {
    "LLM": "gtp_serve.llm",
    "Completion": "gtp_serve.completion",
    "Delta": "gtp_serve.completion",
    "SamplingParams": "gtp_serve.request",
    "Score": "gtp_serve.completion",
}


def __getattr__(name: str) -> object:
    """Import the public names at their first use: LLM needs torch, whose import takes seconds that the command line
    and the HTTP process, which need only other parts of this package, must not pay.
    """
    if name not in _FROM:
        raise AttributeError(f"module 'gtp_serve' has no attribute '{name}'")
    return getattr(importlib.import_module(_FROM[name]), name)
