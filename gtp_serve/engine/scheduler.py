"""Which sequences take part in the next step, with which tokens; who waits, yields, is done.  No torch.

Everything goes by arrival.  Running sequences are served oldest first, so decodes come before the prompt
chunks of newer ones; the rest of ``max_step_tokens`` goes to new admissions in the same order.  When blocks
run out, a sequence may take them from newer ones only: the oldest always moves, so everything ends.  Hence,
always: every running sequence is older than every waiting one.

Full blocks of running, ended and preempted sequences are found again by their content.  A request whose next
block is being computed by a running one waits for it, and so do those behind it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from secrets import randbits

from gtp_serve.config import EngineConfig
from gtp_serve.engine.admission import check_request
from gtp_serve.engine.sequence import Sequence, State
from gtp_serve.engine.step import (
    COMPLETE,
    DEAD_END,
    NO_TOKEN,
    NOT_YET,
    StepItem,
    StepPlan,
    StepResult,
    TokenDetails,
)
from gtp_serve.errors import QueueFull, RequestRejected, UsageError
from gtp_serve.kv.blocks import BlockAllocator, blocks_for
from gtp_serve.kv.prefix import PrefixCache, PrefixChain, root_digest
from gtp_serve.request import FinishReason, Request, TokenEvent


def _draw_seed() -> int:
    return randbits(63)


@dataclass(kw_only=True, slots=True)
class Counters:
    """What has happened since the start; only grows."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    non_finite: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


