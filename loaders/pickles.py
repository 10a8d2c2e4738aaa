"""Reading a pickle as data.  No class is looked up and nothing is called: the opcodes that build plain values
do so, each allowed name (``pickle_names``) becomes an inert ``Name`` and whatever would have called one, a
``Record``. Opcodes outside protocols 2 to 5 as ``pickle`` and ``torch.save`` write them are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from gtp_serve.errors import CheckpointCorrupt, PickleRefused
from gtp_serve.loaders.pickle_names import ALLOWED
from gtp_serve.loaders.pickle_shortcuts import Shortcuts
from gtp_serve.loaders.pickle_values import Name, Persistent, Record

#: Largest pickle that is read.  A ``.metadata`` file has about 400 bytes for each chunk of each tensor.
MAX_PICKLE_BYTES = 256 * 1024**2
MAX_NESTING = 64
MAX_MARKS = 256
MAX_NAME_BYTES = 256
MAX_INTEGER_BYTES = 32
#: Containers that a pickle of n bytes may make: real ones make one for each 14 bytes.
CONTAINERS_FREE, CONTAINERS_PER_BYTE = 10_000, 0.25


def read_pickle(data: bytes, file: str, *, persistent: bool = False) -> object:
    """The value that a pickle describes.

    :param file: where the bytes come from, for messages.
    :param persistent: whether persistent references may appear (``torch.save`` files).
    :raises PickleRefused: when it mentions a name outside the allow-list or an opcode that could reach one.
    :raises CheckpointCorrupt: when it is damaged, or larger or deeper than any real one.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointCorrupt(f"{file} holds a pickle of {len(data)} bytes", [("limit", f"{MAX_PICKLE_BYTES} bytes")])
    return _Machine(data, file, persistent).run()


