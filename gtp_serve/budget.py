"""Decides before a weight is read what goes where: device, dtype, context, KV; refuses what cannot fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from gtp_serve.config import DTYPE_BYTES, AttentionBackend, CacheConfig, DType, EngineConfig, ModelConfig, Quant
from gtp_serve.errors import DoesNotFit, EnvironmentFault, UsageError
from gtp_serve.hardware import Hardware, Memory
from gtp_serve.layout.ranks import check_ranks, kv_heads_per_rank, rank_elements
from gtp_serve.layout.spans import Shape
from gtp_serve.sizes import format_gib

BLOCK_SIZE = 16
_BLOCK_SIZES = {"flash-attn": 256}
"""Where attention reads the cache in pages of one size only."""
_BACKEND_WORK = {"flashinfer": 256 << 20}
"""Bytes that attention takes beside its inputs: a workspace for all steps, and one for each recorded batch size."""
DEFAULT_MAX_RUNNING = 64
DEFAULT_FRACTION = {"cuda": 0.9, "cpu": 0.5}
MAX_STEP_TOKENS = 2048
_BASE_WORK = 256 << 20
"""Bytes that torch and the allocator take beside weights, activations and KV."""
_LEAST_CONTEXT = 512
"""A server that chose its own context must hold at least this many tokens."""


class MemoryOptions(Protocol):
    """What the caller has a say in; None and "auto" mean that it is chosen here."""

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]: ...
    @property
    def dtype(self) -> Literal["auto", "float32", "bfloat16", "float16"]: ...
    @property
    def context(self) -> int | None: ...
    @property
    def tp(self) -> int: ...
    @property
    def mem_fraction(self) -> float | None: ...
    @property
    def kv_memory(self) -> int | None: ...
    @property
    def max_running(self) -> int | None: ...
    @property
    def prefix_cache(self) -> bool: ...
    @property
    def graphs(self) -> bool: ...
    @property
    def attention(self) -> AttentionBackend: ...
    @property
    def quant(self) -> Quant: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def refit_memory(self) -> Literal["auto", "staged", "inplace"]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What was decided.  Bytes, but ``engine``; of all ranks on a CPU, of one rank on GPUs: each has its own."""

    engine: EngineConfig
    memory: Memory
    weights: int
    refit: int
    """The second set of weights, which an update fills while the first serves; 0 when updates are in place."""
    work: int
    kv: int

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return self.weights + self.refit + self.work + self.kv

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.engine.cache.num_blocks * self.engine.cache.block_size


