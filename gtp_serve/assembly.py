"""The parts of an engine, built from its configuration: decoder, weights, KV cache; and its first token.

What the engine process and ``LLM`` have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gtp_serve.config import EngineConfig
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.graphs import SCRATCH_BLOCKS, Capture, build_graphs, refusal
from gtp_serve.engine.runner import ForwardPass
from gtp_serve.errors import EngineFault, EnvironmentFault
from gtp_serve.kv.pool import KVPool
from gtp_serve.layers.placement import Collective, InRankOrder
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import Checkpoint
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.greedy import Greedy
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.plan import build_plan
from gtp_serve.request import Request, SamplingParams, TokenEvent

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FIRST_TOKEN_STEPS = 64


def check_device(config: EngineConfig, *, rank: int = 0) -> None:
    """Make sure of the rank's device, and make it the current one: each rank has the GPU of its number.

    :raises EnvironmentFault: when it is not there.
    """
    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise EnvironmentFault("torch finds no usable GPU", [("torch", torch.__version__), ("try", "--device cpu")])
    if rank >= torch.cuda.device_count():
        raise EnvironmentFault(f"rank tp{rank} has no GPU: torch finds {torch.cuda.device_count()}")
    torch.cuda.set_device(rank)


def empty_decoder(config: EngineConfig, collective: Collective | None = None) -> Decoder:
    """One rank's decoder, not yet filled."""
    dtype = _DTYPES[config.dtype]
    ops = choose_ops(
        device=config.device, dtype=dtype, head_dim=config.model.head_dim, deterministic=config.deterministic
    )
    if config.deterministic and collective is not None:
        collective = InRankOrder(collective)
    return build_decoder(
        config.model,
        dtype=dtype,
        device=config.device,
        tp_rank=0 if collective is None else collective.rank,
        tp_size=config.tp,
        collective=collective,
        ops=ops,
    )


def fill_decoder(
    decoder: Decoder, checkpoint: Checkpoint, *, threads: int, progress: Callable[[int, int], None]
) -> int:
    """Put this rank's part of the checkpoint into its parameters; bytes read.

    :param progress: told the bytes done and in all.
    """
    targets = decoder.targets()
    plan = build_plan(checkpoint.source.shards(), [target.shard for target in targets], logical_tensors(decoder.config))
    total, done = plan.source_bytes, 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return apply_plan(plan, checkpoint.source, targets, threads=threads, progress=advance)


def captures_steps(config: EngineConfig, decoder: Decoder) -> bool:
    """Whether decode steps are to be captured: a captured collective would need all ranks to capture together."""
    return config.graphs and config.tp == 1 and refusal(decoder, config) is None


def build_pool(config: EngineConfig, decoder: Decoder) -> KVPool:
    """The KV cache of one rank; under captured steps with the scratch block that the scheduler never sees."""
    model, cache = config.model, config.cache
    scratch = SCRATCH_BLOCKS if captures_steps(config, decoder) else 0
    return KVPool(
        num_layers=model.num_layers,
        num_blocks=cache.num_blocks + scratch,
        block_size=cache.block_size,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=model.head_dim,
        dtype=_DTYPES[config.dtype],
        device=config.device,
    )


def with_graphs(
    config: EngineConfig, decoder: Decoder, pool: KVPool, capture: Capture | None = None
) -> tuple[ForwardPass, Callable[[], None]]:
    """The decoder as the runner is to call it, and what to do between two steps: capture one more batch size.

    :param capture: how steps are recorded; CUDA graphs by default, and then only where ``captures_steps``.
    """
    if capture is None and not captures_steps(config, decoder):
        return decoder, lambda: None
    graphs = build_graphs(decoder, pool, config, capture)

    def capture_one() -> None:
        graphs.capture_next()

    return graphs, capture_one


def greedy_choice(config: EngineConfig, decoder: Decoder) -> Callable[[Tensor, int], Greedy] | None:
    """The device's own way to choose in all-greedy steps; None where every step must choose by the same operations."""
    return decoder.placement.ops.greedy if config.device == "cuda" and not config.deterministic else None


def first_token(engine: Engine, prompt: Sequence[int]) -> int:
    """One greedy token through the whole engine, as a client's request would go.

    :raises EngineFault: when none comes out.
    """
    room = max(1, engine.config.max_context - 1)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    engine.add(Request(rid="first-token", input_ids=tuple(prompt[:room]), sampling=sampling))
    events: list[TokenEvent] = []
    for _ in range(_FIRST_TOKEN_STEPS):
        if not engine.has_work():
            break
        events += engine.step()
    tokens = [token for event in events for token in event.token_ids]
    if not tokens:
        reasons = [event.finish.message for event in events if event.finish is not None]
        raise EngineFault("the engine made no first token", [("engine", reasons[0])] if reasons else ())
    return tokens[0]
