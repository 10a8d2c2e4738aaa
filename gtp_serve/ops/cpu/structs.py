"""The operations of ``native/abi.h`` as ctypes structures, field for field.

Pointers and counts are 64 bits wide, strides count elements unless a name says bytes; 0 is no pointer.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int64
from typing import Any, ClassVar, Protocol

F32, BF16, I8 = 0, 1, 2
HEAD_BLOCK = 64
"""Logits that one ``Partial`` sums up."""
PARTIAL_FLOATS = 4
"""Size of a ``Partial`` in float32."""


class Addressed(Protocol):
    """A tensor."""

    def data_ptr(self) -> int:
        """Where its first element lies."""
        ...


def pointers(**tensors: Addressed | None) -> dict[str, int]:
    """Fields of an operation that hold these tensors' addresses."""
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def _whole(names: str) -> list[tuple[str, Any]]:
    return [(name, c_int64) for name in names.split()]


class Op(Structure):
    """What every operation begins with."""

    KIND: ClassVar[int]
    POINTERS: ClassVar[tuple[str, ...]]
    """Fields that hold addresses."""
    _fields_ = _whole("kind counter rows")
    counter: int
    rows: int
    joined: Op | None = None
    """The operation that is carried out within this one, ahead of it."""

    def __init__(self, **values: Any) -> None:
        super().__init__(kind=self.KIND, **values)

    def join(self, earlier: Op) -> None:
        """Carry out an operation within this one, of a kind that has the field ``before``."""
        self.joined = earlier  # its memory must stay
        self.before = ctypes.addressof(earlier)

    def parts(self) -> list[Op]:
        """This operation and what is carried out within it."""
        return [self] if self.joined is None else [self.joined, self]


class Gather(Op):
    """Rows of a table by number."""

    KIND = 0
    POINTERS = ("ids", "table", "out")
    _fields_ = _whole("ids table out table_rows width_bytes table_stride_bytes out_stride_bytes")


class Norm(Op):
    """RMSNorm, after an addition where ``delta`` is given."""

    KIND = 1
    POINTERS = ("x", "delta", "weight", "out", "total")
    _fields_ = [
        *_whole("x delta weight out total"),
        *_whole("inner size x_row x_inner delta_row total_row out_row out_inner dtype"),
        ("eps", c_double),
    ]


class Linear(Op):
    """``x @ weight.T``, scaled, with bias, with SwiGLU, with what greedy choice needs of it, and after a norm."""

    KIND = 2
    POINTERS = ("x", "weight", "bias", "scale", "out", "partials")
    _fields_ = [
        *_whole("x weight bias scale out partials before"),
        *_whole("in_size out_size x_row weight_row out_row dtype weight_dtype out_dtype swiglu vocab"),
    ]


class Rope(Op):
    """Rotation of queries and keys; keys and values to their slots."""

    KIND = 3
    POINTERS = ("q", "k", "v", "cos", "sin", "out_q", "keys", "values", "slots")
    _fields_ = [
        *_whole("q k v cos sin out_q keys values slots"),
        *_whole("heads kv_heads size q_row k_row v_row cos_row num_slots dtype"),
    ]


class Attention(Op):
    """Attention over the paged cache, and the rotation before it."""

    KIND = 4
    POINTERS = ("q", "keys", "values", "out", "tables", "starts", "positions")
    _fields_ = [
        *_whole("q keys values out tables starts positions before"),
        *_whole("sequences table_row heads kv_heads size q_row block_size num_blocks window max_context dtype"),
        ("scale", c_double),
    ]


class Swiglu(Op):
    """``silu(gate) * up``."""

    KIND = 5
    POINTERS = ("x", "out")
    _fields_ = _whole("x out size x_row out_row dtype")


class AddShared(Op):
    """The shared expert's share added to the routed ones'."""

    KIND = 6
    POINTERS = ("base", "y", "gate", "out")
    _fields_ = _whole("base y gate out size dtype")


class Route(Op):
    """Experts of each token and their weights."""

    KIND = 7
    POINTERS = ("logits", "weights", "experts")
    _fields_ = _whole("logits weights experts num_experts chosen logits_row normalise dtype")


class Experts(Op):
    """Each token through its experts."""

    KIND = 8
    POINTERS = ("x", "weights", "experts", "gate_up", "down", "gate_up_scale", "down_scale", "out")
    _fields_ = [
        *_whole("x weights experts gate_up down gate_up_scale down_scale out"),
        *_whole("size ffn num_experts chosen x_row dtype weight_dtype"),
    ]


class Greedy(Op):
    """The most probable token of each row."""

    KIND = 9
    POINTERS = ("logits", "partials", "token_ids", "logprobs", "finite")
    _fields_ = _whole("logits partials token_ids logprobs finite vocab logits_row")


class Draw(Op):
    """An id drawn for each row."""

    KIND = 10
    POINTERS = ("logits", "at", "temperatures", "top_k", "top_p", "min_p", "uniform", "ids")
    _fields_ = _whole("logits at temperatures top_k top_p min_p uniform ids vocab logits_row")


KINDS: tuple[type[Op], ...] = (
    Gather,
    Norm,
    Linear,
    Rope,
    Attention,
    Swiglu,
    AddShared,
    Route,
    Experts,
    Greedy,
    Draw,
)


def sizes() -> list[int]:
    """Bytes of each kind's structure, to be compared with the library's."""
    return [ctypes.sizeof(kind) for kind in KINDS]
