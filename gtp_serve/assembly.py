"""The parts of an engine, built from its configuration: decoder, weights, their updates, KV cache; its first token.

What the engine process and ``LLM`` have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from gtp_serve.config import EngineConfig, ModelConfig
from gtp_serve.engine.capture import Capture
from gtp_serve.engine.engine import Engine, to_stderr
from gtp_serve.engine.graphs import DecodeGraphs, Together, alone, build_graphs, refusal
from gtp_serve.engine.runner import ForwardPass, ModelRunner
from gtp_serve.engine.step import StepPlan
from gtp_serve.errors import EngineFault, EnvironmentFault, LayoutMismatch
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.layers.int8 import Int8Weights
from gtp_serve.layers.placement import Collective, InRankOrder
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import Checkpoint, SavedOverrides, open_checkpoint
from gtp_serve.loaders.huggingface import open_stream
from gtp_serve.loaders.megatron_folder import looks_like_megatron
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.sampling import BY_TORCH, Chooser
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.mapping import MappedRange
from gtp_serve.refit.orders import DiskOrder, Report
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.rank import RankWeights
from gtp_serve.refit.shared import SharedBytes
from gtp_serve.refit.source import WeightSource
from gtp_serve.refit.staging import Sources
from gtp_serve.refit.store import WeightStore
from gtp_serve.refit.transports.foreign import ForeignGroups
from gtp_serve.refit.transports.group import GroupReceiver
from gtp_serve.request import Request, SamplingParams, TokenEvent

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FIRST_TOKEN_STEPS = 64
_STAGING_THREADS = {"cpu": 1, "cuda": 4}
"""That bring new weights beside decoding, which needs the cores itself on a CPU."""
_MAY_DIFFER = frozenset({"family", "dtype", "vocab_size", "max_context", "eos_token_ids", "bos_token_id"})
"""Fields of ModelConfig that change neither the weights' shapes nor what is computed with them."""
_NOTHING_SAID = SavedOverrides()


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
        device=config.device,
        dtype=dtype,
        head_dim=config.model.head_dim,
        block_size=config.cache.block_size,
        attention=config.attention,
        deterministic=config.deterministic,
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


def keep_weights(decoder: Decoder, config: EngineConfig, memory: MappedRange | None = None) -> WeightStore:
    """Move the parameters of a decoder, not yet filled, to where updates can exchange them.

    What is derived from them is computed by the store's ``derive`` when they are filled.

    :param memory: on a CPU, taken before for them.
    """
    store = WeightStore(decoder.targets(), memory=memory)
    if config.quant == "int8":
        table = decoder.placement.ops.int8
        if table is None:
            raise EnvironmentFault(
                f"--quant int8 needs the native CPU ops, and this engine has {decoder.placement.ops.name}"
            )
        store.attach(Int8Weights(decoder.matrices(), table))
    return store


def rank_weights(
    config: EngineConfig,
    decoder: Decoder,
    store: WeightStore,
    pool: KVPool,
    report: Callable[[Report], None],
    *,
    saved: SavedOverrides = _NOTHING_SAID,
    meeting_host: str = "127.0.0.1",
) -> RankWeights:
    """What updates one rank's weights.

    :param store: of the decoder, from ``keep_weights``.
    :param report: takes what the rank says of an update, from any thread.
    :param saved: how the trainer saves, where its checkpoints do not say.
    :param meeting_host: address on which rank 0 meets trainers.
    """
    rank = decoder.placement.tp.rank
    return RankWeights(
        rank=rank,
        store=store,
        shapes=logical_tensors(config.model),
        sources=Sources(
            disk=lambda order: open_update(order, config.model, saved),
            stream=_open_stream,
            group=GroupReceiver(rank=rank, size=config.tp),
            foreign=ForeignGroups(rank, config.device),
            meeting_host=meeting_host,
        ),
        report=report,
        threads=_STAGING_THREADS[config.device],
        stall_threads=torch.get_num_threads(),
        caches=[*pool.keys, *pool.values],
    )


