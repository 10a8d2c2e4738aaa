"""What the scheduler decides: order, chunks, admission, preemption, endings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import ScriptedRunner, engine_config, request, scripted_output

from gtp_serve.config import EngineConfig
from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.step import NO_TOKEN, StepPlan, StepResult
from gtp_serve.errors import PromptTooLong, QueueFull, RequestRejected, UsageError
from gtp_serve.request import TokenEvent


def make_scheduler(config: EngineConfig | None = None, **limits: int) -> Scheduler:
    return Scheduler(config or engine_config(**limits), draw_seed=lambda: 0)


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check_invariants()
    return plan


def give(scheduler: Scheduler, plan: StepPlan, token: int = 1) -> list[TokenEvent]:
    count = len(plan.samplers)
    events = scheduler.commit(plan, StepResult(token_ids=(token,) * count, logprobs=(-1.0,) * count))
    scheduler.check_invariants()
    return events


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(item.rid, item.start, len(item.token_ids), item.sample is not None) for item in plan.items]


def run(scheduler: Scheduler, runner: ScriptedRunner) -> dict[str, list[int]]:
    output: dict[str, list[int]] = {}
    while (plan := scheduler.schedule()) is not None:
        for event in scheduler.commit(plan, runner.launch(plan).wait()):
            output.setdefault(event.rid, []).extend(event.token_ids)
        scheduler.check_invariants()
    return output


def test_nothing_to_do_gives_no_plan() -> None:
    scheduler = make_scheduler()

    assert scheduler.schedule() is None
    assert not scheduler.has_work()


def test_a_long_prompt_is_cut_into_chunks_and_sampled_after_the_last() -> None:
    scheduler = make_scheduler(max_step_tokens=8)
    scheduler.add(request("a", range(1, 21)))

    plans = []
    for _ in range(4):
        plans.append(plan_of(scheduler))
        give(scheduler, plans[-1])

    assert [shape(plan) for plan in plans] == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 4, True)],
        [("a", 20, 1, True)],
    ]
    assert plans[2].items[0].token_ids == (17, 18, 19, 20)


def test_prompt_chunks_ride_along_with_decodes_under_the_token_limit() -> None:
    scheduler = make_scheduler(max_step_tokens=6)
    scheduler.add(request("a", [1, 2]))
    give(scheduler, plan_of(scheduler))
    scheduler.add(request("b", range(1, 8)))
    scheduler.add(request("c", [1]))

    first = plan_of(scheduler)
    give(scheduler, first)
    second = plan_of(scheduler)

    assert shape(first) == [("a", 2, 1, True), ("b", 0, 5, False)]
    assert shape(second) == [("a", 3, 1, True), ("b", 5, 2, True), ("c", 0, 1, True)]
    assert second.num_tokens <= 6


def test_slots_follow_the_block_table() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(request("a", range(1, 7)))

    item = plan_of(scheduler).items[0]

    table = item.block_table
    assert len(table) == 2
    assert item.slots(4) == [table[0] * 4 + i for i in range(4)] + [table[1] * 4, table[1] * 4 + 1]
    assert list(item.positions) == [0, 1, 2, 3, 4, 5]
    assert item.context_len == 6


def test_no_more_sequences_run_than_allowed_and_the_rest_come_in_order() -> None:
    scheduler = make_scheduler(max_running=2)
    for rid in "abc":
        scheduler.add(request(rid, max_new_tokens=1))

    first = plan_of(scheduler)
    give(scheduler, first)
    second = plan_of(scheduler)

    assert [item.rid for item in first.items] == ["a", "b"]
    assert [item.rid for item in second.items] == ["c"]


def test_a_request_waits_until_its_whole_prompt_has_room() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_context=16)
    scheduler.add(request("a", range(1, 10), max_new_tokens=1))
    scheduler.add(request("b", range(1, 6), max_new_tokens=1))

    first = plan_of(scheduler)
    give(scheduler, first)
    second = plan_of(scheduler)

    assert [item.rid for item in first.items] == ["a"]  # holds three blocks of four; b needs two
    assert [item.rid for item in second.items] == ["b"]


def test_a_later_small_request_does_not_overtake_one_that_waits_for_room() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_context=16)
    scheduler.add(request("a", range(1, 10), max_new_tokens=4))
    scheduler.add(request("b", range(1, 6), max_new_tokens=1))
    scheduler.add(request("c", [1], max_new_tokens=1))

    assert [item.rid for item in plan_of(scheduler).items] == ["a"]


def test_the_newest_stalls_then_yields_when_blocks_run_out_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=2, max_context=6)
    scheduler.add(request("a", [1, 2], max_new_tokens=4, ignore_eos=True))
    scheduler.add(request("b", [3, 4], max_new_tokens=2, ignore_eos=True))
    steps = []

    while scheduler.has_work():
        plan = plan_of(scheduler)
        steps.append((shape(plan), scheduler.counters.preemptions))
        give(scheduler, plan)
        if len(steps) == 1:
            scheduler.add(request("c", [5], max_new_tokens=1, ignore_eos=True))

    assert steps == [
        ([("a", 0, 2, True), ("b", 0, 2, True)], 0),
        ([("a", 2, 1, True)], 0),  # took the last block; b keeps what it has
        ([("a", 3, 1, True)], 0),
        ([("a", 4, 1, True)], 1),  # took b's
        ([("b", 0, 3, True), ("c", 0, 1, True)], 1),
    ]
    assert scheduler.blocks.num_used == 0


def test_recomputation_after_preemption_is_invisible() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2, max_context=12, max_step_tokens=5)
    requests = [request(rid, [n, n + 1, n + 2], max_new_tokens=9, ignore_eos=True) for n, rid in enumerate("abcd")]
    for req in requests:
        scheduler.add(req)

    output = run(scheduler, ScriptedRunner())

    assert scheduler.counters.preemptions > 0
    assert {rid: tuple(tokens) for rid, tokens in output.items()} == {r.rid: scripted_output(r) for r in requests}
    assert scheduler.counters.prompt_tokens == 12  # each prompt token once, however often it was fed
    assert scheduler.counters.generation_tokens == 36


def test_the_oldest_moves_in_every_step_however_few_blocks_there_are() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=1, max_context=4, max_step_tokens=2)
    for rid in "abcdef":
        scheduler.add(request(rid, [1], max_new_tokens=3, ignore_eos=True))

    while scheduler.has_work():
        oldest = scheduler.rids[0]
        plan = plan_of(scheduler)
        assert plan.items[0].rid == oldest
        give(scheduler, plan)


@pytest.mark.parametrize(
    ("sampling", "token", "finish"),
    [
        ({}, 7, ("stop", 7)),
        ({"ignore_eos": True, "max_new_tokens": 1}, 7, ("length", None)),
        ({"stop_token_ids": (9,)}, 9, ("stop", 9)),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, 7, ("stop", 7)),
        ({"max_new_tokens": 1}, 7, ("stop", 7)),
        ({"max_new_tokens": 1}, 8, ("length", None)),
    ],
)
def test_a_sequence_ends_for_the_right_reason(
    sampling: dict[str, Any], token: int, finish: tuple[str, int | None]
) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", **sampling))

    (event,) = give(scheduler, plan_of(scheduler), token)

    assert event.finish is not None
    assert (event.finish.type, event.finish.matched) == finish
    assert event.token_ids == (token,)
    assert event.logprobs == (-1.0,)
    assert event.weight_version == "v0"
    assert not scheduler.has_work()


def test_end_tokens_are_banned_until_the_minimum_is_reached() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", min_new_tokens=2, stop_token_ids=(9, 3)))

    banned = []
    for _ in range(3):
        plan = plan_of(scheduler)
        assert plan.items[0].sample is not None
        banned.append(plan.items[0].sample.banned)
        give(scheduler, plan)

    assert banned == [(3, 7, 9), (3, 7, 9), ()]


def test_the_random_number_belongs_to_seed_and_index_also_after_preemption() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=2, max_context=6)
    for rid in "ab":
        scheduler.add(request(rid, [1, 2], max_new_tokens=4, ignore_eos=True, seed=ord(rid)))

    seen = []
    while scheduler.has_work():
        plan = plan_of(scheduler)
        seen += [(i.rid, i.sample.seed, i.sample.index) for i in plan.items if i.sample is not None]
        give(scheduler, plan)

    assert scheduler.counters.preemptions > 0
    assert sorted(seen) == [(rid, ord(rid), index) for rid in "ab" for index in range(4)]


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(request("a"))
    scheduler.add(request("b"))

    seeds = {item.sample.seed for item in plan_of(scheduler).items if item.sample is not None}

    assert len(seeds) == 2


@pytest.mark.parametrize("when", ["waiting", "half a prompt", "in flight", "decoding", "preempted"])
def test_an_aborted_sequence_returns_its_blocks_in_any_state(when: str) -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2, max_context=12, max_step_tokens=4)
    scheduler.add(request("a", range(1, 8), max_new_tokens=4))
    plan = None if when == "waiting" else plan_of(scheduler)
    if plan is not None and when != "in flight":
        give(scheduler, plan)
    if when == "decoding":
        give(scheduler, plan_of(scheduler))
    if when == "preempted":
        scheduler._preempt_newest()

    event = scheduler.abort("a")

    assert event is not None
    assert event.finish is not None
    assert (event.finish.type, event.finish.code) == ("abort", "aborted")
    assert scheduler.blocks.num_used == 0
    assert not scheduler.has_work()
    if when == "in flight":
        assert plan is not None
        assert give(scheduler, plan) == []
    assert scheduler.abort("a") is None
    assert scheduler.schedule() is None


def test_a_result_is_not_given_to_a_new_request_of_the_same_name() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    plan = plan_of(scheduler)
    scheduler.abort("a")
    scheduler.add(request("a", [9, 9]))

    events = give(scheduler, plan, token=5)

    assert events == []
    assert plan_of(scheduler).items[0].token_ids == (9, 9)


def test_a_row_that_is_not_finite_ends_only_its_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    scheduler.add(request("b"))

    events = scheduler.commit(plan_of(scheduler), StepResult(token_ids=(NO_TOKEN, 4), logprobs=(float("nan"), -1.0)))

    assert events[0].finish is not None
    assert (events[0].finish.type, events[0].finish.code) == ("abort", "non-finite-logits")
    assert events[0].token_ids == events[0].logprobs == ()
    assert (events[1].token_ids, events[1].finish) == ((4,), None)
    assert scheduler.counters.non_finite == 1
    scheduler.check_invariants()


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    scheduler = make_scheduler(max_running=1)
    scheduler.add(request("a"))
    scheduler.add(request("b"))

    events = scheduler.fail(plan_of(scheduler), "it broke", "engine-error")

    assert [(e.rid, e.finish and e.finish.code, e.finish and e.finish.message) for e in events] == [
        ("a", "engine-error", "it broke")
    ]
    assert scheduler.rids == ("b",)
    scheduler.check_invariants()


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (StepResult(token_ids=(), logprobs=()), "1 samplers gave 0 tokens"),
        (StepResult(token_ids=(1,), logprobs=()), "0 log-probabilities"),
        (StepResult(token_ids=(50,), logprobs=(0.0,)), "token id 50"),
        (StepResult(token_ids=(-9,), logprobs=(0.0,)), "token id -9"),
    ],
)
def test_a_result_that_cannot_be_is_refused_and_the_step_can_still_fail(result: StepResult, complaint: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    plan = plan_of(scheduler)

    with pytest.raises(ValueError, match=complaint):
        scheduler.commit(plan, result)

    assert len(scheduler.fail(plan, "it broke", "engine-error")) == 1


def test_one_plan_at_a_time() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    plan = plan_of(scheduler)

    with pytest.raises(RuntimeError, match="not committed"):
        scheduler.schedule()
    give(scheduler, plan)
    with pytest.raises(RuntimeError, match="not under way"):
        give(scheduler, plan)


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (request("x", ()), "empty-prompt", "input_ids"),
        (request("x", (1, 50)), "bad-token-id", "input_ids"),
        (request("x", (-1,)), "bad-token-id", "input_ids"),
        (request("x", stop_token_ids=(50,)), "bad-token-id", "sampling_params.stop_token_ids"),
        (request("x", max_new_tokens=-1), "invalid-value", "sampling_params.max_new_tokens"),
        (request("x", max_new_tokens=4, min_new_tokens=5), "invalid-value", "sampling_params.min_new_tokens"),
        (request("x", temperature=-1.0), "invalid-value", "sampling_params.temperature"),
        (request("x", temperature=float("nan")), "invalid-value", "sampling_params.temperature"),
        (request("x", temperature=float("inf")), "invalid-value", "sampling_params.temperature"),
        (request("x", top_k=0), "invalid-value", "sampling_params.top_k"),
        (request("x", top_p=0.0), "invalid-value", "sampling_params.top_p"),
        (request("x", top_p=1.1), "invalid-value", "sampling_params.top_p"),
        (request("x", min_p=float("nan")), "invalid-value", "sampling_params.min_p"),
        (
            request("x", min_new_tokens=1, stop_token_ids=tuple(range(50))),
            "invalid-value",
            "sampling_params.min_new_tokens",
        ),
        (request("first"), "duplicate-rid", "rid"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(bad: object, code: str, param: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(request("first"))

    with pytest.raises(RequestRejected) as caught:
        scheduler.add(bad)  # type: ignore[arg-type]

    assert (caught.value.code, caught.value.param, caught.value.http_status) == (code, param, 400)
    assert scheduler.rids == ("first",)


def test_x1_a_bad_token_id_is_named_with_its_place() -> None:
    with pytest.raises(RequestRejected, match=r"input_ids\[2\] is 50.*0 to 49"):
        make_scheduler().add(request("a", (1, 2, 50)))


@pytest.mark.parametrize(
    ("prompt", "new", "code", "hint"),
    [
        (10, 11, "prompt-too-long", "max_new_tokens of at most 10"),
        (20, 1, "prompt-too-long", "a prompt of fewer than 20 tokens"),
        (10, 10, None, ""),
    ],
)
def test_a_request_longer_than_the_context_is_refused(prompt: int, new: int, code: str | None, hint: str) -> None:
    scheduler = make_scheduler(max_context=20)
    req = request("a", [1] * prompt, max_new_tokens=new)

    if code is None:
        scheduler.add(req)
        return
    with pytest.raises(PromptTooLong, match=hint) as caught:
        scheduler.add(req)
    assert caught.value.code == code


def test_a_request_that_no_empty_cache_could_hold_is_refused_at_once() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    scheduler.add(request("a", [1] * 6, max_new_tokens=6))

    with pytest.raises(PromptTooLong, match="KV cache of 12 tokens") as caught:
        scheduler.add(request("b", [1] * 6, max_new_tokens=7))

    assert caught.value.code == "never-fits"


def test_h7_the_queue_is_bounded_behind_those_that_start_at_once() -> None:
    scheduler = make_scheduler(max_running=2, max_waiting=1)
    for rid in "abc":
        scheduler.add(request(rid))

    with pytest.raises(QueueFull) as caught:
        scheduler.add(request("d"))
    give(scheduler, plan_of(scheduler))
    with pytest.raises(QueueFull):
        scheduler.add(request("d"))
    scheduler.abort("a")
    scheduler.add(request("d"))

    assert caught.value.http_status == 503
    assert scheduler.rids == ("b", "c", "d")


@pytest.mark.parametrize("limit", ["max_running", "max_step_tokens"])
def test_limits_that_allow_nothing_are_refused(limit: str) -> None:
    with pytest.raises(UsageError, match=limit):
        make_scheduler(replace(engine_config(), **{limit: 0}))  # type: ignore[arg-type]


def test_a_damaged_scheduler_says_so() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    scheduler._waiting.clear()

    with pytest.raises(AssertionError, match="every request"):
        scheduler.check_invariants()


def test_the_first_event_tells_how_long_the_request_waited_and_later_ones_do_not() -> None:
    now = [0.0]
    scheduler = Scheduler(engine_config(max_running=1), draw_seed=lambda: 0, clock=lambda: now[0])
    scheduler.add(request("a", [1], max_new_tokens=2, ignore_eos=True))
    scheduler.add(request("b", [1], max_new_tokens=2, ignore_eos=True))
    told: dict[str, list[float]] = {"a": [], "b": []}
    now[0] = 0.5
    while scheduler.has_work():
        for event in give(scheduler, plan_of(scheduler)):
            told[event.rid].append(event.queue_seconds)
        now[0] += 1.0

    assert told == {"a": [0.5, 0.0], "b": [2.5, 0.0]}
