"""A streamed body of weights: what is kept, what is refused by name and when, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from safetensors_bytes import entries, file_bytes

from gtp_serve.errors import RequestRejected
from gtp_serve.refit.shared import SealedMemory, SharedBytes
from gtp_serve.server import spool as module
from gtp_serve.server.spool import spool

SHAPES = {"model.embed_tokens.weight": (7, 4), "model.layers.0.mlp.up_proj.weight": (6, 4), "model.norm.weight": (4,)}
GOOD = file_bytes(entries(SHAPES))
ENOUGH = 1 << 40


def memfds() -> int:
    """Memory files that this process has open."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(fd).startswith("/memfd:gtp-serve")
        except OSError:
            continue
    return count


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = memfds()
    yield
    assert memfds() == before


class Body:
    """Hands out bytes in pieces and counts them."""

    def __init__(self, data: bytes, piece: int = 16, pause: float = 0.0, stuck_at: int | None = None) -> None:
        self.data, self.piece, self.pause, self.stuck_at = data, piece, pause, stuck_at
        self.taken = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.data), self.piece):
            if self.stuck_at is not None and start >= self.stuck_at:
                await asyncio.sleep(60)
            await asyncio.sleep(self.pause)
            self.taken += len(self.data[start : start + self.piece])
            yield self.data[start : start + self.piece]
            yield b""


def keep(body: Body | bytes, **changed: Any) -> SealedMemory:
    body = Body(body) if isinstance(body, bytes) else body
    options: dict[str, Any] = {"length": None, "digest": "", "seconds": 5.0, "available": ENOUGH, **changed}
    return asyncio.run(spool(body.pieces(), options.pop("shapes", SHAPES), **options))


def refused(body: Body | bytes, **changed: Any) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        keep(body, **changed)
    return caught.value


@pytest.mark.parametrize("piece", [1, 3, 8, 64, 10_000])
@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_a_whole_file_is_kept_sealed_byte_for_byte(piece: int, kind: str) -> None:
    data = file_bytes({"__metadata__": {"format": "pt"}, **entries(SHAPES, kind)})
    with keep(Body(data, piece), length=len(data), digest=xxhash.xxh3_128_hexdigest(data)) as memory:
        assert memory.size == len(data)
        shared = SharedBytes(memory.segment())  # refuses what is not sealed
        assert bytes(shared.view) == data
        shared.close()


