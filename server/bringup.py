"""From a checkpoint path to a serving engine, phase by phase, while the HTTP side already answers.

Imported by the serve command after its port is open: these imports (tokenizers, zmq, the loaders) take
longer than a user should wait for the first answer.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from gtp_serve import __version__
from gtp_serve.budget import Budget, plan_memory
from gtp_serve.config import EngineConfig, ModelConfig
from gtp_serve.engine.client import EngineClient
from gtp_serve.engine.messages import Phase
from gtp_serve.engine.process import WorkerProcess
from gtp_serve.errors import NoTokenizer, UsageError
from gtp_serve.hardware import Hardware, count_threads, find_hardware
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.checkpoint import Checkpoint
from gtp_serve.loaders.facts import Facts
from gtp_serve.loaders.manifest import check_manifest
from gtp_serve.loaders.tokenizer import Tokenizer, load_tokenizer, model_with_tokenizer
from gtp_serve.loaders.tokenizer_files import TokenizerFiles, read_template, tokenizer_at
from gtp_serve.server.early_engine import EarlyEngine
from gtp_serve.server.grammar_check import GrammarChecker, checker_argv
from gtp_serve.server.launch import Launch, absolute, first_prompt_ids, launch_argv, saved_overrides, write_order
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.page.picture import describe_checkpoint
from gtp_serve.server.startup import ReadyNote, Reporter
from gtp_serve.server.state import Managed, ServerState, Serving
from gtp_serve.sizes import GIB, format_gib

_FIRST_TEXT = "2+2="
_START_ENGINE = "start engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the checkpoint is, read without a weight."""

    model: ModelConfig
    facts: Facts
    files: TokenizerFiles | None
    path: Path
    described: dict[str, Any]
    """For ``GET /checkpoint``."""