class _Machine:
    """A stack machine over one pickle.  ``stack`` holds the items above the last mark, ``marks`` those below
    it."""

    def __init__(self, data: bytes, file: str, persistent: bool) -> None:
        self.data = data
        self.file = file
        self.persistent = persistent
        self.position = 0
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: list[object] = []
        self.names: dict[tuple[str, str], Name] = {}
        self.depths: dict[int, tuple[int, object]] = {}
        self.containers = int(CONTAINERS_FREE + len(data) * CONTAINERS_PER_BYTE)

    def run(self) -> object:
        """Interpret.  The commonest instructions are done here, on locals: large runs save millions of them."""
        data, memo, marks, stack = self.data, self.memo, self.marks, self.stack
        handlers, unpack2, unpack4, position = _HANDLERS, _U2.unpack_from, _U4.unpack_from, 0
        shortcut = Shortcuts(data, memo, self.depths).object
        try:
            while True:
                code = data[position]
                position += 1
                if code == _MEMOIZE:
                    memo.append(stack[-1])
                elif code == _BINGET:
                    stack.append(memo[data[position]])
                    position += 1
                elif code == _LONG_BINGET:
                    stack.append(memo[unpack4(data, position)[0]])
                    position += 4
                elif code == _EMPTY_TUPLE:
                    # Two marks may be open inside such an object.
                    whole = shortcut(stack[-1], position) if stack and len(marks) < MAX_MARKS - 1 else None
                    if whole is None:
                        stack.append(())
                    else:
                        stack[-1], self.position, made = whole
                        self.made(made)
                        position = self.position
                elif code == _BININT1:
                    stack.append(data[position])
                    position += 1
                elif code == _MARK and len(marks) < MAX_MARKS:
                    marks.append(stack)
                    stack = self.stack = []
                elif code == _BININT2:
                    stack.append(unpack2(data, position)[0])
                    position += 2
                else:
                    self.position = position
                    if code == _STOP:
                        return self.finish()
                    handler = handlers.get(code)
                    if handler is None:
                        raise self.unknown(code)
                    handler(self)
                    position, stack = self.position, self.stack
        except (IndexError, struct.error):
            self.position = position
            raise self.corrupt("ends too early, or refers to a value that it has not made") from None

    def finish(self) -> object:
        if len(self.stack) != 1 or self.marks:
            raise self.corrupt("ends with values left over")
        if self.position != len(self.data):
            raise self.corrupt(f"has {len(self.data) - self.position} bytes after its end")
        return self.stack[0]

    def corrupt(self, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.file}: the pickle {what}", [("at", f"byte {self.position}")])

    def unknown(self, code: int) -> CheckpointCorrupt | PickleRefused:
        if code in _REFUSED:
            return PickleRefused(
                f"{self.file}: the pickle uses {_REFUSED[code]}, which no checkpoint needs; nothing was run",
                [("at", f"byte {self.position - 1}")],
            )
        return self.corrupt(f"has the byte {code} where an instruction was expected")

    # bytes

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise self.corrupt(f"claims {count} bytes where {len(self.data) - self.position} are left")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.data, self.position)[0]
        self.position += form.size
        return value

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + MAX_NAME_BYTES)
        if end < 0:
            raise self.corrupt("has a name without an end")
        text = self.take(end - self.position)
        self.position += 1
        return text.decode("utf-8", "backslashreplace")

    # values

    def name(self, module: str, name: str) -> None:
        pair = (module, name)
        if pair not in ALLOWED:
            raise PickleRefused(
                f"{self.file}: the pickle asks for {_printable(module)}.{_printable(name)}, which is not on "
                "the list of names that a checkpoint may use; nothing of it was run",
            )
        known = self.names.get(pair)
        if known is None:
            known = self.names[pair] = Name(f"{module}.{name}")
        self.stack.append(known)

    def made(self, count: int = 1) -> None:
        self.containers -= count
        if self.containers < 0:
            raise self.corrupt("makes far more objects than a real one of its size")

    def tuple(self, items: tuple[object, ...]) -> None:
        """Push a tuple, minding how deep tuples lie in tuples: they are what a comparison would walk down."""
        if tuple in map(type, items):
            known = (self.depths.get(id(item)) for item in items if type(item) is tuple)
            depth = max(1 if found is None else found[0] for found in known)
            if depth >= MAX_NESTING:
                raise self.corrupt(f"nests tuples more than {MAX_NESTING} deep")
            self.depths[id(items)] = (depth + 1, items)
        self.made()
        self.stack.append(items)

    def popped(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def call(self, target: object, args: object) -> object:
        if type(target) is not Name or type(args) is not tuple:
            raise self.corrupt("calls something that is not a name")
        self.made()
        if target.name == "torch.Size" and len(args) == 1 and type(args[0]) is tuple:
            return args[0]
        if target.name == "collections.OrderedDict" and not args:
            return {}
        return Record(target.name, args)

    def check_key(self, key: object, *, depth: int = 0) -> None:
        """Check a dictionary key before it is hashed: hashing walks down tuples."""
        if isinstance(key, tuple):
            if depth > 3 or len(key) > 16:
                raise self.corrupt("has a dictionary key that is too large")
            for item in key:
                self.check_key(item, depth=depth + 1)
        elif not isinstance(key, _HASHED):
            raise self.corrupt("has a dictionary key that is a container")

    def fill(self, target: object, pairs: list[object]) -> None:
        if type(target) is not dict or len(pairs) % 2:
            raise self.corrupt("fills a dictionary that is none")
        keys = pairs[::2]
        expected = len(target) + len(keys)
        if not _TEXT.issuperset(map(type, keys)):
            for key in keys:
                self.check_key(key)
        target.update(zip(keys, pairs[1::2], strict=True))
        if len(target) != expected:
            raise self.corrupt("has the same key twice in one dictionary")

    def extend(self, target: object, items: list[object]) -> None:
        if not isinstance(target, list):
            raise self.corrupt("appends to a list that is none")
        target.extend(items)

    def build(self, state: object, target: object) -> None:
        if isinstance(target, dict):
            return  # attributes of an OrderedDict: nothing needs them
        if not isinstance(target, Record) or target.state is not None:
            raise self.corrupt("sets the state of something that has none")
        target.state = state

    def text(self, count: int) -> None:
        try:
            self.stack.append(self.take(count).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise self.corrupt("has text that is not UTF-8") from None

    def integer(self, count: int) -> None:
        if not 0 <= count <= MAX_INTEGER_BYTES:
            raise self.corrupt(f"has an integer of {count} bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def remember(self, index: int) -> None:
        """Number the top value.  Picklers count from 0 without a gap, so no number can claim memory."""
        if index > len(self.memo):
            raise self.corrupt(f"numbers a value {index} where {len(self.memo)} comes next")
        self.memo[index : index + 1] = [self.stack[-1]]

    def protocol(self) -> None:
        version = self.number(_U1)
        if not 2 <= version <= 5:
            raise self.corrupt(f"has protocol {version}, not 2 to 5")

    def frame(self) -> None:
        length = self.number(_U8)
        if length > len(self.data) - self.position:
            raise self.corrupt(f"claims a frame of {length} bytes where {len(self.data) - self.position} are left")

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise self.corrupt("asks for a name that is not text")
        self.name(module, name)

    def persistent_id(self) -> None:
        if not self.persistent:
            raise PickleRefused(
                f"{self.file}: the pickle refers to something outside itself, which this file needs not; "
                "nothing of it was run"
            )
        self.made()
        self.stack.append(Persistent(self.stack.pop()))


def _printable(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")[:MAX_NAME_BYTES]


_U1, _U2, _U4, _U8 = (struct.Struct(f) for f in ("<B", "<H", "<I", "<Q"))
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP: Final = ord(".")
_MEMOIZE: Final = 0x94
_BINGET: Final = ord("h")
_LONG_BINGET: Final = ord("j")
_BININT1: Final = ord("K")
_BININT2: Final = ord("M")
_EMPTY_TUPLE: Final = ord(")")
_MARK: Final = ord("(")

_TEXT: Final = frozenset([str])
_HASHED: Final = (str, int, float, bytes, type(None), Name, Record)

Handler = Callable[[_Machine], None]


def _too_many_marks(m: _Machine) -> None:
    raise m.corrupt(f"nests more than {MAX_MARKS} deep")


def _empty_dict(m: _Machine) -> None:
    m.made()
    m.stack.append({})


def _empty_list(m: _Machine) -> None:
    m.made()
    m.stack.append([])


def _reduce(m: _Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


def _newobj_ex(m: _Machine) -> None:
    keywords = m.stack.pop()
    if keywords != {}:
        raise m.corrupt("makes an object with keyword arguments")
    _reduce(m)


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    m.build(state, m.stack[-1])


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.fill(m.stack[-1], [key, value])


def _setitems(m: _Machine) -> None:
    pairs = m.popped()
    m.fill(m.stack[-1], pairs)


def _append(m: _Machine) -> None:
    item = m.stack.pop()
    m.extend(m.stack[-1], [item])


def _appends(m: _Machine) -> None:
    items = m.popped()
    m.extend(m.stack[-1], items)


def _frozenset(m: _Machine) -> None:
    # kept as a list: a set would hash its items
    items = m.popped()
    m.made()
    m.stack.append(items)


def _tuple_of(count: int) -> Handler:
    def handler(m: _Machine) -> None:
        if len(m.stack) < count:
            raise IndexError
        items = tuple(m.stack[-count:])
        del m.stack[-count:]
        m.tuple(items)

    return handler


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.popped()


def _push(value: object) -> Handler:
    return lambda m: m.stack.append(value)


def _global(m: _Machine) -> None:
    module = m.line()
    m.name(module, m.line())


def _inst(m: _Machine) -> None:
    _global(m)  # names the culprit where it is not on the list
    raise PickleRefused(f"{m.file}: the pickle uses INST, which no checkpoint needs; nothing of it was run")


_HANDLERS: dict[int, Handler] = {
    0x80: _Machine.protocol,
    0x81: _reduce,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x88: _push(True),
    0x89: _push(False),
    0x8A: lambda m: m.integer(m.number(_U1)),
    0x8B: lambda m: m.integer(m.number(_I4)),
    0x8C: lambda m: m.text(m.number(_U1)),
    0x8D: lambda m: m.text(m.number(_U8)),
    0x8E: lambda m: m.stack.append(m.take(m.number(_U8))),
    0x8F: _empty_list,
    0x90: _appends,
    0x91: _frozenset,
    0x92: _newobj_ex,
    0x93: _Machine.stack_name,
    0x95: _Machine.frame,
    _MARK: _too_many_marks,
    ord("0"): _pop,
    ord("1"): lambda m: m.popped().clear(),
    ord("B"): lambda m: m.stack.append(m.take(m.number(_U4))),
    ord("C"): lambda m: m.stack.append(m.take(m.number(_U1))),
    ord("G"): lambda m: m.stack.append(_F8.unpack(m.take(8))[0]),
    ord("J"): lambda m: m.stack.append(m.number(_I4)),
    ord("N"): _push(None),
    ord("Q"): _Machine.persistent_id,
    ord("R"): _reduce,
    ord("X"): lambda m: m.text(m.number(_U4)),
    ord("a"): _append,
    ord("b"): _build,
    ord("c"): _global,
    ord("e"): _appends,
    ord("i"): _inst,
    ord("q"): lambda m: m.remember(m.number(_U1)),
    ord("r"): lambda m: m.remember(m.number(_U4)),
    ord("s"): _setitem,
    ord("t"): lambda m: m.tuple(tuple(m.popped())),
    ord("u"): _setitems,
    ord("]"): _empty_list,
    ord("}"): _empty_dict,
}

#: Opcodes that could reach a name past the list, or that only old or foreign picklers write.
_REFUSED = {
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x96: "BYTEARRAY8",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
    ord("o"): "OBJ",
    ord("P"): "PERSID",
    **{ord(c): f"the text opcode {c}" for c in "FILSTUVdglp2"},
}
