"""Random lives of a scheduler: every request ends exactly once, with the tokens it would have had alone."""

from __future__ import annotations

from itertools import count

import pytest
from fakes import ScriptedRunner, engine_config, scripted_logprob, scripted_output
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.step import StepPlan
from gtp_serve.errors import PromptTooLong, QueueFull
from gtp_serve.request import Request, SamplingParams, TokenEvent

SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (0, 10, 20, 30, 40)]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny KV caches, so that preemption is common; a real (fake) KV memory behind the runner."""

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 5),
        max_step_tokens=st.integers(1, 12),
    )
    def start(self, num_blocks: int, block_size: int, max_running: int, max_step_tokens: int) -> None:
        config = engine_config(
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_waiting=4,
            max_context=20,
        )
        self.scheduler = Scheduler(config, draw_seed=lambda: 5)
        self.runner = ScriptedRunner()
        self.names = count()
        self.plan: StepPlan | None = None
        self.live: dict[str, Request] = {}
        self.output: dict[str, list[TokenEvent]] = {}
        self.ended = 0

    @rule(prompt=st.lists(st.integers(0, 49), min_size=1, max_size=14), sampling=SAMPLING)
    def add(self, prompt: list[int], sampling: SamplingParams) -> None:
        req = Request(rid=f"r{next(self.names)}", input_ids=tuple(prompt), sampling=sampling)
        room = min(self.scheduler.config.max_context, self.cache_tokens)
        if len(prompt) + sampling.max_new_tokens > room:
            with pytest.raises(PromptTooLong):
                self.scheduler.add(req)
            return
        try:
            self.scheduler.add(req)
        except QueueFull:
            assert self.scheduler.num_waiting >= 4
            return
        self.live[req.rid] = req
        self.output[req.rid] = []

    @property
    def cache_tokens(self) -> int:
        cache = self.scheduler.config.cache
        return cache.num_blocks * cache.block_size

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        self.plan = self.scheduler.schedule()
        assert (self.plan is not None) == bool(self.live)
        if self.plan is not None:
            self.check_plan(self.plan)

    def check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert plan.items[0].rid == self.scheduler.rids[0]  # the oldest moves
        assert 0 < plan.num_tokens <= config.max_step_tokens
        assert len(plan.items) <= config.max_running
        slots = [slot for item in plan.items for slot in item.slots(plan.block_size)]
        assert len(set(slots)) == len(slots)
        assert all(item.token_ids for item in plan.items)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        assert self.plan is not None
        result = self.runner.launch(self.plan).wait()
        for event in self.scheduler.commit(self.plan, result):
            self.take(event)
        self.plan = None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail(self) -> None:
        assert self.plan is not None
        members = {item.rid for item in self.plan.items} & set(self.live)
        events = self.scheduler.fail(self.plan, "it broke", "engine-error")
        assert {event.rid for event in events} == members
        for event in events:
            self.take(event)
        self.plan = None

    @precondition(lambda self: bool(self.live))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        event = self.scheduler.abort(rid)
        assert event is not None
        self.take(event)

    def take(self, event: TokenEvent) -> None:
        req = self.live[event.rid]  # a KeyError here is an event after the end
        self.output[event.rid].append(event)
        tokens = [token for e in self.output[event.rid] for token in e.token_ids]
        expected = scripted_output(req, seed=5)
        assert tuple(tokens) == expected[: len(tokens)]
        if event.token_ids:
            assert event.logprobs == (scripted_logprob([*req.input_ids, *tokens[:-1]]),)
        complete = len(tokens) == len(expected)
        if event.finish is None:
            assert not complete
            return
        if event.finish.type != "abort":
            assert complete
        del self.live[event.rid]
        self.ended += 1

    @invariant()
    def holds_together(self) -> None:
        self.scheduler.check_invariants()
        assert set(self.scheduler.rids) == set(self.live)
        assert sum(self.scheduler.counters.finished.values()) == self.ended
        if not self.live:
            assert self.scheduler.blocks.num_used == 0

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.commit()
        for _ in range(3000):
            if not self.live:
                break
            self.schedule()
            self.commit()
            self.holds_together()
        assert not self.live
        self.holds_together()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_life_of_a_scheduler_ends_each_request_once_with_its_own_tokens = SchedulerMachine.TestCase