class Bringup:
    """One start of the engine.  ``client`` is there from the moment the engine process runs."""

    def __init__(
        self,
        options: ServeOptions,
        reporter: Reporter,
        state: ServerState,
        metrics: Metrics,
        *,
        port: Phase,
        url: str,
        started: float,
        early: EarlyEngine | None = None,
    ) -> None:
        self.client: Managed | None = None
        self._early = early
        self._options = options
        self._reporter = reporter
        self._state = state
        self._metrics = metrics
        self._port = port
        self._url = url
        self._started = started
        self._engine_started = started
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_json: str | None = None

    async def run(self) -> Managed:
        """Until the server is ready.

        :raises GtpServeError: whatever is in the way, before any weight is read where that is possible.
        """
        options = self._options
        hardware = await self._find_hardware()
        self._reporter.title(_title(hardware))
        self._reporter.phase(self._port)
        with self._phase("read checkpoint index") as say:
            found = await asyncio.to_thread(_look, options)
            say(f"{found.facts.num_tensors} tensors, all shapes match")
        self._reporter.fact("checkpoint", _checkpoint_lines(found))
        await self._verify(found)
        with self._phase("read tokenizer") as say:
            files = _tokenizer_files(options, found)
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, options, files)
            self._tokenizer_json = None if files is None else absolute(files.tokenizer_json)
            say("none (--no-tokenizer)" if self._tokenizer is None else "tokenizer.json")
        self._reporter.fact("tokenizer", [_tokenizer_line(options, found, self._tokenizer)])
        model = model_with_tokenizer(found.model, self._tokenizer)
        budget = plan_memory(model, logical_tensors(model), options, hardware)
        if options.max_waiting is not None:
            budget = replace(budget, engine=replace(budget.engine, max_waiting=options.max_waiting))
        self._reporter.fact("memory", _memory_lines(budget))
        self._reporter.fact("new weights", [_refit_line(options, budget)])
        for warning in found.facts.warnings:
            self._reporter.line("WARNING", "checkpoint", {"says": warning})
        return await self._start_engine(found, budget, hardware)

    async def _verify(self, found: Found) -> None:
        """Compare the files with the operator's list, or say that nobody has."""
        manifest = self._options.manifest
        if manifest is None:
            self._reporter.fact("files", ["not verified (no --manifest)"])
            return
        with self._phase("verify files") as say:
            count = await asyncio.to_thread(check_manifest, manifest, found.path)
            say(f"{count / GIB:.2f} GiB as {manifest} lists them")

    async def _start_engine(self, found: Found, budget: Budget, hardware: Hardware) -> Managed:
        launch = self._launch(found, budget, hardware)
        self._engine_started = time.monotonic()
        self._on_phase(Phase(name=_START_ENGINE, state="running"))
        client = await self._start_client(launch)
        self._serve(client, found, budget)
        return client

    async def _find_hardware(self) -> Hardware:
        """Of the machine where the engine is to run."""
        return await asyncio.to_thread(find_hardware)

    def _launch(self, found: Found, budget: Budget, hardware: Hardware) -> Launch:
        options = self._options
        encoded = self._tokenizer.encode(_FIRST_TEXT) if self._tokenizer is not None else []
        return Launch(
            ckpt=absolute(options.ckpt),
            iteration=options.iteration,
            saved=options.saved,
            engine=budget.engine,
            threads=options.threads or max(1, count_threads(hardware.cores) // options.tp),
            tokenizer=self._tokenizer_json,
            refit_seconds=options.refit_timeout,
            refit_host=_meeting_host(options),
            first_prompt=first_prompt_ids(encoded, budget.engine.model.vocab_size, budget.engine.model.bos_token_id),
        )

    async def _start_client(self, launch: Launch) -> Managed:
        """The engine, once it serves; ``client`` is set as soon as there is something to stop."""
        self.client = client = await EngineClient.open(
            lambda endpoint: self._connect(launch, endpoint), on_phase=self._on_phase
        )
        await client.wait_ready()
        return client

    async def _connect(self, launch: Launch, endpoint: str) -> WorkerProcess:
        """The process that was started early, or one that starts now."""
        if self._early is not None:
            return await WorkerProcess.adopt(self._early.hand_over(write_order(launch, endpoint)))
        argv = launch_argv(launch, warnings=self._options.verbosity > 0)
        return await WorkerProcess.spawn([*argv, "--endpoint", endpoint])

    def _serve(self, client: Managed, found: Found, budget: Budget) -> None:
        seconds = time.monotonic() - self._started
        name = self._options.name or _default_name(self._options.ckpt)
        facts = {"num_parameters": found.facts.parameters, "checkpoint_format": found.facts.format}
        if found.facts.iteration is not None:
            facts["iteration"] = found.facts.iteration
        self._metrics.startup.labels("total").set(seconds)
        self._state.set_serving(
            Serving(
                client=client,
                engine=budget.engine,
                tokenizer=self._tokenizer,
                name=name,
                grammars=self._grammars(budget.engine.model),
                facts=facts | self._more_facts(),
                checkpoint=found.described,
            )
        )
        self._reporter.ready(
            ReadyNote(
                seconds=seconds,
                weight_version=budget.engine.weight_version,
                url=self._url,
                example=_example(
                    self._url, with_text=self._tokenizer is not None, with_key=self._options.api_key is not None
                ),
                drain_seconds=self._options.drain_timeout,
                page=self._options.page,
            )
        )

    def _more_facts(self) -> dict[str, Any]:
        """Further lines of ``/model_info``."""
        return {}

    def _grammars(self, model: ModelConfig) -> GrammarChecker | None:
        if self._tokenizer_json is None:
            return None
        return GrammarChecker(checker_argv(self._tokenizer_json, model.vocab_size, model.eos_token_ids))

    def _on_phase(self, phase: Phase) -> None:
        if phase.state == "ok":
            phase = self._finished(phase)
        self._state.set_phase(phase)
        self._reporter.phase(phase)
        if phase.state == "ok":
            self._metrics.startup.labels(phase.name.lower().replace(" ", "_")).set(phase.seconds)

    def _finished(self, phase: Phase) -> Phase:
        """What only this side knows: how long the process took to come up, and the first token's text."""
        if phase.name == _START_ENGINE:
            return structs.replace(phase, seconds=time.monotonic() - self._engine_started)
        if phase.name == "first token":
            return structs.replace(phase, detail=self._show_token(phase.detail))
        return phase

    def _show_token(self, token: str) -> str:
        if self._tokenizer is None or not token.isdigit():
            return f"id {token}"
        text = self._tokenizer.decode([int(token)], skip_special_tokens=False)
        return f"{_quote(_FIRST_TEXT)} -> {_quote(text)}"

    @contextmanager
    def _phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """A phase of this process; what is said in it becomes its line's detail."""
        started = time.monotonic()
        said: list[str] = []
        self._on_phase(Phase(name=name, state="running"))
        try:
            yield said.append
        except BaseException:
            self._on_phase(Phase(name=name, state="failed", seconds=time.monotonic() - started))
            raise
        self._on_phase(Phase(name=name, state="ok", detail=" ".join(said), seconds=time.monotonic() - started))


def _meeting_host(options: ServeOptions) -> str:
    """One address: a port for trainers is never opened on all interfaces because the server's own is."""
    if options.refit_host is not None:
        return options.refit_host
    return "127.0.0.1" if options.host in ("", "0.0.0.0", "::", "*") else options.host


def _default_name(ckpt: Path) -> str:
    """The folder's name; a Megatron iteration is named after its run."""
    path = ckpt.absolute()
    name = path.parent.name if path.name.startswith("iter_") else path.name
    return os.fsencode(name).decode("utf-8", "replace")  # a file's name need not be valid text, a model's is


def _quote(text: str) -> str:
    return '"' + "".join(char if char.isprintable() else "\ufffd" for char in text) + '"'


def _look(options: ServeOptions) -> Found:
    checkpoint: Checkpoint = open_checkpoint(
        options.ckpt, iteration=options.iteration, saved=saved_overrides(options.saved)
    )
    try:
        return Found(
            model=checkpoint.config,
            facts=checkpoint.facts,
            files=checkpoint.tokenizer,
            path=Path(checkpoint.path),
            described=describe_checkpoint(checkpoint),
        )
    finally:
        checkpoint.close()


def _load_tokenizer(options: ServeOptions, files: TokenizerFiles | None) -> Tokenizer | None:
    template = None
    if options.chat_template is not None:
        if not options.chat_template.is_file():
            raise UsageError(f"--chat-template {options.chat_template} is not a file")
        template = read_template(options.chat_template)
    return None if files is None else load_tokenizer(files, chat_template=template)


def _tokenizer_files(options: ServeOptions, found: Found) -> TokenizerFiles | None:
    """The tokenizer that the options and the checkpoint lead to; None when none is wanted.

    :raises NoTokenizer: when there is none and nobody said that none is wanted.
    """
    if options.no_tokenizer:
        return None
    files = tokenizer_at(options.tokenizer) if options.tokenizer is not None else found.files
    if files is None:
        saved = found.facts.saved_tokenizer
        raise NoTokenizer(
            "this checkpoint has no tokenizer" + (", and its saved path is not here" if saved else ""),
            [
                *([("saved as", saved)] if saved else []),
                ("try", "--tokenizer /path/to/hf-folder, or --no-tokenizer (token ids only)"),
            ],
        )
    return files


def _title(hardware: Hardware) -> list[str]:
    torch = hardware.torch
    words = [f"gtp-serve {__version__}", f"torch {torch.version}" if torch is not None else "no torch"]
    if hardware.gpus:
        first = hardware.gpus[0]
        words += [f"CUDA {torch.cuda if torch is not None else '?'}"]
        words += [f"{len(hardware.gpus)} x {first.name} ({format_gib(first.memory.total)})"]
    else:
        words += [f"cpu ({hardware.cores} cores, {format_gib(hardware.ram.total)})"]
    return words


def _checkpoint_lines(found: Found) -> list[str]:
    facts, model = found.facts, found.model
    several = f"   (newest of {len(facts.iterations)} iterations)" if len(facts.iterations) > 1 else ""
    if facts.iteration is not None and facts.iterations and facts.iteration != max(facts.iterations):
        several = f"   (one of {len(facts.iterations)} iterations)"
    saved = ""
    if facts.format == "megatron":
        grid = facts.saved
        parts = [f"TP{grid.tp}", f"PP{grid.pp}", f"EP{grid.ep}", f"GTP{grid.gtp}"]
        saved = f", saved with {' '.join(parts)}"
    step = f", step {facts.iteration}" if facts.iteration is not None else ""
    padding = f" (+{model.vocab_rows - model.vocab_size} pad)" if model.vocab_rows > model.vocab_size else ""
    size = f"{facts.parameters / 1e9:.2f} B" if facts.parameters >= 1e8 else f"{facts.parameters / 1e6:.2f} M"
    return [
        f"{found.path}{several}",
        f"{facts.format_text}{saved}{step}",
        f"{model.family}  {model.num_layers} layers  {size} params  {model.dtype}  vocab {model.vocab_size}{padding}",
    ]


def _tokenizer_line(options: ServeOptions, found: Found, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "none: token ids only (--no-tokenizer)"
    folder = options.tokenizer or (found.files.folder if found.files is not None else found.path)
    chat = "chat template found" if tokenizer.has_chat_template else "no chat template"
    return f"{folder}   (tokenizer.json, {chat})"


def _memory_lines(budget: Budget) -> list[str]:
    engine = budget.engine
    weights, kv, work = (f"{part / GIB:.1f}" for part in (budget.weights, budget.kv, budget.work))
    refit = f" + refit {budget.refit / GIB:.1f}" if budget.refit else ""
    share = 100 * budget.needed / budget.memory.total if budget.memory.total else 0
    sequences = budget.kv_tokens // engine.max_context
    return [
        f"weights {weights}{refit} + KV {kv} + work {work} = {budget.needed / GIB:.1f}"
        f" of {format_gib(budget.memory.total)}  ({share:.0f}%), {engine.dtype} on {_where(engine)}",
        f"KV fits {budget.kv_tokens:,} tokens = {sequences} sequences of {engine.max_context:,}",
        *([] if budget.refit else ["one set of weights: an update is copied in place, while nothing runs"]),
    ]


def _refit_line(options: ServeOptions, budget: Budget) -> str:
    who = "with the admin key" if options.admin_key is not None else "from this machine only (no admin key)"
    return f"{budget.engine.refit_memory}, {who}"


def _where(engine: EngineConfig) -> str:
    if engine.tp == 1:
        return engine.device
    return f"{engine.device}, {engine.tp} ranks" + (" together" if engine.device == "cpu" else ", each")


def _example(url: str, *, with_text: bool, with_key: bool) -> str:
    prompt = '"text": "2+2="' if with_text else '"input_ids": [1, 2, 3]'
    body = "{" + prompt + ', "sampling_params": {"max_new_tokens": 8}}'
    key = ' -H "authorization: Bearer $KEY"' if with_key else ""
    return f"curl -s {url}/generate{key} -H 'content-type: application/json' -d {shlex.quote(body)}"
