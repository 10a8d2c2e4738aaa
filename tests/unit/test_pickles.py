from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import pickle
import random
import struct
import time
import tracemalloc
import types
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gtp_serve.errors import CheckpointCorrupt, CheckpointError, PickleRefused
from gtp_serve.loaders.pickle_shortcuts import Shortcuts
from gtp_serve.loaders.pickle_values import Name, Persistent, Record
from gtp_serve.loaders.pickles import MAX_NESTING, read_pickle


def read(data: bytes, **options: Any) -> Any:
    return read_pickle(data, "folder/.metadata", **options)


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


PLAIN = {
    "none": None,
    "flags": [True, False],
    "integers": [0, 255, 65535, -1, 2**31 - 1, 2**40, -(2**40), 2**63 - 1],
    "floats": [0.5, -1e300],
    "text": ["", "a", "ü" * 300, "\ud800"],
    "bytes": [b"", b"x" * 300],
    "nested": {"a": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]},
    "long list": list(range(3000)),
    7: {(1, "b"): 2},
}


@pytest.mark.parametrize("protocol", [4, 5])
def test_plain_values_come_back_as_they_were(protocol: int) -> None:
    assert read(pickle.dumps(PLAIN, protocol=protocol)) == PLAIN


def test_plain_values_come_back_from_protocol_2_as_torch_save_writes_it() -> None:
    value = {key: item for key, item in PLAIN.items() if key != "bytes"}

    assert read(pickle.dumps(value, protocol=2)) == value


def test_allowed_objects_become_records_with_their_state() -> None:
    value = {
        "args": argparse.Namespace(a=1),
        "simple": types.SimpleNamespace(b=2),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "ordered": collections.OrderedDict(x=1),
        "path": pathlib.PurePosixPath("/a/b"),
        "index": MetadataIndex("key", torch.Size([0, 1]), 2),
        "properties": TensorProperties(dtype=torch.float32),
        "set": {1},
    }

    result = read(pickle.dumps(value, protocol=4))

    assert isinstance(result["args"], Record)
    assert (result["args"].name, result["args"].attributes()) == ("argparse.Namespace", {"a": 1})
    assert result["simple"].attributes() == {"b": 2}
    assert result["size"] == (2, 3)
    assert isinstance(result["dtype"], Name)
    assert result["dtype"].name == "torch.bfloat16"
    assert result["ordered"] == {"x": 1}
    assert result["path"].args == ("/", "a", "b")
    assert result["index"].attributes() == {"fqn": "key", "offset": (0, 1), "index": 2}
    assert result["properties"].state[0].name == "torch.float32"
    assert result["set"] == [1]


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_under_both_spellings_and_never_opened(module: str) -> None:
    data = b"\x80\x02c" + module.encode() + b"\nPosixPath\n" + text("/etc") + b"\x85R."

    assert read(data).args == ("/etc",)


def test_storages_of_torch_save_are_read_only_where_they_may_be() -> None:
    data = b"\x80\x02" + text("storage") + b"Q."

    assert read(data, persistent=True) == Persistent("storage")
    with pytest.raises(PickleRefused, match="outside itself"):
        read(data)


#: Each would run something under the standard library's reader; %s is the marker's path.
GADGETS = {
    "open": b"\x80\x02c__builtin__\nopen\n%s" + text("w") + b"\x86R.",
    "open by STACK_GLOBAL": b"\x80\x04\x8c\x08builtins\x8c\x04open\x93%s\x8c\x01w\x86R.",
    "os.system": b"\x80\x02cos\nsystem\n%s\x85R.",
    "posix.system": b"\x80\x02cposix\nsystem\n%s\x85R.",
    "eval": b"\x80\x02c__builtin__\neval\n%s\x85R.",
    "exec": b"\x80\x02cbuiltins\nexec\n%s\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\n%s\x85R.",
    "__import__": b"\x80\x02cbuiltins\n__import__\n%s\x85R.",
    "torch.load": b"\x80\x02ctorch\nload\n%s\x85R.",
    "torch.serialization.load": b"\x80\x02ctorch.serialization\nload\n%s\x85R.",
    "dotted name from an allowed module": b"\x80\x04\x8c\x05torch\x8c\x13serialization.os.sy\x93%s\x85R.",
    "dotted escape of an allowed class": b"\x80\x04\x8c\x07pathlib\x8c\x0fPosixPath.touch\x93%s\x85R.",
    "module with a dot too many": b"\x80\x02ctorch.Size.__class__\nSize\n%s\x85R.",
    "allowed name in another module": b"\x80\x02cevil\nPosixPath\n%s\x85R.",
    "copyreg": b"\x80\x02ccopyreg\n_reconstructor\n%s\x85R.",
    "copyreg.add_extension": b"\x80\x02ccopyreg\nadd_extension\n%s\x85R.",
    "extension code": b"\x80\x02\x82\x01%s\x85R.",
    "INST": b"\x80\x02(%sios\nsystem\n.",
    "INST of an allowed name": b"\x80\x02(%sipathlib\nPosixPath\n.",
    "OBJ": b"\x80\x02(cpathlib\nPosixPath\n%so.",
    "persistent id as text": b"\x80\x02Pmarker\n%s.",
    "persistent id": b"\x80\x02%sQ.",
    "subprocess": b"\x80\x02csubprocess\nPopen\n%s\x85R.",
    "runpy": b"\x80\x02crunpy\nrun_path\n%s\x85R.",
    "operator": b"\x80\x02coperator\nmethodcaller\n%s\x85R.",
    "_pickle": b"\x80\x02c_pickle\nloads\n%s\x85R.",
    "numpy.load": b"\x80\x02cnumpy\nload\n%s\x85R.",
}


