"""The table of ops that a decoder is built with: every function its layers call, chosen once by device.

``REFERENCE`` is the specification; ``ops.choice`` picks a table for a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gtp_serve.ops import reference
from gtp_serve.ops.batch import AttentionPlan, Batch, FixedAttention
from gtp_serve.ops.greedy import Greedy, greedy
from gtp_serve.ops.paged import plan_paged
from gtp_serve.ops.sampling import Draw


class RecordedStep(Protocol):
    """A step's operations with the addresses that they work on."""

    def run(self, *rows: int) -> None:
        """Carry them out.

        :param rows: of the inputs, and those that are wanted (see WANTED); at most as many as were recorded.
        """
        ...


WANTED = 1
"""Which of the numbers given to ``RecordedStep.run`` is that of the rows that are wanted; the first is that of all."""


class Recorder(Protocol):
    """Records what functions of one table would do."""

    def record(self, step: Callable[[], Tensor], inputs: Mapping[int, int]) -> tuple[RecordedStep, Tensor]:
        """Record a step, none of whose operations is carried out; with it the memory of its result.

        :param inputs: by its address, which of the numbers given to ``run`` is the number of rows of an input.
        :raises EngineFault: part of the step is no operation of this table.
        """
        ...

    def greedy(self, logits: Tensor, vocab_size: int) -> Greedy:
        """As ``Ops.greedy``; while a step is recorded, a part of it, with a number of rows of its own."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """Functions on tensors; each means what its namesake in ``ops.reference`` means."""

    name: str
    """What the start output says."""
    capturable: bool
    """A step of single tokens asks the host nothing, so that it can be recorded and replayed."""
    captures_experts: bool
    """So does a step through routed experts."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    plan_attention: Callable[[Batch, int, int | None], AttentionPlan]
    """Of a batch, the block size and the window."""
    fix_attention: Callable[[Batch, int, int | None], FixedAttention] | None = None
    """For attention that asks the host before each step: of a recorded step's buffers, the same; else None."""
    swiglu: Callable[[Tensor], Tensor]
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    embedding: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    greedy: Callable[[Tensor, int], Greedy]
    normalises: bool = False
    """See ``ops.sampling.Chooser``, as ``draw``."""
    draw: Draw | None = None
    gated_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    """``swiglu(linear(...))`` in one; None: one after the other."""
    logits: Callable[[Tensor, Tensor], Tensor] | None = None
    """The vocabulary head in float32 throughout; None: as ``linear``, then widened."""
    add_shared: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    """``base + sigmoid(gate) * shared``, or without a gate; None: one after the other."""
    tabulates_angles: bool = False
    """Rotary angles are taken from tables by ``embedding``, so that a step computes none."""
    int8: dict[int, tuple[Tensor, Tensor]] | None = None
    """By the address of a weight, rows and scales that products read instead; None: this table has no such form."""
    recorder: Recorder | None = None
    """Records steps of this table, where it can; on a GPU the device does."""

    @property
    def normalise(self) -> Callable[[Tensor, int], Greedy] | None:
        """By what log-probabilities are normalised; None: ``log_softmax``."""
        return self.greedy if self.normalises else None

    def __deepcopy__(self, memo: dict[int, object]) -> Ops:
        """Copies of a model compute by the same functions."""
        return self


def rotate_and_cache(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    keys_NPKE: Tensor,
    values_NPKE: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Rotated queries [T, H, E]; rotated keys, and values as they are, go to their slots of the cache."""
    rotated_TKE = reference.apply_rotary(k_TKE, cos_TR, sin_TR)
    reference.write_kv(rotated_TKE, v_TKE, keys_NPKE, values_NPKE, slots_T)
    return reference.apply_rotary(q_THE, cos_TR, sin_TR)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """The reference's plan, cut on the host."""

    segments: tuple[reference.Segment, ...]

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """[T, H, E]."""
        return reference.attend(q_THE, keys_NPKE, values_NPKE, self.segments, scale)


def plan_segments(batch: Batch, block_size: int, window: int | None) -> SegmentPlan:
    """Attention as the reference computes it."""
    return SegmentPlan(reference.plan_attention(batch, block_size, window))


def plan_single_tokens(batch: Batch, block_size: int, window: int | None) -> AttentionPlan:
    """Nothing from the host where each sequence brings one token; any other step as the reference does it."""
    return plan_paged(batch, window) if batch.decode_only else plan_segments(batch, block_size, window)


REFERENCE = Ops(
    name="plain torch",
    capturable=False,
    captures_experts=False,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    rotate_and_cache=rotate_and_cache,
    plan_attention=plan_segments,
    swiglu=reference.swiglu,
    embedding=reference.embedding,
    linear=reference.linear,
    route=reference.route,
    experts=reference.experts,
    greedy=greedy,
)

PLAIN_PAGED = replace(REFERENCE, name="plain torch, capturable", capturable=True, plan_attention=plan_single_tokens)
"""Plain torch whose decode step can be captured, at the price of attending over whole block tables."""
