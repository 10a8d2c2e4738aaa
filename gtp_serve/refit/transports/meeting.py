"""Taking part in a transfer: the work runs in a thread, and the caller watches over it.

Whatever happens (a peer dies or stops, the store's process is suspended, the deadline passes, the caller gives up),
the caller comes back within seconds with one reason, and threads, sockets and groups are gone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from gtp_serve.errors import GtpServeError, UpdateFailed
from gtp_serve.refit.transports.liveness import Member, Silence, Verdict
from gtp_serve.refit.transports.pulse import Pulse
from gtp_serve.refit.transports.session import FORM_SECONDS, Kept, PeerLost, Session, Stopped
from gtp_serve.refit.transports.stores import CONNECT_SECONDS, Terms, cut_connections, open_store

__all__ = ["Terms", "open_store", "take_part"]

TICK_SECONDS = 0.02
_MOST_OF_A_TICK = 5 * TICK_SECONDS
"""What a tick counts for at most where silence is measured; one that takes longer has waited for a processor."""
LINGER_SECONDS = 1.5
"""How long the store stays open for others to read why, or that, it is over."""

T = TypeVar("T")


def take_part(
    terms: Terms,
    place: int,
    run: Callable[[Session], T],
    *,
    kept: Kept | None = None,
    device: str = "cpu",
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] | None = None,
) -> T:
    """Run one participant's part to its end.

    :param run: called in a thread of its own.
    :param kept: of this participant's transfer before.
    :param device: of this participant, for the nccl backend.
    :param cancelled: asked often, from this thread.
    :raises UpdateFailed: for whatever reason it ended early.
    """
    members = _members(terms)
    me = msgspec.structs.replace(members.pop(place), pid=os.getpid(), host=socket.gethostname())
    pulse = Pulse(terms, place, me, members)
    session = Session(terms, place, pulse, kept or Kept(), device)
    work = _Work(run, session)
    pulse.start()
    work.start()
    try:
        try:
            verdict = _watch(work, pulse, terms, cancelled, progress)
        except BaseException as error:  # the caller's own, from a callback or a signal: nobody is left waiting for it
            _break_off(work, pulse, session, _given_up(me, error))
            raise
        if verdict is None and not work.succeeded:
            verdict = _reason(work, pulse, session)
        if verdict is None:
            _leave(work, pulse, session)
            return work.result  # type: ignore[return-value]  # it is there when the work succeeded
        _break_off(work, pulse, session, verdict)
        raise UpdateFailed(verdict.message, verdict.details, code=verdict.code)
    finally:
        session.stop.set()
        pulse.close(0)
        session.release()


def _given_up(me: Member, error: BaseException) -> Verdict:
    if isinstance(error, GtpServeError):
        return Verdict(error.code, error.message, error.details)
    return Verdict("dropped", f"{me} gave the update up", (("error", type(error).__name__),))


def _members(terms: Terms) -> dict[int, Member]:
    trainers = {rank: Member(side="trainer", rank=rank) for rank in range(terms.trainers)}
    engines = {terms.trainers + rank: Member(side="engine", rank=rank) for rank in range(terms.engines)}
    return trainers | engines


class _Work(threading.Thread, Generic[T]):
    """The part itself."""

    def __init__(self, run: Callable[[Session], T], session: Session) -> None:
        super().__init__(name="refit-transfer", daemon=True)
        self.result: T | None = None
        self.error: Exception | None = None
        self.succeeded = False
        self.session = session
        self._run = run

    def run(self) -> None:
        """Do it and keep what came of it."""
        try:
            self.result = self._run(self.session)
            self.succeeded = True
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames hold buffers and connections
        finally:
            del self._run


def _watch(
    work: _Work[T],
    pulse: Pulse,
    terms: Terms,
    cancelled: Callable[[], bool],
    progress: Callable[[int, int], None] | None,
) -> Verdict | None:
    """Until the work has ended or there is a reason to end it."""
    join_by = time.monotonic() + terms.join_seconds
    silence = Silence(_MOST_OF_A_TICK)
    while True:
        work.join(TICK_SECONDS)
        if progress is not None and work.session.total:
            progress(work.session.done, work.session.total)
        if not work.is_alive():
            return None
        now = time.monotonic()
        stalled = silence.look(now, pulse.last_answer) > terms.silent_seconds
        verdict = pulse.verdict or _store_trouble(pulse, terms, stalled)
        if verdict is not None:
            return verdict
        if cancelled():
            return Verdict("dropped", "the update was dropped")
        if now >= terms.deadline or (now >= join_by and pulse.missing()):
            return _late(pulse)


def _store_trouble(pulse: Pulse, terms: Terms, stalled: bool) -> Verdict | None:
    keeper = pulse.member(terms.trainers)
    if pulse.lost:
        return Verdict("peer-lost", f"{keeper} has ended, and with it the store", (("error", pulse.lost),))
    if stalled:
        seconds = time.monotonic() - pulse.last_answer
        return Verdict("peer-silent", f"{keeper} has been silent for {seconds:.1f} s; it keeps the store")
    return None


def _late(pulse: Pulse) -> Verdict:
    missing = pulse.missing()
    if missing:
        return Verdict("peer-late", f"{', '.join(map(str, missing))} did not come in time")
    return Verdict("update-deadline", "the transfer was not complete at its deadline")


def _break_off(work: _Work[T], pulse: Pulse, session: Session, verdict: Verdict) -> None:
    """Tell the others why, and end what is still under way."""
    pulse.say("failed", verdict)
    # Before connections break, so that others learn the cause and not the effect.
    stalled = time.monotonic() - pulse.last_answer > session.terms.silent_seconds
    reached = not stalled and pulse.fresh_round(1.0)
    session.cut()
    if not reached:
        cut_connections(session.terms.port)
    work.join(LINGER_SECONDS)
    _linger(session, pulse)
    if not pulse.close(LINGER_SECONDS) or work.is_alive():
        cut_connections(session.terms.port)
        pulse.close(2 * CONNECT_SECONDS + LINGER_SECONDS)  # torch may try twice to reach a store that is gone
        work.join(FORM_SECONDS + LINGER_SECONDS)
    work.error = None


def _leave(work: _Work[T], pulse: Pulse, session: Session) -> None:
    keeps_store = session.place == session.terms.trainers
    pulse.close(LINGER_SECONDS)
    session.leave(LINGER_SECONDS * 2 if keeps_store else 0)
    if pulse.is_alive():
        cut_connections(session.terms.port)
        pulse.join(LINGER_SECONDS)


def _linger(session: Session, pulse: Pulse) -> None:
    """The store's keeper waits a little for the others to have read why it is over."""
    if session.place == session.terms.trainers and not pulse.lost:
        give_up = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < give_up and not pulse.all_know():
            pulse.fresh_round(0.1)
            time.sleep(TICK_SECONDS)


