"""What operators and clients may write in odd ways: one sentence about it, never a fault of ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fakes import engine_config

from gtp_serve.errors import RequestRejected, UsageError
from gtp_serve.server import bringup
from gtp_serve.server.config_file import read_config_file
from gtp_serve.server.launch import Launch, launch_argv, read_launch
from gtp_serve.server.options import SavedGrid
from gtp_serve.server.sampling_fields import read_sampling


@pytest.mark.parametrize(
    "text",
    [
        b"port = " + b"1" * 5000,
        b"port = 0x" + b"f" * 9000 + b"g",
        b"x = " + b"[" * 5000 + b"]" * 5000,
        b"port = 5\nport = 6",
        b'name = "a\xff"',
        b"\xff\xfep\0o\0r\0t\0",
        b"port = ",
        b"[[[",
    ],
    ids=lambda text: text[:12].decode("latin-1"),
)
def test_a_configuration_file_that_cannot_be_read_is_named(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "gtp-serve.toml"
    path.write_bytes(text)

    with pytest.raises(UsageError, match="is not TOML") as caught:
        read_config_file(path)

    assert str(path) in str(caught.value)


def launch(**changes: Any) -> Launch:
    fields: dict[str, Any] = {
        "ckpt": "/a",
        "iteration": None,
        "saved": SavedGrid(),
        "engine": engine_config(),
        "threads": 1,
        "first_prompt": (1,),
    }
    return Launch(**(fields | changes))


@pytest.mark.parametrize("name", [b"caf\xe9", b"\xff\xfe", "größe-日本".encode(), b"a\nb", b"a\"b\\c'd", b"\x7f\x01"])
def test_a_folder_may_have_any_name(name: bytes, tmp_path: Path) -> None:
    """As bytes of the file system they need be no text; the engine process and clients hear of them all the same."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)

    argument = launch_argv(launch(ckpt=path, tokenizer=path))[-1]

    argument.encode("ascii")
    told = read_launch(argument)
    assert (told.ckpt, told.tokenizer) == (path, path)
    shown = bringup._default_name(Path(path))
    shown.encode("utf-8")
    assert shown == name.decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["03", "+3", " 3", "3 ", "3.0", "0x3", "٣", "³", "-0", "", "1_0", "3e0", "9" * 5000])
def test_an_id_with_a_bias_has_one_spelling(name: str) -> None:
    """Of "3" and "03" the last would win, and a double key is refused everywhere else."""
    with pytest.raises(RequestRejected, match="is no token id") as caught:
        read_sampling({"logit_bias": {"3": 1.0, name: 2.0}}, 1, False)

    assert caught.value.code == "bad-token-id"
