"""An engine process without a model: a script for tests to start through EngineClient.

Its mode decides how it behaves: serve, refuse (a typed start-up error), crash (an untyped one), exit (no last
words), hang (never ready), poison (every step raises), slow (a little per step), stuck (a step never ends), updates
(weights that are a word and can be updated; "silent": they never vote).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from fakes import ScriptedRunner, engine_config
from update_fakes import FakeWeights

from gtp_serve.engine.all_ranks import News
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.messages import Phase
from gtp_serve.engine.step import StepPlan
from gtp_serve.engine.updates import Updates
from gtp_serve.engine.worker import run_worker
from gtp_serve.errors import CheckpointCorrupt


def build(mode: str, report: Callable[[Phase], None]) -> Engine:
    """The engine, or the mode's way of failing."""
    report(Phase(name="load weights", state="running", total=10))
    print("loading, says the worker", file=sys.stderr, flush=True)
    if mode == "refuse":
        raise CheckpointCorrupt("a file is short", [("try", "another copy")])
    if mode == "crash":
        raise ZeroDivisionError("something unforeseen")
    if mode == "exit":
        time.sleep(0.3)  # let the phase leave first
        os._exit(17)
    if mode == "hang":
        time.sleep(600)
    report(Phase(name="load weights", state="ok", seconds=0.1, done=10, total=10))
    delay = {"slow": 0.01, "updates": 0.01, "silent": 0.01, "stuck": 600.0}.get(mode, 0.0)
    runner = ScriptedRunner(delay=delay, before=_raise if mode == "poison" else _nothing)
    engine = Engine(engine_config(num_blocks=512, max_running=64, max_waiting=8), runner, draw_seed=lambda: 0)
    if mode in ("updates", "silent"):
        news = News()
        Updates(engine, FakeWeights(0, news.put, votes=mode == "updates"), news)
    return engine


def _raise(plan: StepPlan) -> None:
    raise RuntimeError(f"poisoned step {plan.step}")


def _nothing(plan: StepPlan) -> None:
    pass


def main() -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--endpoint", required=True)
    args = parser.parse_args()
    return run_worker(args.endpoint, lambda report: build(args.mode, report))


if __name__ == "__main__":
    sys.exit(main())
