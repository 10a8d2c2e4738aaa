"""The instructions that metadata mostly consists of, taken whole: a small object with a state of plain values.

torch writes one for each chunk and two for each item, and always the same way.  Whatever is written in another way, or
would be refused, is left to the step-by-step reader: a shortcut decides nothing.
"""

from __future__ import annotations

import re
import struct
from typing import Final

from gtp_serve.loaders.pickle_values import Name, Record

SIZE: Final = "torch.Size"
#: A class of this name does not become a ``Record``.
_DICTIONARY: Final = "collections.OrderedDict"

# A key and its value; each ( of a group that is wanted by itself is written <.  The values are: an earlier one, or a
# size of numbers where that is the class; an integer; text.
_INTEGER = rb"K.|M..|J....|" + b"|".join(b"\\x8a" + bytes([n]) + b"." * n for n in range(1, 9))
# Up to three numbers go without MARK, more with it; then TUPLE1, TUPLE2, TUPLE3 or TUPLE, once more TUPLE1, and REDUCE,
# each with MEMOIZE.  Whether mark, numbers and tuple go together is looked at afterwards.
_SIZE = rb"<\(?)<(?:K.|M..|J....){1,8}+)<[t\x85-\x87])\x94\x85\x94R\x94"
_PAIR = rb"<h.|j....)(?:<h.|j....)(?:%s)?+|<%s)|\x8c<.)<[ -~]{0,255}+)\x94)" % (_SIZE, _INTEGER)
_PAIRS: Final = re.compile(_PAIR.replace(b"<", b"("), re.DOTALL)
#: What follows EMPTY_TUPLE on a class: NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK, pairs, SETITEMS BUILD.
_OBJECT: Final = re.compile(rb"\x81\x94}\x94\(((?:%s){1,4}+)ub" % _PAIR.replace(b"<", b"(?:"), re.DOTALL)

_COUNTED: Final = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_KEPT_SIZES = 1000
_U4, _I4 = struct.Struct("<I"), struct.Struct("<i")
_BININT1, _BININT2, _BININT = ord("K"), ord("M"), ord("J")


class Shortcuts:
    """Takes objects whole.

    :param data: the pickle.
    :param memo: its values by number; what an object makes is added as step by step.
    :param depths: how deep tuples lie in tuples, by their identity; likewise.
    """

    def __init__(self, data: bytes, memo: list[object], depths: dict[int, tuple[int, object]]) -> None:
        self._data, self._memo, self._depths = data, memo, depths
        self._sizes: dict[bytes, tuple[int, ...]] = {}  # a few shapes come again and again; offsets do not

    def object(self, kind: object, position: int) -> tuple[Record, int, int] | None:
        """The object of class ``kind`` whose making goes on at ``position``; None when it must be made step by step.

        :return: the object, the position after it, and how many containers were made.
        """
        found = _OBJECT.match(self._data, position)
        if found is None or type(kind) is not Name or kind.name in (SIZE, _DICTIONARY):
            return None
        memo, depths, sizes, unpack4 = self._memo, self._depths, self._sizes, _U4.unpack_from
        before = len(memo)
        record, state = Record(kind.name, ()), dict[object, object]()
        record.state = state
        memo += (record, state)
        pairs = _PAIRS.findall(found[1])
        value: object
        for key, reference, mark, numbers, ending, integer, length, text in pairs:
            # Written out: a call for each part would double the time of a large file.
            name = memo[key[1] if len(key) == 2 else unpack4(key, 1)[0]]
            if type(name) is not str:
                break
            if reference:
                value = memo[reference[1] if len(reference) == 2 else unpack4(reference, 1)[0]]
                if numbers:
                    if type(value) is not Name or value.name != SIZE:
                        break
                    value = sizes.get(numbers)
                    if value is None:
                        value = _integers(numbers)
                        if len(sizes) < _KEPT_SIZES:
                            sizes[numbers] = value
                    if _COUNTED.get(ending, len(value)) != len(value) or (ending == b"t") != (mark == b"("):
                        break
                    outer = (value,)
                    depths[id(outer)] = (2, outer)
                    memo += (value, outer, value)
            elif integer:
                value = _integer(integer)
            elif length[0] == len(text):
                value = text.decode("ascii")
                memo.append(value)
            else:
                break
            state[name] = value
        else:
            if len(state) == len(pairs):
                return record, found.end(), len(memo) - before
        del memo[before:]
        return None


def _integer(code: bytes) -> int:
    """The operand of BININT1, BININT2, BININT or LONG1."""
    if code[0] in (_BININT1, _BININT2):
        return int.from_bytes(code[1:], "little")
    return int.from_bytes(code[1 if code[0] == _BININT else 2 :], "little", signed=True)


def _integers(code: bytes) -> tuple[int, ...]:
    """The operands of a run of BININT1, BININT2 and BININT."""
    values: list[int] = []
    at, end = 0, len(code)
    while at < end:
        kind = code[at]
        if kind == _BININT1:
            values.append(code[at + 1])
            at += 2
        elif kind == _BININT2:
            values.append(code[at + 1] | code[at + 2] << 8)
            at += 3
        else:
            values.append(_I4.unpack_from(code, at + 1)[0])
            at += 5
    return tuple(values)
