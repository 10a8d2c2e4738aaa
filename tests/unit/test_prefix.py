"""The prefix cache: names, hits, eviction, and requests that wait for one another instead of computing twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import ScriptedRunner, engine_config, request, scripted_output

from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.step import NO_TOKEN, StepPlan, StepResult
from gtp_serve.kv.blocks import BlockAllocator
from gtp_serve.kv.prefix import PrefixCache, PrefixChain, root_digest
from gtp_serve.request import LogprobOptions, Request, SamplingParams, TokenEvent

ROOT = root_digest(generation=0, version="v", salt="")
LONG = range(1, 14)
"""13 tokens: three full blocks of four and one token."""


def names(tokens: Sequence[int], root: bytes = ROOT) -> list[bytes]:
    return list(PrefixChain(root, 4).extend(tokens))


def make_scheduler(**limits: int) -> Scheduler:
    return Scheduler(engine_config(**limits), draw_seed=lambda: 0)


def step(scheduler: Scheduler, runner: ScriptedRunner) -> tuple[StepPlan, list[TokenEvent]]:
    plan = scheduler.schedule()
    assert plan is not None
    events = scheduler.commit(plan, runner.launch(plan).wait())
    scheduler.check_invariants()
    return plan, events


def finish_all(scheduler: Scheduler, runner: ScriptedRunner) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while scheduler.has_work():
        events += step(scheduler, runner)[1]
    return events


def fed(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {item.rid: (item.start, len(item.token_ids)) for item in plan.items}


def test_only_full_blocks_have_names_and_each_stands_for_all_before_it() -> None:
    assert len(names([1] * 11)) == 2
    assert names([1] * 12) == [*names([1] * 11), names([1] * 12)[2]]
    assert len(set(names([1] * 12))) == 3  # equal tokens at other places
    assert set(names([1] * 8)).isdisjoint(names([2, *[1] * 7]))


def test_a_chain_extended_bit_by_bit_is_the_chain_of_the_whole() -> None:
    chain = PrefixChain(ROOT, 4)
    for length in range(1, 14):
        chain.extend(list(LONG)[:length])

    assert chain.digests == names(LONG)


def test_i2_weights_and_salts_start_chains_of_their_own() -> None:
    roots = {
        root_digest(generation=generation, version=version, salt=salt)
        for generation, version, salt in [
            (0, "v", ""),
            (1, "v", ""),
            (0, "w", ""),
            (0, "v", "s"),
            (0, "vs", ""),
            (0, "", "vs"),
        ]
    }

    assert len(roots) == 6
    assert all(len(root) == 32 for root in roots)


def test_the_cache_gives_way_longest_unused_first_and_ends_before_beginnings() -> None:
    blocks = BlockAllocator(4)
    cache = PrefixCache(blocks)
    first, second = names(LONG)[:2], names([9] * 8)
    for chain in (first, second):
        held = cache.allocate(2)
        for name, block in zip(chain, held, strict=True):
            cache.put(name, block)
        blocks.release(held)
    blocks.retain(cache.find(first))  # used again: now the second chain is the older one
    blocks.release(cache.find(first))

    lengths = []
    for _ in range(4):
        cache.allocate(1)
        lengths.append((len(cache.find(first)), len(cache.find(second))))
        cache.check_invariants()

    assert lengths == [(2, 1), (2, 0), (1, 0), (0, 0)]
    with pytest.raises(ValueError, match="1 blocks asked for, 0 free"):
        cache.allocate(1)


def test_a_second_prompt_computes_only_what_follows_the_shared_blocks() -> None:
    scheduler, runner = make_scheduler(), ScriptedRunner()
    scheduler.add(request("a", LONG, max_new_tokens=1))
    finish_all(scheduler, runner)
    same, longer = request("b", LONG, max_new_tokens=2), request("c", [*range(1, 10), 40, 41], max_new_tokens=2)
    scheduler.add(same)
    scheduler.add(longer)

    plan, events = step(scheduler, runner)

    assert fed(plan) == {"b": (12, 1), "c": (8, 3)}
    assert {event.rid: event.cached_tokens for event in events} == {"b": 12, "c": 8}
    assert plan.items[0].block_table[:2] == plan.items[1].block_table[:2]
    events += finish_all(scheduler, runner)
    for req in (same, longer):
        mine = [event for event in events if event.rid == req.rid]
        assert tuple(token for event in mine for token in event.token_ids) == scripted_output(req)
        assert len({event.cached_tokens for event in mine}) == 1
    counters = scheduler.counters
    assert (counters.cached_tokens, counters.prompt_tokens) == (20, 13 + 1 + 3)
    assert (counters.prefix_queries, counters.prefix_hits) == (13 + 13 + 11, 20)
    assert scheduler.blocks.num_used == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler, runner = make_scheduler(), ScriptedRunner()
    for rid in "ab":
        scheduler.add(request(rid, range(1, 9), max_new_tokens=1))
        plan, _ = step(scheduler, runner)

    assert fed(plan) == {"b": (4, 4)}


def test_an_answer_is_cached_as_a_prompt_is() -> None:
    scheduler, runner = make_scheduler(), ScriptedRunner()
    first = request("a", [1, 2, 3], max_new_tokens=10, ignore_eos=True)
    scheduler.add(first)
    finish_all(scheduler, runner)
    scheduler.add(request("b", [*first.input_ids, *scripted_output(first), 5], max_new_tokens=1))

    plan, _ = step(scheduler, runner)

    assert fed(plan) == {"b": (12, 2)}


def test_nothing_is_cached_when_it_is_switched_off() -> None:
    scheduler, runner = make_scheduler(prefix_cache=False), ScriptedRunner()
    for rid in "ab":
        scheduler.add(request(rid, LONG, max_new_tokens=1))
        plan, events = step(scheduler, runner)

    assert fed(plan) == {"b": (0, 13)}
    assert events[0].cached_tokens == scheduler.counters.prefix_queries == len(scheduler.prefixes) == 0


@pytest.mark.parametrize("label", ["v0", "v1"])
def test_w4_nothing_is_reused_across_weights_even_of_the_same_name(label: str) -> None:
    scheduler, runner = make_scheduler(), ScriptedRunner()
    scheduler.add(request("a", LONG, max_new_tokens=1))
    finish_all(scheduler, runner)

    scheduler.set_weight_version(label)
    scheduler.add(request("b", LONG, max_new_tokens=1))
    plan, events = step(scheduler, runner)

    assert fed(plan) == {"b": (0, 13)}
    assert (events[0].weight_version, events[0].cached_tokens) == (label, 0)


def test_what_runs_across_a_change_of_weights_is_shared_with_nobody() -> None:
    scheduler, runner = make_scheduler(max_step_tokens=8), ScriptedRunner()
    scheduler.add(request("a", LONG, max_new_tokens=8, ignore_eos=True))
    scheduler.add(request("b", LONG, max_new_tokens=1))
    step(scheduler, runner)

    scheduler.set_weight_version("v1")
    finish_all(scheduler, runner)
    scheduler.add(request("c", LONG, max_new_tokens=1))
    plan, _ = step(scheduler, runner)

    assert fed(plan) == {"c": (12, 1)}  # b's, which was waiting then and was computed with the new weights
    assert len(scheduler.prefixes) == 2 + 3


def test_weights_do_not_change_under_a_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    scheduler.schedule()

    with pytest.raises(RuntimeError, match="under way"):
        scheduler.set_weight_version("v1")


def test_salts_keep_requests_apart() -> None:
    scheduler, runner = make_scheduler(), ScriptedRunner()
    plans = []
    for rid, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        sampling = SamplingParams(max_new_tokens=1)
        scheduler.add(Request(rid=rid, input_ids=tuple(LONG), sampling=sampling, cache_salt=salt))
        plans.append(fed(step(scheduler, runner)[0]))

    assert plans == [{"a": (0, 13)}, {"b": (0, 13)}, {"c": (12, 1)}]


@pytest.mark.parametrize(("start", "reused"), [(0, 0), (3, 0), (4, 4), (9, 8), (12, 12)])
def test_tokens_whose_logprobs_are_wanted_are_computed(start: int, reused: int) -> None:
    scheduler, runner = make_scheduler(), ScriptedRunner()
    scheduler.add(request("a", LONG, max_new_tokens=1))
    finish_all(scheduler, runner)
    asked = LogprobOptions(prompt_start=start)
    sampling = SamplingParams(max_new_tokens=1)
    scheduler.add(Request(rid="b", input_ids=tuple(LONG), sampling=sampling, logprobs=asked))

    plan = scheduler.schedule()

    assert plan is not None
    assert fed(plan) == {"b": (reused, 13 - reused)}


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    scheduler, runner = make_scheduler(max_step_tokens=8), ScriptedRunner()
    requests = [request(rid, LONG, max_new_tokens=2, ignore_eos=True, seed=n) for n, rid in enumerate("abcd")]
    for req in requests:
        scheduler.add(req)

    plans, events = [], []
    while scheduler.has_work():
        plan, new = step(scheduler, runner)
        plans.append(fed(plan))
        events += new

    assert plans == [
        {"a": (0, 8)},
        {"a": (8, 5)},
        {"a": (13, 1), "b": (12, 1), "c": (12, 1), "d": (12, 1)},
        {"b": (13, 1), "c": (13, 1), "d": (13, 1)},
    ]
    for req in requests:
        mine = [token for event in events if event.rid == req.rid for token in event.token_ids]
        assert tuple(mine) == scripted_output(req)


@pytest.mark.parametrize("how", ["abort", "fail", "preempt"])
def test_who_waits_for_a_block_goes_on_when_it_will_not_come(how: str) -> None:
    scheduler, runner = make_scheduler(max_step_tokens=4), ScriptedRunner()
    scheduler.add(request("a", LONG, max_new_tokens=1))
    scheduler.add(request("b", LONG, max_new_tokens=1))
    assert fed(step(scheduler, runner)[0]) == {"a": (0, 4)}
    if how == "abort":
        scheduler.abort("a")
    elif how == "fail":
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.fail(plan, "it broke", "engine-error")
    else:
        scheduler._preempt_newest()
    scheduler.check_invariants()

    after = fed(step(scheduler, runner)[0])
    events = finish_all(scheduler, runner)

    assert after == {"a" if how == "preempt" else "b": (4, 4)}  # the block that was complete is used
    assert events[-1].rid == "b"


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    scheduler, runner = make_scheduler(num_blocks=8), ScriptedRunner()
    req = request("a", LONG, max_new_tokens=4, ignore_eos=True)
    scheduler.add(req)
    events = step(scheduler, runner)[1]

    scheduler._preempt_newest()
    plan, more = step(scheduler, runner)
    events += more + finish_all(scheduler, runner)

    assert fed(plan) == {"a": (12, 2)}
    assert tuple(token for event in events for token in event.token_ids) == scripted_output(req)
    assert {event.cached_tokens for event in events} == {0}  # constant: it had none when it was first admitted
    assert scheduler.counters.prompt_tokens == 13


def test_blocks_of_a_sequence_whose_logits_were_not_finite_are_not_found_again() -> None:
    scheduler, runner = make_scheduler(), ScriptedRunner()
    scheduler.add(request("a", LONG))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, StepResult(token_ids=(NO_TOKEN,), logprobs=(0.0,)))
    scheduler.check_invariants()

    scheduler.add(request("b", LONG, max_new_tokens=1))

    assert fed(step(scheduler, runner)[0]) == {"b": (0, 13)}


def test_cached_blocks_do_not_keep_a_request_waiting() -> None:
    scheduler, runner = make_scheduler(num_blocks=4), ScriptedRunner()
    scheduler.add(request("a", LONG, max_new_tokens=3, ignore_eos=True))
    finish_all(scheduler, runner)
    scheduler.add(request("b", [40] * 14, max_new_tokens=2, ignore_eos=True))

    plan, _ = step(scheduler, runner)

    assert fed(plan) == {"b": (0, 14)}


def test_a_late_request_is_ended_by_name_wherever_it_is() -> None:
    now = 0.0
    scheduler = Scheduler(engine_config(max_running=1), draw_seed=lambda: 0, clock=lambda: now)
    for rid, limit in (("running", 5.0), ("waiting", 5.0), ("patient", 6.0), ("free", None)):
        sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
        scheduler.add(Request(rid=rid, input_ids=(1, 2, 3), sampling=sampling, deadline_seconds=limit))
    runner = ScriptedRunner()
    step(scheduler, runner)
    now = 4.9
    assert scheduler.expire() == []

    now = 5.0
    events = scheduler.expire()

    scheduler.check_invariants()
    assert [(event.rid, event.finish and event.finish.code) for event in events] == [
        ("running", "deadline-exceeded"),
        ("waiting", "deadline-exceeded"),
    ]
    assert events[0].finish is not None
    assert events[0].finish.message == "its 5 seconds were over after 1 tokens"
    assert scheduler.rids == ("patient", "free")
    assert scheduler.blocks.num_used == 0


def test_blocks_that_a_request_would_reuse_are_not_counted_as_room_for_it() -> None:
    scheduler, runner = make_scheduler(num_blocks=5, max_context=20), ScriptedRunner()
    scheduler.add(request("a", LONG, max_new_tokens=1))
    finish_all(scheduler, runner)
    scheduler.add(request("b", [40], max_new_tokens=2, ignore_eos=True))
    scheduler.add(request("c", [*LONG, 1, 1, 1, 1], max_new_tokens=1))  # five blocks, of which three are there

    plans = [fed(step(scheduler, runner)[0]) for _ in range(3)]

    assert plans == [{"b": (0, 1)}, {"b": (1, 1)}, {"c": (12, 5)}]
