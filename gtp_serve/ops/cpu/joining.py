"""Operations of a recorded step that are carried out within the next one: a barrier less for each, and what they give
needs no memory.

A norm is found by the linear that alone reads it, where that arranges its rows; a rotation by the attention of single
tokens, where that loads its queries.  The arithmetic is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from gtp_serve.ops.cpu.structs import Attention, Linear, Norm, Op, Rope


def join(ops: Sequence[Op], is_read_once: Callable[[int], bool]) -> list[Op]:
    """The same step with fewer operations; those that go on are changed.

    :param is_read_once: whether what lies at an address is written by one operation, read by one, and by nothing else.
    """
    gone: set[int] = set()
    for at, (earlier, later) in enumerate(pairwise(ops)):
        link = _link(earlier, later)
        if link is not None and is_read_once(getattr(earlier, link[0])):
            setattr(earlier, link[0], 0)
            setattr(later, link[1], 0)
            later.join(earlier)
            gone.add(at)
    return [op for at, op in enumerate(ops) if at not in gone]


def _link(earlier: Op, later: Op) -> tuple[str, str] | None:
    """The result and the input that are the same, if they can be left out."""
    if isinstance(earlier, Norm) and isinstance(later, Linear) and _is_input(earlier, later):
        return "out", "x"
    if isinstance(earlier, Rope) and isinstance(later, Attention) and _are_queries(earlier, later):
        return "out_q", "q"
    return None


def _is_input(norm: Norm, linear: Linear) -> bool:
    found = (norm.inner, norm.out, norm.out_row, norm.size, norm.dtype, norm.rows, norm.counter)
    return found == (1, linear.x, linear.x_row, linear.in_size, linear.dtype, linear.rows, linear.counter)


def _are_queries(rope: Rope, attention: Attention) -> bool:
    shared = ("keys", "values", "heads", "kv_heads", "size", "dtype", "rows", "counter")
    alike = all(getattr(rope, name) == getattr(attention, name) for name in shared)
    return alike and not attention.starts and (rope.out_q, rope.heads * rope.size) == (attention.q, attention.q_row)
