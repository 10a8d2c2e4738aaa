"""What an engine process that was started early does beside the import of torch: it hears what it is to build, and
takes the memory of its weights.

Memory that nobody has touched costs more than reading the weights into it, and the import leaves a core idle.
"""

from __future__ import annotations

import threading
from math import prod

from gtp_serve.config import EngineConfig
from gtp_serve.errors import DoesNotFit
from gtp_serve.hardware import read_memory
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.refit.mapping import ALIGNMENT, MappedRange
from gtp_serve.server.launch import Launch, read_order

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


class EarlyMemory:
    """Waits for the order in a thread of its own, and takes the memory then.

    :param pipe: descriptor; see ``read_order``.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._order: tuple[Launch, str] | None = None
        self._memory: MappedRange | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="early memory", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[tuple[Launch, str] | None, MappedRange | None]:
        """The order, None when there will be none, and the memory for its weights if there is any.

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


def take_memory(config: EngineConfig) -> MappedRange | None:
    """Memory for one set of weights of a rank on a CPU; None where that is not wanted.

    A set that takes more than half of what there is is left alone: whether it fits is for others to find out and say.
    """
    if config.device != "cpu" or config.tp > 1:
        return None
    num_bytes = weight_bytes(config)
    if num_bytes > read_memory().available // 2:
        return None
    try:
        memory = MappedRange(num_bytes)
    except DoesNotFit:
        return None
    memory.populate()
    return memory


def weight_bytes(config: EngineConfig) -> int:
    """Of all parameters of one rank of one, with what lies between them, at least."""
    shapes = logical_tensors(config.model).values()
    return sum(-(-prod(shape) * _WIDTHS[config.dtype] // ALIGNMENT) * ALIGNMENT for shape in shapes)
