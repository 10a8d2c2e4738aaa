"""The engine in one process, on a scripted runner."""

from __future__ import annotations

import random

import pytest
from fakes import ScriptedRunner, engine_config, request, scripted_output

from gtp_serve.engine.engine import Engine
from gtp_serve.engine.step import StepPlan
from gtp_serve.errors import EngineFault, QueueFull
from gtp_serve.request import FinishReason, Request, TokenEvent


def make_engine(runner: ScriptedRunner | None = None, **limits: int) -> Engine:
    return Engine(engine_config(**limits), runner or ScriptedRunner(), draw_seed=lambda: 0, log=lambda text: None)


def drain(engine: Engine) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    while engine.has_work():
        for event in engine.step():
            events.setdefault(event.rid, []).append(event)
        engine.check_invariants()
    return events


def tokens(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


def finish(events: list[TokenEvent]) -> FinishReason:
    assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    reason = events[-1].finish
    assert reason is not None
    return reason


def random_requests(count: int) -> list[Request]:
    rng = random.Random(count)
    return [
        request(
            f"r{n}",
            [rng.randrange(50) for _ in range(rng.randint(1, 30))],
            max_new_tokens=rng.randint(1, 25),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
        )
        for n in range(count)
    ]


def break_steps(*broken: int) -> ScriptedRunner:
    def before(plan: StepPlan) -> None:
        if plan.step in broken:
            raise RuntimeError(f"step {plan.step} broke")

    return ScriptedRunner(before=before)


@pytest.mark.parametrize("num_blocks", [400, 20])
def test_64_requests_together_answer_as_each_does_alone(num_blocks: int) -> None:
    requests = random_requests(64)
    together = make_engine(num_blocks=num_blocks, max_running=16, max_step_tokens=40)
    for req in requests:
        together.add(req)

    mixed = drain(together)

    for req in requests:
        solo = make_engine()
        solo.add(req)
        alone = drain(solo)[req.rid]
        assert tokens(mixed[req.rid]) == tokens(alone) == scripted_output(req)
        assert finish(mixed[req.rid]) == finish(alone)
        assert [e.logprobs for e in mixed[req.rid]] == [e.logprobs for e in alone]
    assert together.stats().kv_blocks_used == 0
    assert (together.stats().preemptions_total > 0) == (num_blocks == 20)


def test_aborting_half_of_64_leaks_no_block_and_spoils_no_other() -> None:
    requests = random_requests(64)
    engine = make_engine(num_blocks=100, max_running=16, max_step_tokens=40)
    for req in requests:
        engine.add(req)
    events: dict[str, list[TokenEvent]] = {}
    doomed = [req.rid for req in requests[::2]]
    random.Random(0).shuffle(doomed)

    while engine.has_work():
        if doomed:
            engine.abort(doomed.pop())
        for event in engine.step():
            events.setdefault(event.rid, []).append(event)
        engine.check_invariants()

    stats = engine.stats()
    assert (stats.kv_blocks_used, stats.running, stats.waiting) == (0, 0, 0)
    assert all(tokens(events[req.rid]) == scripted_output(req) for req in requests[1::2])
    assert all(finish(events[req.rid]) is not None for req in requests)
    assert stats.requests_total["abort"] > 20


def test_an_aborted_request_gets_a_last_event() -> None:
    engine = make_engine()
    engine.add(request("a"))
    engine.step()

    engine.abort("a")
    engine.abort("nobody")

    assert engine.has_work()
    (event,) = engine.step()
    assert (event.rid, event.token_ids) == ("a", ())
    assert event.finish == FinishReason(type="abort", message="aborted by the client", code="aborted")
    assert not engine.has_work()


def test_l5_a_failed_step_costs_its_own_requests_only() -> None:
    engine = make_engine(break_steps(1), max_running=2)
    requests = [request(rid, max_new_tokens=4, ignore_eos=True) for rid in "abc"]
    for req in requests:
        engine.add(req)

    events = drain(engine)

    assert [finish(events[rid]).code for rid in "ab"] == ["engine-error", "engine-error"]
    assert "RuntimeError" in finish(events["a"]).message
    assert "broke" not in finish(events["a"]).message  # the text of an exception may tell what a client must not know
    assert tokens(events["c"]) == scripted_output(requests[2])
    assert engine.stats().failed_steps_total == 1


def test_three_failed_steps_in_a_row_end_the_engine() -> None:
    engine = make_engine(break_steps(0, 1, 2))
    for rid in "abc":
        engine.add(request(rid))
        if rid < "c":
            engine.step()

    with pytest.raises(EngineFault, match=r"3 steps in a row failed.*RuntimeError.*step 2 broke"):
        engine.step()


def test_failed_steps_with_good_ones_between_are_survived() -> None:
    engine = make_engine(break_steps(0, 1, 3, 4, 6, 7))
    for n in range(9):
        engine.add(request(f"r{n}", max_new_tokens=1))
        engine.step()

    assert engine.stats().failed_steps_total == 6
    assert engine.stats().steps_total == 9


def test_a_result_with_an_impossible_token_is_a_failed_step() -> None:
    class Wrong(ScriptedRunner):
        def launch(self, plan: StepPlan):  # type: ignore[no-untyped-def]
            pending = super().launch(plan)
            pending.result = type(pending.result)(token_ids=(50,), logprobs=(0.0,))
            return pending

    engine = make_engine(Wrong())
    engine.add(request("a"))

    (event,) = engine.step()

    assert event.finish is not None
    assert event.finish.code == "engine-error"


def test_x2_logits_that_are_not_finite_fail_their_request_and_are_counted() -> None:
    engine = make_engine(ScriptedRunner(not_finite=frozenset({"b"})))
    requests = [request(rid, max_new_tokens=3, ignore_eos=True) for rid in "abc"]
    for req in requests:
        engine.add(req)

    events = drain(engine)

    assert finish(events["b"]).code == "non-finite-logits"
    assert tokens(events["b"]) == ()
    assert tokens(events["a"]) == scripted_output(requests[0])
    assert tokens(events["c"]) == scripted_output(requests[2])
    assert engine.stats().non_finite_total == 1


def test_statistics_count_what_happened() -> None:
    times = iter(range(100))
    engine = Engine(
        engine_config(max_running=1, max_waiting=1),
        ScriptedRunner(),
        clock=lambda: float(next(times)),
        log=lambda text: None,
    )
    engine.add(request("a", [1, 2, 3], max_new_tokens=2, ignore_eos=True))
    engine.add(request("b", [1, 2], max_new_tokens=2, ignore_eos=True))
    with pytest.raises(QueueFull):
        engine.add(request("c"))

    engine.step()
    during = engine.stats()
    drain(engine)
    after = engine.stats()

    assert (during.running, during.waiting, during.kv_blocks_used) == (1, 1, 1)
    assert (during.prompt_tokens_total, during.generation_tokens_total) == (3, 1)
    assert (after.prompt_tokens_total, after.generation_tokens_total) == (5, 4)
    assert after.requests_total == {"stop": 0, "length": 2, "abort": 0, "rejected": 1}
    assert (after.steps_total, after.step_tokens_total, after.step_seconds_total) == (4, 7, 4.0)
    assert (after.kv_blocks_total, after.weight_version) == (64, "v0")
