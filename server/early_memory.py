"""What an engine process that was started early does beside the import of torch: it hears what it is to build, and
takes the memory of its weights and of the beginning of its KV cache.

Memory that nobody has touched costs more than reading the weights into it, and the import leaves a core idle.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import prod

from gtp_serve.budget import block_bytes
from gtp_serve.config import EngineConfig
from gtp_serve.errors import DoesNotFit
from gtp_serve.hardware import read_memory
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.refit.mapping import ALIGNMENT, HUGE_PAGE, MappedRange
from gtp_serve.server.launch import Launch, read_order

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenMemory:
    """Memory of one rank."""

    weights: MappedRange | None = None
    cache: MappedRange | None = None


NOTHING_TAKEN = TakenMemory()


class EarlyMemory:
    """Waits for the order in a thread of its own, and takes the memory then.

    :param pipe: descriptor; see ``read_order``.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._order: tuple[Launch, str] | None = None
        self._memory = NOTHING_TAKEN
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="early memory", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[tuple[Launch, str] | None, TakenMemory]:
        """The order, None when there will be none, and the memory for it.

        :raises ValueError: the order is something else.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._order, self._memory

    def _run(self) -> None:
        try:
            self._order = read_order(self._pipe)
            if self._order is not None:
                self._memory = take_memory(self._order[0].engine)
        except BaseException as error:  # raised where the order is waited for
            self._error = error


def take_memory(config: EngineConfig) -> TakenMemory:
    """Memory for one set of weights of a rank on a CPU and for its cache, where that is wanted.

    What takes more than half of what there is is left alone: whether it fits is for others to find out and say.
    """
    if config.device != "cpu" or config.tp > 1:
        return NOTHING_TAKEN
    # Blocks are handed out from the first on: of each layer's keys and values the first request touches the first page.
    num_tensors = 2 * config.model.num_layers
    num_bytes = weight_bytes(config)
    if num_bytes + num_tensors * HUGE_PAGE > read_memory().available // 2:
        return NOTHING_TAKEN
    try:
        weights, cache = MappedRange(num_bytes), MappedRange(cache_bytes(config))
    except DoesNotFit:
        return NOTHING_TAKEN
    weights.populate()
    for tensor in range(num_tensors):
        cache.populate(cache.size * tensor // num_tensors // HUGE_PAGE * HUGE_PAGE, HUGE_PAGE)
    return TakenMemory(weights=weights, cache=cache)


def cache_bytes(config: EngineConfig) -> int:
    """Of the KV cache of one rank of one, with the block of captured steps."""
    return (config.cache.num_blocks + SCRATCH_BLOCKS) * block_bytes(
        config.model, config.dtype, block_size=config.cache.block_size
    )


def weight_bytes(config: EngineConfig) -> int:
    """Of all parameters of one rank of one, with what lies between them, at least."""
    shapes = logical_tensors(config.model).values()
    return sum(-(-prod(shape) * _WIDTHS[config.dtype] // ALIGNMENT) * ALIGNMENT for shape in shapes)