class Reduces:
    """A class whose pickled form calls something."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("name", GADGETS)
def test_gadgets_are_refused_by_name_and_run_nothing(name: str, tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "marker"
    gadget = GADGETS[name].replace(b"%s", text(str(marker)))

    with pytest.raises(PickleRefused, match=r"folder/\.metadata"):
        read(gadget)

    assert not marker.exists()


def test_the_refusal_names_the_module_and_the_name() -> None:
    with pytest.raises(PickleRefused, match=r"posix\.system.*nothing of it was run"):
        read(b"\x80\x02cposix\nsystem\n" + text("x") + b"\x85R.")


def test_a_gadget_anywhere_inside_a_good_pickle_is_refused(tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "marker"

    with pytest.raises(PickleRefused, match=r"io\.open|builtins\.open|_io\.open"):
        read(pickle.dumps({"deep": [{"a": (1, Reduces(str(marker)))}]}, protocol=4))

    assert not marker.exists()


def test_state_and_arguments_of_allowed_names_run_nothing(tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "marker"
    state = b"}" + text("__class__") + text(str(marker)) + b"s"
    data = b"\x80\x02cargparse\nNamespace\n)\x81" + state + b"b."

    result = read(data)

    assert type(result) is Record
    assert result.attributes() == {"__class__": str(marker)}
    assert not marker.exists()


def test_calling_a_value_that_is_no_name_is_refused() -> None:
    with pytest.raises(CheckpointCorrupt, match="not a name"):
        read(b"\x80\x02" + text("os.system") + text("x") + b"\x85R.")
    with pytest.raises(CheckpointCorrupt, match="not a name"):
        read(b"\x80\x02cargparse\nNamespace\n)R)R.")


MANY = 300_000

BOMBS = {
    "a text of 1 TB": b"\x80\x04\x8d" + struct.pack("<Q", 10**12) + b"x.",
    "bytes of 1 TB": b"\x80\x04\x8e" + struct.pack("<Q", 10**12) + b"x.",
    "bytes of 2^63": b"\x80\x04\x8e" + struct.pack("<Q", 2**63) + b"x.",
    "a bytearray of 1 TB": b"\x80\x05\x96" + struct.pack("<Q", 10**12) + b"x.",
    "a frame of 1 TB": b"\x80\x04\x95" + struct.pack("<Q", 10**12) + b"N.",
    "an integer of 2 GB": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "an integer of negative length": b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x.",
    "memo index 2^31 - 1": b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".",
    "memo index 2^32 - 1": b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "a memo index never written": b"\x80\x02j" + struct.pack("<I", 7) + b".",
    "a million marks": b"\x80\x02" + b"(" * 10**6 + b".",
    "a million nested tuples": b"\x80\x02)" + b"\x85" * 10**6 + b".",
    "a million nested tuples by memo": b"\x80\x04)" + b"\x94\x85" * 10**6 + b".",
    "billion laughs of tuples": b"\x80\x04)\x94" + b"".join(b"(h%ch%ct\x94" % (i, i) for i in range(200)) + b".",
    "very many dictionaries": b"\x80\x02" + b"}" * MANY + b".",
    "very many lists": b"\x80\x02" + b"]" * MANY + b".",
    "a name without an end": b"\x80\x02c" + b"a" * 10**6,
    "a list as key": b"\x80\x02}]Ns.",
    "a key that is a deep tuple": b"\x80\x02})" + b"\x85" * 30 + b"Ns.",
    "the same key twice": b"\x80\x02}" + text("a") + b"Ns" + text("a") + b"Ns.",
    "nothing": b"",
    "no end": b"\x80\x02N",
    "two values": b"\x80\x02NN.",
    "bytes after the end": b"\x80\x02N.N",
    "an open mark": b"\x80\x02(N.",
    "an empty stack": b"\x80\x02R.",
    "protocol 9": b"\x80\x09N.",
    "an unknown instruction": b"\x80\x02\xff.",
    "text that is not UTF-8": b"\x80\x04\x8c\x01\xff.",
    "state of text": b"\x80\x02" + text("a") + b"}b.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_damage_end_quickly_in_one_sentence_and_bounded_memory(name: str) -> None:
    data = BOMBS[name]
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(CheckpointError) as caught:
            read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert time.monotonic() - started < 20
    assert peak < 40 * len(data) + 2**21
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("folder/.metadata")


def test_tuples_may_nest_up_to_the_limit_only() -> None:
    assert read(b"\x80\x02)" + b"\x85" * (MAX_NESTING - 1) + b".")
    with pytest.raises(CheckpointCorrupt, match="deep"):
        read(b"\x80\x02)" + b"\x85" * (MAX_NESTING + 1) + b".")


def test_a_deep_chain_of_lists_is_read_and_let_go_of_without_recursion() -> None:
    links = b"".join(b"]j" + struct.pack("<I", i) + b"a\x940" for i in range(50_000))

    result = read(b"\x80\x04]\x940" + links + b"j" + struct.pack("<I", 50_000) + b".")

    assert len(result) == 1
    del result


def test_random_damage_never_ends_in_another_error() -> None:
    good = pickle.dumps(
        {"args": argparse.Namespace(a=[1, 2], b="x"), "i": MetadataIndex("key", torch.Size([1, 2]))},
        protocol=4,
    )
    rng = random.Random(0)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(CheckpointError):
            read(bytes(data), persistent=rng.random() < 0.5)


def metadata(protocol: int = 4) -> bytes:
    """Several tensors of every number of axes, whose indices need each kind of integer."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    items: dict[MetadataIndex, _StorageInfo] = {}
    for axes in range(6):
        key, chunks = f"tensor.{axes}.wéight" if axes == 3 else f"tensor.{axes}", []
        for n in range(6):
            start = torch.Size([300**n % 2**31] * axes)
            chunks.append(ChunkStorageMetadata(start, torch.Size([1] * axes)))
            name = f"__{n % 2}_0.distcp" if n else "__é_0.distcp"
            items[MetadataIndex(key, start, n)] = _StorageInfo(name, 70**n, 200 * n)
        tensors[key] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2**31] * axes), chunks)
    return pickle.dumps(Metadata(tensors, storage_data=items), protocol=protocol)


