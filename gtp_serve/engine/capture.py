"""How a step is recorded on a device: ``CudaCapture`` makes CUDA graphs, ``NativeCapture`` programs of native CPU ops,
``EagerCapture`` runs the same step over the same buffers anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtp_serve.engine.step import NO_TOKEN, StepResult
from gtp_serve.ops.greedy import Greedy
from gtp_serve.ops.table import RecordedStep, Recorder

_WARM_UPS = 2


class Recorded(Protocol):
    """One step that can be run again."""

    def replay(self, count: int) -> Tensor:
        """Run it on what its buffers hold now; the result is always in the same memory.

        :param count: rows of the result that are wanted; others may be padding or not computed at all.
        """
        ...


class Capture(Protocol):
    """How steps are recorded on a device."""

    def warm_up(self, step: Callable[[], Tensor]) -> None:
        """Run the step as often as the device needs before it can be recorded."""
        ...

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Recorded:
        """Record the step after its warm-up.

        :param inputs: what it reads that has one row for each sequence.
        """
        ...


class EagerCapture:
    """Records nothing: each replay runs the step again."""

    def warm_up(self, step: Callable[[], Tensor]) -> None:
        """Nothing to do."""

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> EagerStep:
        """Run it once, for the memory of its result."""
        return EagerStep(step, step().clone())


@dataclass(frozen=True, slots=True, eq=False)
class EagerStep:
    """A step that is run anew, its result copied to where a recorded one would be."""

    step: Callable[[], Tensor]
    output: Tensor

    def replay(self, count: int) -> Tensor:
        """See ``Recorded``."""
        return self.output.copy_(self.step())


class NativeCapture:
    """Programs of native CPU ops, which compute exactly the rows that there are."""

    def __init__(self, recorder: Recorder, vocab_size: int) -> None:
        self._recorder, self._vocab_size = recorder, vocab_size

    def warm_up(self, step: Callable[[], Tensor]) -> None:
        """Nothing to do."""

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> NativeStep:
        """One program for any number of sequences up to the inputs', which can also choose their next tokens."""
        chosen: list[Greedy] = []

        def step_and_choice() -> Tensor:
            logits = step()
            chosen.append(self._recorder.greedy(logits, self._vocab_size))
            return logits

        program, output = self._recorder.record(step_and_choice, {tensor.data_ptr(): 0 for tensor in inputs})
        return NativeStep(program, output, Choices(*(part.numpy() for part in chosen[0])))


class Choices(NamedTuple):
    """The memory of a ``Greedy``."""

    token_ids_S: NDArray[np.int64]
    logprobs_S: NDArray[np.float32]
    finite_S: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class NativeStep:
    """A program, its logits, and the most probable tokens."""

    program: RecordedStep
    output: Tensor
    choices: Choices

    def replay(self, count: int) -> Tensor:
        """See ``Recorded``."""
        self.program.run(count)
        return self.output


@dataclass(frozen=True, slots=True, eq=False)
class ReadyStep:
    """A step whose inputs are in place; one of these is called, once, before other inputs take theirs."""

    step: NativeStep
    count: int

    def logits(self) -> tuple[Tensor, Greedy]:
        """[sequences, V], and the most probable tokens; there until the next step."""
        self.step.program.run(self.count, self.count)
        best = Greedy(*(torch.from_numpy(part[: self.count]) for part in self.step.choices))
        return self.step.output[: self.count], best

    def most_probable(self) -> StepResult:
        """The most probable token of each sequence."""
        self.step.program.run(self.count, self.count)
        token_ids, logprobs, finite = (part[: self.count].tolist() for part in self.step.choices)
        if not all(finite):
            token_ids = [token if fine else NO_TOKEN for token, fine in zip(token_ids, finite, strict=True)]
        return StepResult(token_ids=tuple(token_ids), logprobs=tuple(logprobs))


class CudaCapture:
    """CUDA graphs that share one memory pool: they never run at the same time."""

    def __init__(self, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> CudaStep:
        """As a graph; collectives become part of it, and run only when all ranks replay theirs."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: a refit's threads may allocate, and NCCL's may look at their events, while this one records.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()
        return CudaStep(graph, output)

    def warm_up(self, step: Callable[[], Tensor]) -> None:
        """Until kernels are compiled, libraries set up and ranks connected."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                step()
        current.wait_stream(self._stream)


@dataclass(frozen=True, slots=True, eq=False)
class CudaStep:
    """A graph and its result, which keeps its place in the pool."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self, count: int) -> Tensor:
        """See ``Recorded``.  Runs on the current stream and is not waited for."""
        self.graph.replay()
        return self.output