def open_update(order: DiskOrder, served: ModelConfig, saved: SavedOverrides = _NOTHING_SAID) -> WeightSource:
    """A checkpoint of the model that is served.

    :raises LayoutMismatch: for another model, naming each difference.
    :raises CheckpointError: as ``open_checkpoint``.
    """
    path = Path(order.path)
    checkpoint = _open_as_saved(path, order.iteration, saved)
    names = [field.name for field in fields(ModelConfig) if field.name not in _MAY_DIFFER]
    pairs = [(name, getattr(served, name), getattr(checkpoint.config, name)) for name in names]
    details = [(name, f"{ours} is served, {theirs} was found") for name, ours, theirs in pairs if ours != theirs]
    if details:
        checkpoint.close()
        raise LayoutMismatch(f"{path} holds another model than the one that is served", details, code="other-model")
    return checkpoint.source


def _open_as_saved(path: Path, iteration: int | None, saved: SavedOverrides) -> Checkpoint:
    """What was said of the first checkpoint holds for later ones, except where they say otherwise themselves."""
    if saved != _NOTHING_SAID and path.is_dir() and looks_like_megatron(path):
        with suppress(LayoutMismatch):
            return open_checkpoint(path, iteration=iteration, saved=saved)
    return open_checkpoint(path, iteration=iteration)


def _open_stream(memory: SharedBytes) -> WeightSource:
    return open_stream(Path(f"/proc/self/fd/{memory.fd}"), len(memory.view))


def captures_steps(config: EngineConfig, decoder: Decoder) -> bool:
    """Whether decode steps are to be captured; the same on all ranks."""
    return config.graphs and refusal(decoder, config) is None


def build_pool(config: EngineConfig, decoder: Decoder, memory: MappedRange | None = None) -> KVPool:
    """The KV cache of one rank; under captured steps with the scratch block that the scheduler never sees.

    :param memory: on a CPU, taken before for it.
    """
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
        memory=None if memory is None else memory.memory,
    )


def with_graphs(
    config: EngineConfig,
    decoder: Decoder,
    pool: KVPool,
    capture: Capture | None = None,
    together: Together = alone,
) -> tuple[ForwardPass, Callable[[], None]]:
    """The decoder as the runner is to call it, and what to do between two steps: capture one more batch size.

    :param capture: how steps are recorded; CUDA graphs by default, and then only where ``captures_steps``.
    :param together: with several ranks, how rank 0 tells the others to capture a size too.
    """
    if capture is None and not captures_steps(config, decoder):
        return decoder, lambda: None
    graphs = build_graphs(decoder, pool, config, capture, together, log=to_stderr)

    def capture_one() -> None:
        graphs.capture_next()

    return graphs, capture_one


def check_addresses(model: ForwardPass) -> Callable[[], None]:
    """What raises EngineFault when captured steps of a model from ``with_graphs`` would read memory that is not in use
    any more.
    """
    return model.addresses.check if isinstance(model, DecodeGraphs) else lambda: None


class RankWork:
    """What a rank does that does not sample: the steps and captures that rank 0 says.

    :param model: as ``with_graphs`` gave it.
    """

    def __init__(self, config: EngineConfig, model: ForwardPass, pool: KVPool) -> None:
        self._model, self._runner = model, ModelRunner(model, pool, config)

    def follow(self, plan: StepPlan, bucket: int | None) -> Tensor:
        """Run the model over a plan, in this captured step or in none."""
        return self._runner.follow(plan, bucket)

    def capture(self, size: int) -> str:
        """Capture the step of this many rows; why it could not be recorded, or nothing."""
        if not isinstance(self._model, DecodeGraphs):
            raise EngineFault("rank 0 captures steps and this rank does not", code="internal")
        return self._model.capture(size)

    def check(self) -> None:
        """As ``check_addresses``."""
        check_addresses(self._model)()


def chooser_of(config: EngineConfig, decoder: Decoder) -> Chooser:
    """How this decoder's device chooses tokens; by torch alone where every step must do it by the same operations and
    its own greedy choice is not one of them.
    """
    ops = decoder.placement.ops
    if not ops.normalises and (config.deterministic or config.device != "cuda"):
        return BY_TORCH
    return Chooser(greedy=ops.greedy, normalises=ops.normalises, draw=ops.draw)


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
