"""Random lives of an engine's updates: messages come twice, late, out of order or never, and calls come at any time.

Beside the machine are ranks that hold what they were told to (``Rank``) and a judge that knows nothing of the
machine's states: it counts the votes that were delivered and looks at what the ranks really hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from gtp_serve.errors import UpdateFailed, UpdateRefused
from gtp_serve.refit.actions import Drop
from gtp_serve.refit.digest import combine
from gtp_serve.refit.history import KEPT
from gtp_serve.refit.orders import (
    DiskOrder,
    Fed,
    FedOrder,
    GroupOrder,
    Progress,
    StageOrder,
    UpdateRecord,
    UpdateRequest,
    Vote,
)
from gtp_serve.refit.under_way import HOLD_SECONDS
from gtp_serve.refit.update import UpdateMachine

LABELS = st.sampled_from(["0", "1", "2", "3", "7", "a", "b", "", "x y"])
ORDERS = st.sampled_from([DiskOrder(path="/a"), GroupOrder(trainers=1), FedOrder(group="g")])
NAMES = ["u0", "u1", "u2", "u3"]
IDS = st.sampled_from([*NAMES, "none"])
REQUESTS = st.builds(
    UpdateRequest,
    order=ORDERS,
    version=LABELS,
    base=st.sampled_from([None, None, None, "0", "1"]),
    commit=st.sampled_from(["auto", "auto", "manual"]),
    memory=st.sampled_from([None, None, "staged", "inplace"]),
    deadline_seconds=st.sampled_from([None, None, 5.0, 0.0]),
    dry_run=st.sampled_from([False, False, False, True]),
    any_order=st.booleans(),
)


@dataclass
class Rank:
    """One rank's memory: what lies in the set that serves and in the other one."""

    number: int
    live: str = "first"
    other: str = "nothing"
    inbox: list[StageOrder | Drop] = field(default_factory=list)
    job: StageOrder | None = None
    written: bool = False
    voted: bool = False

    def write(self, what: str) -> None:
        assert self.job is not None
        self.written = True
        if self.job.memory == "inplace":
            self.live = what
        else:
            self.other = what

    def vote(self, *, good: bool) -> Vote:
        assert self.job is not None
        self.voted = True
        update = self.job.update
        if good:
            self.write(update)
            return Vote(update=update, rank=self.number, digest=f"{update}@{self.number}")
        error = ("broken", "the bytes are wrong", ())
        return Vote(update=update, rank=self.number, error=error, touched=self.written)

    def swap(self) -> None:
        self.live, self.other = self.other, self.live


class Judge:
    """What must be so, from what was delivered and from what lies in the ranks."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.label, self.content = "0", "first"
        """What is served, and what all ranks must hold then."""
        self.before = ("", "")
        """The same of what a rollback would restore, if there is one."""
        self.used = {"0"}
        self.torn = False
        self.words: dict[str, dict[int, bool]] = {}
        """For each update that was staged: each rank's first delivered word."""

    def note_stage(self, update: str) -> None:
        self.words[update] = {}

    def note_vote(self, vote: Vote) -> None:
        if vote.update in self.words and 0 <= vote.rank < len(self.ranks):
            self.words[vote.update].setdefault(vote.rank, vote.error is None)

    def may_commit(self, update: str) -> None:
        assert self.words[update] == {rank.number: True for rank in self.ranks}

    def note_commit(self, label: str, content: str) -> None:
        assert all(rank.live == content for rank in self.ranks)
        self.before = (self.label, self.content)
        self.label, self.content, self.torn = label, content, False
        self.used.add(label)

    def look(self, machine: UpdateMachine) -> None:
        status = machine.status()
        assert status.version == self.label
        assert bool(status.torn) == self.torn
        being_written = status.update is not None and status.update.memory == "inplace"
        if not self.torn and not being_written:
            assert {rank.live for rank in self.ranks} == {self.content}
        if status.rollback_version is not None and status.update is None:
            assert status.rollback_version == self.before[0]
            assert {rank.other for rank in self.ranks} == {self.before[1]}
        assert len(status.history) <= KEPT
        ids = [record.id for record in status.history] + ([status.update.id] if status.update else [])
        assert len(set(ids)) == len(ids)
        for record in status.history:
            assert record.state in ("committed", "aborted", "torn") or (record.state == "verified" and record.dry_run)
            assert (record.state in ("aborted", "torn")) == bool(record.code)