def plan_memory(model: ModelConfig, tensors: Mapping[str, Shape], options: MemoryOptions, hardware: Hardware) -> Budget:
    """Settle every "auto" of the engine against the memory of this machine.

    :param tensors: every logical tensor of the model.
    :raises UsageError: when the model cannot be cut for this many ranks, or has fewer positions than are wanted.
    :raises DoesNotFit: with what is needed, what is there and what to try.
    :raises EnvironmentFault: when the device that was asked for is not there.
    """
    tp = options.tp
    check_ranks(model, tp)
    _check_context(model, options.context)
    device = choose_device(options, hardware)
    dtype = choose_dtype(model, options, hardware, device)
    memory = _gpu_memory(hardware, tp) if device == "cuda" else hardware.ram
    sharing = tp if device == "cpu" else 1
    max_running = options.max_running or DEFAULT_MAX_RUNNING
    elements = sum(rank_elements(name, shape, model, tp) for name, shape in tensors.items())
    _check_quant(options, hardware, device, dtype)
    weights = sharing * elements * (DTYPE_BYTES[dtype] + (options.quant == "int8"))
    work = sharing * (estimate_work(model, dtype, max_running) + _BACKEND_WORK.get(options.attention, 0))
    block_size = _BLOCK_SIZES.get(options.attention, BLOCK_SIZE)
    per_block = sharing * block_bytes(model, dtype, tp, block_size)

    def fit(refit: int) -> _Fit:
        room = _kv_room(options, device, memory, weights + refit, work)
        context, blocks = _choose_blocks(model, options, block_size, per_block, max_running, room)
        kv = blocks * per_block
        fits = kv <= room and weights + refit + work + kv <= memory.available
        return _Fit(refit=refit, context=context, blocks=blocks, fits=fits)

    chosen = _choose_sets(options, weights, fit)
    context = chosen.context
    if not chosen.fits:
        one = -(-context // block_size) * per_block
        raise _too_big(options, device, memory, weights, chosen.refit, work, context, one)
    engine = EngineConfig(
        model=model,
        cache=CacheConfig(num_blocks=chosen.blocks, block_size=block_size),
        dtype=dtype,
        device=device,
        tp=tp,
        max_context=context,
        max_running=max_running,
        max_step_tokens=max(MAX_STEP_TOKENS, max_running),
        prefix_cache=options.prefix_cache,
        graphs=options.graphs,
        attention=options.attention,
        quant=options.quant,
        deterministic=options.deterministic,
        refit_memory="staged" if chosen.refit else "inplace",
    )
    kv = chosen.blocks * per_block
    return Budget(engine=engine, memory=memory, weights=weights, refit=chosen.refit, work=work, kv=kv)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    """What there is room for beside so many bytes for a second set of weights."""

    refit: int
    context: int
    blocks: int
    fits: bool


def _choose_sets(options: MemoryOptions, weights: int, fit: Callable[[int], _Fit]) -> _Fit:
    """Two sets of weights, so that updates do not disturb serving, unless they do not fit or cost context."""
    if options.refit_memory == "inplace":
        return fit(0)
    two = fit(weights)
    if options.refit_memory == "staged":
        return two
    one = fit(0)
    return two if two.fits and two.context >= one.context else one


def _gpu_memory(hardware: Hardware, tp: int) -> Memory:
    """Of the fullest GPU among those that the ranks take."""
    if tp > len(hardware.gpus):
        raise EnvironmentFault(
            f"--tp {tp} needs {tp} GPUs, and there are {len(hardware.gpus)}",
            [("try", f"--tp {len(hardware.gpus)} or fewer, or --device cpu")],
        )
    return min((gpu.memory for gpu in hardware.gpus[:tp]), key=lambda memory: memory.available)


def most_positions(model: ModelConfig) -> int:
    """Tokens of the longest context that the model's rotary embedding is made for."""
    rope = model.rope
    if rope.scaling not in ("linear", "dynamic", "yarn"):
        return model.max_context
    return max(model.max_context, int((rope.original_context or model.max_context) * rope.factor))


def _check_context(model: ModelConfig, context: int | None) -> None:
    most = most_positions(model)
    if context is not None and context > most:
        raise UsageError(
            f"a context of {context:,} tokens is more than the model's {most:,} positions",
            [("try", f"--context {most} or less")],
        )


def _check_quant(options: MemoryOptions, hardware: Hardware, device: str, dtype: DType) -> None:
    """The int8 form of weights is read by the native CPU ops alone."""
    if options.quant == "none":
        return
    why = None
    if device != "cpu":
        why = f"the device is {device}"
    elif not hardware.native_ops:
        why = "they were not built with this package"
    elif options.attention == "torch":
        why = "--attention-backend torch serves without them"
    elif dtype == "float16":
        why = "they do not compute in float16"
    if why is not None:
        raise UsageError(f"--quant {options.quant} needs the native CPU ops, and {why}", [("try", "without --quant")])


def choose_device(options: MemoryOptions, hardware: Hardware) -> Literal["cpu", "cuda"]:
    """A GPU when torch can use one and there is one, unless the options say otherwise."""
    if options.device == "cpu" or (options.device == "auto" and not hardware.gpus):
        return "cpu"
    if not hardware.gpus:
        built = hardware.torch is not None and hardware.torch.cuda is not None
        saw = "the driver lists no GPU" if built else "the installed torch is built without CUDA"
        raise EnvironmentFault("--device cuda, but there is no GPU to use", [("saw", saw), ("try", "--device cpu")])
    return "cuda"


def choose_dtype(model: ModelConfig, options: MemoryOptions, hardware: Hardware, device: str) -> DType:
    """As saved, but float32 on a CPU on which neither the native ops nor torch are fast in it."""
    if options.dtype != "auto":
        return options.dtype
    if device == "cpu" and not (hardware.native_ops and model.dtype == "bfloat16"):
        return model.dtype if hardware.cpu_flags & _CPU_INSTRUCTIONS[model.dtype] else "float32"
    return model.dtype


_CPU_INSTRUCTIONS: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16"}),
    "float32": frozenset(),
}


