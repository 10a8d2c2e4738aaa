"""Stand-ins at the seams: a runner that needs no model but keeps a real paged KV memory."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gtp_serve.config import CacheConfig, EngineConfig, ModelConfig
from gtp_serve.engine.step import NO_TOKEN, SampleSpec, StepPlan, StepResult
from gtp_serve.request import Request, SamplingParams

TINY_MODEL = ModelConfig(
    family="llama",
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=16,
    vocab_size=50,
    vocab_rows=64,
    max_context=256,
    dtype="float32",
    eos_token_ids=(7,),
)


def engine_config(*, num_blocks: int = 64, block_size: int = 4, **limits: int) -> EngineConfig:
    """A configuration with small numbers; the model's eos is 7, its ids are 0 to 49."""
    config = EngineConfig(
        model=TINY_MODEL,
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
        dtype="float32",
        max_context=256,
        weight_version="v0",
    )
    return replace(config, **limits)  # type: ignore[arg-type]


def request(rid: str, prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> Request:
    """A request with the given sampling parameters."""
    return Request(rid=rid, input_ids=tuple(prompt), sampling=SamplingParams(**sampling))


def scripted_token(prefix: Sequence[int], spec: SampleSpec, vocab_size: int = TINY_MODEL.vocab_size) -> int:
    """The next token as a fixed function of everything before it, the seed (if drawn) and what is banned."""
    salt = f"{spec.seed} {spec.index}" if spec.temperature > 0 else ""
    token = zlib.crc32(f"{salt} {tuple(prefix)}".encode()) % vocab_size
    while token in spec.banned:
        token = (token + 1) % vocab_size
    return token


def scripted_logprob(prefix: Sequence[int]) -> float:
    """A log-probability that tells prefixes apart; exact in float32."""
    return -(zlib.crc32(str(tuple(prefix)).encode()) % 4096) / 256


def scripted_output(req: Request, seed: int = 0, model: ModelConfig = TINY_MODEL) -> tuple[int, ...]:
    """What a ScriptedRunner must generate for a request, whatever runs beside it."""
    sampling = req.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
    tokens = list(req.input_ids)
    output: list[int] = []
    while len(output) < sampling.max_new_tokens and not (output and output[-1] in ends):
        spec = SampleSpec(
            temperature=sampling.temperature,
            top_k=-1,
            top_p=1.0,
            min_p=0.0,
            seed=seed if sampling.seed is None else sampling.seed,
            index=len(output),
            banned=tuple(sorted(ends)) if len(output) < sampling.min_new_tokens else (),
        )
        output.append(scripted_token(tokens, spec, model.vocab_size))
        tokens.append(output[-1])
    return tuple(output)


@dataclass(kw_only=True)
class ScriptedRunner:
    """Writes each fed token into its slot and reads the whole context back through the block table.

    A wrong slot, a stale or shared block, a skipped or repeated position gives a wrong token or raises.

    :param not_finite: rids whose logits are not finite.
    :param before: called with each plan; may raise.
    """

    delay: float = 0.0
    not_finite: frozenset[str] = frozenset()
    before: Callable[[StepPlan], None] = lambda plan: None
    plans: list[StepPlan] = field(default_factory=list)
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> ScriptedPending:
        """Feed the plan."""
        self.before(plan)
        self.plans.append(plan)
        token_ids: list[int] = []
        logprobs: list[float] = []
        for item in plan.items:
            for slot, token, at in zip(item.slots(plan.block_size), item.token_ids, item.positions, strict=True):
                self.memory[slot] = (token, at)
        for item in plan.samplers:
            assert item.sample is not None
            prefix = self._context(item.block_table, item.context_len, plan.block_size)
            bad = item.rid in self.not_finite
            token_ids.append(NO_TOKEN if bad else scripted_token(prefix, item.sample))
            logprobs.append(scripted_logprob(prefix))
        return ScriptedPending(StepResult(token_ids=tuple(token_ids), logprobs=tuple(logprobs)), self.delay)

    def _context(self, table: Sequence[int], length: int, block_size: int) -> list[int]:
        entries = [self.memory[table[at // block_size] * block_size + at % block_size] for at in range(length)]
        if [at for _, at in entries] != list(range(length)):
            raise AssertionError(f"the KV memory holds other positions: {entries}")
        return [token for token, _ in entries]


@dataclass
class ScriptedPending:
    """A result that is there after a delay."""

    result: StepResult
    delay: float = 0.0

    def wait(self) -> StepResult:
        """The result."""
        if self.delay:
            time.sleep(self.delay)
        return self.result