class Updates(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 3), memory=st.sampled_from(["staged", "staged", "inplace"]))
    def start(self, ranks: int, memory: Any) -> None:
        self.now = 0.0
        self.machine = UpdateMachine(
            version="0", ranks=ranks, clock=lambda: self.now, wall=lambda: self.now, memory=memory, deadline_seconds=20
        )
        self.ranks = [Rank(number) for number in range(ranks)]
        self.judge = Judge(self.ranks)
        self.mail: list[Vote] = []
        self.begun: dict[str, UpdateRequest] = {}
        self.numbers = count()

    def call(self, what: Callable[[], Any]) -> Any:
        """A call's answer; one that is refused has changed nothing."""
        before = (self.machine.mark(), self.machine.phase)
        try:
            answer = what()
        except UpdateRefused:
            assert (self.machine.mark(), self.machine.phase) == before
            assert self.machine.take_actions() == []
            return None
        self.note_end()
        return answer

    def note_end(self) -> None:
        """The one thing that an end may change for the judge: weights that were being written are torn."""
        for action in self.machine.take_actions():
            if isinstance(action, StageOrder):
                self.judge.note_stage(action.update)
            for rank in self.ranks:
                rank.inbox.append(action)
        newest = self.machine.status().history[:1]
        if newest and newest[0].state == "torn" and self.machine.live.torn:
            assert newest[0].memory == "inplace" or newest[0].code in ("swap-broke", "digest-mismatch")
            self.judge.torn = True

    # -- calls -------------------------------------------------------------------------------------

    @precondition(lambda self: self.machine.current is None)
    @rule(request=REQUESTS, again=st.sampled_from([False, False, True]))
    def begin_well(self, request: UpdateRequest, again: bool) -> None:
        label = self.judge.label if again else str(100 + next(self.numbers))
        request = replace(request, version=label, base=None, any_order=again or request.any_order)
        self.begin(f"n{next(self.numbers)}", request)
        if self.machine.current is not None:
            self.open(True)

    @precondition(lambda self: self.machine.current is None)
    @rule(request=REQUESTS, again=st.booleans(), stop_after=st.integers(0, 12))
    def update_well(self, request: UpdateRequest, again: bool, stop_after: int) -> None:
        """All the way to the commit, or nearly."""
        self.begin_well(request, again)
        if self.machine.current is not None:
            self.work_well(3 if stop_after else 1)
        if self.machine.phase == "verified" and stop_after:
            self.commit("u0")
        if self.machine.phase == "committing" and stop_after > 1:
            self.swap("no", False)

    @rule(update=st.sampled_from(NAMES), request=REQUESTS)
    def begin(self, update: str, request: UpdateRequest) -> None:
        known = [record.id for record in self.machine.status().history]
        now = self.machine.current
        if update in known or (now is not None and now.id == update):
            self.repeat(update, request)
            return
        answer = self.call(lambda: self.machine.begin(update, request))
        if answer is not None:
            record, seconds = answer
            assert now is None  # one at a time
            assert seconds > 0
            assert (record.state, record.base) == ("staging", self.judge.label)
            assert request.base in (None, self.judge.label)
            self.check_label(request)
            self.begun[update] = request

    def check_label(self, request: UpdateRequest) -> None:
        assert request.version
        assert " " not in request.version
        if not (request.any_order or isinstance(request.order, FedOrder)):
            assert request.version not in self.judge.used
            if request.version.isdigit() and self.judge.label.isdigit():
                assert int(request.version) > int(self.judge.label)

    def repeat(self, update: str, request: UpdateRequest) -> None:
        mark = self.machine.mark()
        answer = self.call(lambda: self.machine.begin(update, request))
        assert (answer is not None) == (self.begun[update] == request)
        assert answer is None or answer == (self.machine.record(update), None)
        again = self.call(lambda: self.machine.begin(update, self.begun[update]))
        assert again == (self.machine.record(update), None)
        assert self.machine.mark() == mark

    @precondition(lambda self: self.machine.phase == "opening")
    @rule(well=st.sampled_from([True, True, True, False]))
    def open(self, well: bool) -> None:
        record = self.machine.current
        assert record is not None
        if not well:
            self.call(lambda: self.machine.fail(record.id, UpdateFailed("no port", code="no-port")))
            assert self.machine.record(record.id).state == "aborted"
            return
        self.call(lambda: self.machine.stage(record.id, self.begun[record.id].order))
        self.call(lambda: self.machine.stage(record.id, self.begun[record.id].order))  # a repeat tells nobody twice
        assert [action.update for rank in self.ranks[:1] for action in rank.inbox].count(record.id) == 1

    @rule(update=IDS)
    def commit(self, update: str) -> None:
        answer = self.call(lambda: self.machine.commit(self.some(update)))
        assert answer is None or answer.state in ("verified", "committed")

    @rule(update=IDS, seldom=st.integers(0, 2))
    def abort(self, update: str, seldom: int) -> None:
        if seldom:
            return
        answer = self.call(lambda: self.machine.abort(self.some(update), "no more"))
        assert answer is None or answer.state != "committed"

    @precondition(lambda self: self.machine.status().rollback_version is not None)
    @rule(swap=st.booleans())
    def roll_back(self, swap: bool) -> None:
        target = self.machine.status().rollback_version
        record = self.call(lambda: self.machine.roll_back("keep"))
        assert record is None or record.version == target
        if record is not None and swap:
            self.swap("no", False)

    @precondition(lambda self: self.machine.current is None)
    @rule()
    def roll_back_perhaps_to_nothing(self) -> None:
        if self.machine.status().rollback_version is None:
            assert self.call(lambda: self.machine.roll_back("keep")) is None

    @rule(label=LABELS, seldom=st.integers(0, 4))
    def relabel(self, label: str, seldom: int) -> None:
        if seldom:
            return
        busy = self.machine.current is not None
        record: UpdateRecord | None = self.call(lambda: self.machine.relabel(label))
        if record is not None:
            assert not busy
            assert not self.judge.torn
            self.judge.label = label
            self.judge.used.add(label)

    @rule(update=IDS, end=st.booleans())
    def feed(self, update: str, end: bool) -> None:
        update = self.some(update)
        self.call(lambda: self.machine.end_feed(update) if end else self.machine.feed(update))

    def some(self, update: str) -> str:
        """Mostly the one that is under way, or the last one."""
        status = self.machine.status()
        known = [*([status.update] if status.update else []), *status.history]
        return known[0].id if known and update in ("u0", "u1") else update

    # -- ranks -------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 2))
    def listen(self, number: int) -> None:
        rank = self.ranks[number % len(self.ranks)]
        if not rank.inbox:
            return
        action = rank.inbox.pop(0)
        if isinstance(action, StageOrder):
            rank.job, rank.written, rank.voted = action, False, False
        elif rank.job is not None and rank.job.update == action.update:
            if not rank.voted:
                self.mail.append(rank.vote(good=False))
            rank.job = None

    @rule(number=st.integers(0, 2), what=st.sampled_from(["write", "good", "good", "good", "bad"]))
    def work(self, number: int, what: str) -> None:
        rank = self.ranks[number % len(self.ranks)]
        if rank.job is None or rank.voted:
            return
        if what == "write":
            rank.write(f"part of {rank.job.update}")
        else:
            self.mail.append(rank.vote(good=what == "good"))

    @rule(ranks=st.integers(1, 3))
    def work_well(self, ranks: int) -> None:
        """What happens nearly always, so that lives get beyond it."""
        for rank in self.ranks[:ranks]:
            while rank.inbox:
                self.listen(rank.number)
            self.work(rank.number, "good")
        while self.mail:
            self.deliver(0, "keep")

    @precondition(lambda self: bool(self.mail))
    @rule(which=st.integers(0, 20), fate=st.sampled_from(["keep", "keep", "twice", "lose", "later"]))
    def deliver(self, which: int, fate: str) -> None:
        at = which % len(self.mail)
        vote = self.mail[at] if fate == "later" else self.mail.pop(at)
        if fate == "lose":
            return
        for _ in range(2 if fate == "twice" else 1):
            if self.machine.phase in ("staging", "failing"):
                self.judge.note_vote(vote)
            self.call(lambda: self.machine.vote(vote))

    @rule(update=IDS, rank=st.sampled_from([-1, 3, 9]), good=st.booleans())
    def stray(self, update: str, rank: int, good: bool) -> None:
        mark = self.machine.mark()
        update = self.some(update)
        error = None if good else ("x", "x", ())
        self.machine.vote(Vote(update=update, rank=rank, error=error))
        self.machine.vote(Vote(update="never", rank=0, error=error))
        self.machine.note_fed(Fed(update=update, rank=rank, pieces=99))
        self.machine.note_progress(Progress(update=update, rank=rank, phase="transfer"))
        for first, well in self.judge.words.get(update, {}).items():  # a second word changes nothing
            self.machine.vote(Vote(update=update, rank=first, error=("x", "x", ()) if well else None))
        assert self.machine.mark() == mark

    # -- the swap and the clock --------------------------------------------------------------------

    @precondition(lambda self: self.machine.phase == "committing")
    @rule()
    def swap_well(self) -> None:
        self.swap("no", False)

    @precondition(lambda self: self.machine.phase == "committing")
    @rule(breaks=st.sampled_from(["no", "no", "no", "no", "rank", "digest"]), calls=st.booleans())
    def swap(self, breaks: str, calls: bool) -> None:
        record = self.machine.current
        assert record is not None
        swap = self.machine.take_swap()
        if not swap.roll_back:
            self.judge.may_commit(swap.update)
        if calls:  # nothing can stop it now
            self.now += 1000.0
            self.abort("u0", 0)
            self.machine.tick()
            self.commit("u0")
            assert self.machine.phase == "swapping"
        for rank in self.ranks[: 1 if breaks == "rank" else None]:
            if record.memory == "staged":
                rank.swap()
        if breaks == "rank":
            self.call(lambda: self.machine.tear("swap-broke", "a rank broke", ()))
            return
        digests = [f"{rank.live}@{rank.number}" for rank in self.ranks]
        if breaks == "digest":
            digests[-1] = "other"
        content = self.judge.before[1] if swap.roll_back else swap.update
        if breaks == "digest" and not swap.roll_back:
            assert self.call(lambda: self.machine.committed(digests, 0.1)).state == "torn"
            return
        self.judge.note_commit(swap.version, content)
        ended = self.call(lambda: self.machine.committed(digests, 0.1))
        assert (ended.state, ended.digest, ended.stall_seconds) == ("committed", combine(digests), 0.1)

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.5, 0.5, 3.0, 6.0, 21.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.call(lambda: self.machine.tick(running=1))

    @rule(seldom=st.integers(0, 5))
    def nobody_says_anything_any_more(self, seldom: int) -> None:
        """Whatever is waited for, the wait ends."""
        if seldom:
            return
        self.mail.clear()
        for seconds in (30.0, HOLD_SECONDS, 30.0, 30.0):
            self.now += seconds
            self.call(lambda: self.machine.tick())
        assert self.machine.current is None

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        self.judge.look(self.machine)


Updates.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
test_w1_any_life_of_updates_never_serves_what_not_all_ranks_have_verified = Updates.TestCase
