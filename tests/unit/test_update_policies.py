"""What becomes of requests while weights change, in place or not, and while the engine is paused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes import request, scripted_output
from update_fakes import Bench, begin, code_of

from gtp_serve.errors import UpdateRefused, WeightsTorn
from gtp_serve.refit.orders import (
    Pause,
    Relabel,
    Resume,
    RollBack,
)

LONG: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


# -- in-flight policies ---------------------------------------------------------------------------------------------


def test_w7_keep_goes_on_with_the_old_kv() -> None:
    bench = Bench()
    bench.add(request("a", **LONG))
    bench.step(4)
    bench.answer(begin(in_flight="keep"))
    bench.run()
    assert [plan.items[0].start for plan in bench.runner.plans] == [0, *range(3, 14)]
    assert set(bench.versions("a")) == {"0", "1"}


def test_recompute_feeds_everything_again_before_the_next_token() -> None:
    bench = Bench()
    req = request("a", **LONG)
    bench.add(req)
    bench.step(4)
    before = len(bench.runner.plans)
    bench.answer(begin(in_flight="recompute"))
    bench.run()
    after = [plan.items[0] for plan in bench.runner.plans[before:]]
    again = [item.start for item in after].index(0)  # after the steps that ran while the weights were staged
    assert [item.start for item in after[:again]] == [3 + before - 1 + step for step in range(again)]
    assert after[again].context_len > 3
    assert bench.tokens("a") == scripted_output(req)
    versions = bench.versions("a")
    assert versions == sorted(versions)
    assert set(versions) == {"0", "1"}


def test_wait_lets_running_requests_end_and_starts_no_others() -> None:
    bench = Bench(max_running=2)
    bench.add(request("a", **LONG), request("b", max_new_tokens=5, ignore_eos=True))
    bench.step(2)
    bench.answer(begin(in_flight="wait"))
    bench.add(request("c", max_new_tokens=3, ignore_eos=True))
    bench.run()
    assert set(bench.versions("a")) == set(bench.versions("b")) == {"0"}
    assert set(bench.versions("c")) == {"1"}
    assert len(bench.versions("a")) == 12


def test_wait_ends_at_the_deadline_and_says_what_ran() -> None:
    bench = Bench()
    bench.add(request("a", **LONG))
    bench.step(2)
    bench.answer(begin(in_flight="wait", deadline_seconds=10.0))
    bench.step()
    bench.now += 11.0
    bench.step()
    record = bench.record("u")
    assert (record.state, record.message) == ("aborted", "1 requests were still running after 10 s")
    bench.add(request("b", max_new_tokens=2))
    bench.run()
    assert set(bench.versions("b")) == {"0"}  # and admissions go on


def test_abort_ends_what_has_run_and_keeps_what_waits() -> None:
    bench = Bench(max_running=1)
    bench.add(request("a", **LONG), request("b", max_new_tokens=3, ignore_eos=True))
    bench.step(2)
    bench.answer(begin(in_flight="abort"))
    bench.run()
    reason = bench.events["a"][-1].finish
    assert reason is not None
    assert (reason.type, reason.code) == ("abort", "weights-replaced")
    assert bench.versions("b") == ["1"] * 3


# -- in place -------------------------------------------------------------------------------------------------------


def test_in_place_no_step_runs_until_all_ranks_have_the_new_weights() -> None:
    bench = Bench(memory="inplace", votes=False)
    req = request("a", **LONG)
    bench.add(req)
    bench.step(3)
    bench.answer(begin())
    bench.step()
    steps = bench.engine.stats().steps_total
    bench.add(request("b", max_new_tokens=2, ignore_eos=True))
    bench.step(5)
    assert bench.engine.stats().steps_total == steps
    bench.now += 3.0
    for rank in bench.ranks:
        rank.vote()
    bench.run()
    assert bench.record("u").stall_seconds == pytest.approx(3.0)
    assert bench.updates.status().rollback_version is None
    assert bench.tokens("a") == scripted_output(req)
    assert set(bench.versions("a")) == {"0", "1"}
    assert bench.versions("b") == ["1", "1"]


def test_in_place_a_failure_leaves_the_weights_torn_until_a_good_update() -> None:
    bench = Bench(memory="inplace", votes=False)
    bench.add(request("a", **LONG))
    bench.step(2)
    call = bench.ask(begin(in_flight="wait"))
    bench.step(20)
    assert len(bench.tokens("a")) == 12  # it was waited for, and then the ranks were told
    assert bench.result(call)["state"] == "staging"
    bench.ranks[0].vote()
    bench.ranks[1].vote("not-finite")
    bench.poll()
    assert bench.record("u").state == "torn"
    with pytest.raises(WeightsTorn, match="not-finite it is") as caught:
        bench.add(request("b"))
    assert (caught.value.code, caught.value.http_status) == ("weights_torn", 503)
    assert code_of(bench, Relabel(version="7")) == "weights_torn"
    assert code_of(bench, RollBack()) == "nothing-to-roll-back"

    bench.answer(begin("v"))
    for rank in bench.ranks:
        rank.vote()
    bench.poll()
    bench.add(request("b", max_new_tokens=2, ignore_eos=True))
    bench.run()
    assert bench.versions("b") == ["1", "1"]


def test_in_place_a_failure_before_the_first_byte_changes_nothing() -> None:
    bench = Bench(memory="inplace", votes=False)
    req = request("a", **LONG)
    bench.add(req)
    bench.step(3)
    bench.answer(begin())
    for rank in bench.ranks:
        rank.vote("no-such-file", touched=False)
    bench.run()
    assert bench.record("u").state == "aborted"
    assert bench.updates.status().torn == ""
    assert bench.tokens("a") == scripted_output(req)


def test_in_place_nobody_may_keep_the_engine_waiting_for_the_commit() -> None:
    bench = Bench(memory="inplace")
    bench.answer(begin(commit="manual", deadline_seconds=10.0))
    assert bench.record("u").state == "verified"
    bench.now += 10.0
    bench.step()
    assert bench.record("u").state == "torn"
    assert bench.record("u").message == "nobody asked for the commit of the verified update in time"


def test_a_second_set_cannot_be_had_where_there_is_no_memory_for_it() -> None:
    bench = Bench(memory="inplace")
    assert code_of(bench, begin(memory="staged")) == "no-staging-memory"
    assert code_of(bench, begin(dry_run=True)) == "dry-run-inplace"


# -- pause and resume -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_pause_stops_steps_and_requests_wait_for_its_end(mode: str) -> None:
    bench = Bench()
    req = request("a", **LONG)
    bench.add(req)
    bench.step(3)
    assert bench.answer(Pause(mode=mode))["paused"]  # type: ignore[arg-type]
    steps = bench.engine.stats().steps_total
    bench.add(request("b", max_new_tokens=2, ignore_eos=True))
    bench.step(5)
    assert bench.engine.stats().steps_total == steps
    assert not bench.engine.has_work()
    assert bench.engine.has_requests()
    bench.answer(begin())  # an update lands in the meantime
    assert not bench.answer(Resume())["paused"]
    bench.run()
    assert bench.tokens("a") == scripted_output(req)
    assert bench.versions("b") == ["1", "1"]
    restarts = sum(item.start == 0 for plan in bench.runner.plans for item in plan.items if item.rid == "a")
    assert restarts == (2 if mode == "recompute" else 1)


def test_a_request_expires_also_while_nothing_runs() -> None:
    bench = Bench()
    bench.add(msgspec.structs.replace(request("a", **LONG), deadline_seconds=5.0))
    bench.step(2)
    bench.answer(Pause())
    bench.step()
    assert not bench.engine.has_work()
    bench.now += 6.0
    bench.step()
    reason = bench.events["a"][-1].finish
    assert reason is not None
    assert reason.code == "deadline-exceeded"


def test_a_pause_that_ends_what_runs() -> None:
    bench = Bench()
    bench.add(request("a", **LONG))
    bench.step(2)
    bench.answer(Pause(mode="abort"))
    bench.step()
    reason = bench.events["a"][-1].finish
    assert reason is not None
    assert reason.code == "paused"


def test_a_pause_that_waits_is_answered_when_the_last_one_has_ended() -> None:
    bench = Bench()
    bench.add(request("a", **LONG))
    bench.step(2)
    call = bench.ask(Pause(mode="wait"))
    bench.step(2)
    bench.add(request("b", max_new_tokens=2, ignore_eos=True))
    assert call not in bench.outcomes
    bench.step(20)
    assert bench.result(call)["paused"]
    assert len(bench.tokens("a")) == 12
    assert bench.tokens("b") == ()
    bench.answer(Resume())
    bench.run()
    assert len(bench.tokens("b")) == 2


def test_a_pause_that_waits_too_long_or_is_taken_back_is_answered_so() -> None:
    bench = Bench()
    bench.add(request("a", max_new_tokens=100, ignore_eos=True))
    bench.step(2)
    late = bench.ask(Pause(mode="wait"))
    bench.step()
    bench.now += 121.0
    bench.step()
    with pytest.raises(UpdateRefused, match="1 requests were still running") as caught:
        bench.result(late)
    assert caught.value.code == "pause-deadline"
    back = bench.ask(Pause(mode="wait"))
    bench.step()
    bench.ask(Resume())
    bench.step()
    with pytest.raises(UpdateRefused, match="taken back"):
        bench.result(back)
    bench.run()
    assert len(bench.tokens("a")) == 100