class Scheduler:
    """All sequences of one engine: ``add`` and ``abort``; ``schedule`` and ``commit`` (or ``fail``) in turn.

    :param draw_seed: gives a seed to a request that brings none.
    :param clock: seconds, monotonic; deadlines are kept by it.
    :raises UsageError: when a limit of the configuration allows nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        draw_seed: Callable[[], int] = _draw_seed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_limits(config)
        self.config = config
        self.weight_version = config.weight_version
        self.blocks = BlockAllocator(config.cache.num_blocks)
        self.prefixes = PrefixCache(self.blocks)
        self.counters = Counters()
        self.admits = True
        """Whether requests that have not run yet may start; those that have go on in any case."""
        self._draw_seed = draw_seed
        self._clock = clock
        self._eos = tuple(i for i in config.model.eos_token_ids if 0 <= i < config.model.vocab_size)
        self._by_rid: dict[str, Sequence] = {}
        self._timed: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._arrivals = 0
        self._generation = 0
        self._plans = 0
        self._in_flight: tuple[StepPlan, tuple[Sequence, ...]] | None = None

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def num_started(self) -> int:
        """Sequences that have run and have not ended, preempted ones included."""
        return sum(map(_has_started, self._by_rid.values()))

    @property
    def rids(self) -> tuple[str, ...]:
        """Requests that have not ended, oldest first."""
        return tuple(seq.rid for seq in (*self._running, *self._waiting))

    def has_work(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self._by_rid)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue.

        :raises RequestRejected: it can never be answered, its rid is in use, or (QueueFull) too many wait.
        """
        if request.rid in self._by_rid:
            raise RequestRejected(f"request id {request.rid!r} is in use", code="duplicate-rid", param="rid")
        check_request(request, self.config)
        self._check_queue()
        seed = self._draw_seed() if request.sampling.seed is None else request.sampling.seed
        limit, now = request.deadline_seconds, self._clock()
        seq = Sequence(
            request,
            arrival=self._arrivals,
            seed=seed,
            eos_token_ids=self._eos,
            deadline=None if limit is None else now + limit,
            arrived=now,
        )
        self._arrivals += 1
        self._by_rid[request.rid] = seq
        if seq.deadline is not None:
            self._timed[request.rid] = seq
        self._waiting.append(seq)
        self._name_blocks(seq)

    def _check_queue(self) -> None:
        # Requests that will start with the next step do not wait; the bound is on those behind them.
        free_places = max(0, self.config.max_running - len(self._running))
        if len(self._waiting) >= self.config.max_waiting + free_places:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting, which is the limit",
                [("try", "again in a while, or raise the limit")],
            )

    def abort(self, rid: str, message: str = "aborted by the client", code: str = "aborted") -> TokenEvent | None:
        """End a request in whatever state; its blocks are free at once.  None when there is no such request.

        Also legal between ``schedule`` and ``commit``: what the step gives for it is dropped.
        """
        seq = self._by_rid.get(rid)
        if seq is None:
            return None
        return self._finish(seq, FinishReason(type="abort", message=message, code=code))

    def abort_started(self, message: str, code: str) -> list[TokenEvent]:
        """End all that have run, as ``abort`` does; those that have not stay in the queue."""
        started = [seq for seq in self._by_rid.values() if _has_started(seq)]
        return [self._finish(seq, FinishReason(type="abort", message=message, code=code)) for seq in started]

    def has_late(self) -> bool:
        """Whether ``expire`` would end anything."""
        if not self._timed:
            return False
        now = self._clock()
        return any(seq.deadline is not None and seq.deadline <= now for seq in self._timed.values())

    def expire(self) -> list[TokenEvent]:
        """End the requests whose deadline has passed, in whatever state, as ``abort`` does."""
        if not self._timed:
            return []
        now = self._clock()
        late = [seq for seq in self._timed.values() if seq.deadline is not None and seq.deadline <= now]
        return [self._finish(seq, _too_late(seq)) for seq in late]

    def set_weight_version(self, version: str) -> None:
        """From the next step on tokens are made by other weights; KV of the old ones is not shared any more.

        Sequences that are running go on with the KV that they have.
        """
        self._forbid_in_flight()
        self.weight_version = version
        self.forget_prefixes()

    def preempt_all(self) -> None:
        """Running sequences lose their KV, and compute it again before their next token."""
        self._forbid_in_flight()
        while self._running:
            self._preempt_newest()

    def _forbid_in_flight(self) -> None:
        if self._in_flight is not None:
            raise RuntimeError("a step with the old weights is under way")

    def forget_prefixes(self) -> None:
        """Nothing that is computed so far is found again; running sequences keep what they have."""
        self._generation += 1
        for seq in self._running:
            self._disclaim(seq)
        for seq in self._by_rid.values():
            seq.chain = None  # a waiting one gets a new one

    # -- decide ------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do.  Commit (or fail) it before the next.

        It completes what ``prepare`` has begun, if that was called.
        """
        if self._in_flight is not None:
            raise RuntimeError("the last plan was not committed")
        chunks = self._plan_running()
        self._plan_admissions(chunks)
        if not chunks:
            return None
        plan = StepPlan(
            step=self._plans,
            block_size=self.config.cache.block_size,
            items=tuple(_item(seq, count) for seq, count in chunks),
        )
        self._plans += 1
        self._in_flight = (plan, tuple(seq for seq, _ in chunks))
        for (seq, _), item in zip(chunks, plan.items, strict=True):
            seq.in_flight = item
        return plan

    def prepare(self) -> None:
        """While a step is under way: blocks and admissions of the next one, as far as its tokens cannot change
        them.  Who must yield to whom is left to ``schedule``.
        """
        budget = self.config.max_step_tokens
        for seq in self._running:
            count = min(seq.num_next, budget)
            budget -= count
            done = seq.num_computed + (len(seq.in_flight.token_ids) if seq.in_flight is not None else 0)
            missing = blocks_for(done + count, self.config.cache.block_size) - len(seq.blocks)
            if count and missing > self.blocks.num_free:
                return
            if count and missing > 0:
                seq.blocks += self.prefixes.allocate(missing)
        self._admit_waiting(budget)

    def _plan_running(self) -> list[tuple[Sequence, int]]:
        chunks: list[tuple[Sequence, int]] = []
        budget = self.config.max_step_tokens
        for seq in list(self._running):
            if budget == 0:
                break
            if seq.state is not State.RUNNING:
                break  # preempted for an older one, and so is everything after it
            count = self._grow(seq, min(seq.num_pending, budget))
            if count:
                chunks.append((seq, count))
                budget -= count
        return chunks

    def _grow(self, seq: Sequence, count: int) -> int:
        """Get blocks for ``count`` more tokens, from newer sequences if need be; returns for how many."""
        size = self.config.cache.block_size
        missing = blocks_for(seq.num_computed + count, size) - len(seq.blocks)
        while missing > self.blocks.num_free and self._running[-1] is not seq:
            self._preempt_newest()
        if missing > 0:
            seq.blocks += self.prefixes.allocate(min(missing, self.blocks.num_free))
        return min(count, len(seq.blocks) * size - seq.num_computed)

    def _preempt_newest(self) -> None:
        seq = self._running.pop()
        self._disclaim(seq)
        self.blocks.release(seq.preempt())
        self._waiting.appendleft(seq)
        self.counters.preemptions += 1

    def _plan_admissions(self, chunks: list[tuple[Sequence, int]]) -> None:
        chunks += self._admit_waiting(self.config.max_step_tokens - sum(count for _, count in chunks))

    def _admit_waiting(self, budget: int) -> list[tuple[Sequence, int]]:
        chunks: list[tuple[Sequence, int]] = []
        while self._waiting and budget > 0 and len(self._running) < self.config.max_running:
            seq = self._waiting[0]
            if not (self.admits or _has_started(seq)):
                break
            names = self._name_blocks(seq)[: seq.num_reusable // self.config.cache.block_size]
            found = self.prefixes.find(names)
            if len(found) < len(names) and self.prefixes.owner(names[len(found)]) is not None:
                break  # a running sequence is computing it
            # Room for all its tokens, though perhaps only a chunk is fed now: an admission must not force the
            # next preemption.  What runs already has its blocks, or none is free and nothing is admitted.
            if not self._has_room(seq, found):
                break
            self._admit(seq, found)
            count = self._grow(seq, min(seq.num_pending, budget))
            budget -= count
            chunks.append((seq, count))
        return chunks

    def _has_room(self, seq: Sequence, found: list[int]) -> bool:
        missing = blocks_for(len(seq.tokens), self.config.cache.block_size) - len(found)
        return missing <= self.blocks.num_free - sum(map(self.blocks.is_idle, found))

    def _admit(self, seq: Sequence, found: list[int]) -> None:
        self._waiting.popleft()
        self._running.append(seq)
        seq.admit()
        self.blocks.retain(found)
        seq.blocks, seq.num_named = found, len(found)
        seq.num_computed = len(found) * self.config.cache.block_size
        self.prefixes.claim(self._name_blocks(seq)[len(found) :], seq)
        self._count_hits(seq)

    def _count_hits(self, seq: Sequence) -> None:
        of_prompt = min(seq.num_computed, seq.prompt_len)
        seq.num_counted = max(seq.num_counted, of_prompt)
        if seq.cached_tokens is None:
            seq.cached_tokens = of_prompt
            seq.queue_seconds = self._clock() - seq.arrived
            self.counters.cached_tokens += of_prompt
        if self.config.prefix_cache:
            self.counters.prefix_queries += len(seq.tokens)
            self.counters.prefix_hits += seq.num_computed

    # -- the prefix cache --------------------------------------------------------------------------

    def _name_blocks(self, seq: Sequence) -> list[bytes]:
        """Names of a sequence's full blocks under the weights of now; none when they are not to be shared."""
        if seq.chain is None and self.config.prefix_cache and seq.num_computed == 0:
            root = root_digest(generation=self._generation, version=self.weight_version, salt=seq.request.cache_salt)
            seq.chain = PrefixChain(root, self.config.cache.block_size)
        return [] if seq.chain is None else seq.chain.extend(seq.tokens)

    def _share_blocks(self, seq: Sequence) -> None:
        """Let others find the blocks that the last step has filled."""
        full = seq.num_computed // self.config.cache.block_size
        if full <= seq.num_named:
            return
        names = self._name_blocks(seq)[seq.num_named : full]
        for name, block in zip(names, seq.blocks[seq.num_named :], strict=False):
            self.prefixes.put(name, block)
        seq.num_named = full

    def _disclaim(self, seq: Sequence) -> None:
        if seq.chain is not None:
            self.prefixes.disclaim(seq.chain.digests[seq.num_named :], seq)

    # -- take the result ---------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take a step's tokens; returns one event for each sequence that sampled.

        :raises ValueError: when the result does not belong to the plan or holds an id that does not exist;
            nothing changed.
        """
        self._check_result(plan, result)
        events = []
        details = result.details or (None,) * len(result.token_ids)
        rows = iter(zip(result.token_ids, result.logprobs, details, strict=True))
        for at, (seq, item) in enumerate(zip(self._land(plan), plan.items, strict=True)):
            row = None if item.sample is None else next(rows)
            if seq.state is not State.RUNNING:
                continue
            not_yet = row is not None and row[0] == NOT_YET
            self._advance(seq, item.context_len - not_yet)
            if seq.told is not None:
                scores, routed = result.scores, result.routed
                score = scores[at] if scores else None
                if score is not None and not all(map(isfinite, score.logprobs)):
                    events.append(self._not_finite(seq, "a token of the prompt"))
                    continue
                seq.told.collect(item, score, routed[at] if routed else b"")
            if row is not None and not not_yet:
                events.append(self._take(seq, *row))
        return events

    def fail(self, plan: StepPlan, message: str, code: str) -> list[TokenEvent]:
        """End every sequence of a step that could not be carried out; the others go on."""
        reason = FinishReason(type="abort", message=message, code=code)
        return [self._finish(seq, reason) for seq in self._land(plan) if seq.state is State.RUNNING]

    def _land(self, plan: StepPlan) -> tuple[Sequence, ...]:
        if self._in_flight is None or self._in_flight[0] is not plan:
            raise RuntimeError(f"step {plan.step} is not under way")
        sequences = self._in_flight[1]
        self._in_flight = None
        for seq in sequences:
            seq.in_flight = None
        return sequences

    def _check_result(self, plan: StepPlan, result: StepResult) -> None:
        wanted, got = len(plan.samplers), (len(result.token_ids), len(result.logprobs))
        if got != (wanted, wanted):
            raise ValueError(f"a step with {wanted} samplers gave {got[0]} tokens and {got[1]} log-probabilities")
        for token in result.token_ids:
            if token not in (NO_TOKEN, COMPLETE, DEAD_END, NOT_YET) and not 0 <= token < self.config.model.vocab_size:
                raise ValueError(f"a step gave token id {token}; there are {self.config.model.vocab_size}")

    def _advance(self, seq: Sequence, num_computed: int) -> None:
        seq.num_computed = num_computed
        counted = min(seq.num_computed, seq.prompt_len)
        self.counters.prompt_tokens += max(0, counted - seq.num_counted)
        seq.num_counted = max(counted, seq.num_counted)
        self._share_blocks(seq)

    def _take(self, seq: Sequence, token: int, logprob: float, details: TokenDetails | None) -> TokenEvent:
        if token == COMPLETE:
            return self._finish(seq, FinishReason(type="stop"))
        if token == DEAD_END:
            return self._finish(seq, _dead_end(seq))
        if token == NO_TOKEN:
            return self._not_finite(seq, f"token {seq.num_output}")
        if seq.request.sampling.max_new_tokens == 0:
            return self._finish(seq, FinishReason(type="length"), asked=True)
        self.counters.generation_tokens += 1
        reason = seq.append(token)
        if reason is not None:
            return self._finish(seq, reason, (token,), (logprob,), details)
        return TokenEvent(
            rid=seq.rid,
            token_ids=(token,),
            logprobs=(logprob,),
            weight_version=self.weight_version,
            cached_tokens=seq.cached_tokens or 0,
            queue_seconds=seq.queue_news,
            **({} if seq.told is None else seq.told.fields(details, token=True)),
        )

    def _not_finite(self, seq: Sequence, what: str) -> TokenEvent:
        """End a sequence whose numbers cannot be trusted; nobody is given its blocks."""
        self.counters.non_finite += 1
        self._disclaim(seq)
        self.prefixes.forget(seq.blocks)
        message = f"the model gave logits that are not finite for {what} of this request"
        return self._finish(seq, FinishReason(type="abort", message=message, code="non-finite-logits"))

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        details: TokenDetails | None = None,
        *,
        asked: bool = False,
    ) -> TokenEvent:
        (self._running if seq.state is State.RUNNING else self._waiting).remove(seq)
        self._disclaim(seq)
        self.blocks.release(seq.finish())
        del self._by_rid[seq.rid]
        self._timed.pop(seq.rid, None)
        self.counters.finished[reason.type] += 1
        return TokenEvent(
            rid=seq.rid,
            token_ids=token_ids,
            logprobs=logprobs,
            weight_version=self.weight_version,
            finish=reason,
            cached_tokens=seq.cached_tokens or 0,
            queue_seconds=seq.queue_news,
            **({} if seq.told is None else seq.told.fields(details, token=asked or bool(token_ids))),
        )

    # -- check itself ------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Order, states and blocks agree with one another.

        :raises AssertionError: when they do not (also under ``python -O``).
        """
        self.blocks.check_invariants()
        in_order = [*self._running, *self._waiting]
        arrivals = [seq.arrival for seq in in_order]
        _must(arrivals == sorted(set(arrivals)), "running before waiting, each by arrival")
        _must({seq.rid: seq for seq in in_order} == self._by_rid, "every request is running or waiting")
        _must(len(self._running) <= self.config.max_running, "at most max_running sequences")
        _must(all(seq.state is State.RUNNING for seq in self._running), "running sequences say so")
        _must(
            all(seq.state is State.WAITING and not seq.blocks for seq in self._waiting),
            "waiting ones hold nothing",
        )
        self.prefixes.check_invariants()
        held = Counter(block for seq in self._running for block in seq.blocks)
        _must(len(held) == self.blocks.num_used, "each used block has a holder")
        _must(all(self.blocks.holders(block) == count for block, count in held.items()), "and all are counted")
        running: list[object] = list(self._running)
        _must(all(owner in running for owner in self.prefixes.owners), "only running sequences have claims")
        size = self.config.cache.block_size
        for seq in self._running:
            _must(seq.num_computed < len(seq.tokens), f"{seq.rid} has a token to feed")
            _must(seq.num_computed <= len(seq.blocks) * size, f"{seq.rid} has its KV in blocks")
            _must(len(seq.blocks) <= blocks_for(len(seq.tokens) + 1, size), f"{seq.rid} holds no spare block")
            _must(seq.num_named * size <= seq.num_computed, f"{seq.rid} shares computed blocks only")


