"""When the store's keeper is given up: a store that the test makes slow, or silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import pytest

from gtp_serve.errors import UpdateFailed
from gtp_serve.refit.transports import pulse
from gtp_serve.refit.transports.liveness import Beat, Member
from gtp_serve.refit.transports.meeting import take_part
from gtp_serve.refit.transports.session import Session
from gtp_serve.refit.transports.stores import Terms

TRAINERS, ENGINES = 4, 8
SILENT_SECONDS = 1.0


class Store:
    """Holds a beat of everybody that changes each time it is asked for; ``wait`` comes before each answer."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait
        self.asked = 0

    def set(self, key: str, value: bytes) -> None:
        self._answer()

    def check(self, keys: Sequence[str]) -> bool:
        self._answer()
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._answer()
        return [msgspec.json.encode(Beat(count=self.asked, who=_who(int(key.split("/")[1])))) for key in keys]

    def _answer(self) -> None:
        self.asked += 1
        self._wait()


def _who(place: int) -> Member:
    engine = place >= TRAINERS
    return Member(side="engine" if engine else "trainer", rank=place - TRAINERS if engine else place)


def take_part_with(store: Store, monkeypatch: pytest.MonkeyPatch, work: Callable[[Session], str]) -> str:
    monkeypatch.setattr(pulse, "connect", lambda terms: store)
    terms = Terms(
        host="127.0.0.1", port=9, update="u", trainers=TRAINERS, engines=ENGINES, backend="gloo", bucket_bytes=1 << 20,
        silent_seconds=SILENT_SECONDS, deadline=time.monotonic() + 60,
    )  # fmt: skip
    return take_part(terms, 0, work)


def test_a_store_that_answers_is_not_silent_however_long_a_round_of_questions_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dozen questions to hear of everybody the first time, each of which may wait for a processor."""
    store = Store(lambda: time.sleep(0.15))

    def work(session: Session) -> str:
        time.sleep(2 * SILENT_SECONDS)
        return "done"

    assert take_part_with(store, monkeypatch, work) == "done"
    assert store.asked > TRAINERS + ENGINES


def test_a_store_that_answers_no_more_is_silent_and_its_keeper_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    store = Store(lambda: stopped.wait(20) if store.asked > 30 else None)

    def work(session: Session) -> str:
        assert session.stop.wait(20)
        stopped.set()
        return "too late"

    began = time.monotonic()
    with pytest.raises(UpdateFailed, match=r"engine rank 0 has been silent for .* s; it keeps the store") as failed:
        take_part_with(store, monkeypatch, work)

    assert failed.value.code == "peer-silent"
    assert SILENT_SECONDS <= time.monotonic() - began < 15
