"""While a step computes, the engine's caller goes on: events of the step before, new requests, the next step."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from fakes import ScriptedPending, ScriptedRunner, engine_config, request, scripted_output

from gtp_serve.engine.engine import Engine
from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.step import StepPlan, StepResult
from gtp_serve.engine.thread import InThread
from gtp_serve.request import Request, SamplingParams, TokenEvent


@dataclass(kw_only=True)
class GatedRunner(ScriptedRunner):
    """Each step computes only once the test lets it."""

    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def launch(self, plan: StepPlan) -> ScriptedPending:
        self.started.release()
        assert self.gate.acquire(timeout=20)
        return super().launch(plan)


def make_engine(runner: ScriptedRunner, clock: Callable[[], float] = time.monotonic) -> Engine:
    return Engine(engine_config(), runner, draw_seed=lambda: 0, log=lambda text: None, clock=clock)


def tokens(events: list[TokenEvent], rid: str) -> tuple[int, ...]:
    return tuple(token for event in events if event.rid == rid for token in event.token_ids)


def test_events_come_back_while_the_next_step_computes() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    req = request("a", max_new_tokens=3, ignore_eos=True)
    engine.add(req)
    runner.gate.release()

    events = engine.step()  # would never return if it waited for the second step

    assert tokens(events, "a") == scripted_output(req)[:1]
    assert runner.started.acquire(timeout=20)
    assert runner.started.acquire(timeout=20)
    assert len(runner.plans) == 1
    runner.gate.release(2)
    while engine.has_work():
        events += engine.step()
    assert tokens(events, "a") == scripted_output(req)


def test_what_is_added_before_the_step_is_taken_joins_the_next_one() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner)
    engine.add(request("a", max_new_tokens=5, ignore_eos=True))
    engine.step()
    engine.wait()

    engine.add(request("b", max_new_tokens=5, ignore_eos=True))
    engine.step()
    engine.wait()

    assert [[item.rid for item in plan.items] for plan in runner.plans] == [["a"], ["a"], ["a", "b"]]


def test_an_aborted_request_costs_nothing_that_is_under_way() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner)
    kept = request("b", [4, 5], max_new_tokens=6, ignore_eos=True)
    engine.add(request("a", max_new_tokens=6, ignore_eos=True))
    engine.add(kept)
    events = engine.step()

    engine.abort("a")
    engine.add(request("a", [9], max_new_tokens=1, ignore_eos=True))  # the same name, another request
    while engine.has_work():
        events += engine.step()
        engine.check_invariants()

    assert tokens(events, "b") == scripted_output(kept)
    assert [event.finish.type for event in events if event.rid == "a" and event.finish] == ["abort", "length"]
    assert tokens([event for event in events if event.rid == "a"][2:], "a") == scripted_output(
        request("a", [9], max_new_tokens=1)
    )


def test_a_step_that_fails_costs_its_own_requests_also_when_the_next_is_prepared() -> None:
    def before(plan: StepPlan) -> None:
        if plan.step == 1:
            raise RuntimeError("broke")

    engine = make_engine(ScriptedRunner(before=before))
    engine.add(request("a", max_new_tokens=6, ignore_eos=True))
    events = engine.step()
    late = request("b", [4, 5], max_new_tokens=6, ignore_eos=True)
    engine.add(late)
    engine.wait()  # prepares the step that b joins
    engine.check_invariants()

    while engine.has_work():
        events += engine.step()
        engine.check_invariants()

    assert [event.finish.code for event in events if event.rid == "a" and event.finish] == ["engine-error"]
    assert tokens(events, "b") == scripted_output(late)
    assert engine.stats().kv_blocks_used == 0


def test_a_late_request_leaves_with_its_code_and_the_tokens_that_it_had() -> None:
    now = 0.0
    engine = make_engine(ScriptedRunner(), clock=lambda: now)
    sampling = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    engine.add(Request(rid="a", input_ids=(1, 2, 3), sampling=sampling, deadline_seconds=1.0))
    events = engine.step()
    now = 1.5

    while engine.has_work():
        events += engine.step()

    assert len(tokens(events, "a")) == 2
    assert events[-1].finish is not None
    assert (events[-1].finish.type, events[-1].finish.code) == ("abort", "deadline-exceeded")
    assert engine.stats().kv_blocks_used == 0


def test_weights_change_between_two_steps() -> None:
    engine = make_engine(ScriptedRunner())
    engine.add(request("a", max_new_tokens=4, ignore_eos=True))
    events = engine.step()

    engine.set_weight_version("v1")
    while engine.has_work():
        events += engine.step()

    assert [event.weight_version for event in events] == ["v0", "v0", "v1", "v1"]


def test_tokens_made_before_weights_changed_do_not_wait_for_the_step_after() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    req = request("a", max_new_tokens=3, ignore_eos=True)
    engine.add(req)
    runner.gate.release(2)
    events = engine.step()

    engine.set_weight_version("v1")
    events += engine.step()  # would never return if it waited for the third step

    assert tokens(events, "a") == scripted_output(req)[:2]
    assert len(runner.plans) == 2
    runner.gate.release()
    while engine.has_work():
        events += engine.step()
    assert tokens(events, "a") == scripted_output(req)
    assert [event.weight_version for event in events] == ["v0", "v0", "v1"]


@pytest.mark.parametrize("prepared", [True, False])
def test_a_prepared_step_is_the_step_that_would_have_been_scheduled(prepared: bool) -> None:
    scheduler = Scheduler(engine_config(num_blocks=10, max_step_tokens=6), draw_seed=lambda: 0)
    runner = ScriptedRunner()
    requests = [request(f"r{n}", range(1, 4 + n), max_new_tokens=8, ignore_eos=True) for n in range(6)]
    for req in requests:
        scheduler.add(req)
    events: list[TokenEvent] = []
    while (plan := scheduler.schedule()) is not None:
        if prepared:
            scheduler.prepare()
            scheduler.check_invariants()
        events += scheduler.commit(plan, runner.launch(plan).wait())
        scheduler.check_invariants()

    assert all(tokens(events, req.rid) == scripted_output(req) for req in requests)
    assert scheduler.counters.preemptions > 0


def test_preparing_gets_blocks_and_admits_before_the_tokens_are_known() -> None:
    scheduler = Scheduler(engine_config(), draw_seed=lambda: 0)
    scheduler.add(request("a", [1, 2, 3, 4], max_new_tokens=8, ignore_eos=True))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.add(request("b", [5], max_new_tokens=8, ignore_eos=True))

    scheduler.prepare()

    assert (scheduler.blocks.num_used, scheduler.num_running, scheduler.num_waiting) == (3, 2, 0)
    scheduler.check_invariants()


def test_a_sequence_that_is_certain_to_end_gets_no_more_blocks() -> None:
    scheduler = Scheduler(engine_config(), draw_seed=lambda: 0)
    scheduler.add(request("a", [1, 2, 3, 4], max_new_tokens=1))
    scheduler.schedule()

    scheduler.prepare()

    assert scheduler.blocks.num_used == 1


def test_the_thread_of_a_runner_passes_on_what_it_raises_and_ends_with_its_owner() -> None:
    def before(plan: StepPlan) -> None:
        raise KeyError("from the thread")

    runner = InThread(ScriptedRunner(before=before))
    pending = runner.launch(StepPlan(step=0, block_size=4, items=()))

    with pytest.raises(KeyError, match="from the thread"):
        pending.wait()
    (thread,) = [thread for thread in threading.enumerate() if thread is runner._thread]
    del runner, pending
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_runner_in_a_thread_computes_beside_its_caller() -> None:
    gated = GatedRunner()
    runner = InThread(gated)

    pending = runner.launch(StepPlan(step=0, block_size=4, items=()))

    assert gated.started.acquire(timeout=20)
    gated.gate.release()
    assert pending.wait() == StepResult(token_ids=(), logprobs=())