def test_a_head_of_its_own_and_stored_names_of_a_family_are_understood() -> None:
    stored = {
        "model.layers.0.block_sparse_moe.gate.weight": (2, 4),
        "model.layers.0.block_sparse_moe.experts.1.w2.weight": (4, 3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (2,),
    }
    logical = {"model.layers.0.mlp.gate.weight": (2, 4), "model.layers.0.mlp.experts.1.down_proj.weight": (4, 3)}
    keep(file_bytes(entries(stored)), shapes=logical).close()


def change(edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The good file with an edited header."""
    header = copy.deepcopy(entries(SHAPES))
    edit(header)
    return file_bytes(header, bytes(len(GOOD)))


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def edit(header: dict[str, Any]) -> None:
        header[new] = header.pop(old)

    return edit


NORM = "model.norm.weight"
REFUSED: dict[str, tuple[bytes, str, str]] = {
    # what: the body, the code, words of the message
    "missing": (file_bytes(entries({n: s for n, s in SHAPES.items() if n != NORM})), "ckpt-layout", NORM),
    "unknown": (file_bytes(entries({**SHAPES, "model.extra.weight": (1,)})), "ckpt-unknown-key", "model.extra.weight"),
    "renamed": (change(rename(NORM, "model.nrom.weight")), "ckpt-layout", NORM),
    "tied head": (file_bytes(entries({**SHAPES, "lm_head.weight": (7, 4)})), "unknown-tensor", "lm_head.weight"),
    "transposed": (
        file_bytes(entries({**SHAPES, "model.layers.0.mlp.up_proj.weight": (4, 6)})),
        "ckpt-layout",
        "[4, 6]",
    ),
    "a row too many": (file_bytes(entries({**SHAPES, "model.embed_tokens.weight": (8, 4)})), "ckpt-layout", "[8, 4]"),
    "another axis": (file_bytes(entries({**SHAPES, NORM: (4, 1)})), "ckpt-layout", NORM),
    "integers": (
        change(lambda h: h[NORM].update(dtype="U8", shape=[4], data_offsets=h[NORM]["data_offsets"])),
        "ckpt-corrupt",
        NORM,
    ),
    "wide integers": (file_bytes(entries(SHAPES, "I64")), "wrong-dtype", "I64"),
    "an element type that is none": (change(lambda h: h[NORM].update(dtype="F99")), "ckpt-corrupt", "F99"),
    "an element type that is no text": (change(lambda h: h[NORM].update(dtype=7)), "ckpt-corrupt", NORM),
    "a negative shape": (change(lambda h: h[NORM].update(shape=[-4])), "ckpt-corrupt", NORM),
    "a shape of truths": (change(lambda h: h[NORM].update(shape=[True])), "ckpt-corrupt", NORM),
    "offsets that leave a hole": (change(lambda h: h[NORM].update(data_offsets=[212, 228])), "ckpt-corrupt", "hole"),
    "offsets that overlap": (change(lambda h: h[NORM].update(data_offsets=[204, 220])), "ckpt-corrupt", "overlaps"),
    "offsets the wrong way": (change(lambda h: h[NORM].update(data_offsets=[224, 208])), "ckpt-corrupt", NORM),
    "offsets beyond all memory": (change(lambda h: h[NORM].update(data_offsets=[208, 2**62])), "ckpt-corrupt", NORM),
    "a name twice": ((13).to_bytes(8, "little") + b'{"a":0,"a":0}', "ckpt-corrupt", "twice"),
    "no tensor": (file_bytes({}), "ckpt-layout", "lacks"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "ckpt-corrupt", "JSON object"),
    "not JSON": ((4).to_bytes(8, "little") + b"{abc", "ckpt-corrupt", "JSON"),
    "not UTF-8": ((4).to_bytes(8, "little") + b'{"\xff"', "ckpt-corrupt", "UTF-8"),
    "deep nesting": ((40_000).to_bytes(8, "little") + b'{"a":' * 8000, "ckpt-corrupt", ""),
    "a header of all memory": (b"\xff" * 64, "bad-stream", "length of a header"),
    "a header above the limit": (file_bytes({}, length=(32 << 20) + 1) + b" " * 64, "bad-stream", "limit"),
    "an empty header": (bytes(8) + b"xx", "bad-stream", ""),
    "nothing": (b"", "bad-stream", "length of a header"),
    "seven bytes": (GOOD[:7], "bad-stream", "length of a header"),
    "half a header": (GOOD[:40], "cut-off", "ends in its header"),
    "a pickle": (b"\x80\x04\x95" + b"c__builtin__\neval\n" * 9, "bad-stream", ""),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_header_is_refused_by_name(what: str) -> None:
    data, code, words = REFUSED[what]
    error = refused(data)
    assert (error.code, error.http_status) == (code, 422)
    assert words in str(error)


def test_a_wrong_header_is_refused_before_a_byte_of_a_tensor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SealedMemory", lambda size: pytest.fail("memory was taken"))
    shapes = {"model.embed_tokens.weight": (1 << 20, 64)}
    data = file_bytes(entries({"model.embed_tokens.weight": (1 << 20, 64), "model.extra.weight": (1,)}), b"")
    body = Body(data + bytes(100_000), piece=64)
    assert refused(body, shapes=shapes).code == "ckpt-unknown-key"
    assert body.taken < len(data) + 64


@pytest.mark.parametrize("end", [len(GOOD) - 1, len(GOOD) - 200, len(GOOD) - 224])
def test_a_body_that_is_cut_off_is_refused(end: int) -> None:
    assert refused(GOOD[:end]).code == "cut-off"


def test_a_body_that_goes_on_is_refused_and_not_read_to_its_end() -> None:
    body = Body(GOOD + bytes(1 << 16), piece=64)
    assert refused(body).code == "too-long"
    assert body.taken <= len(GOOD) + 64


def test_a_length_that_is_not_the_headers_is_refused_before_the_tensors_are_read() -> None:
    for length, code in ((len(GOOD) - 1, "cut-off"), (len(GOOD) + 1, "too-long")):
        body = Body(GOOD)
        assert refused(body, length=length).code == code
        assert body.taken < len(GOOD) - 200


def test_a_length_beyond_the_model_is_refused_unread() -> None:
    body = Body(GOOD)
    error = refused(body, length=1 << 60)
    assert (error.http_status, body.taken) == (413, 0)


def test_more_than_the_free_memory_is_refused_unread() -> None:
    body = Body(GOOD)
    error = refused(body, available=len(GOOD) - 1)
    assert (error.code, error.http_status) == ("no-room", 503)
    assert body.taken < len(GOOD) - 200


def test_another_digest_is_refused() -> None:
    flipped = bytearray(GOOD)
    flipped[-5] ^= 1
    error = refused(bytes(flipped), digest=xxhash.xxh3_128_hexdigest(GOOD))
    assert (error.code, error.param) == ("digest-mismatch", "digest")


def test_a_body_that_stops_coming_is_given_up() -> None:
    for stuck_at in (0, 64, len(GOOD) - 32):
        error = refused(Body(GOOD, stuck_at=stuck_at), silent=0.05)
        assert (error.code, error.http_status) == ("body-too-slow", 408)


def test_a_body_that_drips_is_given_up_at_its_deadline() -> None:
    assert refused(Body(GOOD, piece=1, pause=0.01), seconds=0.2, silent=5).http_status == 408


def test_a_caller_that_gives_up_leaves_nothing() -> None:
    async def go() -> None:
        body = Body(GOOD, stuck_at=len(GOOD) - 32)
        task = asyncio.create_task(spool(body.pieces(), SHAPES, length=None, digest="", seconds=5, available=ENOUGH))
        await asyncio.sleep(0.1)
        assert memfds() > before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = memfds()
    asyncio.run(go())
