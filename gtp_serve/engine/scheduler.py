"""Which sequences take part in the next step, with which tokens; who waits, yields, is done.  No torch.

Everything goes by arrival.  Running sequences are served oldest first, so decodes come before the prompt
chunks of newer ones; the rest of ``max_step_tokens`` goes to new admissions in the same order.  When blocks
run out, a sequence may take them from newer ones only: the oldest always moves, so everything ends.  Hence,
always: every running sequence is older than every waiting one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import randbits

from gtp_serve.config import EngineConfig
from gtp_serve.engine.admission import check_request
from gtp_serve.engine.sequence import Sequence, State
from gtp_serve.engine.step import NO_TOKEN, StepItem, StepPlan, StepResult
from gtp_serve.errors import QueueFull, RequestRejected, UsageError
from gtp_serve.kv.blocks import BlockAllocator, blocks_for
from gtp_serve.request import FinishReason, Request, TokenEvent


def _draw_seed() -> int:
    return randbits(63)


@dataclass(kw_only=True, slots=True)
class Counters:
    """What has happened since the start; only grows."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    non_finite: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


class Scheduler:
    """All sequences of one engine: ``add`` and ``abort``; ``schedule`` and ``commit`` (or ``fail``) in turn.

    :param draw_seed: gives a seed to a request that brings none.
    :raises UsageError: when a limit of the configuration allows nothing.
    """

    def __init__(self, config: EngineConfig, *, draw_seed: Callable[[], int] = _draw_seed) -> None:
        _check_limits(config)
        self.config = config
        self.weight_version = config.weight_version
        self.blocks = BlockAllocator(config.cache.num_blocks)
        self.counters = Counters()
        self._draw_seed = draw_seed
        self._eos = tuple(i for i in config.model.eos_token_ids if 0 <= i < config.model.vocab_size)
        self._by_rid: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._arrivals = 0
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
        seq = Sequence(request, arrival=self._arrivals, seed=seed, eos_token_ids=self._eos)
        self._arrivals += 1
        self._by_rid[request.rid] = seq
        self._waiting.append(seq)

    def _check_queue(self) -> None:
        # Requests that will start with the next step do not wait; the bound is on those behind them.
        free_places = max(0, self.config.max_running - len(self._running))
        if len(self._waiting) >= self.config.max_waiting + free_places:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting, which is the limit",
                [("try", "again in a while, or raise the limit")],
            )

    def abort(
        self, rid: str, message: str = "aborted by the client", code: str = "aborted"
    ) -> TokenEvent | None:
        """End a request in whatever state; its blocks are free at once.  None when there is no such request.

        Also legal between ``schedule`` and ``commit``: what the step gives for it is dropped.
        """
        seq = self._by_rid.get(rid)
        if seq is None:
            return None
        return self._finish(seq, FinishReason(type="abort", message=message, code=code))

    # -- decide ------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do.  Commit (or fail) it before the next."""
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
        return plan

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
        seq.blocks += self.blocks.allocate(min(max(missing, 0), self.blocks.num_free))
        return min(count, len(seq.blocks) * size - seq.num_computed)

    def _preempt_newest(self) -> None:
        seq = self._running.pop()
        self.blocks.release(seq.preempt())
        self._waiting.appendleft(seq)
        self.counters.preemptions += 1

    def _plan_admissions(self, chunks: list[tuple[Sequence, int]]) -> None:
        budget = self.config.max_step_tokens - sum(count for _, count in chunks)
        while self._waiting and budget > 0 and len(self._running) < self.config.max_running:
            seq = self._waiting[0]
            # Room for all its tokens, though perhaps only a chunk is fed now: an admission must not force the
            # next preemption.  What runs already has its blocks, or none is free and nothing is admitted.
            if self._blocks_missing(seq) > self.blocks.num_free:
                break
            count = min(seq.num_pending, budget)
            self._admit(seq, count)
            budget -= count
            chunks.append((seq, count))

    def _admit(self, seq: Sequence, count: int) -> None:
        self._waiting.popleft()
        self._running.append(seq)
        seq.admit()
        seq.blocks = self.blocks.allocate(blocks_for(count, self.config.cache.block_size))

    def _blocks_missing(self, seq: Sequence) -> int:
        return blocks_for(len(seq.tokens), self.config.cache.block_size) - len(seq.blocks)

    # -- take the result ---------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take a step's tokens; returns one event for each sequence that sampled.

        :raises ValueError: when the result does not belong to the plan or holds an id that does not exist;
            nothing changed.
        """
        self._check_result(plan, result)
        events = []
        rows = iter(zip(result.token_ids, result.logprobs, strict=True))
        for seq, item in zip(self._land(plan), plan.items, strict=True):
            row = None if item.sample is None else next(rows)
            if seq.state is not State.RUNNING:
                continue
            self._advance(seq, item)
            if row is not None:
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
        return sequences

    def _check_result(self, plan: StepPlan, result: StepResult) -> None:
        wanted, got = len(plan.samplers), (len(result.token_ids), len(result.logprobs))
        if got != (wanted, wanted):
            raise ValueError(
                f"a step with {wanted} samplers gave {got[0]} tokens and {got[1]} log-probabilities"
            )
        for token in result.token_ids:
            if token != NO_TOKEN and not 0 <= token < self.config.model.vocab_size:
                raise ValueError(f"a step gave token id {token}; there are {self.config.model.vocab_size}")

    def _advance(self, seq: Sequence, item: StepItem) -> None:
        seq.num_computed = item.context_len
        counted = min(seq.num_computed, seq.prompt_len)
        self.counters.prompt_tokens += max(0, counted - seq.num_counted)
        seq.num_counted = max(counted, seq.num_counted)

    def _take(self, seq: Sequence, token: int, logprob: float) -> TokenEvent:
        if token == NO_TOKEN:
            self.counters.non_finite += 1
            message = f"the model gave logits that are not finite for token {seq.num_output} of this request"
            return self._finish(seq, FinishReason(type="abort", message=message, code="non-finite-logits"))
        self.counters.generation_tokens += 1
        reason = seq.append(token)
        if reason is not None:
            return self._finish(seq, reason, (token,), (logprob,))
        return TokenEvent(
            rid=seq.rid, token_ids=(token,), logprobs=(logprob,), weight_version=self.weight_version
        )

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
    ) -> TokenEvent:
        (self._running if seq.state is State.RUNNING else self._waiting).remove(seq)
        self.blocks.release(seq.finish())
        del self._by_rid[seq.rid]
        self.counters.finished[reason.type] += 1
        return TokenEvent(
            rid=seq.rid,
            token_ids=token_ids,
            logprobs=logprobs,
            weight_version=self.weight_version,
            finish=reason,
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
        held = [block for seq in self._running for block in seq.blocks]
        _must(len(held) == len(set(held)) == self.blocks.num_used, "each used block has one holder")
        size = self.config.cache.block_size
        for seq in self._running:
            _must(seq.num_computed < len(seq.tokens), f"{seq.rid} has a token to feed")
            _must(seq.num_computed <= len(seq.blocks) * size, f"{seq.rid} has its KV in blocks")
            _must(len(seq.blocks) <= blocks_for(len(seq.tokens), size), f"{seq.rid} holds no spare block")


def _item(seq: Sequence, count: int) -> StepItem:
    start = seq.num_computed
    complete = start + count == len(seq.tokens)
    return StepItem(
        rid=seq.rid,
        token_ids=tuple(seq.tokens[start : start + count]),
        start=start,
        block_table=tuple(seq.blocks),
        sample=seq.sample_spec() if complete else None,
    )


def _check_limits(config: EngineConfig) -> None:
    least = {"max_running": 1, "max_step_tokens": 1, "max_waiting": 0, "max_context": 2}
    for name, low in least.items():
        value = getattr(config, name)
        if value < low:
            raise UsageError(f"{name} is {value}", [("needed", f"at least {low}")])
    cache = config.cache
    if cache.block_size < 1 or cache.num_blocks < 1:
        raise UsageError(
            f"a KV cache of {cache.num_blocks} blocks of {cache.block_size} tokens holds nothing"
        )


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"does not hold: {what}")
