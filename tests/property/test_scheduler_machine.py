"""Random lives of a scheduler: every request ends exactly once, with the tokens it would have had alone.

Beside the scheduler runs a model of what each KV slot holds: which token, computed with which weights, for which
salt, after which tokens.  What the prefix cache names and what a plan reuses is held against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest
from fakes import ScriptedRunner, engine_config, scripted_logprob, scripted_output
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.step import StepItem, StepPlan
from gtp_serve.errors import PromptTooLong, QueueFull
from gtp_serve.kv.prefix import PrefixChain, root_digest
from gtp_serve.request import LogprobOptions, Request, SamplingParams, TokenEvent

SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (0, 10, 20, 30, 40)]),
)


PROMPTS = st.one_of(
    st.lists(st.integers(0, 49), min_size=1, max_size=14),
    # Beginnings of one another, so that blocks are shared; equal blocks at other places must not be.
    st.builds(lambda n, end: [*([1, 2] * 7)[:n], *end], st.integers(4, 13), st.lists(st.integers(0, 1), max_size=1)),
    st.sampled_from([[1] * 8, [1] * 12]),
)


@dataclass(frozen=True)
class Slot:
    """What one position of one block holds."""

    tokens: tuple[int, ...]
    """All tokens up to and including this position's."""
    weights: frozenset[int]
    """Generations that computed them."""
    salts: frozenset[str]


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny KV caches, so that preemption is common; a real (fake) KV memory behind the runner."""

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.integers(1, 4),
        max_running=st.integers(1, 5),
        max_step_tokens=st.integers(1, 12),
        prefix_cache=st.sampled_from([True, True, False]),
    )
    def start(
        self, num_blocks: int, block_size: int, max_running: int, max_step_tokens: int, prefix_cache: bool
    ) -> None:
        config = engine_config(
            prefix_cache=prefix_cache,
            num_blocks=num_blocks,
            block_size=block_size,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_waiting=4,
            max_context=20,
        )
        self.now = 0.0
        self.scheduler = Scheduler(config, draw_seed=lambda: 5, clock=lambda: self.now)
        self.generation = 0
        self.labels = ["v0"]
        self.salts: dict[str, str] = {}
        self.slots: dict[int, Slot] = {}
        self.old_kv: dict[str, int] = {}
        """Requests that were running when the weights changed, and how far their KV reaches."""
        self.fed: dict[str, set[int]] = {}
        self.runner = ScriptedRunner()
        self.names = count()
        self.plan: StepPlan | None = None
        self.live: dict[str, Request] = {}
        self.output: dict[str, list[TokenEvent]] = {}
        self.ended = 0

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        salt=st.sampled_from(["", "", "", "a", "b"]),
        scored_from=st.sampled_from([None, None, 0, 5]),
        deadline=st.sampled_from([None, None, None, 2.0]),
    )
    def add(
        self, prompt: list[int], sampling: SamplingParams, salt: str, scored_from: int | None, deadline: float | None
    ) -> None:
        req = Request(
            rid=f"r{next(self.names)}",
            input_ids=tuple(prompt),
            sampling=sampling,
            cache_salt=salt,
            logprobs=LogprobOptions(prompt_start=None if scored_from is None else min(scored_from, len(prompt) - 1)),
            deadline_seconds=deadline,
        )
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
        self.fed[req.rid] = set()
        self.salts[req.rid] = salt

    @property
    def cache_tokens(self) -> int:
        cache = self.scheduler.config.cache
        return cache.num_blocks * cache.block_size

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        started = self.scheduler.num_started
        self.plan = self.scheduler.schedule()
        assert (self.plan is not None) == bool(started or (self.live and self.scheduler.admits))
        if not self.scheduler.admits:
            assert self.scheduler.num_started == started
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
        read = {block for item in plan.items for block in item.block_table[: item.start // plan.block_size]}
        assert not read & {slot // plan.block_size for slot in slots}  # nobody writes what another one reads
        for item in plan.items:
            self.check_reuse(item, plan.block_size)

    def check_reuse(self, item: StepItem, block_size: int) -> None:
        """What lies before the item's first token is what this very request would have computed."""
        if item.start < self.old_kv.get(item.rid, 0):
            del self.old_kv[item.rid]  # it was preempted and starts again
        elif item.rid in self.old_kv:
            self.old_kv[item.rid] = item.context_len
        self.fed[item.rid].update(item.positions)
        if item.start == 0:
            return
        at = item.start - 1
        before = self.slots[item.block_table[at // block_size] * block_size + at % block_size]
        so_far = [*self.live[item.rid].input_ids, *self.tokens_of(item.rid)]
        assert before.tokens == tuple(so_far[: item.start])
        assert before.salts == {self.live[item.rid].cache_salt}
        if item.rid not in self.old_kv:
            assert before.weights == {self.generation}

    def tokens_of(self, rid: str) -> list[int]:
        return [token for event in self.output[rid] for token in event.token_ids]

    def remember(self, plan: StepPlan) -> None:
        """Write the plan into the model of the KV memory."""
        for item in plan.items:
            slots = [block * plan.block_size + at for block in item.block_table for at in range(plan.block_size)]
            before = self.slots[slots[item.start - 1]] if item.start else Slot((), frozenset(), frozenset())
            for slot, token in zip(slots[item.start : item.context_len], item.token_ids, strict=True):
                before = Slot(
                    (*before.tokens, token),
                    before.weights | {self.generation},
                    before.salts | {self.salts[item.rid]},
                )
                self.slots[slot] = before

    @precondition(lambda self: self.plan is None)
    @rule(steps=st.integers(1, 12), prepared=st.booleans())
    def go_on(self, steps: int, prepared: bool) -> None:
        for _ in range(steps):
            self.schedule()
            if self.plan is None:
                return
            if prepared:
                self.scheduler.prepare()
            self.holds_together()
            self.commit()
            self.holds_together()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def prepare(self) -> None:
        self.scheduler.prepare()

    @precondition(lambda self: self.plan is None)
    @rule(
        label=st.sampled_from(["v0", "v1"]), in_flight=st.sampled_from(["keep", "keep", "recompute", "abort", "wait"])
    )
    def refit(self, label: str, in_flight: str) -> None:
        if in_flight == "recompute":
            self.preempt_all()
        if in_flight == "abort":
            self.end_started()
        if in_flight == "wait":
            self.hold_admissions(True)
            self.finish_started()
        self.scheduler.set_weight_version(label)
        self.note_new_weights(label)
        if in_flight == "wait":
            self.hold_admissions(False)
        if in_flight != "keep":
            assert not self.old_kv.keys() & self.live.keys()

    def note_new_weights(self, label: str) -> None:
        self.generation += 1
        self.labels.append(label)
        self.old_kv |= {seq.rid: seq.num_computed for seq in self.scheduler._running if seq.num_computed}

    @precondition(lambda self: self.plan is None)
    @rule()
    def preempt_all(self) -> None:
        self.scheduler.preempt_all()
        self.old_kv.clear()
        assert self.scheduler.num_running == self.scheduler.blocks.num_used == 0

    @precondition(lambda self: self.plan is None)
    @rule()
    def forget_prefixes(self) -> None:
        self.scheduler.forget_prefixes()
        self.note_new_weights(self.labels[-1])  # names are as after other weights, though these are the same

    @rule(held=st.booleans())
    def hold_admissions(self, held: bool) -> None:
        self.scheduler.admits = not held

    def end_started(self) -> None:
        fresh = {rid for rid in self.live if self.scheduler._by_rid[rid].cached_tokens is None}
        for event in self.scheduler.abort_started("the weights were replaced", "weights-replaced"):
            assert event.finish is not None
            assert event.finish.code == "weights-replaced"
            self.take(event)
            self.old_kv.pop(event.rid, None)
        assert set(self.live) == fresh
        assert self.scheduler.num_started == 0

    def finish_started(self) -> None:
        """As when an update waits: what has run goes on to its end, and nothing else starts."""
        waiting = {rid for rid in self.live if self.scheduler._by_rid[rid].cached_tokens is None}
        for _ in range(3000):
            self.schedule()
            if self.plan is None:
                break
            self.scheduler.prepare()
            self.commit()
            self.holds_together()
        assert set(self.live) == waiting
        assert self.scheduler.num_running == 0
        self.old_kv.clear()

    @rule()
    def let_time_pass(self) -> None:
        self.now += 1.0
        for event in self.scheduler.expire():
            assert event.finish is not None
            assert event.finish.code == "deadline-exceeded"
            assert self.live[event.rid].deadline_seconds is not None
            self.take(event)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        assert self.plan is not None
        result = self.runner.launch(self.plan).wait()
        self.remember(self.plan)
        for event in self.scheduler.commit(self.plan, result):
            self.take(event)
        self.plan = None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail(self) -> None:
        assert self.plan is not None
        self.remember(self.plan)
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
        assert event.weight_version == self.labels[-1]  # what made its token, or was there when it ended
        self.output[event.rid].append(event)
        tokens = [token for e in self.output[event.rid] for token in e.token_ids]
        expected = scripted_output(req, seed=5)
        assert tuple(tokens) == expected[: len(tokens)]
        if event.token_ids:
            assert event.logprobs == (scripted_logprob([*req.input_ids, *tokens[:-1]]),)
        complete = len(tokens) == len(expected)
        if len(tokens) == 1 and event.token_ids:
            whole = range(min(req.num_cacheable, len(req.input_ids) - 1), len(req.input_ids))
            assert self.fed[event.rid] >= set(whole)  # what was asked about the prompt passed through the model
        assert len({e.cached_tokens for e in self.output[event.rid] if e.token_ids}) <= 1
        assert event.cached_tokens < len(req.input_ids)
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
        self.check_names()
        assert set(self.scheduler.rids) == set(self.live)
        assert sum(self.scheduler.counters.finished.values()) == self.ended
        if not self.live:
            assert self.scheduler.blocks.num_used == 0

    def check_names(self) -> None:
        """Each block that can be found has the content that its name stands for."""
        size = self.scheduler.config.cache.block_size
        for block, name in self.scheduler.prefixes.names.items():
            last = self.slots[block * size + size - 1]
            (generation,), (salt,) = last.weights, last.salts
            assert name == self.written_out(generation, salt, last.tokens)[-1]
        assert self.scheduler.config.prefix_cache or not self.scheduler.prefixes.names

    def written_out(self, generation: int, salt: str, tokens: tuple[int, ...]) -> list[bytes]:
        root = root_digest(generation=generation, version=self.labels[generation], salt=salt)
        return PrefixChain(root, self.scheduler.config.cache.block_size).extend(tokens)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.hold_admissions(False)
        if self.plan is not None:
            self.commit()
        for _ in range(3000):
            if not self.live:
                break
            self.schedule()
            self.scheduler.prepare()
            self.commit()
            self.holds_together()
        assert not self.live
        self.holds_together()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_life_of_a_scheduler_ends_each_request_once_with_its_own_tokens = SchedulerMachine.TestCase