def _await_verdict(pulse: Pulse, terms: Terms) -> None:
    """The error names nobody, as when connections could not be made: whoever is to blame falls silent, or tells."""
    until = time.monotonic() + terms.silent_seconds + 1
    while pulse.verdict is None and not pulse.lost and time.monotonic() < until:
        pulse.fresh_round(0.5)
        time.sleep(TICK_SECONDS)


def _reason(work: _Work[T], pulse: Pulse, session: Session) -> Verdict:
    """Why the work failed, where it may be a consequence of somebody else's end."""
    error = work.error
    if isinstance(error, GtpServeError):
        return Verdict(error.code, error.message, error.details)
    # A peer that fails says so before it closes its connections; one that was killed says nothing.
    pulse.fresh_round(session.terms.silent_seconds + 1)
    if not isinstance(error, PeerLost | Stopped):
        _await_verdict(pulse, session.terms)
    if pulse.verdict is not None:
        return pulse.verdict
    trouble = _store_trouble(pulse, session.terms, time.monotonic() - pulse.last_answer > session.terms.silent_seconds)
    if trouble is not None:
        return trouble
    if isinstance(error, PeerLost):
        return Verdict("peer-lost", f"{session.who(error.place)} closed its connection", (("error", error.reason),))
    if isinstance(error, Stopped):
        return Verdict("dropped", "the update was dropped")
    text = str(error).splitlines()[0] if str(error) else ""
    return Verdict("update-failed", "the transfer failed", (("error", f"{type(error).__name__}: {text}"),))
