"""Faults of the kinds that have happened to such servers, planted into the product for a test of the judge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sim_world import planted

from gtp_serve.engine.client import EngineClient
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.messages import Abort
from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.sequence import Sequence
from gtp_serve.engine.standstill import Standstill
from gtp_serve.kv.blocks import BlockAllocator
from gtp_serve.refit.under_way import UnderWay
from gtp_serve.refit.update import UpdateMachine
from gtp_serve.server.reply import Reply
from gtp_serve.text import StopMatcher


def _blocks_leak() -> AbstractContextManager[None]:
    release = BlockAllocator.release

    def leaky(self: BlockAllocator, blocks: list[int]) -> None:
        release(self, blocks[:-1] if len(blocks) > 3 else blocks)

    return planted(BlockAllocator, "release", leaky)


def _names_outlive_weights() -> AbstractContextManager[None]:
    set_version = Scheduler.set_weight_version

    def same_names(self: Scheduler, version: str) -> None:
        root, self.forget_prefixes = self.forget_prefixes, lambda: None  # type: ignore[method-assign]
        set_version(self, version)
        self.forget_prefixes = root  # type: ignore[method-assign]

    return planted(Scheduler, "set_weight_version", same_names)


def _label_is_late() -> AbstractContextManager[None]:
    def late(self: Engine, version: str) -> None:
        self.settle()
        self._scheduler.forget_prefixes()

    return planted(Engine, "set_weight_version", late)


def _step_is_not_settled() -> AbstractContextManager[None]:
    """The step under way is taken after the swap, under the new label."""

    def unsettled(self: Engine) -> None:
        return

    return planted(Engine, "settle", unsettled)


def _one_vote_is_enough() -> AbstractContextManager[None]:
    return planted(UnderWay, "all_voted", property(lambda self: len(self.votes) >= 1))


def _failed_swap_counts() -> AbstractContextManager[None]:
    def commit_anyway(self: UpdateMachine, code: str, message: str, details: Any) -> Any:
        current = self._swapping()
        self.live.replace(current.record.version, ["x"], keeps_old=True)
        return self._end(current, state="committed")

    return planted(UpdateMachine, "tear", commit_anyway)


def _torn_serves_on() -> AbstractContextManager[None]:
    return planted(Standstill, "_note_torn", lambda self, torn: None)


def _frozen_engine_steps() -> AbstractContextManager[None]:
    return planted(Engine, "freeze", lambda self, frozen: None)


def _recompute_keeps() -> AbstractContextManager[None]:
    return planted(Engine, "preempt_all", lambda self: self.settle())


def _abort_is_not_sent() -> AbstractContextManager[None]:
    post = EngineClient._post

    def silent(self: EngineClient, message: Any) -> None:
        if not isinstance(message, Abort):
            post(self, message)

    return planted(EngineClient, "_post", silent)


def _last_event_is_lost() -> AbstractContextManager[None]:
    def forgetful(self: Engine, rid: str, message: str, code: str) -> None:
        self._scheduler.abort(rid, message, code)

    return planted(Engine, "_abort", forgetful)


def _event_comes_twice() -> AbstractContextManager[None]:
    handle = EngineClient._deliver

    def twice(self: EngineClient, name: str, item: Any) -> None:
        handle(self, name, item)
        if getattr(item, "token_ids", ()) and item.finish is None and item.token_ids[0] % 7 == 0:
            handle(self, name, item)

    return planted(EngineClient, "_deliver", twice)


def _preempted_forgets_a_token() -> AbstractContextManager[None]:
    preempt = Sequence.preempt

    def forget(self: Sequence) -> list[int]:
        if self.num_output > 1:
            self.tokens.pop()
        return preempt(self)

    return planted(Sequence, "preempt", forget)


def _deadlines_do_not_count() -> AbstractContextManager[None]:
    return planted(Scheduler, "expire", lambda self: [])


def _spans_are_off_by_one() -> AbstractContextManager[None]:
    spans = Reply.spans

    def wrong(self: Reply) -> list[dict[str, Any]]:
        found = spans(self)
        if len(found) > 1:
            found[0]["end"] -= 1
            found[1]["start"] -= 1
        return found

    return planted(Reply, "spans", wrong)


def _stops_only_inside_a_piece() -> AbstractContextManager[None]:
    def push(self: StopMatcher, text: str) -> tuple[str, str | None]:
        for stop in self._stops:
            if stop in text:
                return text.partition(stop)[0], stop
        return text, None

    return planted(StopMatcher, "push", push)


def _rids_are_kept() -> AbstractContextManager[None]:
    def close(self: EngineClient, rid: str, name: str) -> None:
        self._streams.pop(name, None)

    return planted(EngineClient, "_close", close)


PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "blocks leak": _blocks_leak,
    "cache names outlive their weights": _names_outlive_weights,
    "the label is late": _label_is_late,
    "the step under way is not settled": _step_is_not_settled,
    "one vote is enough": _one_vote_is_enough,
    "a failed swap counts as a commit": _failed_swap_counts,
    "torn weights serve on": _torn_serves_on,
    "a frozen engine steps": _frozen_engine_steps,
    "recompute keeps the KV": _recompute_keeps,
    "an abort is not sent": _abort_is_not_sent,
    "an abort's last event is lost": _last_event_is_lost,
    "an event comes twice": _event_comes_twice,
    "a preempted sequence forgets a token": _preempted_forgets_a_token,
    "deadlines do not count": _deadlines_do_not_count,
    "spans are off by one": _spans_are_off_by_one,
    "stop strings across pieces are missed": _stops_only_inside_a_piece,
    "names of ended requests are kept": _rids_are_kept,
}
