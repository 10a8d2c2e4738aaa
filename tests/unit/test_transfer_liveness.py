"""Who is called silent, and when: with a clock that the test turns."""

from __future__ import annotations

import pytest

from gtp_serve.refit.transports.liveness import Beat, Member, Roll, Silence, State

A = Member(side="trainer", rank=1, pid=123, host="x")
B = Member(side="engine", rank=0, pid=9, host="y")


def beat(who: Member, count: int, state: State = "working", message: str = "") -> Beat:
    return Beat(count=count, who=who, state=state, code="why" if message else "", message=message)


def roll(seconds: float = 2.0) -> Roll:
    return Roll({0: Member(side="trainer", rank=1), 1: Member(side="engine", rank=0)}, silent_seconds=seconds)


def test_a_peer_that_stops_beating_is_named_with_process_and_host_after_two_seconds() -> None:
    one = roll()
    verdicts = [one.round(0.5 * n, {0: beat(A, 1), 1: beat(B, n)}) for n in range(6)]

    assert verdicts[:4] == [None] * 4
    assert verdicts[4] is not None
    assert verdicts[4].code == "peer-silent"
    assert verdicts[4].message == "trainer rank 1 (pid 123, host x) has been silent for 2.0 s"


def test_peers_that_beat_are_not_named_however_long_it_takes() -> None:
    one = roll()

    assert all(one.round(0.5 * n, {0: beat(A, n), 1: beat(B, n)}) is None for n in range(1000))


def test_a_process_that_was_itself_held_up_blames_nobody() -> None:
    one = roll()
    one.round(0.0, {0: beat(A, 1), 1: beat(B, 1)})

    assert one.round(60.0, {0: beat(A, 1), 1: beat(B, 1)}) is None
    assert one.round(60.1, {0: beat(A, 2), 1: beat(B, 2)}) is None


def test_a_peer_that_has_never_come_is_missing_and_not_silent() -> None:
    one = roll()
    verdicts = [one.round(0.5 * n, {1: beat(B, n)}) for n in range(20)]

    assert verdicts == [None] * 20
    assert [str(member) for member in one.missing()] == ["trainer rank 1"]


def test_a_peer_that_is_done_may_be_silent() -> None:
    one = roll()

    assert all(one.round(0.5 * n, {0: beat(A, 1, "done"), 1: beat(B, n)}) is None for n in range(20))


def test_the_cause_that_a_peer_tells_comes_before_another_peers_silence() -> None:
    one = roll()
    for n in range(4):
        one.round(0.5 * n, {0: beat(A, 1), 1: beat(B, n)})

    verdict = one.round(2.0, {0: beat(A, 1), 1: beat(B, 4, "failed", "the disk is full")})

    assert verdict is not None
    assert verdict.message == "the disk is full"


def test_whoever_has_failed_or_beats_no_more_needs_no_word_any_more() -> None:
    one = roll()
    one.round(0.0, {0: beat(A, 1), 1: beat(B, 1)})
    assert not one.all_know(0.0)

    one.round(0.5, {0: beat(A, 1), 1: beat(B, 2, "failed", "the disk is full")})
    assert not one.all_know(0.9)
    assert one.all_know(1.0)


def test_rounds_that_took_long_count_for_less_against_a_peer() -> None:
    """Whoever waited for a processor, or for the store, could not hear anybody either."""
    one = roll()
    verdicts = [one.round(1.5 * n, {0: beat(A, 1), 1: beat(B, n)}) for n in range(5)]

    assert verdicts[:4] == [None] * 4  # 4.5 s of which 1.8 s count
    assert verdicts[4] is not None
    assert verdicts[4].message == "trainer rank 1 (pid 123, host x) has been silent for 6.0 s"


def test_silence_is_measured_in_time_in_which_one_could_listen() -> None:
    silence = Silence(0.1)

    assert silence.look(10.0, heard=9.98) == pytest.approx(0.02)
    assert silence.look(10.02, heard=9.98) == pytest.approx(0.04)
    assert silence.look(70.0, heard=9.98) == pytest.approx(0.14)
    assert silence.look(70.02, heard=9.98) == pytest.approx(0.16)
    assert silence.look(70.04, heard=70.03) == pytest.approx(0.01)