def plain(value: object) -> object:
    """Names and records as what they hold, so that they compare."""
    if isinstance(value, Record):
        return ("record", value.name, plain(value.args), plain(value.state))
    if isinstance(value, Name):
        return ("name", value.name)
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {"keys": [plain(k) for k in value], "values": [plain(v) for v in value.values()]}
    return (type(value), value)


def outcome(data: bytes) -> tuple[str, object]:
    try:
        return "value", plain(read(data))
    except CheckpointError as error:
        return "error", type(error)


def step_by_step(data: bytes) -> tuple[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shortcuts, "object", lambda *_: None)
        return outcome(data)


def test_objects_taken_whole_are_those_made_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    data, taken, real = metadata(), list[bool](), Shortcuts.object

    def counted(self: Shortcuts, kind: object, position: int) -> Any:
        whole = real(self, kind, position)
        taken.append(whole is not None)
        return whole

    monkeypatch.setattr(Shortcuts, "object", counted)
    assert outcome(data) == step_by_step(data)
    assert sum(taken) > 80  # of 36 chunks and 72 parts of items: not those without axes, nor the odd names


def test_damage_has_the_same_end_whether_objects_are_taken_whole_or_step_by_step() -> None:
    good, rng = metadata(), random.Random(0)
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256) if rng.random() < 0.5 else rng.choice(good)
        assert outcome(bytes(data)) == step_by_step(bytes(data)), bytes(data)


def test_numbers_and_depths_go_on_as_after_single_steps() -> None:
    """Values made inside an object are referred to later, and a tuple inside it counts as nested."""
    size = b"h\x00(K\x01M\x02\x01J\xff\xff\xff\xfft\x94\x85\x94R\x94"
    body = b")\x81\x94}\x94(h\x01" + size + b"h\x02\x8a\x03\x00\x00\x80h\x03\x8c\x01q\x94ub"
    head = b"\x80\x04ctorch\nSize\n\x94" + text("a") + b"\x94" + text("b") + b"\x94" + text("c") + b"\x94"
    kind = b"cargparse\nNamespace\n"
    for reference in range(4, 10):
        data = head + b"0000(" + kind + body + b"h" + bytes([reference]) + b"t."
        assert outcome(data) == step_by_step(data)
        assert outcome(data)[0] == "value"
    for nested in range(MAX_NESTING - 4, MAX_NESTING + 3):
        data = head + b"0000(" + kind + body + b"h\x07" + b"\x85" * nested + b"t."
        assert outcome(data) == step_by_step(data)
    assert outcome(head + b"0000(" + kind + body + b"h\x07" + b"\x85" * MAX_NESTING + b"t.")[0] == "error"