def _has_started(seq: Sequence) -> bool:
    return seq.cached_tokens is not None


def _item(seq: Sequence, count: int) -> StepItem:
    start = seq.num_computed
    complete = start + count == len(seq.tokens)
    return StepItem(
        rid=seq.rid,
        token_ids=tuple(seq.tokens[start : start + count]),
        start=start,
        block_table=tuple(seq.blocks),
        sample=seq.sample_spec() if complete else None,
        score=None if seq.told is None else seq.told.score_spec(start, count),
        routes=seq.told is not None and seq.told.routes,
    )


def _dead_end(seq: Sequence) -> FinishReason:
    if seq.request.sampling.grammar is not None:
        message = f"the grammar cannot go on after token {seq.num_output} of this request"
        return FinishReason(type="abort", message=message, code="grammar-dead-end")
    message = f"after token {seq.num_output} of this request every id is forbidden that was allowed"
    return FinishReason(type="abort", message=message, code="no-token-allowed")


def _too_late(seq: Sequence) -> FinishReason:
    seconds = seq.request.deadline_seconds or 0.0
    message = f"its {seconds:g} seconds were over after {seq.num_output} tokens"
    return FinishReason(type="abort", message=message, code="deadline-exceeded")


def _check_limits(config: EngineConfig) -> None:
    least = {"max_running": 1, "max_step_tokens": 1, "max_waiting": 0, "max_context": 2}
    for name, low in least.items():
        value = getattr(config, name)
        if value < low:
            raise UsageError(f"{name} is {value}", [("needed", f"at least {low}")])
    cache = config.cache
    if cache.block_size < 1 or cache.num_blocks < 1:
        raise UsageError(f"a KV cache of {cache.num_blocks} blocks of {cache.block_size} tokens holds nothing")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"does not hold: {what}")