def block_bytes(model: ModelConfig, dtype: DType, tp: int = 1, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of one KV block over all layers on one rank."""
    rows = kv_heads_per_rank(model, tp) * model.head_dim
    return 2 * model.num_layers * rows * block_size * DTYPE_BYTES[dtype]


def estimate_work(model: ModelConfig, dtype: DType, max_running: int) -> int:
    """Bytes of activations and logits of one rank's largest step; an estimate from above, not a measurement."""
    ffn = max(model.ffn_size, model.moe.ffn_size * model.moe.top_k if model.moe else 0)
    per_token = (6 * model.hidden_size + 2 * (model.q_rows + 2 * model.kv_rows) + 3 * ffn) * DTYPE_BYTES[dtype]
    logits = 4 * max_running * model.vocab_rows * 4
    return _BASE_WORK + max(MAX_STEP_TOKENS, max_running) * per_token + logits


def _kv_room(options: MemoryOptions, device: str, memory: Memory, weights: int, work: int) -> int:
    """Bytes that the KV cache may take."""
    if options.kv_memory is not None:
        return options.kv_memory
    fraction = options.mem_fraction or DEFAULT_FRACTION[device]
    if device == "cuda":
        return max(0, int(memory.total * fraction) - (memory.total - memory.available) - weights - work)
    return max(0, int((memory.available - weights - work) * fraction))


def _choose_blocks(
    model: ModelConfig, options: MemoryOptions, block_size: int, per_block: int, max_running: int, room: int
) -> tuple[int, int]:
    """(context, blocks): each sequence at full context if there is room, else what fits, at least one
    sequence.
    """
    fits = room // per_block
    context = options.context or max(min(model.max_context, fits * block_size), min(model.max_context, _LEAST_CONTEXT))
    one = -(-context // block_size)
    if options.kv_memory is not None:
        return context, max(fits, one)
    return context, max(one, min(fits, one * max_running))


def _too_big(
    options: MemoryOptions, device: str, memory: Memory, weights: int, refit: int, work: int, context: int, one: int
) -> DoesNotFit:
    where = "gpu 0" if device == "cuda" else "memory"
    free = f"{format_gib(memory.available)} free"
    if weights + refit + work > memory.available:
        twice = " twice" if refit else ""
        message = f"{format_gib(weights)} of weights do not fit{twice} in {where} with {free}"
        advice = "free some memory, or a smaller --dtype" if device == "cuda" else "a machine with more memory"
        if refit:
            advice = "--refit-memory inplace, which needs one set of weights"
    else:
        message = f"the KV cache of one {context:,}-token sequence does not fit"
        advice = "a smaller --context" if options.kv_memory is None else "a larger --kv-memory or a smaller --context"
    second = f"{format_gib(refit)} second set + " if refit else ""
    details = [
        (
            "need",
            f"{format_gib(weights)} weights + {second}{format_gib(work)} work + {format_gib(one)} KV of one sequence",
        ),
        (where, f"{format_gib(memory.total)} in all, {free}"),
    ]
    if options.kv_memory is not None:
        details.append(("--kv-memory", format_gib(options.kv_memory)))
    elif options.mem_fraction is not None:
        details.append(("--mem-fraction", f"{options.mem_fraction:g}"))
    return DoesNotFit(message, [*details, ("try", advice)])
