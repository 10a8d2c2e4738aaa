"""Updates of an engine's weights on ranks that only pretend: votes, swaps, failures, and what calls are answered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes import request, scripted_output
from update_fakes import Bench, begin, code_of

from gtp_serve.errors import EngineFault, UpdateFailed, WeightsTorn
from gtp_serve.refit.digest import combine
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    Commit,
    EndFeed,
    FedOrder,
    Feed,
    GroupOrder,
    Piece,
    Progress,
    Relabel,
    RollBack,
)

LONG: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
PIECE = Piece(names=("x",), dtypes=("float32",), shapes=((1,),))


def test_weights_label_and_digest_change_together_between_two_steps_on_all_ranks() -> None:
    bench = Bench(votes=False)
    req = request("a", **LONG)
    bench.add(req)
    bench.step(3)

    answer = bench.answer(begin())
    bench.step(2)
    assert answer["state"] == "staging"
    assert [rank.live for rank in bench.ranks] == ["first", "first"]
    bench.ranks[1].vote()
    bench.step(2)
    assert [rank.live for rank in bench.ranks] == ["first", "first"]  # one of two
    assert bench.record("u").votes == 1
    bench.ranks[0].vote()
    seen = len(bench.versions("a"))
    bench.run()

    assert [rank.live for rank in bench.ranks] == ["u", "u"]
    versions = bench.versions("a")
    assert versions == ["0"] * (seen + 1) + ["1"] * (11 - seen)  # the step under way was finished with the old ones
    assert bench.tokens("a") == scripted_output(req)
    status = bench.updates.status()
    assert (status.version, status.rollback_version, status.update) == ("1", "0", None)
    assert status.digest == combine(["u@0", "u@1"]) == status.history[0].digest
    record = status.history[0]
    assert (record.state, record.base, record.votes, record.kind) == ("committed", "0", 2, "disk")
    assert (record.source_bytes, record.target_bytes, record.seconds["transfer"]) == (200, 100, 2.0)
    assert bench.swaps_checked == 1
    assert bench.engine.stats().weight_version == "1"


def test_the_stall_is_the_time_from_the_last_step_to_the_end_of_the_swap() -> None:
    bench = Bench()
    bench.add(request("a", **LONG))
    bench.step(3)

    def swap() -> None:
        bench.now += 0.25

    bench.ranks[0].in_swap = swap
    bench.answer(begin())
    bench.run()
    record = bench.record("u")
    assert record.stall_seconds == pytest.approx(0.25)
    assert record.seconds["total"] == pytest.approx(0.25)
    assert record.began == 1100.0


def test_a_vote_against_it_drops_it_everywhere_and_names_the_rank() -> None:
    bench = Bench(votes=False)
    bench.answer(begin())
    bench.ranks[0].vote()
    bench.ranks[1].vote("digest-wrong")
    bench.poll()
    record = bench.record("u")
    assert (record.state, record.code, record.message) == ("aborted", "digest-wrong", "digest-wrong it is")
    assert ("on", "rank tp1") in record.details
    assert [rank.calls[-1] for rank in bench.ranks] == ["drop", "drop"]
    assert (bench.updates.status().version, bench.ranks[0].live) == ("0", "first")

    bench.answer(begin("v"))
    for rank in bench.ranks:
        rank.vote()
    bench.poll()
    assert bench.updates.status().version == "1"


def test_an_update_ends_only_when_each_rank_has_stopped() -> None:
    bench = Bench(votes=False)
    bench.answer(begin())
    bench.ranks[1].vote("bad")
    bench.poll()
    assert bench.record("u").state == "staging"
    assert code_of(bench, begin("v")) == "update-under-way"
    bench.ranks[0].vote("dropped", touched=False)
    bench.poll()
    assert bench.record("u").state == "aborted"
    assert bench.record("u").code == "bad"


def test_a_rank_that_is_late_is_named_with_how_far_it_was() -> None:
    bench = Bench(votes=False)
    bench.answer(begin(deadline_seconds=30.0))
    bench.ranks[0].vote()
    bench.news.put(Progress(update="u", rank=1, phase="transfer", done=3, total=10))
    bench.poll()
    bench.now += 29.0
    bench.poll()
    assert bench.record("u").state == "staging"
    bench.now += 1.0
    bench.poll()
    bench.now += 5.0  # nor does it say that it has stopped
    bench.poll()
    record = bench.record("u")
    assert (record.state, record.code) == ("aborted", "update-deadline")
    assert record.message == "not all of the weights were there and verified within 30 s; late: tp1"
    assert record.details == (("tp1", "transfer, 3 of 10 bytes"),)
    assert bench.updates.status().rollback_version is None
    bench.ranks[1].vote()  # much too late
    bench.poll()
    assert bench.updates.status().version == "0"


def test_a_rank_that_fails_in_the_swap_leaves_no_weights_to_serve() -> None:
    bench = Bench()
    bench.add(request("a", **LONG))
    bench.step(2)
    bench.ranks[1].breaks_in = "commit"
    bench.answer(begin())
    bench.run()
    status = bench.updates.status()
    assert status.history[0].state == "torn"
    assert status.torn == "the swap failed: commit broke"
    assert status.version == "0"
    reason = bench.events["a"][-1].finish
    assert reason is not None
    assert (reason.type, reason.code) == ("abort", "weights_torn")
    with pytest.raises(WeightsTorn, match="commit broke"):
        bench.add(request("b"))

    bench.ranks[1].breaks_in = ""
    bench.answer(begin("v", "2"))
    bench.add(request("b", max_new_tokens=2, ignore_eos=True))
    bench.run()
    assert bench.versions("b") == ["2", "2"]
    assert bench.updates.status().rollback_version is None  # what was live was no version


def test_a_rank_that_holds_other_weights_than_it_voted_for_is_not_served() -> None:
    bench = Bench(votes=False)
    bench.answer(begin())
    for rank in bench.ranks:
        rank.vote()
    bench.ranks[1].other = "something else"
    bench.poll()
    assert bench.updates.status().torn == "rank tp1 holds other weights than it has verified"
    assert bench.updates.status().version == "0"


def test_a_rank_that_is_gone_in_the_swap_ends_the_engine() -> None:
    bench = Bench()
    bench.answer(begin(commit="manual"))
    bench.ask(Commit(id="u"))
    bench.others.held = []  # it does nothing any more
    bench.others.fault = EngineFault("rank tp1 got signal 9")
    with pytest.raises(EngineFault, match="signal 9"):
        bench.poll()


def test_a_rank_that_does_not_swap_in_time_ends_the_engine_by_name() -> None:
    bench = Bench()
    bench.answer(begin(commit="manual"))
    bench.ask(Commit(id="u"))
    bench.others.held = []
    bench.others.on_check = lambda: bench.let_pass(20.0)
    with pytest.raises(EngineFault, match="rank tp1 did not do what all ranks were told to within 60 s"):
        bench.poll()


# -- calls ----------------------------------------------------------------------------------------------------------


def test_a_manual_commit_waits_for_the_word_and_may_be_repeated() -> None:
    bench = Bench(votes=False)
    bench.answer(begin(commit="manual"))
    assert code_of(bench, Commit(id="u")) == "not-verified"
    for rank in bench.ranks:
        rank.vote()
    bench.step(3)
    assert bench.record("u").state == "verified"
    assert bench.updates.status().version == "0"
    assert bench.answer(Commit(id="u"))["state"] == "verified"
    assert bench.answer(Commit(id="u"))["state"] == "committed"
    assert bench.updates.status().version == "1"
    assert [rank.calls.count("commit") for rank in bench.ranks] == [1, 1]
    assert code_of(bench, AbortUpdate(id="u")) == "update-committed"


def test_a_begin_that_is_repeated_starts_nothing_and_another_content_is_refused() -> None:
    bench = Bench(votes=False)
    bench.answer(begin())
    assert bench.answer(begin())["id"] == "u"
    assert [rank.calls.count("stage") for rank in bench.ranks] == [1, 1]
    assert code_of(bench, begin(version="2")) == "id-in-use"
    for rank in bench.ranks:
        rank.vote()
    bench.poll()
    assert bench.answer(begin())["state"] == "committed"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"version": "0"}, "version-repeated"),
        ({"version": "-"}, ""),
        ({"version": "4", "base": "3"}, "base-mismatch"),
        ({"version": "a b"}, "bad-label"),
        ({"version": "4", "deadline_seconds": -1.0}, "bad-deadline"),
    ],
)
def test_an_update_that_does_not_fit_is_refused(fields: dict[str, object], code: str) -> None:
    bench = Bench()
    if code:
        assert code_of(bench, begin(**fields)) == code  # type: ignore[arg-type]
        assert bench.updates.status().history == ()
    else:
        bench.answer(begin(**fields))  # type: ignore[arg-type]


def test_a_lower_number_is_refused_unless_order_does_not_matter() -> None:
    bench = Bench()
    bench.answer(begin("a", "5"))
    assert code_of(bench, begin("b", "4")) == "version-reordered"
    bench.answer(begin("c", "4", any_order=True))
    bench.answer(begin("d", "4", any_order=True))
    assert [record.version for record in bench.updates.status().history] == ["4", "4", "5"]
    assert bench.ranks[0].live == "d"


def test_a_dry_run_verifies_and_changes_nothing() -> None:
    bench = Bench()
    bench.answer(begin(dry_run=True))
    record = bench.record("u")
    assert (record.state, record.code, record.dry_run) == ("verified", "", True)
    assert (bench.updates.status().version, bench.ranks[0].live) == ("0", "first")
    assert bench.ranks[1].calls[-1] == "drop"


def test_a_rollback_brings_back_what_was_before_and_a_second_one_what_was_after() -> None:
    bench = Bench()
    assert code_of(bench, RollBack()) == "nothing-to-roll-back"
    bench.answer(begin())
    assert bench.answer(RollBack())["version"] == "0"
    assert [rank.live for rank in bench.ranks] == ["first", "first"]
    assert bench.answer(RollBack())["state"] == "committed"
    assert (bench.updates.status().version, bench.ranks[0].live) == ("1", "u")
    assert bench.engine.weight_version == "1"


def test_an_abort_is_answered_when_the_ranks_have_stopped() -> None:
    bench = Bench(votes=False)
    bench.answer(begin())
    call = bench.ask(AbortUpdate(id="u", reason="enough"))
    bench.poll()
    assert call not in bench.outcomes
    assert [rank.calls[-1] for rank in bench.ranks] == ["drop", "drop"]
    for rank in bench.ranks:
        rank.vote("dropped")
    bench.poll()
    answer = bench.result(call)
    assert (answer["state"], answer["code"], answer["message"]) == ("aborted", "aborted", "enough")
    assert code_of(bench, AbortUpdate(id="never")) == "unknown-update"


def test_a_group_is_opened_before_the_ranks_hear_of_it_and_its_place_is_told() -> None:
    bench = Bench(votes=False)
    answer = bench.answer(begin(order=GroupOrder(trainers=2)))
    assert (answer["host"], answer["port"]) == ("10.0.0.1", 7)
    for rank in bench.ranks:
        assert rank.order is not None
        assert isinstance(rank.order.order, GroupOrder)
        assert rank.order.order.port == 7


def test_what_cannot_be_opened_is_refused_in_its_own_words() -> None:
    bench = Bench()
    bench.ranks[0].breaks_in = "prepare"
    with pytest.raises(UpdateFailed, match="prepare broke") as caught:
        bench.answer(begin())
    assert caught.value.code == "broken"
    assert bench.record("u").state == "aborted"
    assert "stage" not in bench.ranks[1].calls


def test_a_rank_that_cannot_even_begin_votes_against_it() -> None:
    bench = Bench()
    bench.ranks[1].breaks_in = "stage"
    bench.answer(begin())
    assert bench.record("u").message == "stage broke"


def test_pieces_are_answered_when_all_ranks_have_them() -> None:
    bench = Bench(votes=False)
    bench.answer(begin(order=FedOrder(group="g"), deadline_seconds=10.0))
    first, second = bench.ask(Feed(id="u", piece=PIECE)), bench.ask(Feed(id="u", piece=PIECE))
    bench.ranks[0].fed(1)
    bench.ranks[0].fed(2)
    bench.ranks[1].fed(1)
    bench.poll()
    assert bench.result(first)["state"] == "staging"
    assert second not in bench.outcomes
    bench.now += 8.0
    bench.ask(Feed(id="u", piece=PIECE))
    bench.now += 8.0  # each piece has the full time again
    bench.poll()
    assert bench.record("u").state == "staging"
    bench.ranks[1].fed(3)
    bench.ranks[0].fed(3)
    bench.poll()
    bench.answer(EndFeed(id="u", version="named-late"))
    assert bench.answer(EndFeed(id="u"))["state"] == "staging"
    assert bench.ranks[1].calls.count("end_feed") == 1
    assert code_of(bench, Feed(id="u", piece=PIECE)) == "feed-ended"
    for rank in bench.ranks:
        rank.vote()
    bench.poll()
    assert bench.updates.status().version == "named-late"


def test_a_piece_is_answered_also_when_the_commit_was_quicker() -> None:
    bench = Bench(votes=False)
    bench.answer(begin(order=FedOrder(group="g")))
    fed, ended = bench.ask(Feed(id="u", piece=PIECE)), bench.ask(EndFeed(id="u"))
    for rank in bench.ranks:
        rank.fed(1)
        rank.vote()
    bench.poll()
    assert bench.result(fed)["state"] == "committed"
    assert bench.result(ended)["state"] == "staging"


def test_a_piece_that_is_refused_is_answered_with_the_reason() -> None:
    bench = Bench(votes=False)
    bench.answer(begin(order=FedOrder(group="g")))
    call = bench.ask(Feed(id="u", piece=PIECE))
    bench.ranks[1].vote("tensors-refused")
    bench.poll()
    with pytest.raises(UpdateFailed) as caught:
        bench.result(call)
    assert caught.value.code == "tensors-refused"


def test_a_label_alone_changes_what_tokens_carry() -> None:
    bench = Bench()
    bench.add(request("a", **LONG))
    bench.step(3)
    assert bench.answer(Relabel(version="other"))["version"] == "other"
    assert bench.answer(Relabel(version="other"))["version"] == "other"
    bench.run()
    assert set(bench.versions("a")) == {"0", "other"}
    assert [record.kind for record in bench.updates.status().history] == ["label"]
    assert code_of(bench, Relabel(version="a b")) == "bad-label"


# -- the end --------------------------------------------------------------------------------------------------------


def test_when_the_engine_ends_what_is_under_way_is_dropped_and_all_are_answered() -> None:
    bench = Bench(votes=False)
    bench.answer(begin(order=FedOrder(group="g")))
    call = bench.ask(Feed(id="u", piece=PIECE))
    outcomes = bench.updates.close()
    assert [(outcome.call, outcome.error is not None) for outcome in outcomes] == [(call, True)]
    assert [rank.calls[-1] for rank in bench.ranks] == ["drop", "drop"]


def test_only_the_last_200_updates_are_kept() -> None:
    bench = Bench()
    for number in range(1, 206):
        bench.ask(begin(f"u{number}", str(number)))
        bench.poll()
        bench.poll()
    history = bench.updates.status().history
    assert len(history) == 200
    assert (history[0].version, history[-1].version) == ("205", "6")
    assert code_of(bench, Commit(id="u3")) == "unknown-update"


def test_a_change_is_told_once() -> None:
    bench = Bench(votes=False)
    assert bench.updates.take_change()
    assert not bench.updates.take_change()
    bench.answer(begin())
    assert bench.updates.take_change()
    bench.poll()
    assert not bench.updates.take_change()


def test_a_command_is_a_struct_of_a_closed_set() -> None:
    assert msgspec.json.decode(msgspec.json.encode(begin()), type=Begin) == begin()
