"""The engine in the caller's own process: no HTTP, no other process.

with LLM("/ckpts/my-run") as llm:
    for completion in llm.generate(["2+2=", "The sky is"], max_new_tokens=16, temperature=0):
        print(completion.text)
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec
from msgspec import structs

from gtp_serve.completion import Completion, Delta, Growing, Score
from gtp_serve.config import AttentionBackend, Quant
from gtp_serve.embedded import EmbeddedOptions, open_engine
from gtp_serve.engine.caller import Caller
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.limits import MAX_SEED
from gtp_serve.engine.messages import EngineStats
from gtp_serve.errors import EngineFault, NoTokenizer, QueueFull, RequestRejected, UpdateFailed, UsageError
from gtp_serve.loaders.chat_prompt import encode_chat
from gtp_serve.loaders.tokenizer import Tokenizer
from gtp_serve.progress import Bar
from gtp_serve.refit.orders import (
    Begin,
    Control,
    DiskOrder,
    InFlight,
    RollBack,
    UpdateRecord,
    UpdateRequest,
    WeightsStatus,
)
from gtp_serve.refit.versions import next_label
from gtp_serve.request import LogprobOptions, Request, SamplingParams, TokenEvent
from gtp_serve.sizes import parse_size
from gtp_serve.text import special_stops
from gtp_serve.wanted import Prompt, Prompts, SamplingForm, Wanted, read_prompts, read_wanted

Messages = Sequence[Mapping[str, Any]]
_R = TypeVar("_R", UpdateRequest, RollBack)
_UPDATE_POLL_SECONDS = 0.005


class LLM:
    """A checkpoint, loaded and ready.  Safe to use from several threads, whose requests share steps.

    :param ckpt: Megatron torch_dist folder, Hugging Face folder or GGUF file.
    :param context: most tokens of prompt plus output; by default what the model and the memory allow.
    :param kv_memory: bytes, or a size such as ``"4GiB"``; by default what fits.
    :param max_running: sequences in one step.
    :param tokenizer: folder with ``tokenizer.json``, by default the checkpoint's; False: token ids only.
    :param quant: ``int8`` has products read an int8 form of the weights: faster on a CPU, and less exact.
    :param deterministic: a token's log-probability has the same bits whatever is computed beside it; slower.
    :param graphs: record decode steps and replay them, where the device can.
    :param attention_backend: what computes attention on a GPU; flashinfer and flash-attn are extras.
    :param refit_memory: ``staged`` has room for a second set of weights, so that new ones arrive while the old ones
        serve; ``inplace`` has not; by default what fits.
    :param progress: show loading on a terminal.
    :raises GtpServeError: whatever is wrong with the checkpoint, the memory or the device.
    """

    def __init__(
        self,
        ckpt: str | Path,
        *,
        tp: int = 1,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        context: int | None = None,
        kv_memory: int | str | None = None,
        mem_fraction: float | None = None,
        max_running: int | None = None,
        tokenizer: str | Path | Literal[False] | None = None,
        chat_template: str | Path | None = None,
        iteration: int | None = None,
        quant: Quant = "none",
        deterministic: bool = False,
        prefix_cache: bool = True,
        graphs: bool = True,
        refit_memory: Literal["auto", "staged", "inplace"] = "auto",
        attention_backend: AttentionBackend = "auto",
        progress: bool = True,
    ) -> None:
        if tp != 1:
            raise UsageError(
                f"tp={tp}: LLM computes in this process, which is one rank", [("try", f"gtp-serve --tp {tp}")]
            )
        options = EmbeddedOptions(
            device=device,
            dtype=dtype,
            context=context,
            mem_fraction=mem_fraction,
            kv_memory=parse_size(kv_memory) if isinstance(kv_memory, str) else kv_memory,
            max_running=max_running,
            prefix_cache=prefix_cache,
            graphs=graphs,
            attention=attention_backend,
            quant=quant,
            deterministic=deterministic,
            refit_memory=refit_memory,
        )
        embedded = open_engine(
            Path(ckpt),
            options,
            tokenizer=tokenizer,
            chat_template=chat_template,
            iteration=iteration,
            progress=progress,
        )
        self.tokenizer = embedded.tokenizer
        """None when there is none."""
        self.config = embedded.engine.config
        """What the engine was built for: dtype, device, context, KV blocks."""
        self._grammars = embedded.grammars
        self._engine: Engine | None = embedded.engine
        assert embedded.engine.updates is not None  # open_engine makes them
        self._caller = Caller(embedded.engine.updates)
        self._fault: EngineFault | None = None
        self._lock = threading.RLock()
        self._inboxes: dict[str, deque[TokenEvent]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back.  Whatever runs ends with an error; a second call does nothing."""
        with self._lock:
            if self._engine is not None:
                self._caller.close()
            self._engine = None
            self._inboxes.clear()
            if self._grammars is not None:
                self._grammars.close()

    def stats(self) -> EngineStats:
        """The engine's numbers as of now."""
        with self._lock:
            return self._running().stats()

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingForm | Sequence[SamplingForm] | None = None,
        *,
        n: int = 1,
        return_logprob: bool = True,
        top_logprobs: int = 0,
        return_routed_experts: bool = False,
        progress: bool = True,
        **fields: Any,
    ) -> list[Completion]:
        """Complete prompts, all at once; a list in their order, ``n`` in a row for each.

        :param prompts: a text, a list of token ids, or a list of either.
        :param sampling: for all prompts, or one for each; its fields may be given as keywords instead, with
            ``stop``, ``no_stop_trim``, ``skip_special_tokens``, ``json_schema``, ``regex``, ``choice``, ``lark``.
        :param n: with a seed, the sequences of a prompt take it and the following ones.
        :param return_routed_experts: say of each token which experts it went to, in each MoE layer.
        :raises UsageError: for arguments that cannot mean anything.
        :raises RequestRejected: for a prompt that cannot be answered; none is answered then.
        """
        if return_routed_experts and self.config.model.moe is None:
            raise UsageError("return_routed_experts: this model has no experts")
        return self._complete(
            [self._encode(prompt) for prompt in read_prompts(prompts)],
            sampling,
            fields,
            n=n,
            with_logprobs=return_logprob,
            options=_logprob_options(top_logprobs),
            routed=return_routed_experts,
            progress=progress,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingForm | Sequence[SamplingForm] | None = None,
        *,
        n: int = 1,
        return_logprob: bool = True,
        top_logprobs: int = 0,
        progress: bool = True,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """The assistant's next message in one or several conversations.

        :param messages: objects with ``role`` and ``content``; or a list of such lists.
        :param template: further variables for the chat template, for example ``tools``.
        :raises RequestRejected: also when there is no chat template.
        """
        several = not messages or not isinstance(messages[0], Mapping)
        conversations: Sequence[Messages] = messages if several else [messages]  # type: ignore[assignment, list-item]
        return self._complete(
            [self._render(conversation, template or {}) for conversation in conversations],
            sampling,
            fields,
            n=n,
            with_logprobs=return_logprob,
            options=_logprob_options(top_logprobs),
            progress=progress,
        )

    def stream(self, prompt: Prompt, sampling: SamplingForm | None = None, **fields: Any) -> Iterator[Delta]:
        """One completion, token by token.  Closing the iterator ends the sequence."""
        (one,) = read_prompts(prompt)
        (wanted,) = read_wanted(sampling, fields, 1)
        request, growing = self._job(self._encode(one), wanted, 0, None)
        return self._deltas(request, growing)

    def score(self, items: Prompts, *, start: int = 0, progress: bool = True) -> list[Score]:
        """Log-probabilities of the tokens of texts or lists of ids, each after those before it; nothing is generated.

        :param start: leave out the tokens up to this one, a prompt's say; they are still read.
        """
        wanted = Wanted(
            sampling=SamplingParams(max_new_tokens=0), text=read_wanted(None, {}, 1)[0].text, max_is_default=False
        )
        options = LogprobOptions(prompt_start=start)
        texts = [self._encode(item) for item in read_prompts(items)]
        for ids in texts:
            _check_start(start, max(1, len(ids)))  # without tokens it is refused for that
        jobs = [self._job(ids, wanted, 0, options) for ids in texts]
        self._run(jobs, Bar("scoring", len(jobs), unit="sequences", wanted=progress))
        return [
            Score(ids=request.input_ids, start=start, logprobs=_require_scored(growing)) for request, growing in jobs
        ]

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weights(self) -> WeightsStatus:
        """Which weights serve, which are on their way, which have been."""
        with self._lock:
            self._running()
            return self._caller.updates.status()

    def update_weights(
        self,
        path: str | Path,
        version: str | None = None,
        *,
        in_flight: InFlight = "keep",
        iteration: int | None = None,
        dry_run: bool = False,
    ) -> UpdateRecord:
        """Put a checkpoint's weights in place of those that serve; returns when they are.

        Other threads go on generating meanwhile, with the old weights up to one token and the new ones from the next.

        :param version: label of the new weights, by default the one after the present one.
        :param in_flight: what becomes of sequences that run: they keep the KV of the old weights, compute it again
            (``recompute``), are waited for, or end (``abort``).
        :param dry_run: read and check only.
        :raises UpdateRefused: as things are, it cannot be.
        :raises UpdateFailed: something is wrong with the checkpoint; the old weights go on serving.
        """
        order = DiskOrder(path=str(Path(path).absolute()), iteration=iteration)
        label = version if version is not None else next_label(self.weights.version)
        request = _checked(UpdateRequest(order=order, version=label, in_flight=in_flight, dry_run=dry_run))
        update = uuid.uuid4().hex
        self._control(Begin(request=request, id=update))
        while (record := self._ended(update)) is None:
            self._drive()
        if record.code:
            raise UpdateFailed(record.message, record.details, code=record.code)
        return record

    def roll_back(self, *, in_flight: InFlight = "keep") -> UpdateRecord:
        """Back to the weights before the last update, bit for bit; a second time: forth again.

        :raises UpdateRefused: there are none.
        """
        return msgspec.convert(self._control(_checked(RollBack(in_flight=in_flight))), UpdateRecord)

    def _ended(self, update: str) -> UpdateRecord | None:
        return next((record for record in self.weights.history if record.id == update), None)

    def _control(self, command: Control) -> Any:
        with self._lock:
            self._running()
            answer = self._caller.ask(command)
        while not answer.done():
            self._drive()
        return answer.result()

    def _drive(self) -> None:
        """Have the engine go on, unless another thread does."""
        if self._lock.acquire(timeout=_UPDATE_POLL_SECONDS):
            try:
                worked = self._go_on(self._running())
            finally:
                self._lock.release()
            if not worked:
                time.sleep(_UPDATE_POLL_SECONDS)

    # -- from arguments to requests ----------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        return tuple(self._require_tokenizer("a text").encode(prompt))

    def _render(self, messages: Messages, variables: Mapping[str, Any]) -> tuple[int, ...]:
        tokenizer = self._require_tokenizer("a conversation")
        others = {name: value for name, value in variables.items() if name != "add_generation_prompt"}
        prompt = bool(variables.get("add_generation_prompt", True))
        return tuple(encode_chat(tokenizer, messages, add_generation_prompt=prompt, variables=others))

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise NoTokenizer(
                f"{what} needs a tokenizer, and there is none",
                [("try", 'LLM(..., tokenizer="/path/to/hf-folder"), or token ids')],
            )
        return self.tokenizer

    def _complete(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingForm | Sequence[SamplingForm] | None,
        fields: Mapping[str, Any],
        *,
        n: int,
        with_logprobs: bool,
        options: LogprobOptions | None,
        progress: bool,
        routed: bool = False,
    ) -> list[Completion]:
        if type(n) is not int or n < 1:
            raise UsageError(f"n is {n!r}", [("needed", "a whole number, 1 or more")])
        wanted = read_wanted(sampling, fields, len(prompts))
        jobs = [
            self._job(ids, one, sample, options, routed)
            for ids, one in zip(prompts, wanted, strict=True)
            for sample in range(n)
        ]
        self._run(jobs, Bar("generating", len(jobs), unit="sequences", wanted=progress))
        return [growing.whole(with_logprobs=with_logprobs) for _, growing in jobs]

    def _job(
        self,
        ids: tuple[int, ...],
        wanted: Wanted,
        sample: int,
        options: LogprobOptions | None,
        routed: bool = False,
    ) -> tuple[Request, Growing]:
        sampling, stop = wanted.sampling, wanted.text.stop
        hidden: dict[int, str] = {}
        if stop:
            hidden = special_stops(stop, self._require_tokenizer("a stop string"), self.config.model.vocab_size)
        new = sampling.max_new_tokens
        if wanted.max_is_default:
            new = max(min(new, self.config.max_context - len(ids)), sampling.min_new_tokens, 1)
        sampling = structs.replace(
            sampling,
            max_new_tokens=new,
            seed=_nth_seed(sampling.seed, sample),
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *hidden))),
        )
        request = Request(
            rid=uuid.uuid4().hex,
            input_ids=ids,
            sampling=sampling,
            logprobs=options,
            return_routed_experts=routed,
        )
        growing = Growing(ids, self.tokenizer, wanted.text, hidden_stops=hidden, min_tokens=sampling.min_new_tokens)
        return request, growing

    # -- driving the engine ------------------------------------------------------------------------

    def _run(self, jobs: Sequence[tuple[Request, Growing]], bar: Bar) -> None:
        """Until all are finished; whatever happens, none of them is left in the engine."""
        waiting, running = deque(jobs), dict[str, Growing]()
        self._check_grammars([request for request, _ in jobs])
        tokens = 0
        with bar:
            try:
                while waiting or running:
                    self._admit(waiting, running)
                    for rid, event in self._next_events(running):
                        growing = running[rid]
                        tokens += len(event.token_ids)
                        if growing.add(event):
                            del running[rid]
                            self._forget(rid)
                            bar.advance(f"{tokens} tokens")
            finally:
                for rid in running:
                    self._forget(rid)

    def _admit(self, waiting: deque[tuple[Request, Growing]], running: dict[str, Growing]) -> None:
        """Hand over what the engine's queue takes."""
        while waiting and len(running) < self.config.max_waiting:
            request, growing = waiting[0]
            try:
                self._add(request)
            except QueueFull:
                if running:
                    return
                raise
            running[request.rid] = growing
            waiting.popleft()

    def _check_grammars(self, requests: Sequence[Request]) -> None:
        """A grammar that is not served is refused before anything runs, by the compiler's own words."""
        grammars = {request.sampling.grammar for request in requests} - {None}
        if grammars and self._grammars is None:
            self._require_tokenizer("a grammar")
        for grammar in grammars:
            if grammar is not None and self._grammars is not None:
                self._grammars.compile(grammar).result()

    def _deltas(self, request: Request, growing: Growing) -> Iterator[Delta]:
        self._check_grammars([request])
        self._add(request)
        try:
            while growing.finish is None:
                for _, event in self._next_events({request.rid: growing}):
                    growing.add(event)
                    yield growing.news()
        finally:
            self._forget(request.rid)

    def _running(self) -> Engine:
        if self._fault is not None:
            raise self._fault
        if self._engine is None:
            raise UsageError("this LLM is closed")
        return self._engine

    def _add(self, request: Request) -> None:
        with self._lock:
            self._running().add(request)
            self._inboxes[request.rid] = deque()

    def _forget(self, rid: str) -> None:
        """End a sequence, if it still runs, and throw away what else comes of it."""
        with self._lock:
            self._inboxes.pop(rid, None)
            if self._engine is not None:
                self._engine.abort(rid)

    def _next_events(self, wanted: Mapping[str, Growing]) -> list[tuple[str, TokenEvent]]:
        """Events of some sequences; steps until there is one.  Those of others go to their inboxes."""
        while True:
            with self._lock:
                engine = self._running()
                found = [(rid, box.popleft()) for rid in wanted if (box := self._inboxes.get(rid))]
                if found:
                    return found
                if not engine.has_requests():
                    raise EngineFault("the engine lost a request")
                worked = self._go_on(engine)
            if not worked:  # weights are being written where they serve
                time.sleep(_UPDATE_POLL_SECONDS)

    def _go_on(self, engine: Engine) -> bool:
        """One step, if there is one to do, after a look at the updates; its events go to the inboxes."""
        try:
            engine.check()
            self._caller.poll()
            if not engine.has_work():
                return False
            events = engine.step()
        except EngineFault as fault:
            self._fault = fault
            raise
        for event in events:
            if event.rid in self._inboxes:
                self._inboxes[event.rid].append(event)
        return True


def _nth_seed(seed: int | None, sample: int) -> int | None:
    """Of the n sequences of one prompt; a seed that cannot be stays what it is, for the engine to refuse."""
    if seed is None or not 0 <= seed <= MAX_SEED:
        return seed
    return (seed + sample) % (MAX_SEED + 1)


def _checked(request: _R) -> _R:
    """The same, once its fields are known to be of their types.

    :raises UsageError: naming the field.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(request), type(request))
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(f"an argument of the update is not what it must be: {error}") from error


def _check_start(start: int, count: int) -> None:
    if type(start) is not int or not 0 <= start < count:
        raise UsageError(f"start is {start!r} and there are {count} tokens", [("possible", f"0 to {count - 1}")])


def _logprob_options(top_logprobs: int) -> LogprobOptions | None:
    return LogprobOptions(top_n=top_logprobs) if top_logprobs else None


def _require_scored(growing: Growing) -> tuple[float, ...]:
    finish = growing.finish
    if finish is not None and finish.type == "abort":
        raise RequestRejected(finish.message, code=finish.code or None)
    return growing.prompt_logprobs
